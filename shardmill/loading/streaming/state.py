"""Positions of a stream, and its state: a small JSON value that says where each stream resumes.

A state holds ints and strings only, no text and no token. Besides the envelope of all states it has
a seal, so that one that was edited is refused. `join_states` makes one state from those of all
processes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add, sub
from typing import Annotated, Any

import msgspec
from msgspec.structs import asdict, astuple

from shardmill.errors import StateMismatchError
from shardmill.loading.state import (
    State,
    differences,
    read_envelope,
    refuse_differences,
    write_envelope,
)
from shardmill.records import JSON

KIND = "shardmill.stream"
MAX_STREAMS = 2**20
"""A run has thousands of consumers at most; a larger number in a state is damage."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class ReadCounts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a stream has read since its start, over all epochs, in input rows.

    A batch of the source is counted with its first document, so the buckets always add up. Of
    streams that read the same rows only the first counts rows without text: over all streams
    `documents + empty + dropped` is the input.
    """

    documents: _Count = 0  # texts that belong to this stream
    elsewhere: _Count = 0  # texts that belong to other streams
    empty: _Count = 0  # rows without text
    dropped: _Count = 0  # rows that gave no text; the log has the reason
    repaired: _Count = 0  # texts in which bytes that are not UTF-8 were replaced


class StreamCursor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a stream of documents resumes: before a batch of a unit, or inside one."""

    epoch: _Count = 0
    unit: _Count = 0  # how many units of this epoch's order are done
    cursor: dict[str, Any] | None = None  # in the next unit; None: its start
    skip: _Count = 0  # texts of the batch after the cursor that are done, in any stream
    number: _Count = 0  # texts of this epoch that are done, in any stream
    read: ReadCounts = msgspec.field(name="tally", default=ReadCounts())  # up to here


class Counts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Rows given and what they hold; `input_...`: what was read to make them, in input rows.

    `tokens + padding == rows * (seq_len + 1)`; over an epoch `tokens + truncated_tokens` is every
    token of every document. Reading is ahead of giving by what is buffered. Rows without text
    count in one process only: over all processes `input_documents + input_empty + input_dropped`
    is the input.
    """

    rows: _Count = 0  # with rows of padding only, in the last batch
    tokens: _Count = 0  # without padding
    padding: _Count = 0  # tokens
    documents: _Count = 0  # whose first token was given
    truncated_documents: _Count = 0  # those of them that max_doc_tokens cut
    truncated_tokens: _Count = 0  # and what it took off
    input_documents: _Count = 0
    input_elsewhere: _Count = 0  # documents of other streams among the rows that this one read
    input_empty: _Count = 0
    input_dropped: _Count = 0
    input_repaired: _Count = 0  # documents in which bytes that are not UTF-8 were replaced

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
        return Counts(*map(add, astuple(self), astuple(other)))

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*map(sub, astuple(self), astuple(other)))

    def to_dict(self) -> dict[str, JSON]:
        """The counts, and the shares that follow from them."""
        shares = {"utilisation": self.utilisation, "padding_share": self.padding_share}
        return {**asdict(self), "input_read": self.input_read, **shares}

    def with_input(self, read: ReadCounts) -> Counts:
        given = astuple(self)[: -len(ReadCounts.__struct_fields__)]
        return Counts(*given, *astuple(read))


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStats:
    """Counts of the last batch given, and of all since the start of the run."""

    batch: Counts
    total: Counts

    def to_dict(self) -> dict[str, JSON]:
        return {"batch": self.batch.to_dict(), "total": self.total.to_dict()}


class Position(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the next row of a stream comes from, and what it gave before."""

    block: StreamCursor = msgspec.field(name="place", default=StreamCursor())
    # start of the block that holds its oldest document
    document: _Count = 0  # of that block; the number of its documents: nothing of it is left
    part: _Count = 0  # sequential: ids of that document in earlier rows; bins: rows already given
    # of the buffer that begins with that document
    counts: Counts = Counts()

    def to_json(self) -> str:
        """Compact, and ASCII also where the source's cursor is not."""
        return json.dumps(msgspec.to_builtins(self), separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What a state says."""

    num_streams: int  # of the whole run
    positions: Mapping[int, Position]  # of the streams in this state
    data: Mapping[str, JSON] = field(default_factory=dict)  # what identifies the stream

    @property
    def totals(self) -> Counts:
        return sum((one.counts for one in self.positions.values()), Counts())


def write_state(saved: Saved) -> State:
    state = write_envelope(
        KIND,
        num_streams=saved.num_streams,
        streams={str(stream): one.to_json() for stream, one in saved.positions.items()},
        totals=asdict(saved.totals),
        data=dict(saved.data),
    )
    return {**state, "seal": _seal(state)}


def _seal(state: Mapping[str, Any]) -> str:
    """sha256 over all other keys."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


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
    wrong = sorted({name for name, _ in form.totals.items() ^ asdict(saved.totals).items()})
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
        found = msgspec.json.decode(text, type=Position)
        # what is missing got its default
        missing = msgspec.to_builtins(found) != msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise _changed(f"stream {stream} is {text!r:.80}: {error}") from error
    if missing:
        raise _changed(f"stream {stream} is {text!r:.80}: keys or counts are missing")
    return found


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
    return write_state(replace(first, positions=dict(sorted(positions.items()))))
