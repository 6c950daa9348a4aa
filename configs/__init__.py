"""Model shapes and recipes as JSON, read through `importlib.resources`."""
