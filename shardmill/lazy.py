"""Names that are imported when somebody asks for them.

In: which module holds each name.  Out: the `__getattr__` of a package.
Promise: the name is the module's own object; another one is the usual AttributeError.
Not here: which names are worth it: those whose modules take a while to import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def later(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """`homes`: name -> the full name of the module that has it."""

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return find
