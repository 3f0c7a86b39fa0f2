"""The input that stores were built from, as the caller has it now.

A manifest records the files of a build by name, size and hash, but not where they are: the input
may have moved. `matched_inputs` accepts only the very input of the build, read in the same way, and
leaves out files that were added since; anything else is refused by name. `find_inputs` finds the
files of several stores in the folders that were named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

from shardmill.errors import OptionError, ShardmillError, SourceError
from shardmill.inspect.stores import Shelf
from shardmill.protocols import ConversationSource, Source
from shardmill.records import JSON
from shardmill.sources import (
    ConcatSource,
    HubParquetSource,
    HubSource,
    open_chats,
    open_source,
)
from shardmill.sources.append import append_files, only_files
from shardmill.sources.mapping import take_mapping
from shardmill.sources.open import FORMATS, is_hub_dataset
from shardmill.sources.source import FileSource
from shardmill.sources.turns import ReadRules
from shardmill.storage.files import InputFile, describe_difference, has_content, list_files
from shardmill.store import Manifest
from shardmill.urls import Url

AnySource: TypeAlias = Source | ConversationSource
Inputs: TypeAlias = AnySource | Sequence[AnySource] | None
OpenInputs: TypeAlias = Callable[[], Inputs]
_Recorded: TypeAlias = dict[str, Any]  # a source or a file, as a manifest describes it

_MOST_FILES, _MOST_STORES = 3, 8  # in a message
_RULES = tuple(one.name for one in fields(ReadRules))
_MAPPING = ("fields", "join", "filter", "strip_front_matter")
_OPTIONS = ("field", "on_bad", "split", "ext", "shape", *_RULES)
"""Those facts of a source with which it is opened."""
_HUB_OPTIONS = ("name", "config", "split", "field", "revision")
_NEXT = "name the input that the store was built from, with the options of its build"


def matched_inputs(manifest: Manifest, inputs: Inputs) -> list[AnySource]:
    """One source for each that the store was built from, in their order."""
    recorded = manifest.sources
    if not recorded:
        raise OptionError(
            "this store does not record what it was built from (it was converted, or made from "
            "examples in a program), so the origin of its tokens is not known"
        )
    if inputs is None:
        return [_matched(_hub_source(one), one) for one in recorded]
    given = list(inputs) if isinstance(inputs, Sequence) else [inputs]
    if len(given) != len(recorded):
        names = ", ".join(repr(one.get("name")) for one in recorded)
        raise OptionError(
            f"{len(given)} inputs, but the store was built from {len(recorded)} sources: {names}; "
            "give one for each, in this order"
        )
    return [_matched(source, one) for source, one in zip(given, recorded, strict=True)]


def recorded_rules(recorded: Sequence[_Recorded], function: str | None = None) -> dict[str, Any]:
    """How the rows of a store were read, for `open_chats` or `open_source`. What a manifest names
    as `map` is code that runs here, so a caller must name it too: `function`."""
    first = recorded[0] if recorded else {}
    while first.get("kind") == "concat" and first.get("parts"):
        first = first["parts"][0]  # all parts are read in one way
    known = first.get("map")
    if known is not None and function is None:
        raise OptionError(
            f"the store was built with the function {known!r}, which would be run again: name it "
            "with {map} where you trust it, or open the input in Python with open_source",
            map=...,
        )
    rules = {key: first[key] for key in (*_RULES, *_MAPPING) if first.get(key) not in (None, False)}
    return rules if function is None else {**rules, "map": function}


def recorded_reading(recorded: Sequence[_Recorded]) -> dict[str, Any]:
    """How the files of the documents of a store were read, for `open_source`, where all were read
    in one way: their kind, what parts them, and the endings of members."""
    known = [one for one in recorded if one.get("kind") in FORMATS]
    found = [{key: one[key] for key in ("kind", "split", "ext") if one.get(key)} for one in known]
    is_same = len(known) == len(recorded) and all(one == found[0] for one in found)
    return found[0] if found and is_same else {}


def _hub_source(recorded: _Recorded) -> Source:
    """Only a dataset of a hub can be found again by what a manifest records."""
    if recorded.get("kind") != "hub":
        listed = [one for one in _listed(recorded) if isinstance(one, dict) and "file" in one]
        files = f": {_some_files(listed)}" if listed else ""
        raise OptionError(
            f"the store was built from {recorded.get('name')!r} ({recorded.get('kind')}{files}), "
            "and does not record where that is; name it with --input (`inputs` in Python), as for "
            "the build"
        )
    options = {key: recorded[key] for key in _HUB_OPTIONS}
    options["mapping"], _ = take_mapping(recorded_rules([recorded]))
    shuffle = recorded.get("shuffle")
    if shuffle:
        options["shuffle"] = (shuffle["seed"], shuffle["buffer_size"])
    opened = HubParquetSource if "num_files" in recorded else HubSource  # else it was streamed
    return opened(recorded["dataset"], **options)


def _matched(source: AnySource, recorded: _Recorded) -> AnySource:
    if isinstance(source, FileSource | ConcatSource):
        source = _same_files(source, recorded)
    changes = describe_difference(_nameless(recorded), _nameless(source.describe()))
    if changes:
        raise SourceError(
            f"source {source.name!r} is not what the store was built from (then -> now): "
            f"{changes[0]:.300}; {_NEXT}"
        )
    return source


def _same_files(source: Source, recorded: _Recorded) -> Source:
    """The files of the build in its order, without others."""
    try:
        found = append_files(source, recorded)
    except (SourceError, OptionError) as error:
        what = str(error).partition(";")[0]
        raise SourceError(f"{what}; {_NEXT}") from error
    left = only_files(found.source, found.old) if found.num_new else found.source
    assert left is not None, "a description of files has some"
    return left


def _nameless(value: object) -> JSON:
    """Without names, which depend on where the input is."""
    if isinstance(value, dict):
        return {key: _nameless(one) for key, one in value.items() if key != "name"}
    if isinstance(value, list | tuple):
        return [_nameless(one) for one in value]
    return cast(JSON, value)


@dataclass(slots=True, kw_only=True)
class _Named:
    """One --input."""

    store: int | None  # None: whichever was built from it
    where: str
    files: dict[str, list[InputFile]] = field(default_factory=dict)  # by the last part of the name
    used: bool = False  # whether some store was built from something in it


def find_inputs(shelf: Shelf, named: Sequence[str]) -> dict[int, OpenInputs]:
    """How to open the input of each store that has some among `named`.

    Each is a file, a folder, a glob or a dataset, for all stores that were built from something in
    it; "STORE=..." is for that store alone. An input that no store was built from is refused.
    """
    inputs = [_named(shelf, one) for one in named]
    found: dict[int, OpenInputs] = {}
    wanted: dict[int, str] = {}
    for number in range(len(shelf) if inputs else 0):
        try:
            manifest = shelf.manifest(number)
        except (ShardmillError, OSError):  # the list of stores says why
            continue
        own = [one for one in inputs if one.store in (None, number)]
        alone = len(shelf) == 1 or any(one.store == number for one in own)
        entries = _entries(manifest.sources)
        if entries is None:
            wanted[number] = f"store {shelf.names[number]!r} was not built from files"
            if alone and own:
                found[number] = partial(_open_as_named, manifest, own)
                for one in own:
                    one.used = True
            continue
        files = [_file_of(entry, own, by_name=alone) for entry in entries]
        wanted[number] = f"store {shelf.names[number]!r} wants {_some_files(entries)}"
        if any(files):
            found[number] = partial(_open_found, manifest, own, files, wanted[number])
    unused = next((one for one in inputs if not one.used), None)
    if unused is not None:
        wants = [text for number, text in wanted.items() if unused.store in (None, number)]
        more = [f"and {len(wants) - _MOST_STORES:,} more stores"] * (len(wants) > _MOST_STORES)
        listed = "; ".join([*wants[:_MOST_STORES], *more]) or "no store is open"
        raise OptionError(
            f"--input {Url(unused.where)}: no store was built from what is there: {listed}; "
            "name the folder that holds these files, or STORE=FOLDER for one store"
        )
    return found


def _named(shelf: Shelf, value: str) -> _Named:
    name, equals, rest = value.partition("=")
    made = _Named(store=None, where=value)
    if equals and rest:
        path = Path(name).absolute()
        fits = [n for n, one in enumerate(shelf.names) if name == one or shelf.paths[n] == path]
        fits = fits or [n for n, one in enumerate(shelf.paths) if one.name == name]
        if len(fits) > 1:
            known = ", ".join(shelf.names[number] for number in fits)
            raise OptionError(
                f"--input {name}=...: {len(fits)} stores are called {name!r}; wanted one of {known}"
            )
        if fits:
            made = _Named(store=fits[0], where=rest)
    if is_hub_dataset(made.where):
        return made
    try:
        files = list_files(made.where, suffixes=("",))
    except SourceError:
        if not Path(made.where).is_dir():  # of an empty folder there are none
            raise
        files = ()
    for file in files:
        made.files.setdefault(file.name.rpartition("/")[2], []).append(file)
    return made


def _listed(source: _Recorded) -> Sequence[Any]:
    return source.get("files") or source.get("inputs") or ()


def _entries(sources: Sequence[_Recorded]) -> list[_Recorded] | None:
    """Every file that a store was built from, in order; None when it was built from other input."""
    found: list[_Recorded] = []
    for source in sources:
        if source.get("kind") == "concat":
            inner = _entries(source.get("parts", ()))
        else:
            listed = _listed(source)
            inner = [one for one in listed if isinstance(one, dict) and {"file", "bytes"} <= {*one}]
            inner = inner if len(inner) == len(listed) else None
        if not inner:
            return None
        found += inner
    return found or None


def _file_of(entry: _Recorded, inputs: Sequence[_Named], *, by_name: bool) -> InputFile | None:
    """The file that a manifest names: the same name and size, and of several the same content.
    `by_name`: else one of that name, so that the error can say that it changed."""
    name = entry["file"]
    known = [
        (one, file)
        for one in inputs
        for file in one.files.get(name.rpartition("/")[2], ())
        if f"/{file.place}".endswith(f"/{name}")
    ]
    same = [pair for pair in known if pair[1].num_bytes == entry["bytes"]]
    if len(same) > 1:
        same = [pair for pair in same if has_content(pair[1], entry)]
    if not same and by_name:
        same = known
    for one, _ in same:
        one.used = True
    return same[0][1] if same else None


def _some_files(entries: Sequence[_Recorded]) -> str:
    """The first few, for an error."""
    shown = [
        f"{one['file']!r}" + (f" ({one['bytes']:,} bytes)" if "bytes" in one else "")
        for one in entries[:_MOST_FILES]
    ]
    more = len(entries) - len(shown)
    return ", ".join(shown) + (f" and {more:,} more" if more else "")


def _open_found(
    manifest: Manifest, inputs: Sequence[_Named], files: Sequence[InputFile | None], wanted: str
) -> Inputs:
    """The sources of the build, over the files that were found."""
    left = [file for file in files if file is not None]
    if len(left) < len(files):
        raise OptionError(
            f"{wanted}; only some of them were found: name the others with --input too"
        )
    if not all(isinstance(file.place, Path) for file in left):  # object storage
        return _open_as_named(manifest, [one for one in inputs if one.used])
    remaining = iter(left)
    return [_reopened(source, remaining) for source in manifest.sources]


def _reopened(recorded: _Recorded, left: Iterator[InputFile]) -> AnySource:
    """A source as the manifest describes it, over the next files, by the names they had."""
    if recorded["kind"] == "concat":
        parts: list[Any] = [_reopened(part, left) for part in recorded["parts"]]
        return ConcatSource(parts, name=recorded["name"])
    files = tuple(replace(next(left), name=entry["file"]) for entry in _listed(recorded))
    paths, options = [file.path for file in files], _options(recorded)
    if recorded["kind"] == "chats":
        return open_chats(paths, name=recorded["name"], **options).of_files(files)
    mapping, options = take_mapping(options)
    opened: Any = FORMATS[recorded["kind"]][1](paths, name=recorded["name"], **options)
    made: AnySource = (opened if mapping is None else opened.mapped(mapping)).of_files(files)
    return made


def _open_as_named(manifest: Manifest, inputs: Sequence[_Named]) -> Inputs:
    """What was named, with the options of the build."""
    recorded: _Recorded = manifest.sources[0] if manifest.sources else {}
    opened: Any = open_chats if recorded.get("kind") == "chats" else open_source
    made: AnySource = opened([one.where for one in inputs], **_options(recorded))
    return made


def _options(recorded: _Recorded) -> dict[str, Any]:
    options = {key: recorded[key] for key in _OPTIONS if recorded.get(key) is not None}
    if not recorded.get("shape_is_named"):
        options.pop("shape", None)
    return options | recorded_rules([recorded])
