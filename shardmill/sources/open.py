"""From words to a source: files, folders, globs, URLs and hub datasets.

How a file is read follows from the ending of its name, or from kind=; nothing is guessed from the
content. This module lists the formats: a new one is a module in `formats/` and a line here.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from glob import has_magic
from pathlib import Path
from typing import Any

from shardmill.errors import HubError, OptionError, SourceError
from shardmill.protocols import Source
from shardmill.records import TextBatch
from shardmill.sources.batches import DEFAULT_LIMITS, BatchLimits, name_of
from shardmill.sources.conversations import ChatInput, ChatSource, HubRows
from shardmill.sources.formats import json_array
from shardmill.sources.formats.archives import TarFormat, TarSource, ZipFormat, ZipSource
from shardmill.sources.formats.arrow import ArrowFormat, ArrowSource, is_saved, saved_files
from shardmill.sources.formats.csv import CsvFormat, CsvSource, TsvFormat, TsvSource
from shardmill.sources.formats.json_array import JsonArrayFormat, JsonFormat, JsonSource
from shardmill.sources.formats.jsonl import JsonlFormat, JsonlSource, Object, OnBad, decode_row
from shardmill.sources.formats.parquet import ParquetFormat, ParquetSource
from shardmill.sources.formats.text import TextFormat, TextSource
from shardmill.sources.hub import HubSource
from shardmill.sources.mapping import OPTIONS as MAPPING_OPTIONS
from shardmill.sources.mapping import RowMapping, take_mapping
from shardmill.sources.shapes import ConversationShape, shape_of
from shardmill.sources.source import BadRowError, ConcatSource, FileSource, Format, RowFormat
from shardmill.sources.turns import TURN_COLUMNS, ReadRules, renamed
from shardmill.storage.files import (
    Endings,
    InputFile,
    Where,
    check_unchanged,
    counted,
    ending_of,
    list_files,
    some_endings,
    with_common_names,
)
from shardmill.storage.hub import HubOptions, HubSplit
from shardmill.urls import Url, scrub

logger = logging.getLogger(__name__)


# The formats of files, and what makes a source of documents of each. A `RowFormat` gives
# conversations too; for `.json` see `_row_format`.
FORMATS: dict[str, tuple[type[Format], Callable[..., Source]]] = {
    "jsonl": (JsonlFormat, JsonlSource),
    "json": (JsonFormat, JsonSource),
    "csv": (CsvFormat, CsvSource),
    "tsv": (TsvFormat, TsvSource),
    "parquet": (ParquetFormat, ParquetSource),
    "arrow": (ArrowFormat, ArrowSource),
    "tar": (TarFormat, TarSource),
    "zip": (ZipFormat, ZipSource),
    "text": (TextFormat, TextSource),
}
_ARCHIVES = ("tar", "zip")
_ROW_FORMATS = [format for format, _ in FORMATS.values() if issubclass(format, RowFormat)]
_ENDINGS = tuple(ending for format, _ in FORMATS.values() for ending in format.in_folder())
_ROW_ENDINGS = tuple(ending for format in _ROW_FORMATS for ending in format.in_folder())

_HUB, _HF = "hub:", "hf://"
_LOOK_LIMITS = BatchLimits(most_bytes=256 * 2**20)
_RULES = [field.name for field in fields(ReadRules)]
_HUB_OPTIONS = [field.name for field in fields(HubOptions) if field.name != "field"]


def open_source(
    spec: str | Path | Sequence[str | Path],
    *,
    kind: str | None = None,
    seed: int | None = None,
    **options: Any,
) -> Source:
    """Open one source, or several as one source that reads them in order. `options` are those of
    its kind, and what becomes of a row: `fields` and `join`, `filter`, `map`, `strip_front_matter`
    (docs/sources.md).

    A path that exists is a file or folder, whatever its name looks like. Files come in the order of
    their names. With a `seed` the files of all inputs come in an order that depends only on the
    seed and their names; inside a file nothing moves.
    """
    mapping, options = take_mapping(options)
    parts = [_open_one(part, kind, options, mapping) for part in _named(spec)]
    places = [file.place for part in parts if isinstance(part, FileSource) for file in part.files]
    if len(set(places)) < len(places):
        twice, _ = Counter(places).most_common(1)[0]
        raise SourceError(f"{twice}: two of the inputs name it; name each file once")
    if seed is not None:
        return _in_seeded_order(parts, seed)
    return parts[0] if len(parts) == 1 else ConcatSource(parts)


def _named(where: Where) -> list[str]:
    """Each input that the caller named, once."""
    names = [str(part) for part in ([where] if isinstance(where, str | Path) else where)]
    if not names:
        raise SourceError("no input named; name a file, a folder, a glob or hub:owner/name")
    if len(set(names)) < len(names):
        twice = Url(max(names, key=names.count))
        raise SourceError(f"named more than once: {twice}; name it once")
    return names


def is_hub_dataset(where: str) -> bool:
    """Whether this names a dataset of the hub. A longer path names files in one."""
    if not where.startswith((_HUB, _HF)) or Path(where).exists():
        return False
    return where.startswith(_HUB) or len(where.removeprefix(_HF).rstrip("/").split("/")) <= 3


def _open_one(
    where: str, kind: str | None, options: dict[str, Any], mapping: RowMapping | None
) -> Source:
    if is_hub_dataset(where):
        if kind not in (None, "hub"):
            raise OptionError(f"{where} is a hub dataset, but {{kind}} was given", kind=kind)
        dataset, options = _hub_dataset(where, options)
        if mapping is not None:
            options = {**_without_on_bad(options, mapping), "mapping": mapping}
        return _made(HubSource, dataset, options)
    ext = options.get("ext")
    if kind is None:
        kind = _kind_of_files(where, ext)
    elif kind not in FORMATS:
        raise OptionError(f"{{kind}}: wanted one of {', '.join(FORMATS)}", kind=kind)
    elif kind == "text" and ext is None:
        options = {**options, "ext": "*"}
    make = FORMATS[kind][1]
    if mapping is None:
        return _made(make, where, options)
    if "on_bad" not in inspect.signature(make).parameters:
        options = _without_on_bad(options, mapping)
    source = _made(make, where, options)
    assert isinstance(source, FileSource), "kinds of files are files"
    return source.mapped(mapping)


def _without_on_bad(options: dict[str, Any], mapping: RowMapping) -> dict[str, Any]:
    """Without an option that is for the function of the mapping alone."""
    names = ("on_bad",) if mapping.map is not None else ()
    return {name: value for name, value in options.items() if name not in names}


def _hub_dataset(where: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The dataset that an address names, and the options with the one that the address holds."""
    if where.startswith(_HUB):
        key = "config"
        dataset, _, value = where.removeprefix(_HUB).partition(":")
    else:
        key = "revision"
        dataset, _, value = where.removeprefix(_HF).removeprefix("datasets/").partition("@")
    if dataset.count("/") != 1 or not all(dataset.split("/")):
        raise SourceError(
            f"{where}: wanted hub:owner/name[:config] or hf://datasets/owner/name[@revision]"
        )
    if not value:
        return dataset, options
    if options.get(key, value) != value:
        raise OptionError(
            f"{where} names {key} {value!r}, but {{{key}}} was given", **{key: options[key]}
        )
    return dataset, {**options, key: value}


def _made(make: Callable[..., Source], where: str, options: dict[str, Any]) -> Source:
    signature = inspect.signature(make)
    try:
        signature.bind(where, **options)
    except TypeError as error:
        known = [name for name in signature.parameters if name not in ("where", "mapping")]
        known += MAPPING_OPTIONS
        raise _not_for(str(Url(where)), options, known) from error
    return make(where, **options)


def _not_for(where: str, options: dict[str, Any], known: list[str]) -> OptionError:
    strange = sorted(set(options) - set(known))
    return OptionError(
        f"{where}: {', '.join(f'{{{name}}}' for name in strange)} does not apply to this kind of "
        f"input; options here: {', '.join(known)}",
        **dict.fromkeys(strange, ...),
    )


def _kind_of_files(where: str, ext: Endings) -> str:
    """The kind of all files at `where`, by their endings."""
    files = _listed(where, ext)
    if is_saved([file.name for file in files]):
        return "arrow"
    found: dict[str, Counter[str]] = {}  # kind -> endings of its files
    for file in files:
        kind = _kind_of(file.name)
        if kind is None:
            raise SourceError(
                f"{Url(where)}: {file.name} ends in none of {some_endings(_ENDINGS)}; say what it "
                f"is with {{kind}} ({', '.join(FORMATS)})",
                kind=...,
            )
        found.setdefault(kind, Counter())[ending_of(file.name)] += 1
    if len(found) > 1:
        listed = "; ".join(f"{kind}: {counted(found[kind])}" for kind in sorted(found))
        first = max(found, key=lambda kind: found[kind].total())
        raise SourceError(
            f"{Url(where)}: several kinds of files ({listed}); choose endings with {{ext}}, or a "
            f"glob such as '{_glob_of(where, found[first])}'; or read each file as one text, "
            "whatever it is, with {kind}",
            ext=",".join(sorted(found[first])),
            kind="text",
        )
    (kind,) = found
    return kind


def _listed(where: str, ext: Endings) -> tuple[InputFile, ...]:
    """The files that an input may mean. Endings choose files, and in archives members: an archive
    that is named itself is not left out by them."""
    if ext is not None:
        is_archive = any(where.lower().endswith(FORMATS[kind][0].endings) for kind in _ARCHIVES)
        if not is_archive:
            return list_files(where, suffixes=_ENDINGS, ext=ext, quiet=True)
    return list_files(where, suffixes=_ENDINGS, quiet=True)


def _kind_of(name: str) -> str | None:
    name = name.lower()
    return next((kind for kind, (of, _) in FORMATS.items() if name.endswith(of.endings)), None)


def _glob_of(where: str, endings: Counter[str]) -> str:
    is_glob = has_magic(where) and not Path(where).exists()
    glob = where if is_glob else f"{where.rstrip('/')}/**/*{endings.most_common(1)[0][0]}"
    return str(Url(glob))


def _in_seeded_order(parts: Sequence[Source], seed: int) -> Source:
    """All files of all parts, mixed. Files of one name keep the order of the inputs."""
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise OptionError("{seed}: wanted a whole number", seed=seed)

    def key(file: InputFile) -> str:
        return hashlib.sha256(json.dumps([seed, "file order", file.name]).encode()).hexdigest()

    if len(parts) == 1 and isinstance(parts[0], FileSource):
        return parts[0].of_files(sorted(parts[0].files, key=key))
    files: list[FileSource] = []
    for part in parts:
        if not isinstance(part, FileSource):
            raise OptionError(
                f"{{seed}}: {part.name} is not a list of files, and a seed orders files; name it "
                "without a seed, or its files: hf://datasets/owner/name/**/*.parquet",
                seed=seed,
            )
        files += [part.of_files((file,), f"{part.name}/{file.name}") for file in part.files]
    files.sort(key=lambda source: key(source.files[0]))
    return ConcatSource(files, name=" + ".join(part.name for part in parts))


def open_chats(
    where: Where,
    *,
    shape: str | None = None,
    name: str | None = None,
    on_bad: OnBad = "error",
    ext: Endings = None,
    limits: BatchLimits = DEFAULT_LIMITS,
    **options: Any,
) -> ChatSource:
    """Open conversations. `shape`: one of `SHAPES`; None: that of the first row.

    Further options: those of `ReadRules` (lang= and skip_deleted= of the oasst shapes; for all
    others messages_field=, role_field=, content_field=, role_map= and split_think=; for all
    ignore_columns=, names of columns that change what is trained and are not read); filter= and
    map= (docs/sources.md); for hub datasets those of `HubOptions`. A path that exists is a file or
    folder, whatever its name looks like. Files of several formats may be in one folder; `ext`
    chooses endings. Files are listed at the call, and read (for the shape) on first use. Their
    names in ids and cursors are relative to what all files have in common.
    """
    parts = _named(where)
    hubs = [part for part in parts if is_hub_dataset(part)]
    known = [*_RULES, "filter", "map", *(_HUB_OPTIONS if hubs else [])]
    if not set(options) <= set(known):
        raise _not_for(
            str(Url(parts[0])), options, ["shape", "name", "on_bad", "ext", "limits", *known]
        )
    rules = ReadRules(**{key: options.pop(key) for key in _RULES if key in options})
    mapping, options = take_mapping({**options, "on_bad": on_bad})
    del options["on_bad"]
    files = iter(_files_of([part for part in parts if part not in hubs], ext))
    inputs: list[ChatInput] = []
    for part in parts:
        if part in hubs:
            inputs.append(ChatInput(HubSplit(*_hub_dataset(part, options)), HubRows()))
        else:
            inputs += [ChatInput(file, _row_format(file, rules)) for file in next(files)]
    return ChatSource(
        inputs,
        name=name or name_of(where),
        shape=shape,
        rules=rules,
        on_bad=on_bad,
        limits=limits,
        mapping=mapping,
    )


def open_texts(
    where: Where, *, field: str | None = None, shape: str | None = None, **options: Any
) -> Source | ChatSource:
    """Open what holds text, whatever it is, for `texts_of`.

    Conversations where `shape` or an option of conversations says so. Without these and without
    `field`: where the first row has a shape of conversations and no field `text`.
    """
    are_chats = shape is not None or not options.keys().isdisjoint(_RULES)
    if are_chats and field is not None:
        raise OptionError(
            "{field}: for documents, but another option says that these are conversations: leave "
            "out one of them",
            field=field,
        )
    if are_chats or (field is None and _begins_with_chat(where)):
        return open_chats(where, shape=shape, **options)
    if field is not None:
        options["field"] = field
    return open_source(where, **options)


def _begins_with_chat(where: Where) -> bool:
    try:
        row = open_chats(where).first_row()
    except SourceError:
        return False  # what is wrong is said when the documents are opened
    return row is not None and "text" not in row and _shape(row, ReadRules()) is not None


def texts_of(source: Source | ChatSource) -> Iterator[str]:
    """The documents, or what the messages of conversations say: contents and reasoning. Rows that
    are left out are counted in a warning."""
    left_out: Counter[str] = Counter()
    for batch in source.batches():
        left_out.update(drop.reason for drop in batch.drops)
        if isinstance(batch, TextBatch):
            yield from batch.strings or batch.texts.to_pylist()
            continue
        for chat in batch.conversations:
            own = (
                message for one in chat.branches for message in one.messages[len(chat.messages) :]
            )
            for message in (*chat.messages, *own):
                said = (message.get("reasoning_content"), message.get("content"))
                yield from (text for text in said if isinstance(text, str) and text)
    if left_out:
        counts = ", ".join(f"{reason}: {count:,}" for reason, count in sorted(left_out.items()))
        logger.warning("source %r: rows that gave no text (%s)", source.name, counts)


def _files_of(parts: Sequence[str], ext: Endings) -> list[list[InputFile]]:
    """The files of each part, named relative to what all parts have in common."""
    found = [list(saved_files(list_files(part, suffixes=_ROW_ENDINGS, ext=ext))) for part in parts]
    if len(found) < 2:
        return found
    named = iter(with_common_names([file for files in found for file in files]))
    return [[next(named) for _ in files] for files in found]


def _row_format(file: InputFile, rules: ReadRules) -> RowFormat:
    """A `.json` file is one list, an object with one list of rows, or JSON lines."""
    kind = _kind_of(file.name)
    format = TextFormat if kind is None else FORMATS[kind][0]
    if not issubclass(format, RowFormat):
        raise SourceError(f"{file.place}: ends in none of {some_endings(_ROW_ENDINGS)}; rename it")
    if kind != "json":
        return format()
    check_unchanged(file)
    look = json_array.look(file)
    if not look.is_object or _holds_rows(file, look, rules):
        return JsonArrayFormat()
    logger.info("%s: begins with an object, so it is read as JSON lines", scrub(str(file.place)))
    return JsonlFormat()


def _holds_rows(file: InputFile, look: json_array.Beginning, rules: ReadRules) -> bool:
    """Whether the list in the object that a file begins with holds rows: not when the object is a
    row itself, so that the list holds its turns."""
    if look.found is None:
        return False
    row = _decoded(look.line)
    if row is not None and (look.has_more or _shape(row, rules) is not None):
        return False
    try:
        item = _decoded(json_array.first_item(file, look.found, _LOOK_LIMITS))
    except HubError:
        raise
    except SourceError:
        return False  # read as JSON lines it is an error too, with its line
    if item is None or not item.keys().isdisjoint(("role", "from", rules.role_field)):
        return False
    return look.found.key not in TURN_COLUMNS or _shape(item, rules) is not None


def _decoded(data: bytes) -> Object | None:
    try:
        return decode_row(data)[0]
    except BadRowError:
        return None


def _shape(row: Object, rules: ReadRules) -> ConversationShape | None:
    try:
        return shape_of(renamed(row, rules))
    except BadRowError:
        return None
