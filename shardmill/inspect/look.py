"""What is in files, before anything is built: columns, shape or field, what would be trained.

Reads the first rows only and writes nothing. What it says of a row is what a build would do with
it, by the same readers and templates, and the commands it gives can be run as they are.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shardmill.building.api import Inputs, open_template
from shardmill.chat import REASONS
from shardmill.chat.policy import ChatTemplate, TrainPolicy, check_messages, trained_messages
from shardmill.errors import OptionError, SourceError
from shardmill.messages import Dropped
from shardmill.protocols import Tokenizer
from shardmill.records import JSON, ROLES, Conversation, Drop
from shardmill.sources import CHAT_REASONS, SHAPES, BatchLimits, open_chats, open_source
from shardmill.sources.batches import choose_field
from shardmill.sources.conversations import ChatInput
from shardmill.sources.formats.jsonl import Object, kind_of
from shardmill.sources.meaning import FoundColumn, meanings_in, sentences
from shardmill.sources.message_trees import TreeRow, threads
from shardmill.sources.shapes import ConversationShape, check_best, shape_named, shape_of
from shardmill.sources.source import BadRowError, FileSource, InputRow, leaves
from shardmill.sources.turns import ReadRules, kinds_of, missing_options, renamed
from shardmill.storage.files import InputFile
from shardmill.tokenizers import open_tokenizer
from shardmill.urls import scrub

_LIMITS = BatchLimits(num_bytes=2**18, most_bytes=64 * 2**20)
_MOST_BYTES = 8 * 2**20  # of rows, about
_MOST_FILES = 20
_MOST_PROBLEMS, _ROWS_OF_A_REASON = 10, 2
_CHARACTERS = 2000  # of an example that are kept
_TRY_SPECIALS = {"im_start": "<|im_start|>", "im_end": "<|im_end|>"}

Kind = Literal["documents", "conversations", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LookedColumn:
    """A column of the rows that were seen."""

    name: str
    kinds: dict[str, int]  # what it holds -> rows
    num_null: int  # rows where it holds null or is not there


@dataclass(frozen=True, slots=True, kw_only=True)
class LookedPart:
    """A part of an example."""

    text: str
    trained: bool
    marker: bool = False  # a token of the template, or who speaks


@dataclass(frozen=True, slots=True, kw_only=True)
class LookedExample:
    """What would be made of a row."""

    id: str
    parts: tuple[LookedPart, ...]
    num_left_out: int = 0  # characters at its end that are not in `parts`


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Of the documents or conversations that were seen."""

    least: int
    median: int
    most: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NextCommand:
    """A command that can be run as it is."""

    line: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What was found in the first rows of some inputs."""

    inputs: tuple[str, ...]
    formats: dict[str, int]  # format -> files
    num_bytes: int | None  # of all files; None: not known, as of a stream
    num_rows: int  # seen
    is_all: bool  # whether there are no more
    columns: tuple[LookedColumn, ...] = ()
    kind: Kind = "unknown"
    shape: str | None = None  # of conversations
    field: str | None = None  # of documents
    why: str = ""  # this kind, shape or field
    meanings: tuple[str, ...] = ()  # what columns usually say that would be ignored
    examples: tuple[LookedExample, ...] = ()
    is_rendered: bool = False  # whether they are tokens of a template, as text
    characters: Lengths | None = None
    tokens: Lengths | None = None  # None without a tokenizer
    # rows that would give nothing, by reason
    left_out: dict[str, int] = dataclasses.field(default_factory=dict)
    problems: tuple[str, ...] = ()
    commands: tuple[NextCommand, ...] = ()

    def to_json(self) -> dict[str, JSON]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """What the caller said, for the readers and for the command."""

    inputs: tuple[str, ...]
    rules: ReadRules
    shape: str | None
    field: str | None
    tokenizer: str | Path | Tokenizer | None
    template: str | Path | ChatTemplate | None
    special: Mapping[str, str]
    num_rows: int
    num_examples: int

    @property
    def for_chats(self) -> bool:
        return bool(self.shape or self.template or self.rules.names or self.rules.split_think)


@dataclass(slots=True)
class _Found:
    """What is collected on the way."""

    kind: Kind = "unknown"
    shape: ConversationShape | None = None
    field: str | None = None
    why: str = ""
    texts: list[tuple[str, str]] = dataclasses.field(default_factory=list)  # ids and documents
    chats: list[Conversation] = dataclasses.field(default_factory=list)
    left_out: Counter[str] = dataclasses.field(default_factory=Counter)
    has_bad_rows: bool = False
    problems: list[str] = dataclasses.field(default_factory=list)

    def drop(self, where: str, reason: str, problem: str = "") -> None:
        self.left_out[reason] += 1
        if self.left_out[reason] > _ROWS_OF_A_REASON:
            return
        sentence = problem or CHAT_REASONS.get(reason) or REASONS.get(reason, "")
        self.problems.append(f"{where}: {reason}: {sentence}" if sentence else f"{where}: {reason}")


def look(
    inputs: Inputs,
    *,
    shape: str | None = None,
    field: str | None = None,
    messages_field: str | None = None,
    role_field: str | None = None,
    content_field: str | None = None,
    role_map: Mapping[str, str] | None = None,
    split_think: bool = False,
    ignore_columns: Sequence[str] | None = None,
    tokenizer: str | Path | Tokenizer | None = None,
    template: str | Path | ChatTemplate | None = None,
    special: Mapping[str, str] | None = None,
    rows: int = 100,
    examples: int = 3,
) -> Look:
    """What is in `inputs`, what `build` would read and train of it, and the command to run next.

    `inputs` are those of `build`. At most `rows` rows are read, some of each file, and at most
    about 8 MiB of them. With a `tokenizer` and a `template` the `examples` are rendered, else they
    are the messages as text. The other options are those of `build`.
    """
    if template is not None and tokenizer is None:
        raise OptionError("{template}: needs a {tokenizer}", template=str(template), tokenizer=...)
    rules: dict[str, Any] = {
        "messages_field": messages_field,
        "role_field": role_field,
        "content_field": content_field,
        "role_map": role_map or {},
        "split_think": split_think,
        "ignore_columns": ignore_columns or (),
    }
    given = _Given(
        inputs=tuple(map(str, [inputs] if isinstance(inputs, str | Path) else inputs)),
        rules=ReadRules(**rules),
        shape=shape,
        field=field,
        tokenizer=tokenizer,
        template=template,
        special=special or {},
        num_rows=rows,
        num_examples=examples,
    )
    try:
        row_files = list(open_chats(list(given.inputs), **rules).inputs)
    except SourceError:
        return _look_at_texts(given)
    return _look_at_rows(given, row_files)


# rows


def _look_at_rows(given: _Given, inputs: Sequence[ChatInput]) -> Look:
    found = _Found()
    rows, is_all = _first_rows(inputs, given.num_rows, found)
    good = [(one, row) for one, row in rows if isinstance(row.value, dict)]
    for one, row in rows:
        if isinstance(row.value, BadRowError):
            found.has_bad_rows = True
            found.drop(one.where(row), row.value.reason, str(row.value))
    _decide(given, good, found)
    settled = {*given.rules.ignore_columns, given.rules.messages_field or ""}
    settled |= {found.shape.name} if found.shape else set()
    meant = _meanings(good, settled)
    if found.kind == "documents":
        meant = [one for one in meant if one.meaning.of_documents and given.field is None]
        _read_documents(good, found)
    elif found.kind == "conversations":
        _read_chats(given, good, found)
    sizes = [getattr(one.file, "num_bytes", None) for one in inputs]
    look = Look(
        inputs=tuple(map(scrub, given.inputs)),
        formats=dict(Counter(_format_name(one) for one in inputs)),
        num_bytes=None if None in sizes else sum(size or 0 for size in sizes),
        num_rows=len(rows),
        is_all=is_all,
        columns=_columns([row.value for _, row in good if isinstance(row.value, dict)]),
        kind=found.kind,
        shape=found.shape.name if found.shape else None,
        field=found.field,
        why=found.why,
        meanings=tuple(sentences(meant)),
    )
    return _with_examples(given, look, found, meant)


def _first_rows(
    inputs: Sequence[ChatInput], num_rows: int, found: _Found
) -> tuple[list[tuple[ChatInput, InputRow]], bool]:
    """Rows of the first files, and whether these are all."""
    chosen = inputs[:_MOST_FILES]
    share, num_bytes = max(num_rows // len(chosen), 1), 0
    rows: list[tuple[ChatInput, InputRow]] = []
    is_all = len(chosen) == len(inputs)
    for one in chosen:
        here = 0
        try:
            for row in one.rows(None, _LIMITS):
                if row.value is None:
                    continue
                if here == share or len(rows) >= num_rows or num_bytes > _MOST_BYTES:
                    is_all = False
                    break
                here += 1
                num_bytes += len(repr(row.value))
                rows.append((one, row))
        except SourceError as error:
            is_all = False
            found.problems.append(str(error))
    return rows, is_all


def _decide(given: _Given, good: Sequence[tuple[ChatInput, InputRow]], found: _Found) -> None:
    """Documents or conversations, as the first row that can be read says."""
    if given.field is not None:
        found.kind, found.field, found.why = "documents", given.field, "it was named"
        return
    if not good:
        found.why = "no row can be read"
        return
    one, row = good[0]
    assert isinstance(row.value, dict)
    try:
        value = renamed(row.value, given.rules)
        if given.shape is not None:
            found.shape, found.why = shape_named(given.shape), "it was named"
        else:
            found.shape = shape_of(value)
            found.why = f"found in {one.where(row)}"
    except BadRowError as bad:
        found.why = f"{one.where(row)}: {bad}"
        return
    if found.shape is not None:
        found.kind = "conversations"
        found.why += f": {found.shape.keys}"
        return
    strings = [(key, isinstance(cell, str | bytes)) for key, cell in row.value.items()]
    holds = f"{one.where(row)}: no shape of conversations has these columns: {kinds_of(row.value)}"
    shapes = {one.shape for _, one in meanings_in(row.value) if one.of_documents and one.shape}
    if given.for_chats or shapes:
        those = "".join(f"; there are some of the shape {shape!r}" for shape in sorted(shapes))
        found.why = holds + those
        return
    try:
        found.field = choose_field(strings, wanted=None, where=one.where(row))
    except SourceError:
        found.why = f"{holds}, and none of them holds text"
        return
    found.kind = "documents"
    found.why = "no shape of conversations has these columns, and "
    found.why += "this is the usual name" if found.field == "text" else "it is the first with text"


def _meanings(good: Sequence[tuple[ChatInput, InputRow]], settled: set[str]) -> list[FoundColumn]:
    """The columns that would be ignored and change what rows mean, each once."""
    first: dict[str, FoundColumn] = {}
    for one, row in good:
        assert isinstance(row.value, dict)
        for name, meaning in meanings_in(row.value, settled):
            if name not in first:
                kind, where = kind_of(row.value[name]), one.where(row)
                first[name] = FoundColumn(name=name, meaning=meaning, where=where, kind=kind)
    return list(first.values())


def _columns(rows: Sequence[Object]) -> tuple[LookedColumn, ...]:
    names = dict.fromkeys(name for row in rows for name in row)
    return tuple(
        LookedColumn(
            name=name,
            kinds=dict(Counter(kind_of(row[name]) for row in rows if row.get(name) is not None)),
            num_null=sum(row.get(name) is None for row in rows),
        )
        for name in names
    )


def _format_name(one: ChatInput) -> str:
    if not isinstance(one.file, InputFile):
        return "a dataset of the hub"
    kind = getattr(one.format, "kind", None)
    return "json" if kind is None else str(kind)


def _read_documents(good: Sequence[tuple[ChatInput, InputRow]], found: _Found) -> None:
    for one, row in good:
        assert isinstance(row.value, dict)
        assert found.field is not None
        text = row.value.get(found.field)
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        if text is None:
            found.drop(one.where(row), "no_text", f"the field {found.field!r} is null or missing")
        elif not isinstance(text, str):
            found.has_bad_rows = True
            problem = f"the field {found.field!r} holds {kind_of(text)}, not a string"
            found.drop(one.where(row), "not_a_string", problem)
        elif text:
            found.texts.append((row.id, text))


def _read_chats(given: _Given, good: Sequence[tuple[ChatInput, InputRow]], found: _Found) -> None:
    """The conversations of the rows, as a `ChatSource` reads them."""
    assert found.shape is not None
    tree: list[TreeRow] = []
    for one, row in good:
        assert isinstance(row.value, dict)
        try:
            value = renamed(row.value, given.rules)
            if given.shape is None:
                check_best(value, found.shape)
            items = list(found.shape.read(value, row.id, given.rules, row.row))
        except BadRowError as bad:
            found.has_bad_rows = True
            found.drop(one.where(row), bad.reason, str(bad))
            continue
        tree += [item for item in items if isinstance(item, TreeRow)]
        _take(found, [item for item in items if not isinstance(item, TreeRow)])
    _take(found, [item for item in threads(tree) if isinstance(item, Conversation)])
    said: set[str] = set()
    for chat in found.chats:
        for option, problem in missing_options(chat.messages, given.rules):
            if option not in said:
                found.problems.append(f"{chat.id}: {problem}")
                said.add(option)


def _take(found: _Found, items: Sequence[Conversation | Drop]) -> None:
    for item in items:
        if isinstance(item, Drop):
            found.drop(item.id, item.reason)
        else:
            found.chats.append(item)


# texts


def _look_at_texts(given: _Given) -> Look:
    """Files that are documents, or have one in each line."""
    if given.for_chats:
        raise OptionError(
            f"{scrub(given.inputs[0])}: a file of text has no conversations; leave out {{shape}}, "
            "{template} and what is for them",
            shape=...,
            template=...,
        )
    found = _Found(kind="documents", why="a file of text is a document")
    source = open_source(list(given.inputs))
    parts = [leaf for leaf in leaves(source) if isinstance(leaf, FileSource)]
    files = [file for leaf in parts for file in leaf.files]
    for leaf in parts:
        for file in leaf.files[:_MOST_FILES]:
            one = leaf.of_files((file,)).with_limits(**_text_limits(given.num_rows))
            try:
                for batch in islice(one.batches(), 1):
                    texts = batch.texts.to_pylist()
                    found.texts += [(file.name, text) for text in texts]
            except SourceError as error:
                found.problems.append(str(error))
    look = Look(
        inputs=tuple(map(scrub, given.inputs)),
        formats=dict(Counter(str(leaf.settings["kind"]) for leaf in parts for _ in leaf.files)),
        num_bytes=sum(file.num_bytes for file in files),
        num_rows=len(found.texts),
        is_all=len(found.texts) == len(files),
        kind="documents",
        why=found.why,
    )
    return _with_examples(given, look, found, [])


def _text_limits(num_rows: int) -> dict[str, int]:
    most = _LIMITS.most_bytes
    assert most is not None
    return {"num_documents": num_rows, "num_bytes": _LIMITS.num_bytes, "most_bytes": most}


# examples


def _with_examples(given: _Given, look: Look, found: _Found, meant: Sequence[FoundColumn]) -> Look:
    """With what would be made of the rows, and the commands that make it."""
    tokenizer = given.tokenizer
    if isinstance(tokenizer, str | Path):
        tokenizer = open_tokenizer(tokenizer, specials=dict(given.special) or None)
    examples: list[LookedExample]
    tokens: Sequence[int] | None = None
    is_rendered = False
    if found.kind == "documents":
        shown = found.texts[: given.num_examples]
        examples = [_cut(id, [LookedPart(text=text, trained=True)]) for id, text in shown]
        sizes = [len(text) for _, text in found.texts]
        if tokenizer is not None and found.texts:
            tokens = tokenizer.encode_batch([text for _, text in found.texts]).lengths.tolist()
    else:
        sizes, made = [], []
        for chat in found.chats:
            try:
                parts = _as_text(chat, TrainPolicy())
            except Dropped as why:
                if given.template is None:  # else it is dropped there
                    found.drop(chat.id, str(why))
                continue
            sizes.append(sum(len(part.text) for part in parts if not part.marker))
            made.append(_cut(chat.id, parts))
        examples = made[: given.num_examples]
        if given.template is not None and given.tokenizer is not None and found.chats:
            is_rendered = True
            examples, tokens = _rendered(given, found)
    problems = list(dict.fromkeys(found.problems))
    if len(problems) > _MOST_PROBLEMS:
        more = f"and {len(problems) - _MOST_PROBLEMS:,} more"
        problems = [*problems[:_MOST_PROBLEMS], more]
    look = replace(
        look,
        examples=tuple(examples),
        is_rendered=is_rendered,
        characters=_lengths(sizes),
        tokens=None if tokens is None else _lengths(tokens),
        left_out=dict(found.left_out.most_common()),
        problems=tuple(problems),
    )
    if look.characters is None:
        return look
    return replace(look, commands=tuple(_commands(given, found, meant)))


def _rendered(given: _Given, found: _Found) -> tuple[list[LookedExample], list[int]]:
    """By the template, as tokens with their mask."""
    assert given.template is not None
    assert given.tokenizer is not None
    tokenizer, template, _ = open_template(
        given.template, given.tokenizer, dict(given.special) or None
    )
    result = template.render(found.chats, TrainPolicy())
    for drop in result.drops:
        found.drop(drop.id, drop.reason)
    ids, mask = result.examples.ids, result.examples.mask
    made = []
    for number in range(min(len(ids), given.num_examples)):
        start, stop = int(ids.offsets[number]), int(ids.offsets[number + 1])
        own, trained = ids[number], mask[start:stop]
        marker = np.isin(own, sorted(template.marker_ids))
        edges = np.flatnonzero(np.diff(trained * 2 + marker, prepend=-1, append=-1))
        parts = [
            LookedPart(
                text=tokenizer.decode(own[first:last]),
                trained=bool(trained[first]),
                marker=bool(marker[first]),
            )
            for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
        ]
        made.append(_cut(found.chats[int(result.kept[number])].id, parts))
    return made, ids.lengths.tolist()


def _as_text(chat: Conversation, policy: TrainPolicy) -> list[LookedPart]:
    """Who says what, and which of it is trained. Dropped as any template would drop it."""
    messages = check_messages(chat.messages)
    trained = trained_messages(messages, policy)
    if not trained.any():
        is_answered = any(ROLES[message.role] == "assistant" for message in messages)
        raise Dropped("nothing_trained" if is_answered else "no_assistant")
    parts = []
    for message, is_trained in zip(messages, trained.tolist(), strict=True):
        words = filter(None, [message.reasoning, message.text, *message.calls])
        parts.append(LookedPart(text=f"{ROLES[message.role]}: ", trained=False, marker=True))
        parts.append(LookedPart(text="\n".join(words), trained=is_trained))
        parts.append(LookedPart(text="\n", trained=False, marker=True))
    return parts


def _cut(id: str, parts: Sequence[LookedPart]) -> LookedExample:
    """The beginning of an example."""
    kept, left = [], _CHARACTERS
    for part in parts:
        text = part.text[:left]
        if text:
            kept.append(replace(part, text=text))
        left -= len(text)
    num_left_out = sum(len(part.text) for part in parts) - (_CHARACTERS - left)
    return LookedExample(id=id, parts=tuple(kept), num_left_out=num_left_out)


def _lengths(sizes: Sequence[int]) -> Lengths | None:
    if not sizes:
        return None
    return Lengths(
        least=min(sizes), median=int(np.median(sizes)), most=max(sizes), total=sum(sizes)
    )


# commands


def _commands(given: _Given, found: _Found, meant: Sequence[FoundColumn]) -> Iterator[NextCommand]:
    """One; of columns that would be ignored one for each way to go on."""
    words = _words(given, found)
    if not meant:
        yield NextCommand(line=shlex.join(words), why="")
        return
    if found.kind == "documents":
        words += [] if "--field" in words else ["--field", str(found.field)]
        why = f"the texts of {found.field!r} are the documents, whatever the other columns say"
        yield NextCommand(line=shlex.join(words), why=why)
        return
    for shape in dict.fromkeys(one.meaning.shape for one in meant):
        if shape in SHAPES:
            line = shlex.join([*words, "--shape", shape])
            yield NextCommand(line=line, why=f"the shape {shape!r} reads these columns")
    ignored = [word for one in meant for word in ("--ignore-column", one.name)]
    why = "these columns change nothing"
    yield NextCommand(line=shlex.join([*words, *ignored]), why=why)


def _words(given: _Given, found: _Found) -> list[str]:
    words = ["shardmill", "build"]
    words += ["chats"] if found.kind == "conversations" else []
    words += [scrub(one) for one in given.inputs]
    words += ["--out", _free_folder(given.inputs[0])]
    named = given.tokenizer if isinstance(given.tokenizer, str | Path) else None
    special = dict(given.special)
    if found.kind == "conversations":
        template = given.template if isinstance(given.template, str | Path) else None
        if named is None:
            special = special or _TRY_SPECIALS
        named = named or f"byte:{len(special)}"  # to try it
        words += ["--tokenizer", str(named), "--template", str(template or "chatml")]
        words += [word for pair in special.items() for word in ("--special", "=".join(pair))]
        words += ["--shape", given.shape] if given.shape else []
        words += _rule_words(given.rules)
    else:
        words += ["--tokenizer", str(named or "byte:1")]
        if "eot" in special or named is None:
            words += ["--eot", special.get("eot", "<|eot|>")]
        is_found = found.field not in (None, "text") or given.field is not None
        words += ["--field", str(found.field)] if is_found else []
    words += [word for name in given.rules.ignore_columns for word in ("--ignore-column", name)]
    return words + (["--on-bad", "skip"] if found.has_bad_rows else [])


def _rule_words(rules: ReadRules) -> list[str]:
    words = []
    for name in ("messages_field", "role_field", "content_field"):
        value = getattr(rules, name)
        words += [f"--{name.replace('_', '-')}", value] if value else []
    if rules.role_map:
        words += ["--role-map", ",".join(f"{one}={role}" for one, role in rules.role_map.items())]
    return words + (["--split-think"] if rules.split_think else [])


def _free_folder(where: str) -> str:
    """A folder for the store that is not there yet, named like the input."""
    parts = [part for part in re.split("[/:*?]+", scrub(where)) if re.search(r"\w", part)]
    name = re.split(r"\.(?:jsonl?|txt|md|parquet)\b", parts[-1] if parts else "data")[0]
    if not name.strip(".") or name.startswith("."):
        name = parts[-2] if len(parts) > 1 else "data"
    name = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "data"
    found, number = f"stores/{name}", 2
    while Path(found).exists():
        found, number = f"stores/{name}-{number}", number + 1
    return found
