"""Empty modules in place of libraries that are imported but not used.

`timm`, `open_clip`, `vit_pytorch` and others import torchvision to transform image files;
`speechbrain` imports torchaudio to read sound files. Their models need neither.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def stand_in_for(*names: str) -> tuple[str, ...]:
    """Makes missing top-level modules importable; returns the names of those missing."""
    missing = tuple(name for name in names if find_spec(name) is None)
    sys.meta_path.append(_Absent(missing))
    return missing


class _AnyName(type):
    """A class whose attributes are their own names: enough for a table of options."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Empty(ModuleType):
    __version__ = "0.0"

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyName(name, (), {})


class _Absent(MetaPathFinder, Loader):
    def __init__(self, names: Sequence[str]) -> None:
        self.names = frozenset(names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds the absent modules and their submodules."""
        if fullname.partition(".")[0] not in self.names:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Returns an empty module."""
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leaves it empty."""
