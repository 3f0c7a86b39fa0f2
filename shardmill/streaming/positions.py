"""Where one stream goes on, as a short text.

In: a `Position`, or its text.  Out: the text, or the `Position`.
Promise: reading back gives an equal position; a text that was not written here, or was changed, is
refused with the reason and never reaches a source. The text of a place is made once, not for every
state.
Not here: whether a cursor makes sense (its source knows), the state around it (state).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import Any, NoReturn

from shardmill.errors import StateMismatchError
from shardmill.streaming.records import Mark, Place, Tally
from shardmill.streaming.stats import NAMES, Counts

MOST = 2**63 - 1
_PLACE = tuple(one.name for one in fields(Place))
_TALLY = tuple(one.name for one in fields(Tally))
_POSITION = ("place", "document", "part", "counts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Of one stream: where its next row comes from, and what it has given before."""

    mark: Mark = field(default_factory=lambda: Mark(place=Place()))
    counts: Counts = field(default_factory=Counts)


class PlaceTexts:
    """The texts of places, each kept while its stream stays there."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Place, str]] = {}

    def text(self, stream: int, place: Place) -> str:
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
            place=Place(cursor=cursor, tally=Tally(**tally), **numbers),
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


def _place_text(place: Place) -> str:
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
