"""Where one token of a store came from, for a view; and which input belongs to which store.

In: a store that is open, a position, the inputs that were named.  Out: facts for JSON.
Promise: what `blame` proved, or its error; of a long text only what is around the token. A store
gets the files that its manifest names, whatever else lies beside them; an input that no store was
built from is refused, with what each store wants.
Not here: finding the row and proving it (blame).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from shardmill.errors import OptionError, ShardmillError, SourceError
from shardmill.inspect.blame import AnySource, Inputs, blame_token
from shardmill.inspect.blame_records import Blame
from shardmill.inspect.stores import OpenStore, Shelf
from shardmill.records import JSON
from shardmill.sources import (
    ConcatSource,
    JsonlSource,
    ParquetSource,
    TextSource,
    is_hub_dataset,
    open_chats,
    open_source,
)
from shardmill.storage.files import InputFile, has_content, list_files
from shardmill.store import Manifest
from shardmill.urls import Url

_AROUND = 200  # characters before and behind the token
_MOST_FILES, _MOST_STORES = 3, 8  # in a message
_MOST = 300  # characters of the token itself
_OPTIONS = ("field", "on_bad", "split", "shape", "lang", "skip_deleted")
"""Of a source's description, those with which it is opened."""
_NOTES = {
    "text": "",
    "end": "put behind the document by the build, so it has no text",
    "template": "put there by the chat template, so it has no text of its own",
    "turn": "of a turn that a Jinja template wrote, which tells no words from marks",
}


_READERS: dict[str, Callable[..., Any]] = {
    "jsonl": JsonlSource,
    "parquet": ParquetSource,
    "text": TextSource,
}
_Entry = dict[str, Any]  # of a file in a manifest: "file", "bytes", and a hash
OpenInputs = Callable[[], Inputs]


def find_inputs(shelf: Shelf, named: Sequence[str]) -> dict[int, OpenInputs]:
    """How to open the input of each store that has some among `named`.

    Each is a file, a folder, a glob or a dataset, for all stores that were built from something in
    it; "STORE=..." is for that store alone.
    """
    given = [_given(shelf, one) for one in named]
    found: dict[int, OpenInputs] = {}
    wanted: dict[int, str] = {}
    for number in range(len(shelf) if given else 0):
        try:
            manifest = shelf.manifest(number)
        except (ShardmillError, OSError):  # the list of stores says why
            continue
        own = [one for one in given if one.store in (None, number)]
        alone = len(shelf) == 1 or any(one.store == number for one in own)
        entries = _entries(manifest.sources)
        if entries is None:  # not of files: as the build was told
            wanted[number] = f"store {shelf.names[number]!r} was not built from files"
            if alone and own:
                found[number] = partial(open_inputs, manifest, [one.where for one in own])
                for one in own:
                    one.serves = True
            continue
        files = [_file_of(entry, own, by_name=alone) for entry in entries]
        wanted[number] = f"store {shelf.names[number]!r} wants {_listed_files(entries)}"
        if any(files):
            found[number] = partial(_open_found, manifest, own, files, wanted[number])
    idle = [one for one in given if not one.serves]
    if idle:
        meant = [number for number in wanted if idle[0].store in (None, number)]
        told = "; ".join(wanted[number] for number in meant[:_MOST_STORES]) or "no store is open"
        if len(meant) > _MOST_STORES:
            told += f"; and {len(meant) - _MOST_STORES:,} more stores"
        raise OptionError(
            f"--input {Url(str(idle[0].where))}: no store was built from what is there: {told}; "
            "name the folder that holds these files, or STORE=FOLDER for one store"
        )
    return found


@dataclass(slots=True, kw_only=True)
class _Given:
    """One --input."""

    store: int | None  # None: whichever was built from it
    where: str
    files: dict[str, list[InputFile]] = field(default_factory=dict)  # by the last part of the name
    serves: bool = False  # whether some store was built from something in it


def _given(shelf: Shelf, value: str) -> _Given:
    name, equals, rest = value.partition("=")
    store, where = None, value
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
            store, where = fits[0], rest
    made = _Given(store=store, where=where)
    if not is_hub_dataset(where):
        for file in _files_in(where):
            made.files.setdefault(file.name.rpartition("/")[2], []).append(file)
    return made


def _files_in(where: str) -> Sequence[InputFile]:
    """Every file there; of an empty folder none."""
    try:
        return list_files(where, suffixes=("",))
    except SourceError:
        if Path(where).is_dir():
            return ()
        raise


def _entries(sources: Sequence[dict[str, Any]]) -> list[_Entry] | None:
    """Every file that a store was built from, in order; None when it was built from more."""
    found: list[_Entry] = []
    for source in sources:
        if source.get("kind") == "concat":
            inner = _entries(source.get("parts", ()))
        else:
            listed = source.get("files") or source.get("inputs") or ()
            inner = [one for one in listed if isinstance(one, dict) and {"file", "bytes"} <= {*one}]
            if not inner or len(inner) < len(listed):
                return None
        if inner is None:
            return None
        found += inner
    return found or None


def _file_of(entry: _Entry, given: Sequence[_Given], *, by_name: bool) -> InputFile | None:
    """The file that a manifest names: the same name and size, and of several the same content.
    `by_name`: else one of that name, so that `blame` can say that it changed."""
    name = entry["file"]
    known = [
        (one, file)
        for one in given
        for file in one.files.get(name.rpartition("/")[2], ())
        if f"/{file.place}".endswith(f"/{name}")
    ]
    same = [pair for pair in known if pair[1].num_bytes == entry["bytes"]]
    if len(same) > 1:
        same = [pair for pair in same if has_content(pair[1], entry)]
    if not same and by_name:
        same = known
    for one, _ in same:
        one.serves = True
    return same[0][1] if same else None


def _listed_files(entries: Sequence[_Entry]) -> str:
    told = [f"{one['file']!r} ({one['bytes']:,} bytes)" for one in entries[:_MOST_FILES]]
    more = len(entries) - len(told)
    return ", ".join(told) + (f" and {more:,} more" if more else "")


def _open_found(
    manifest: Manifest, given: Sequence[_Given], files: Sequence[InputFile | None], wanted: str
) -> Inputs:
    """The sources of the build, over the files that were found."""
    if not all(files):
        raise OptionError(
            f"{wanted}; only some of them were found: name the others with --input too"
        )
    taken = [file for file in files if file is not None]
    if not all(isinstance(file.place, Path) for file in taken):  # object storage
        return open_inputs(manifest, [one.where for one in given if one.serves])
    left = iter(taken)
    return [_reopened(source, left) for source in manifest.sources]


def _reopened(recorded: dict[str, Any], left: Iterator[InputFile]) -> AnySource:
    """A source as the manifest describes it, over the next files, by the names they had."""
    if recorded["kind"] == "concat":
        parts: list[Any] = [_reopened(part, left) for part in recorded["parts"]]
        return ConcatSource(parts, name=recorded["name"])
    entries = recorded.get("files") or recorded["inputs"]
    files = tuple(replace(next(left), name=entry["file"]) for entry in entries)
    paths = [file.path for file in files]
    options = {"name": recorded["name"], **_options_of(recorded)}
    if recorded["kind"] == "chats":
        return open_chats(paths, **options).of_files(files)
    made: AnySource = _READERS[recorded["kind"]](paths, **options).of_files(files)
    return made


def origin_facts(opened: OpenStore, split: str, token: int, inputs: Inputs) -> dict[str, JSON]:
    """The row that a token came from, and the characters it is."""
    words = opened.reading.words
    if words is None:
        raise OptionError(f"where a token comes from is proved with its tokenizer: {opened.why}")
    found = blame_token(
        opened.store,
        split,
        token,
        inputs=inputs,
        tokenizer=words.tokenizer,
    )
    return _facts(found)


def open_inputs(manifest: Manifest, inputs: Sequence[str]) -> AnySource:
    """What was named, with the options of the build."""
    recorded: dict[str, Any] = manifest.sources[0] if manifest.sources else {}
    opened = open_chats if recorded.get("kind") == "chats" else open_source
    made: AnySource = opened(list(inputs), **_options_of(recorded))
    return made


def _options_of(recorded: dict[str, Any]) -> dict[str, Any]:
    options = {key: recorded[key] for key in _OPTIONS if recorded.get(key) is not None}
    if not recorded.get("shape_is_named"):
        options.pop("shape", None)
    return options


def _facts(found: Blame) -> dict[str, JSON]:
    start = len(found.text) if found.start is None else found.start
    stop = start if found.stop is None else found.stop
    note = _NOTES[found.kind]
    if found.kind == "text" and found.start is None:
        note = "its tokenizer does not tell which characters it is"
    return {
        "source": found.source,
        "file": found.file,
        "row": found.row_id,
        "own_id": found.own_id,
        "turn": found.turn,
        "role": found.role,
        "from": found.start,
        "to": found.stop,
        "text_before": found.text[max(0, start - _AROUND) : start],
        "text": found.text[start:stop][:_MOST],
        "text_after": found.text[stop : stop + _AROUND],
        "note": note,
    }
