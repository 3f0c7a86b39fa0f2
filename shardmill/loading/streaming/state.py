"""The state of a stream: a small JSON value that says where each of its streams resumes.

A state holds ints and strings only, no text and no token. Besides the envelope of all states it has
a seal, so that one that was edited is refused. `join_states` makes one state from those of all
processes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from operator import add, attrgetter, sub
from typing import Annotated, Any

import msgspec
import numpy as np

from shardmill.errors import StateMismatchError
from shardmill.loading.state import (
    State,
    differences,
    read_envelope,
    refuse_differences,
    write_envelope,
)
from shardmill.loading.streaming.documents import ReadCounts, StreamCursor
from shardmill.loading.streaming.rows import RowPosition, StreamRows
from shardmill.records import JSON

KIND = "shardmill.stream"
MAX_STREAMS = 2**20
"""A run has thousands of consumers at most; a larger number in a state is damage."""


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
    state = write_envelope(
        KIND,
        num_streams=saved.num_streams,
        streams=streams,
        totals=dict(zip(NAMES, _values(saved.totals), strict=True)),
        data=dict(saved.data),
    )
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

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _Place(msgspec.Struct, forbid_unknown_fields=True):
    epoch: _Count
    unit: _Count
    cursor: dict[str, Any] | None
    skip: _Count
    number: _Count
    tally: Annotated[list[_Count], msgspec.Meta(min_length=5, max_length=5)]


class _Stream(msgspec.Struct, forbid_unknown_fields=True):
    """The text of one stream."""

    place: _Place
    document: _Count
    part: _Count
    counts: Annotated[list[_Count], msgspec.Meta(min_length=len(NAMES), max_length=len(NAMES))]


class _Form(msgspec.Struct):
    num_streams: Annotated[int, msgspec.Meta(ge=1, le=MAX_STREAMS)]
    streams: Annotated[dict[str, str], msgspec.Meta(min_length=1)]
    totals: dict[str, _Count]
    data: dict[str, str | int | bool]
    seal: str


def read_state(
    state: object,
    own: Mapping[str, JSON] | None = None,
    *,
    there: str = "the state",
    here: str = "this stream",
) -> Saved:
    """What `state` says. Refused if it was changed, or if its data are not `own` (None: any)."""
    found = read_envelope(state, KIND, _Form.__struct_fields__)
    try:
        form = msgspec.convert(found, _Form)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _changed(str(error)) from error
    positions = {}
    for key, text in form.streams.items():
        is_number = len(key) < 10 and key.isascii() and key.isdigit() and str(int(key)) == key
        if not is_number or int(key) >= form.num_streams:
            raise _changed(f"stream {key!r:.80}, wanted 0 to {form.num_streams - 1}")
        positions[int(key)] = read_position(text, int(key))
    saved = Saved(num_streams=form.num_streams, positions=positions, data=form.data)
    totals = dict(zip(NAMES, _values(saved.totals), strict=True))
    wrong = sorted({name for name, _ in form.totals.items() ^ totals.items()})
    if wrong:
        raise _changed(f"its totals do not follow from its streams: {', '.join(wrong)}")
    if own is not None:
        refuse_differences(differences(form.data, own, there=there, here=here))
    # last, so that a more specific message comes first
    if form.seal != _seal({key: value for key, value in found.items() if key != "seal"}):
        raise _changed("its seal does not fit its values")
    return saved


def read_position(text: str, stream: int) -> Position:
    """The position in `text`; StateMismatchError says what is wrong with it."""
    try:
        found = msgspec.json.decode(text, type=_Stream)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _changed(f"stream {stream} is {text!r:.80}: {error}") from error
    place = found.place
    return Position(
        row=RowPosition(
            block=StreamCursor(
                epoch=place.epoch,
                unit=place.unit,
                cursor=place.cursor,
                skip=place.skip,
                number=place.number,
                read=ReadCounts(**dict(zip(_READ_NAMES, place.tally, strict=True))),
            ),
            document=found.document,
            part=found.part,
        ),
        counts=Counts(**dict(zip(NAMES, found.counts, strict=True))),
    )


_READ_NAMES = tuple(one.name for one in fields(ReadCounts))


def _changed(problem: str) -> StateMismatchError:
    return StateMismatchError(
        f"the state was changed since it was saved: {problem}; pass it as the stream gave it"
    )


def join_states(states: Sequence[Mapping[str, Any]]) -> State:
    """One state from those of all processes of a run, taken at the same step.

    Any number of processes that divides `num_streams` can load it.
    """
    if isinstance(states, Mapping) or not states:
        raise StateMismatchError("join_states wants a list with the state of every process")
    first = read_state(states[0])
    positions = dict(first.positions)
    for number, state in enumerate(states[1:], 1):
        name = f"state {number} (from 0)"
        one = read_state(state, first.data, there=name, here="state 0")
        if one.num_streams != first.num_streams:
            raise StateMismatchError(
                f"num_streams: state 0 has {first.num_streams}, {name} {one.num_streams}; join the "
                "states of one run"
            )
        twice = sorted(positions.keys() & one.positions.keys())
        if twice:
            raise StateMismatchError(
                f"{name} holds streams {twice}, which an earlier state holds too; pass the state "
                "of each process once"
            )
        positions |= one.positions
    missing = sorted(set(range(first.num_streams)) - positions.keys())
    if missing:
        raise StateMismatchError(
            f"streams {missing} of {first.num_streams} are in none of the {len(states)} states; "
            "join the states of all processes"
        )
    return write_state(replace(first, positions=dict(sorted(positions.items()))), {})
