"""What is done to a package of others once somebody imports it, so that this one never has to."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Watcher(MetaPathFinder):
    """Stands first among the finders until the module is asked for."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self.name, self.act = name, act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec, whose loader calls `act` after it; None for all other modules."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute, act = spec.loader.exec_module, self.act

        def exec_module(module: ModuleType) -> None:
            execute(module)
            act()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def when_imported(name: str, act: Callable[[], None]) -> None:
    """Calls `act` after a module is imported, now if it already is.

    Args:
        name: of the module.
        act: may import the module.
    """
    if name in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _Watcher(name, act))
