"""The position of a run, as a small JSON value.

In: the positions of some streams and what identifies the data; or a state.  Out: the state; or the
positions.
Promise: versioned, of one shape for a whole run, ints and texts alone, no text and no token of the
data in it. A state of other data, another order or another version is refused, and each difference
is named with both values; so is one that was changed since it was taken. `join_states` makes one
of the states of all processes.
Not here: who saves it, and where; whether a cursor makes sense (its source).

Where one stream goes on, as a short text.

In: a `Position`, or its text.  Out: the text, or the `Position`.
Promise: reading back gives an equal position; a text that was not written here, or was changed, is
refused with the reason and never reaches a source. The text of a place is made once, not for every
state.
Not here: whether a cursor makes sense (its source knows), the state around it (state).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import Any, NoReturn

from shardmill.errors import StateMismatchError
from shardmill.loading.streaming.records import NAMES, Counts, Mark, StreamCursor, Tally
from shardmill.records import JSON

MOST = 2**63 - 1
_PLACE = tuple(one.name for one in fields(StreamCursor))
_TALLY = tuple(one.name for one in fields(Tally))
_POSITION = ("place", "document", "part", "counts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Of one stream: where its next row comes from, and what it has given before."""

    mark: Mark = field(default_factory=lambda: Mark(place=StreamCursor()))
    counts: Counts = field(default_factory=Counts)


class PlaceTexts:
    """The texts of places, each kept while its stream stays there."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[StreamCursor, str]] = {}

    def text(self, stream: int, place: StreamCursor) -> str:
        kept = self._kept.get(stream)
        if kept is None or kept[0] is not place:
            kept = self._kept[stream] = (place, _place_text(place))
        return kept[1]


def position_text(position: Position, place_text: str) -> str:
    """Compact JSON; `place_text` is that of its mark's place."""
    mark = position.mark
    counts = ",".join(map(str, position.counts.values()))
    return (
        f'{{"place":{place_text},"document":{mark.document},"part":{mark.part},'
        f'"counts":[{counts}]}}'
    )


def read_position(text: object, stream: int) -> Position:
    """The position in `text`; StateMismatchError says what is wrong with it."""
    where = f"stream {stream}"
    found = _exact(_parsed(text, where), _POSITION, where)
    place = _exact(found["place"], _PLACE, f"{where}: place")
    cursor = place["cursor"]
    if cursor is not None and not isinstance(cursor, dict):
        _refuse(f"{where}: cursor", cursor, "an object or null")
    tally = _counts(place["tally"], _TALLY, f"{where}: tally")
    numbers = {
        name: checked_count(place[name], f"{where}: {name}")
        for name in ("epoch", "unit", "skip", "number")
    }
    return Position(
        mark=Mark(
            place=StreamCursor(cursor=cursor, tally=Tally(**tally), **numbers),
            document=checked_count(found["document"], f"{where}: document"),
            part=checked_count(found["part"], f"{where}: part"),
        ),
        counts=Counts(**_counts(found["counts"], NAMES, f"{where}: counts")),
    )


def checked_count(value: object, where: str) -> int:
    """`value` as a count from 0 to 2**63 - 1."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST:
        _refuse(where, value, "a whole number from 0 to 2**63 - 1")
    return value


def _place_text(place: StreamCursor) -> str:
    told = {name: getattr(place, name) for name in _PLACE}
    told["tally"] = astuple(place.tally)
    return json.dumps(told, separators=(",", ":"))


def _parsed(text: object, where: str) -> object:
    if not isinstance(text, str):
        _refuse(where, text, "a text, as get_state() gives it")
    try:
        return json.loads(text, parse_constant=lambda name: _refuse(where, name, "a number"))
    except (ValueError, RecursionError):  # no JSON, or a number of thousands of digits
        _refuse(where, text, "JSON, as get_state() gives it")


def _exact(value: object, names: Sequence[str], where: str) -> dict[str, Any]:
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
        name: checked_count(count, f"{where}: {name}")
        for name, count in zip(names, value, strict=True)
    }


def _refuse(where: str, found: object, wanted: str) -> NoReturn:
    raise StateMismatchError(
        f"the state's {where} is {found!r:.120}, wanted {wanted}; it was changed since it was "
        f"saved: pass what get_state() gave"
    )


VERSION = 1
KIND = "shardmill.stream"
MOST_STREAMS = 2**20
"""A run has thousands of consumers at most; a state that says more is not ours."""
State = dict[str, JSON]

_KEYS = {"version", "kind", "num_streams", "streams", "totals", "data", "seal"}
_NEXT = "Open the stream with the values of the state, or begin a new run without it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What a state says."""

    num_streams: int  # of the whole run
    positions: Mapping[int, Position]  # of the streams in this state
    data: Mapping[str, JSON]
    is_sealed: bool = True  # False: its seal does not fit; see check_seal

    @property
    def totals(self) -> Counts:
        return sum((one.counts for one in self.positions.values()), Counts())


def write_state(saved: Saved, texts: PlaceTexts) -> State:
    """`saved` as JSON. `texts` keeps what was made for the state before."""
    streams: dict[str, JSON] = {
        str(stream): position_text(one, texts.text(stream, one.mark.place))
        for stream, one in saved.positions.items()
    }
    state: State = {
        "version": VERSION,
        "kind": KIND,
        "num_streams": saved.num_streams,
        "streams": streams,
        "totals": dict(saved.totals.items()),
        "data": dict(saved.data),
    }
    return {**state, "seal": _seal(state)}


def read_state(state: object) -> Saved:
    """What `state` says, if it has the right form; its seal is for `check_seal`."""
    found = _checked_form(state)
    num_streams = checked_count(found["num_streams"], "num_streams")
    if not 1 <= num_streams <= MOST_STREAMS:
        raise StateMismatchError(
            f"num_streams: the state has {num_streams}, wanted 1 to {MOST_STREAMS}; it was changed "
            f"since it was saved"
        )
    if not isinstance(found["streams"], Mapping) or not found["streams"]:
        raise StateMismatchError(
            f"the state's streams are {found['streams']!r:.80}, wanted an object with a text for "
            f"each stream"
        )
    positions = {
        _stream_number(key, num_streams): read_position(text, _stream_number(key, num_streams))
        for key, text in found["streams"].items()
    }
    saved = Saved(
        num_streams=num_streams,
        positions=positions,
        data=_read_data(found["data"]),
        is_sealed=found["seal"] == _seal({key: found[key] for key in _KEYS - {"seal"}}),
    )
    told = _read_totals(found["totals"])
    wrong = [name for name, value in (told - saved.totals).items() if value]
    if wrong:
        raise StateMismatchError(
            f"the state's totals do not follow from its streams: {', '.join(wrong)}; it was "
            f"changed since it was saved"
        )
    return saved


def check_data(data: Mapping[str, JSON], own: Mapping[str, JSON]) -> None:
    """StateMismatchError names every difference between a state's data and this stream's."""
    wrong = list(_differences(data, own, "the state", "this stream"))
    if wrong:
        raise StateMismatchError(f"this state is not of this stream. {'; '.join(wrong)}. {_NEXT}")


def check_seal(saved: Saved) -> None:
    """Refuse a state that was changed; last, when nothing more telling is wrong with it."""
    if not saved.is_sealed:
        raise StateMismatchError(
            "the state's seal does not fit its values; it was changed since it was saved: pass "
            "what get_state() gave, unchanged"
        )


def join_states(states: Sequence[Mapping[str, Any]]) -> State:
    """One state out of those of all processes of a run, taken at the same step.

    Any process count that divides `num_streams` can load it.
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
                f"states of one run"
            )
        wrong = list(_differences(one.data, first.data, here, "state 0"))
        if wrong:
            raise StateMismatchError(f"these are states of different runs. {'; '.join(wrong)}")
        check_seal(one)
        twice = sorted(positions.keys() & one.positions.keys())
        if twice:
            raise StateMismatchError(
                f"{here} holds streams {twice}, which an earlier state holds too; pass the state "
                f"of each process once"
            )
        positions |= one.positions
    missing = sorted(set(range(first.num_streams)) - positions.keys())
    if missing:
        raise StateMismatchError(
            f"streams {missing} of {first.num_streams} are in none of the {len(saved)} states; "
            f"join the states of all processes"
        )
    joined = Saved(
        num_streams=first.num_streams,
        positions=dict(sorted(positions.items())),
        data=first.data,
    )
    return write_state(joined, PlaceTexts())


def _seal(state: Mapping[str, Any]) -> str:
    """sha256 over all other keys."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _checked_form(state: object) -> Mapping[str, Any]:
    if not isinstance(state, Mapping):
        raise StateMismatchError(
            f"a state is a dict, as get_state() gives it; found a {type(state).__name__}"
        )
    if state.get("kind") != KIND:
        raise StateMismatchError(
            f"no state of a stream: its kind is {state.get('kind')!r:.80}, wanted {KIND!r}"
        )
    version = state.get("version")
    if isinstance(version, bool) or version != VERSION:
        raise StateMismatchError(
            f"version: the state has {version!r:.80}, this shardmill reads {VERSION}; use the "
            f"shardmill that wrote it"
        )
    if state.keys() != _KEYS:
        raise StateMismatchError(
            f"the state has unknown keys {sorted(map(str, state.keys() - _KEYS))!r:.200} and lacks "
            f"{sorted(_KEYS - state.keys())}; pass what get_state() gave, unchanged"
        )
    return state


def _stream_number(key: object, num_streams: int) -> int:
    is_number = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10
    number = int(str(key)) if is_number else -1
    if str(number) != key or number >= num_streams:
        raise StateMismatchError(
            f"the state has a stream {key!r:.80}, wanted 0 to {num_streams - 1}; it was changed "
            f"since it was saved"
        )
    return number


def _read_totals(totals: object) -> Counts:
    if not isinstance(totals, Mapping) or totals.keys() != set(NAMES):
        raise StateMismatchError(f"the state's totals are {totals!r:.120}, wanted {list(NAMES)}")
    return Counts(**{name: checked_count(totals[name], f"totals: {name}") for name in NAMES})


def _read_data(data: object) -> Mapping[str, JSON]:
    fine = isinstance(data, Mapping) and all(
        isinstance(name, str) and isinstance(value, str | int) for name, value in data.items()
    )
    if not fine:
        raise StateMismatchError(
            f"the state's data are {data!r:.120}, wanted names with numbers or texts"
        )
    assert isinstance(data, Mapping)
    return dict(data)


def _differences(
    found: Mapping[str, JSON], own: Mapping[str, JSON], there: str, here: str
) -> Iterator[str]:
    for name in sorted(found.keys() | own.keys()):
        if name not in found:
            yield f"{name}: {there} does not say it, {here} has {own[name]!r:.80}"
        elif name not in own:
            yield f"{name}: {there} has {found[name]!r:.80}, {here} does not know it"
        elif type(found[name]) is not type(own[name]) or found[name] != own[name]:
            yield f"{name}: {there} has {found[name]!r:.80}, {here} {own[name]!r:.80}"
