"""A position in a stream, as a small JSON value.

In: a stream and the samples consumed, or a state.  Out: the state, or the samples consumed.
Promise: global (no rank, no batch size in it), versioned, under 1 KB for any number of sources; a
state of other data, another order or a later version is refused, and each difference is named.
Exclusions may differ: they move no sample, and what changed is told in a warning.
Not here: who saves it, and where.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from shardmill.arguments import whole_number
from shardmill.errors import OptionError, StateMismatchError
from shardmill.loading.exclusion import tell_change
from shardmill.loading.order import SampleStream
from shardmill.records import JSON
from shardmill.sampling.seeds import fingerprint_of

VERSION = 1
KIND = "shardmill.loader"
MOST_BYTES = 1000
"""Of a state as JSON. Sources that do not fit in are not listed, only counted."""

MOST_SAMPLES = 2**62
"""Of a position: twice as many are the most that an order can number, and steps need room."""

_EXCLUSIONS = "exclusions"  # the one key that is there only when it says something
_SHORT = 16  # hex digits that tell one source's data from another's
_NEXT = "open the same data with the same arguments, or begin a new run without this state"


def make_state(stream: SampleStream, samples: int) -> dict[str, JSON]:
    """The state after the first `samples` samples of the stream."""
    state = {**describe(stream), "samples": samples}
    widest = len(json.dumps({**state, "samples": 2**63 - 1}))
    return state if widest <= MOST_BYTES else {**state, "sources": len(stream.sources)}


def describe(stream: SampleStream) -> dict[str, JSON]:
    """Everything in a state but the position."""
    listed = [[one.name, one.fingerprint, len(one)] for one in stream.sources]
    mix = [[start, [str(share) for share in shares]] for start, shares in stream.shares()]
    excluded = stream.exclusions
    return {
        "version": VERSION,
        "kind": KIND,
        "data": fingerprint_of(sources=_json(listed)),
        "order": stream.order_fingerprint,
        "mix": fingerprint_of(phases=_json(mix))[:_SHORT],
        "seed": stream.seed,
        "shuffle": stream.shuffle,
        "seq_len": stream.seq_len,
        "sources": [[one.name, _short(one.fingerprint)] for one in stream.sources],
        **({} if excluded is None else {_EXCLUSIONS: excluded}),
    }


def read_state(state: Mapping[str, Any], stream: SampleStream) -> int:
    """The samples consumed, if the state is one of this very stream."""
    own = make_state(stream, 0)
    _check_form(state, own)
    found = list(_differences(state, own))
    if found:
        raise StateMismatchError(
            f"this state is not of this stream: {'; '.join(found)}. {_NEXT[0].upper()}{_NEXT[1:]}"
        )
    try:
        samples = whole_number(state["samples"], "samples", least=0)
    except OptionError as error:
        raise StateMismatchError(
            f"the state's {error}; it was changed since it was saved"
        ) from None
    if samples > MOST_SAMPLES:
        raise StateMismatchError(
            f"samples: the state has {samples:,}, wanted at most {MOST_SAMPLES:,}; it was changed "
            f"since it was saved"
        )
    tell_change(state.get(_EXCLUSIONS), stream.exclusions, "Loader")
    return samples


def _check_form(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    if not isinstance(state, Mapping):
        raise StateMismatchError(
            f"a state is a dict, as `state_dict` gives it; found a {type(state).__name__}"
        )
    if state.get("kind") != KIND:
        raise StateMismatchError(
            f"no state of a Loader: its 'kind' is {state.get('kind')!r:.80}, wanted {KIND!r}"
        )
    version = state.get("version")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise StateMismatchError(f"version: the state has {version!r:.80}, wanted {VERSION}")
    if version > VERSION:
        raise StateMismatchError(
            f"version: the state has {version}, which a later shardmill wrote; this one reads up "
            f"to {VERSION}: update shardmill"
        )
    known = own.keys() - {_EXCLUSIONS}
    unknown, missing = sorted(state.keys() - known - {_EXCLUSIONS}), sorted(known - state.keys())
    if unknown or missing:
        raise StateMismatchError(
            f"the state has unknown keys {unknown!r:.200} and lacks {missing!r:.200}; pass what "
            f"`state_dict` gave, unchanged"
        )


def _differences(state: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[str]:
    for key in ("seq_len", "seed", "shuffle"):
        if type(state[key]) is not type(own[key]) or state[key] != own[key]:
            yield f"{key}: the state has {state[key]!r:.80}, this loader {own[key]!r}"
    before = len(told := list(_source_differences(state["sources"], own["sources"])))
    yield from told
    if not before and state["data"] != own["data"]:
        yield (
            f"data: other tokens, names or numbers of windows in at least one of "
            f"{_number(own['sources'])} sources"
        )
    if state["mix"] != own["mix"]:
        yield "weights, temperature or phases: others than those of the state"
    same = all(state[key] == own[key] for key in ("data", "mix", "seed", "shuffle", "seq_len"))
    if same and state["order"] != own["order"]:
        yield "order: made by other rules, those of another version of shardmill"


def _source_differences(before: Any, now: Any) -> Iterator[str]:
    """As much as can be told: by name if both list their sources."""
    if before == now:
        return
    if not (_is_list(before) and _is_list(now)):
        if _number(before) != _number(now):
            yield f"sources: the state has {_number(before)}, this loader {_number(now)}"
        return
    old, new = dict(before), dict(now)
    yield from (f"source {name!r} is in the state only" for name in old if name not in new)
    yield from (f"source {name!r} is in this loader only" for name in new if name not in old)
    for name in old.keys() & new.keys():
        if old[name] != new[name]:
            yield f"source {name!r}: other data"
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


def _short(fingerprint: str) -> str:
    """A store's is its hash and a split's name: hashed again, so that both count."""
    return fingerprint_of(source=fingerprint)[:_SHORT]


def _json(value: Any) -> JSON:
    found: JSON = json.loads(json.dumps(value))
    return found
