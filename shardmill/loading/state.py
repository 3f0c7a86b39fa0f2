"""Saved positions: one envelope for all loaders, streams and samplers, and what two of them hold.

A state is a JSON object with a version, a kind, what identifies the data and their order, and a
position. A state of another kind, a later version, other data or another order is refused, and
every difference is named.

The state of a `Loader` is a number of samples. That of a `TextStream` says where each stream
resumes: ints and strings only, no text and no token, with a seal, so that one that was edited is
refused. `join_states` makes one state from those of all processes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add, sub
from typing import Annotated, Any

import msgspec
from msgspec.structs import asdict, astuple

from shardmill.errors import StateMismatchError
from shardmill.loading.exclusion import warn_of_change
from shardmill.loading.fim import FimCounts
from shardmill.loading.order import SampleStream
from shardmill.records import JSON
from shardmill.sampling.order import fingerprint_of

State = dict[str, JSON]

VERSION = 1
MOST_SAMPLES = 2**62
"""The largest position. An order can number twice as many samples, so that steps fit."""


def write_envelope(kind: str, **values: JSON) -> State:
    return {"version": VERSION, "kind": kind, **values}


def read_envelope(
    state: object, kind: str, keys: Collection[str], *, optional: Collection[str] = ()
) -> dict[str, Any]:
    """`state` if it is of this kind, of a version that can be read, and has these keys.

    `keys` need not list "version" and "kind".
    """
    if not isinstance(state, Mapping):
        raise StateMismatchError(
            f"a state is a dict, as state_dict() returns it; found a {type(state).__name__}"
        )
    if state.get("kind") != kind:
        raise StateMismatchError(
            f"this is a state of kind {state.get('kind')!r:.80}, wanted {kind!r}"
        )
    version = state.get("version")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise StateMismatchError(f"version: the state has {version!r:.80}, wanted {VERSION}")
    if version > VERSION:
        raise StateMismatchError(
            f"version: the state has {version:,}, which a later shardmill wrote; this one reads "
            f"up to {VERSION}: update shardmill"
        )
    known = {"version", "kind", *keys}
    unknown, missing = state.keys() - known - {*optional}, known - state.keys()
    if unknown or missing:
        raise StateMismatchError(
            f"the state has unknown keys {sorted(map(str, unknown))!r:.200} and lacks "
            f"{sorted(missing)!r:.200}; pass what state_dict() returned, unchanged"
        )
    return dict(state)


def differences(
    found: Mapping[str, Any],
    own: Mapping[str, Any],
    *,
    there: str = "the state",
    here: str = "this loader",
) -> Iterator[str]:
    """Each value that differs, in type or value, by name; nested ones as "data.samples"."""
    for name in sorted(found.keys() | own.keys()):
        if name not in found:
            yield f"{name}: missing in {there}, {here} has {own[name]!r:.80}"
        elif name not in own:
            yield f"{name}: {there} has {found[name]!r:.80}, {here} does not know it"
        elif isinstance(found[name], Mapping) and isinstance(own[name], Mapping):
            inner = differences(found[name], own[name], there=there, here=here)
            yield from (f"{name}.{line}" for line in inner)
        elif type(found[name]) is not type(own[name]) or found[name] != own[name]:
            yield f"{name}: {there} has {found[name]!r:.80}, {here} {own[name]!r:.80}"


def refuse_differences(found: Iterator[str]) -> None:
    lines = list(found)
    if lines:
        raise StateMismatchError(
            f"this state belongs to another run: {'; '.join(lines)}. Open the same data with the "
            f"same arguments, or start a new run without this state"
        )


def read_count(state: Mapping[str, Any], name: str, *, most: int = 2**63 - 1) -> int:
    """A whole number of the state, from 0 to `most`."""
    value = state[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        shown = f"{value:,}" if type(value) is int else f"{value!r:.80}"
        raise StateMismatchError(
            f"{name}: the state has {shown}, wanted a whole number from 0 to {most:,}; it was "
            f"changed since it was saved"
        )
    return value


# a loader

_LOADER = "shardmill.loader"
_MOST_BYTES = 1000  # of a state as JSON; sources that do not fit are counted, not listed
_EXCLUSIONS = "exclusions"  # only present when something is excluded; may differ on resume
_FIM = "fim"  # only present when documents are rearranged
_SHORT = 16  # hex digits of a fingerprint that is only compared


def loader_state(stream: SampleStream, samples: int) -> State:
    """The state after the first `samples` global samples: under 1 KB for any number of sources."""
    listed: JSON = [[one.name, one.fingerprint, len(one)] for one in stream.sources]
    mix: JSON = [[start, [str(share) for share in shares]] for start, shares in stream.shares()]
    excluded = stream.exclusions
    state = write_envelope(
        _LOADER,
        data=fingerprint_of(sources=listed),
        order=stream.order_fingerprint,
        mix=fingerprint_of(phases=mix)[:_SHORT],
        seed=stream.seed,
        shuffle=stream.shuffle,
        seq_len=stream.seq_len,
        # the fingerprint of a store ends with the split: hashed again, so that both count
        sources=[
            [one.name, fingerprint_of(source=one.fingerprint)[:_SHORT]] for one in stream.sources
        ],
        **({} if excluded is None else {_EXCLUSIONS: excluded}),
        **({} if stream.fim is None else {_FIM: stream.fim.facts}),
        samples=samples,
    )
    longest = len(json.dumps({**state, "samples": 2**63 - 1}))
    return state if longest <= _MOST_BYTES else {**state, "sources": len(stream.sources)}


def read_loader_state(state: Mapping[str, Any], stream: SampleStream) -> int:
    """The samples consumed, if the state is one of this stream.

    Exclusions may differ, since they move no other sample; a warning says so.
    """
    own = loader_state(stream, 0)
    optional = {_EXCLUSIONS, _FIM}
    found = read_envelope(state, _LOADER, own.keys() - optional, optional=optional)
    refuse_differences(_loader_differences(found, own))
    samples = read_count(found, "samples", most=MOST_SAMPLES)
    warn_of_change(found.get(_EXCLUSIONS), stream.exclusions, "Loader")
    return samples


def _loader_differences(state: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[str]:
    """Hashes are only reported when nothing that can be named explains them."""
    plain = ("seq_len", "seed", "shuffle")
    yield from differences({key: state[key] for key in plain}, {key: own[key] for key in plain})
    named = list(_source_differences(state["sources"], own["sources"]))
    yield from named
    if not named and state["data"] != own["data"]:
        yield (
            f"data: other tokens, names or numbers of windows in at least one of "
            f"{_number(own['sources'])} sources"
        )
    before, now = _fim_facts(state), _fim_facts(own)
    both = before.keys() & now.keys()
    yield from differences({key: before[key] for key in both}, {key: now[key] for key in both})
    if state["mix"] != own["mix"]:
        yield "weights, temperature or phases: not those of the state"
    same = all(state[key] == own[key] for key in ("data", "mix", *plain))
    if same and state["order"] != own["order"]:
        yield "order: made by the rules of another version of shardmill"


def _fim_facts(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Named like the options; a state without them rearranges nothing."""
    found = state.get(_FIM, {"rate": 0})
    if not isinstance(found, Mapping):
        raise StateMismatchError(
            f"{_FIM}: the state has {found!r:.80}; it was changed since it was saved"
        )
    return {f"{_FIM}.{name}": value for name, value in found.items()}


def _source_differences(before: Any, now: Any) -> Iterator[str]:
    """By name if both list their sources."""
    if before == now:
        return
    if not (_is_list(before) and _is_list(now)):
        if _number(before) != _number(now):
            yield f"sources: the state has {_number(before)}, this loader {_number(now)}"
        return
    old, new = dict(before), dict(now)
    yield from (f"source {name!r} is in the state only" for name in old if name not in new)
    yield from (f"source {name!r} is in this loader only" for name in new if name not in old)
    yield from (
        f"source {name!r}: other data" for name in old if new.get(name, old[name]) != old[name]
    )
    if old == new:
        yield f"sources: the state has them in the order {list(old)}, this loader in {list(new)}"


def _is_list(sources: Any) -> bool:
    """Whether it is a list of [name, fingerprint], each name once."""
    pairs = isinstance(sources, list) and all(
        isinstance(one, list) and len(one) == 2 and all(isinstance(part, str) for part in one)
        for one in sources
    )
    return pairs and len({one[0] for one in sources}) == len(sources)


def _number(sources: Any) -> str:
    return f"{len(sources) if isinstance(sources, list) else sources!r:.80}"


# a stream

_STREAM = "shardmill.stream"
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
    token of every document (with fill in the middle less three for each of its documents, and with
    what was cut for them). Reading is ahead of giving by what is buffered. Rows without text count
    in one process only: over all processes `input_documents + input_empty + input_dropped` is the
    input.
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
    fim: FimCounts = field(
        default_factory=FimCounts
    )  # rearranged to fill in the middle, of the total

    def to_dict(self) -> dict[str, JSON]:
        found: dict[str, JSON] = {"batch": self.batch.to_dict(), "total": self.total.to_dict()}
        return found | ({"fim": self.fim.to_dict()} if self.fim.rows else {})


class Position(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the next row of a stream comes from, and what it gave before."""

    block: StreamCursor = msgspec.field(name="place", default=StreamCursor())
    # start of the block that holds its oldest document
    document: _Count = 0  # of that block; the number of its documents: nothing of it is left
    part: _Count = 0  # sequential: ids of that document in earlier rows; bins: rows already given
    # of the buffer that begins with that document
    counts: Counts = Counts()
    fim: FimCounts | msgspec.UnsetType = msgspec.UNSET  # not written when nothing was rearranged

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

    @property
    def fim(self) -> FimCounts:
        return sum((one.fim or FimCounts() for one in self.positions.values()), FimCounts())


def stream_state(saved: Saved) -> State:
    state = write_envelope(
        _STREAM,
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


def read_stream_state(
    state: object,
    own: Mapping[str, JSON] | None = None,
    *,
    there: str = "the state",
    here: str = "this stream",
) -> Saved:
    """What `state` says. Refused if it was changed, or if its data are not `own` (None: any)."""
    found = read_envelope(state, _STREAM, _Form.__struct_fields__)
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
    first = read_stream_state(states[0])
    positions = dict(first.positions)
    for number, state in enumerate(states[1:], 1):
        name = f"state {number} (from 0)"
        one = read_stream_state(state, first.data, there=name, here="state 0")
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
    return stream_state(replace(first, positions=dict(sorted(positions.items()))))
