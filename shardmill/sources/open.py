"""From words on a command line to a source.

In: a file, a folder, a glob, or a URL of one ("s3://bucket/folder/*.jsonl"); a hub dataset:
"hub:owner/name[:config]" or "hf://datasets/owner/name[@revision]".  Out: a `Source`.
Promise: the kind follows from the file's ending, or is said with kind=; nothing is guessed from
content. Unknown endings and folders of several kinds are refused with what to do. Files come in
the order of their names, or in one that is drawn from a seed.
Not here: the kinds themselves.

From words on a command line to conversations.

In: a file, a folder, a glob, "hub:owner/name[:config]", "hf://datasets/owner/name[@revision]", or
several of them; or one URL of object storage.  Out: a `ChatSource` over all of them, in order.
Promise: how a file is read follows from its ending; files of several kinds may lie in one folder.
No file twice. Names in ids and cursors are relative to what all files have in common.
Not here: reading.

Files in an order that is drawn from a seed.

In: sources, in the order they were named, and a seed.  Out: one source of the same files.
Promise: the order depends on the seed and the names of the files alone (relative ones, as they are
in cursors): not on the machine, the format, or how the files were named on the command line, but
for files of one name, which keep the order of the command line. Inside a file nothing moves.
Not here: an order of documents; loading draws that, at no cost, for every epoch.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from shardmill.errors import OptionError, SourceError
from shardmill.protocols import Source
from shardmill.sources.batches import DEFAULT_LIMITS, BatchLimits, name_of
from shardmill.sources.chats.arrow_records import HubRecords, ParquetRecords
from shardmill.sources.chats.conversations import ChatSource
from shardmill.sources.chats.json_records import (
    JSON_SUFFIXES,
    JsonlRecords,
    RecordInput,
    json_input,
)
from shardmill.sources.chats.message_trees import Rules
from shardmill.sources.concat import ConcatSource
from shardmill.sources.file_source import FileSource
from shardmill.sources.formats.hub_source import HubOptions, HubSource
from shardmill.sources.formats.jsonl import JSONL_SUFFIXES, JsonlSource, OnBad
from shardmill.sources.formats.parquet import PARQUET_SUFFIXES, ParquetSource
from shardmill.sources.formats.text import TEXT_SUFFIXES, TextSource
from shardmill.storage.files import InputFile, Where, is_glob, list_files
from shardmill.urls import Url


def in_seeded_order(parts: Sequence[Source], seed: int) -> Source:
    """All files of all parts, mixed."""
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise OptionError(f"seed={seed!r}: wanted a whole number")
    if len(parts) == 1 and isinstance(parts[0], FileSource):
        return parts[0].reordered(lambda file: place_of_file(seed, file.name))
    files: list[tuple[str, Source]] = []
    for part in parts:
        if not isinstance(part, FileSource):
            raise OptionError(
                f"seed={seed}: {part.name} is no files here, and a seed orders files; name it "
                "without a seed, or its files: hf://datasets/owner/name/**/*.parquet"
            )
        files += [(place_of_file(seed, one.files[0].name), one) for one in part.each_file()]
    files.sort(key=lambda pair: pair[0])
    return ConcatSource(
        [source for _, source in files], name=" + ".join(part.name for part in parts)
    )


def place_of_file(seed: int, name: str) -> str:
    """What files are sorted by."""
    return hashlib.sha256(json.dumps([seed, "file order", name]).encode()).hexdigest()


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


_READERS: dict[str, Callable[[InputFile], RecordInput]] = {
    **dict.fromkeys(JSONL_SUFFIXES, JsonlRecords),
    **dict.fromkeys(PARQUET_SUFFIXES, ParquetRecords),
    **dict.fromkeys(JSON_SUFFIXES, json_input),
}
_SUFFIXES = tuple(_READERS)
_RULES = [field.name for field in fields(Rules)]
_HUB_OPTIONS = [field.name for field in fields(HubOptions) if field.name != "field"]


def open_chats(
    where: Where,
    *,
    shape: str | None = None,
    name: str | None = None,
    on_bad: OnBad = "error",
    limits: BatchLimits = DEFAULT_LIMITS,
    **options: Any,
) -> ChatSource:
    """Open conversations. `shape`: one of `SHAPES`; None: that of the first record.

    Further options: lang= and skip_deleted= of the oasst shapes; for hub datasets those of
    `HubOptions`. A file that exists is a file, whatever its name looks like. Files are looked up
    at the call, and read (for the shape) on first use.
    """
    parts = [where] if isinstance(where, str | Path) else list(where)
    if not parts:
        raise SourceError("no chats named; name a file, a folder, a glob or hub:owner/name")
    hubs = [part for part in parts if _is_hub(part)]
    rules, hub_options = _parted(options, is_hub=bool(hubs))
    files = _files([part for part in parts if part not in hubs])
    if len(set(map(str, hubs))) < len(hubs):
        raise SourceError("a hub dataset is named more than once; name it once")
    inputs: list[RecordInput] = []
    for part in parts:
        if part in hubs:
            inputs.append(_hub_input(str(part), hub_options))
        else:
            inputs += [_file_input(file) for file in files.pop(0)]
    return ChatSource(
        inputs, name=name or name_of(where), shape=shape, rules=rules, on_bad=on_bad, limits=limits
    )


def _parted(options: dict[str, Any], *, is_hub: bool) -> tuple[Rules, dict[str, Any]]:
    """The options of trees and those of hubs."""
    known = _RULES + (_HUB_OPTIONS if is_hub else [])
    strange = sorted(set(options) - set(known))
    if strange:
        raise OptionError(
            f"the option {', '.join(strange)} does not apply to this input; "
            f"options here: {', '.join(['shape', 'name', 'on_bad', 'limits', *known])}"
        )
    rules = Rules(**{key: value for key, value in options.items() if key in _RULES})
    return rules, {key: value for key, value in options.items() if key not in _RULES}


def _files(parts: Sequence[str | Path]) -> list[list[InputFile]]:
    """The files of each part, named relative to what all parts have in common."""
    found = [list_files(part, suffixes=_SUFFIXES) for part in parts]
    if len(found) < 2:
        return [list(files) for files in found]
    paths = [file.path for files in found for file in files]
    named = iter(list_files(paths, suffixes=_SUFFIXES))  # refuses a file that two parts name
    return [[next(named) for _ in files] for files in found]


def _file_input(file: InputFile) -> RecordInput:
    for suffix, reader in _READERS.items():
        if file.name.lower().endswith(suffix):
            return reader(file)
    raise SourceError(f"{file.place}: ends in none of {', '.join(_SUFFIXES)}; rename it")


def _is_hub(part: str | Path) -> bool:
    return is_hub_dataset(str(part))


def _hub_input(where: str, options: dict[str, Any]) -> HubRecords:
    if where.startswith(_HUB):
        dataset, _, value = where.removeprefix(_HUB).partition(":")
        key = "config"
    else:
        dataset, _, value = where.removeprefix(_HF).removeprefix("datasets/").partition("@")
        key = "revision"
    if dataset.count("/") != 1 or not all(dataset.split("/")):
        raise SourceError(
            f"{where}: wanted hub:owner/name[:config] or hf://datasets/owner/name[@revision]"
        )
    if value and options.get(key, value) != value:
        raise OptionError(f"{where} names {key} {value!r}, but {key}={options[key]!r}")
    return HubRecords(dataset, **{**options, **({key: value} if value else {})})
