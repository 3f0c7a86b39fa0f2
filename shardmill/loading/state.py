"""Saved positions: one envelope for all loaders, streams and samplers, and the state of a `Loader`.

A state is a JSON object with a version, a kind, what identifies the data and their order, and a
position. A state of another kind, a later version, other data or another order is refused, and
every difference is named.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from shardmill.errors import StateMismatchError
from shardmill.loading.exclusion import warn_of_change
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


_KIND = "shardmill.loader"
_MOST_BYTES = 1000  # of a state as JSON; sources that do not fit are counted, not listed
_EXCLUSIONS = "exclusions"  # only present when something is excluded; may differ on resume
_SHORT = 16  # hex digits of a fingerprint that is only compared


def make_state(stream: SampleStream, samples: int) -> State:
    """The state after the first `samples` global samples: under 1 KB for any number of sources."""
    listed: JSON = [[one.name, one.fingerprint, len(one)] for one in stream.sources]
    mix: JSON = [[start, [str(share) for share in shares]] for start, shares in stream.shares()]
    excluded = stream.exclusions
    state = write_envelope(
        _KIND,
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
        samples=samples,
    )
    longest = len(json.dumps({**state, "samples": 2**63 - 1}))
    return state if longest <= _MOST_BYTES else {**state, "sources": len(stream.sources)}


def read_state(state: Mapping[str, Any], stream: SampleStream) -> int:
    """The samples consumed, if the state is one of this stream.

    Exclusions may differ, since they move no other sample; a warning says so.
    """
    own = make_state(stream, 0)
    found = read_envelope(state, _KIND, own.keys() - {_EXCLUSIONS}, optional=[_EXCLUSIONS])
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
    if state["mix"] != own["mix"]:
        yield "weights, temperature or phases: not those of the state"
    same = all(state[key] == own[key] for key in ("data", "mix", *plain))
    if same and state["order"] != own["order"]:
        yield "order: made by the rules of another version of shardmill"


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
