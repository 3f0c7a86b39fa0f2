"""From words on a command line to a source.

In: a file, a folder, a glob, or a URL of one ("s3://bucket/folder/*.jsonl"); a hub dataset:
"hub:owner/name[:config]" or "hf://datasets/owner/name[@revision]".  Out: a `Source`.
Promise: the kind follows from the file's ending, or is said with kind=; nothing is guessed from
content. Unknown endings and folders of several kinds are refused with what to do. Files come in
the order of their names, or in one that is drawn from a seed.
Not here: the kinds themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardmill.errors import OptionError, SourceError
from shardmill.protocols import Source
from shardmill.sources.concat import ConcatSource
from shardmill.sources.fileorder import in_seeded_order
from shardmill.sources.files import is_glob, list_files
from shardmill.sources.filesource import FileSource
from shardmill.sources.hubsource import HubSource
from shardmill.sources.jsonl import JSONL_SUFFIXES, JsonlSource
from shardmill.sources.parquet import PARQUET_SUFFIXES, ParquetSource
from shardmill.sources.text import TEXT_SUFFIXES, TextSource
from shardmill.urls import Url

SUFFIXES = {"text": TEXT_SUFFIXES, "jsonl": JSONL_SUFFIXES, "parquet": PARQUET_SUFFIXES}
_ALL_SUFFIXES = tuple(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
_KINDS: dict[str, Callable[..., Source]] = {
    "text": TextSource,
    "jsonl": JsonlSource,
    "parquet": ParquetSource,
}
_HUB, _HF = "hub:", "hf://"


def open_source(
    spec: str | Path | Sequence[str | Path],
    *,
    kind: str | None = None,
    seed: int | None = None,
    **options: Any,
) -> Source:
    """Open one source, or several as one behind the other. `options` are those of its kind.

    A file that exists is a file, whatever its name looks like. With a `seed` the files of all of
    them come in an order that is drawn from it and their names; inside a file nothing moves.
    """
    named = [spec] if isinstance(spec, str | Path) else list(spec)
    names = [str(part) for part in named]
    if len(set(names)) < len(names):
        twice = Url(max(names, key=names.count))
        raise SourceError(f"named more than once: {twice}; name it once")
    parts = [_open_one(str(part), kind, options) for part in named]
    if not parts:
        raise SourceError("no source named; name a file, a folder, a glob or hub:owner/name")
    _refuse_twice(parts)
    if seed is not None:
        return in_seeded_order(parts, seed)
    return parts[0] if len(parts) == 1 else ConcatSource(parts)


def _open_one(where: str, kind: str | None, options: dict[str, Any]) -> Source:
    if is_hub_dataset(where):
        if kind not in (None, "hub"):
            raise OptionError(f"{where} is a hub dataset, but kind={kind!r}")
        return _open_hub(where, options)
    return _made(_KINDS[_kind_of(where, kind)], where, options)


def is_hub_dataset(where: str) -> bool:
    """Whether this names a dataset of the hub. What goes on behind its name is files in it."""
    if not where.startswith((_HUB, _HF)) or Path(where).exists():
        return False
    return where.startswith(_HUB) or len(where.removeprefix(_HF).rstrip("/").split("/")) <= 3


def _refuse_twice(parts: Sequence[Source]) -> None:
    """A file that two globs find would be read twice, perhaps into two splits."""
    seen: set[object] = set()
    for part in parts:
        for file in part.files if isinstance(part, FileSource) else ():
            if file.place in seen:
                raise SourceError(f"{file.place}: two of the inputs name it; name each file once")
            seen.add(file.place)


def _open_hub(where: str, options: dict[str, Any]) -> Source:
    if where.startswith(_HUB):
        dataset, _, config = where.removeprefix(_HUB).partition(":")
        found = {"config": config or None}
    else:
        path = where.removeprefix(_HF).removeprefix("datasets/")
        dataset, _, revision = path.partition("@")
        found = {"revision": revision or None}
    if dataset.count("/") != 1 or not all(dataset.split("/")):
        raise SourceError(
            f"{where}: wanted hub:owner/name[:config] or hf://datasets/owner/name[@revision]"
        )
    for key, value in found.items():
        if value is not None and options.get(key, value) != value:
            raise OptionError(f"{where} names {key} {value!r}, but {key}={options[key]!r}")
    given = {key: value for key, value in found.items() if value is not None}
    return _made(HubSource, dataset, {**options, **given})


def _made(make: Callable[..., Source], where: str, options: dict[str, Any]) -> Source:
    try:
        inspect.signature(make).bind(where, **options)
    except TypeError as error:
        known = [name for name in inspect.signature(make).parameters if name != "where"]
        strange = sorted(set(options) - set(known))
        raise OptionError(
            f"{Url(where)}: the option {', '.join(strange)} does not apply to this kind of "
            f"input; options here: {', '.join(known)}"
        ) from error
    return make(where, **options)


def _kind_of(where: str, kind: str | None) -> str:
    if kind is not None:
        if kind not in _KINDS:
            raise OptionError(f"kind={kind!r}: wanted one of {', '.join(_KINDS)}")
        return kind
    files = list_files(where, suffixes=_ALL_SUFFIXES)
    kinds = {_kind_of_name(file.name): file.name for file in files}
    if None in kinds:
        raise SourceError(
            f"{Url(where)}: {kinds[None]} ends in none of {', '.join(_ALL_SUFFIXES)}; "
            f"say what it is with kind= ({', '.join(_KINDS)})"
        )
    if len(kinds) > 1:
        found = ", ".join(f"{name} ({kind})" for kind, name in sorted(kinds.items(), key=str))
        glob = (
            where if is_glob(where) else f"{where.rstrip('/')}/**/*{next(iter(SUFFIXES['jsonl']))}"
        )
        raise SourceError(
            f"{Url(where)}: several kinds of files: {found}; choose one with a glob such as "
            f"'{Url(glob)}', or with kind="
        )
    (found_kind,) = kinds
    assert found_kind is not None
    return found_kind


def _kind_of_name(name: str) -> str | None:
    for kind, suffixes in SUFFIXES.items():
        if name.lower().endswith(suffixes):
            return kind
    return None
