"""From words on a command line to conversations.

In: a file, a folder, a glob, "hub:owner/name[:config]", "hf://datasets/owner/name[@revision]", or
several of them; or one URL of object storage.  Out: a `ChatSource` over all of them, in order.
Promise: how a file is read follows from its ending; files of several kinds may lie in one folder.
No file twice. Names in ids and cursors are relative to what all files have in common.
Not here: reading.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from shardmill.errors import OptionError, SourceError
from shardmill.sources.batching import DEFAULT_LIMITS, BatchLimits
from shardmill.sources.chats import ChatSource
from shardmill.sources.files import InputFile, Where, list_files
from shardmill.sources.hubsource import HubOptions
from shardmill.sources.inputs import JSON_SUFFIXES, JsonlRecords, RecordInput, json_input
from shardmill.sources.inputs_arrow import HubRecords, ParquetRecords
from shardmill.sources.jsonl import JSONL_SUFFIXES, OnBad
from shardmill.sources.naming import name_of
from shardmill.sources.open import is_hub_dataset
from shardmill.sources.parquet import PARQUET_SUFFIXES
from shardmill.sources.shape_trees import Rules

_READERS: dict[str, Callable[[InputFile], RecordInput]] = {
    **dict.fromkeys(JSONL_SUFFIXES, JsonlRecords),
    **dict.fromkeys(PARQUET_SUFFIXES, ParquetRecords),
    **dict.fromkeys(JSON_SUFFIXES, json_input),
}
_SUFFIXES = tuple(_READERS)
_HUB, _HF = "hub:", "hf://"
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
