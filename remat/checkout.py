"""`import solvers` in a checkout: gives the same module objects as `import remat.solvers`.

The folders `solvers/` and `tracers/` lie beside `remat/` and are subpackages of it. In the root of
a checkout they can also be imported by the folder's name. Without this module, such an import would
make a second copy of every class. Nothing here runs in an installed package.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def alias(folder: str) -> None:
    """Makes `folder`, and every module in it, another name for `remat.<folder>`."""
    sys.modules[folder] = importlib.import_module(f"remat.{folder}")
    sys.meta_path.insert(0, _Alias(folder))


class _Alias(MetaPathFinder, Loader):
    def __init__(self, folder: str) -> None:
        self._prefix = f"{folder}."

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname.startswith(self._prefix) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(f"remat.{spec.name}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # the import system set the alias's spec; relative imports need the module's own
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state
