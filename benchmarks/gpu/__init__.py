"""What `gpu_check.py` runs on a GPU."""
