"""The state of a stream: a small JSON value that says where each of its streams resumes.

A state holds ints and strings only, no text and no token. A state of other data, another order or
another version is refused and every difference is named; so is one that was edited. `join_states`
makes one state from those of all processes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from operator import add, attrgetter, sub
from typing import Any, NoReturn

import numpy as np

from shardmill.errors import StateMismatchError
from shardmill.loading.streaming.documents import ReadCounts, StreamCursor
from shardmill.loading.streaming.rows import RowPosition, StreamRows
from shardmill.records import JSON

VERSION = 1
KIND = "shardmill.stream"
MAX_STREAMS = 2**20
"""A run has thousands of consumers at most; a larger number in a state is damage."""
MAX_COUNT = 2**63 - 1
State = dict[str, JSON]

_KEYS = {"version", "kind", "num_streams", "streams", "totals", "data", "seal"}
_EDITED = "it was changed since it was saved"
_UNCHANGED = "pass the state as the stream gave it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Rows given and what they hold; `input_...`: what was read to make them, in input rows.

    `tokens + padding == rows * (seq_len + 1)`; over an epoch `tokens + truncated_tokens` is every
    token of every document. Reading is ahead of giving by what is buffered. Rows without text
    count in one process only: over all processes `input_documents + input_empty + input_dropped`
    is the input.
    """

    rows: int = 0  # with rows of padding only, in the last batch
    tokens: int = 0  # without padding
    padding: int = 0  # tokens
    documents: int = 0  # whose first token was given
    truncated_documents: int = 0  # those of them that max_doc_tokens cut
    truncated_tokens: int = 0  # and what it took off
    input_documents: int = 0
    input_elsewhere: int = 0  # documents of other streams among the rows that this one read
    input_empty: int = 0
    input_dropped: int = 0
    input_repaired: int = 0  # documents in which bytes that are not UTF-8 were replaced

    @property
    def input_read(self) -> int:
        """Input rows: each is in exactly one of documents, elsewhere, empty, dropped."""
        return self.input_documents + self.input_elsewhere + self.input_empty + self.input_dropped

    @property
    def utilisation(self) -> float:
        """The share of tokens that is not padding; 1 when there are no rows."""
        return self.tokens / (self.tokens + self.padding) if self.rows else 1.0

    @property
    def padding_share(self) -> float:
        return 1.0 - self.utilisation

    def __add__(self, other: Counts) -> Counts:
        return Counts(**dict(zip(NAMES, map(add, _values(self), _values(other)), strict=True)))

    def __sub__(self, other: Counts) -> Counts:
        return Counts(**dict(zip(NAMES, map(sub, _values(self), _values(other)), strict=True)))

    def to_dict(self) -> dict[str, JSON]:
        """The counts, and the shares that follow from them."""
        shares = {"utilisation": self.utilisation, "padding_share": self.padding_share}
        counts = dict(zip(NAMES, _values(self), strict=True))
        return {**counts, "input_read": self.input_read, **shares}

    def with_input(self, read: ReadCounts) -> Counts:
        return replace(
            self,
            input_documents=read.documents,
            input_elsewhere=read.elsewhere,
            input_empty=read.empty,
            input_dropped=read.dropped,
            input_repaired=read.repaired,
        )

    def after_rows(self, rows: StreamRows, start: int, stop: int) -> Counts:
        """These counts once rows `start..stop` of `rows` are given too."""
        segments = rows.segments[start:stop]
        tokens = int(np.count_nonzero(segments))
        given = Counts(
            rows=stop - start,
            tokens=tokens,
            padding=segments.size - tokens,
            documents=int(rows.begun[start:stop].sum()),
            truncated_documents=int(rows.cut_documents[start:stop].sum()),
            truncated_tokens=int(rows.cut_tokens[start:stop].sum()),
        )
        return (self + given).with_input(rows.read)


NAMES = tuple(one.name for one in fields(Counts))
"""The names of the counts, in the order in which a state holds them."""
_values: Any = attrgetter(*NAMES)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStats:
    """Counts of the last batch given, and of all since the start of the run."""

    batch: Counts
    total: Counts

    def to_dict(self) -> dict[str, JSON]:
        return {"batch": self.batch.to_dict(), "total": self.total.to_dict()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Of one stream: where its next row comes from, and what it gave before."""

    row: RowPosition = field(default_factory=lambda: RowPosition(block=StreamCursor()))
    counts: Counts = field(default_factory=Counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What a state says."""

    num_streams: int  # of the whole run
    positions: Mapping[int, Position]  # of the streams in this state
    data: Mapping[str, JSON]  # what identifies the stream
    is_intact: bool = True  # False: its seal does not fit; see check_seal

    @property
    def totals(self) -> Counts:
        return sum((one.counts for one in self.positions.values()), Counts())


# writing


def write_state(saved: Saved, cache: dict[int, tuple[StreamCursor, str]]) -> State:
    """`saved` as JSON. `cache` keeps the text of each stream's cursor for the next state."""
    streams: dict[str, JSON] = {}
    for stream, position in saved.positions.items():
        block = position.row.block
        if stream not in cache or cache[stream][0] is not block:
            cache[stream] = (block, _cursor_text(block))
        streams[str(stream)] = position_text(position, cache[stream][1])
    state: State = {
        "version": VERSION,
        "kind": KIND,
        "num_streams": saved.num_streams,
        "streams": streams,
        "totals": dict(zip(NAMES, _values(saved.totals), strict=True)),
        "data": dict(saved.data),
    }
    return {**state, "seal": _seal(state)}


def position_text(position: Position, cursor_text: str | None = None) -> str:
    """Compact JSON; `cursor_text` is that of its block, if it is known."""
    row, counts = position.row, ",".join(map(str, _values(position.counts)))
    return (
        f'{{"place":{cursor_text or _cursor_text(row.block)},"document":{row.document},'
        f'"part":{row.part},"counts":[{counts}]}}'
    )


def _cursor_text(cursor: StreamCursor) -> str:
    values = {
        "epoch": cursor.epoch,
        "unit": cursor.unit,
        "cursor": cursor.cursor,
        "skip": cursor.skip,
        "number": cursor.number,
        "tally": astuple(cursor.read),
    }
    return json.dumps(values, separators=(",", ":"))


def _seal(state: Mapping[str, Any]) -> str:
    """sha256 over all other keys."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


# reading


def read_state(state: object) -> Saved:
    """What `state` says, if its form is right. Its seal is checked by `check_seal`."""
    found = _checked_form(state)
    num_streams = _count(found["num_streams"], "num_streams")
    if not 1 <= num_streams <= MAX_STREAMS:
        _refuse("num_streams", num_streams, f"1 to {MAX_STREAMS}")
    streams, totals, data = found["streams"], found["totals"], found["data"]
    if not isinstance(streams, Mapping) or not streams:
        _refuse("streams", streams, "an object with a text for each stream")
    positions = {}
    for key, text in streams.items():
        is_number = isinstance(key, str) and len(key) < 10 and key.isascii() and key.isdigit()
        stream = int(key) if is_number else -1
        if str(stream) != key or stream >= num_streams:
            _refuse("stream", key, f"0 to {num_streams - 1}")
        positions[stream] = read_position(text, stream)
    if not isinstance(data, Mapping) or not all(
        isinstance(name, str) and isinstance(value, str | int) for name, value in data.items()
    ):
        _refuse("data", data, "names with numbers or strings")
    saved = Saved(
        num_streams=num_streams,
        positions=positions,
        data=dict(data),
        is_intact=found["seal"] == _seal({key: found[key] for key in _KEYS - {"seal"}}),
    )
    if not isinstance(totals, Mapping) or totals.keys() != set(NAMES):
        _refuse("totals", totals, f"exactly the keys {list(NAMES)}")
    wrong = [
        name
        for name in NAMES
        if _count(totals[name], f"totals: {name}") != getattr(saved.totals, name)
    ]
    if wrong:
        raise StateMismatchError(
            f"the state's totals do not follow from its streams: {', '.join(wrong)}; {_EDITED}"
        )
    return saved


def read_position(text: object, stream: int) -> Position:
    """The position in `text`; StateMismatchError says what is wrong with it."""
    where = f"stream {stream}"
    found = _object(_parsed(text, where), ("place", "document", "part", "counts"), where)
    names = ("epoch", "unit", "skip", "number")
    cursor = _object(found["place"], (*names, "cursor", "tally"), f"{where}: place")
    inner = cursor["cursor"]
    if inner is not None and not isinstance(inner, dict):
        _refuse(f"{where}: cursor", inner, "an object or null")
    read_names = [one.name for one in fields(ReadCounts)]
    read = ReadCounts(**_counts(cursor["tally"], read_names, f"{where}: tally"))
    numbers = {name: _count(cursor[name], f"{where}: {name}") for name in names}
    return Position(
        row=RowPosition(
            block=StreamCursor(cursor=inner, read=read, **numbers),
            document=_count(found["document"], f"{where}: document"),
            part=_count(found["part"], f"{where}: part"),
        ),
        counts=Counts(**_counts(found["counts"], NAMES, f"{where}: counts")),
    )


def check_data(data: Mapping[str, JSON], own: Mapping[str, JSON]) -> None:
    """StateMismatchError names every difference between a state's data and this stream's."""
    wrong = list(_differences(data, own, "the state", "this stream"))
    if wrong:
        raise StateMismatchError(
            f"this state is not of this stream. {'; '.join(wrong)}. Open the stream with the "
            "values of the state, or begin a new run without it"
        )


def check_seal(saved: Saved) -> None:
    """Refuse an edited state. Called last, so that a more specific message comes first."""
    if not saved.is_intact:
        raise StateMismatchError(
            f"the state's seal does not fit its values; {_EDITED}: {_UNCHANGED}"
        )


def join_states(states: Sequence[Mapping[str, Any]]) -> State:
    """One state from those of all processes of a run, taken at the same step.

    Any number of processes that divides `num_streams` can load it.
    """
    if isinstance(states, Mapping) or not states:
        raise StateMismatchError("join_states wants a list with the state of every process")
    saved = [read_state(state) for state in states]
    first = saved[0]
    positions: dict[int, Position] = {}
    for number, one in enumerate(saved):
        here = f"state {number} (from 0)"
        if one.num_streams != first.num_streams:
            raise StateMismatchError(
                f"num_streams: state 0 has {first.num_streams}, {here} {one.num_streams}; join the "
                "states of one run"
            )
        wrong = list(_differences(one.data, first.data, here, "state 0"))
        if wrong:
            raise StateMismatchError(f"these are states of different runs. {'; '.join(wrong)}")
        check_seal(one)
        twice = sorted(positions.keys() & one.positions.keys())
        if twice:
            raise StateMismatchError(
                f"{here} holds streams {twice}, which an earlier state holds too; pass the state "
                "of each process once"
            )
        positions |= one.positions
    missing = sorted(set(range(first.num_streams)) - positions.keys())
    if missing:
        raise StateMismatchError(
            f"streams {missing} of {first.num_streams} are in none of the {len(saved)} states; "
            "join the states of all processes"
        )
    return write_state(replace(first, positions=dict(sorted(positions.items()))), {})


def _checked_form(state: object) -> Mapping[str, Any]:
    if not isinstance(state, Mapping):
        raise StateMismatchError(
            f"a state is a dict, as the stream gave it; found a {type(state).__name__}"
        )
    if state.get("kind") != KIND:
        raise StateMismatchError(
            f"not the state of a stream: its kind is {state.get('kind')!r:.80}, wanted {KIND!r}"
        )
    version = state.get("version")
    if isinstance(version, bool) or version != VERSION:
        raise StateMismatchError(
            f"version: the state has {version!r:.80}, this shardmill reads {VERSION}; use the "
            "shardmill that wrote it"
        )
    if state.keys() != _KEYS:
        raise StateMismatchError(
            f"the state has unknown keys {sorted(map(str, state.keys() - _KEYS))!r:.200} and lacks "
            f"{sorted(_KEYS - state.keys())}; {_UNCHANGED}"
        )
    return state


def _parsed(text: object, where: str) -> object:
    if not isinstance(text, str):
        _refuse(where, text, "a string")
    try:
        return json.loads(text, parse_constant=lambda name: _refuse(where, name, "a number"))
    except (ValueError, RecursionError):  # not JSON, or a number of thousands of digits
        _refuse(where, text, "JSON")


def _object(value: object, names: Sequence[str], where: str) -> dict[str, Any]:
    """`value` if it is an object with exactly these keys."""
    if not isinstance(value, dict):
        _refuse(where, value, "an object")
    if value.keys() != set(names):
        _refuse(where, sorted(value), f"exactly the keys {sorted(names)}")
    return value


def _counts(value: object, names: Sequence[str], where: str) -> dict[str, int]:
    if not isinstance(value, list) or len(value) != len(names):
        _refuse(where, value, f"a list of {len(names)} counts")
    return {
        name: _count(count, f"{where}: {name}") for name, count in zip(names, value, strict=True)
    }


def _count(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
        _refuse(where, value, "a whole number from 0 to 2**63 - 1")
    return value


def _refuse(where: str, found: object, wanted: str) -> NoReturn:
    raise StateMismatchError(
        f"the state's {where} is {found!r:.120}, wanted {wanted}; {_EDITED}: {_UNCHANGED}"
    )


def _differences(
    found: Mapping[str, JSON], own: Mapping[str, JSON], there: str, here: str
) -> Iterator[str]:
    for name in sorted(found.keys() | own.keys()):
        if name not in found:
            yield f"{name}: {there} does not have it, {here} has {own[name]!r:.80}"
        elif name not in own:
            yield f"{name}: {there} has {found[name]!r:.80}, {here} does not know it"
        elif type(found[name]) is not type(own[name]) or found[name] != own[name]:
            yield f"{name}: {there} has {found[name]!r:.80}, {here} {own[name]!r:.80}"
