"""A function of the user's own that makes something of each row.

Only its name travels: each process imports it, with the folder in front in which the build or the
reading began, as `python -m` has it. The sha256 of its source files is compared in each.
"""

from __future__ import annotations

import hashlib
import importlib
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from shardmill.errors import OptionError, SourceError
from shardmill.sources.formats.jsonl import kind_of
from shardmill.sources.source import BadRowError, LeftOutError

MAP_REASONS = {
    "map_none": "the function of {map} gave None for it",
    "map_failed": "the function of {map} failed, and such rows are skipped",
}
"""Reasons of drops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MapFunction:
    """A function that is imported by name in each process."""

    module: str
    name: str  # in the module, with dots
    sha256: str  # of the files of its module, and of the one it is defined in
    folder: str = field(compare=False)  # where modules are looked for first, as `python -m` does

    @property
    def where(self) -> str:
        return f"{self.module}:{self.name}"


def find_function(given: str | Callable[..., Any]) -> MapFunction:
    """The function of a name "module:function", or of a function that has such a name."""
    if callable(given):
        module, name = (str(getattr(given, key, "")) for key in ("__module__", "__qualname__"))
        given = f"{module}:{name}"
        if "<" in name or not name:
            raise OptionError(
                "{map}: is made where it is used, and workers import it by its name; write it at "
                "the top of a module, with def",
                map=given,
            )
    if not isinstance(given, str) or not re.fullmatch(r"[\w.]+:[\w.]+", given):
        raise OptionError("{map}: wanted module:function", map=given)
    module, _, name = given.partition(":")
    if module == "__main__":
        raise OptionError(
            "{map}: __main__ is another program in each worker; put the function in a module of "
            "its own, which workers can import",
            map=given,
        )
    return _looked_up(module, name, str(Path.cwd()))[0]


@lru_cache(maxsize=64)
def imported(wanted: MapFunction) -> Callable[..., Any]:
    """The function, in this process. Refused if its source is not what it was."""
    found, function = _looked_up(wanted.module, wanted.name, wanted.folder)
    if found.sha256 != wanted.sha256:
        raise SourceError(
            "{map}: its source is not the one that the reading began with (its sha256 begins "
            f"with {found.sha256[:12]}, wanted {wanted.sha256[:12]}); a worker imports it from "
            "its own folders: all must have the same",
            map=wanted.where,
        )
    return function


_sources_seen: dict[str, str] = {}  # sha256 of source files, when first imported from here


def _looked_up(module: str, name: str, folder: str) -> tuple[MapFunction, Callable[..., Any]]:
    """Import a function by its name; its source files are hashed."""
    given = f"{module}:{name}"
    if folder not in sys.path and not ("" in sys.path and Path(folder) == Path.cwd()):
        sys.path.insert(0, folder)  # as for python -m; it stays, for what the module imports later
    try:
        importlib.invalidate_caches()
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise OptionError(
            f"{{map}}: cannot be imported ({type(error).__name__}: {error}); modules are looked "
            "for in the current folder and where Python finds them",
            map=given,
        ) from error
    if not callable(found):
        raise OptionError(f"{{map}}: is no function but {type(found).__name__}", map=given)
    defined = getattr(found, "__module__", None) or module
    files = [getattr(sys.modules.get(one), "__file__", None) for one in {module: 0, defined: 0}]
    if None in files or defined == "__main__":
        raise OptionError(
            "{map}: has no source file, so a change of it could not be noticed; write a function "
            "in a module that calls it",
            map=given,
        )
    sources = {str(file): Path(str(file)).read_bytes() for file in files}
    seen = {file: hashlib.sha256(data).hexdigest() for file, data in sources.items()}
    if any(_sources_seen.setdefault(file, seen[file]) != seen[file] for file in seen):
        raise OptionError(
            "{map}: its source changed since this process imported it; start the process again",
            map=given,
        )
    digest = hashlib.sha256(b"".join(sources.values())).hexdigest()
    return MapFunction(module=module, name=name, sha256=digest, folder=folder), found


def called(
    function: Callable[..., Any], named: MapFunction, row: dict[str, Any], wanted: type
) -> Any:
    """What the function gives for a row, or why there is nothing."""
    try:
        value = function(row)
    except Exception as error:  # noqa: BLE001 - users' functions raise what they like
        bad = BadRowError(
            "map_failed", f"{named.where} raised {type(error).__name__}: {error}{_line_of(error)}"
        )
        bad.__cause__ = error
        return bad
    if value is None:
        return LeftOutError("map_none", "the function gave None")
    if not isinstance(value, wanted):
        kind = "a string" if wanted is str else "a dict"
        problem = f"{named.where} gave {kind_of(value)}, wanted {kind} or None"
        return BadRowError("map_failed", problem)
    return value


def _line_of(error: Exception) -> str:
    """The line of the function's file that was at work."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is ours
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
