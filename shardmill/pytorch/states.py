"""States that are refused when they belong to something else.

In: a saved state and what this object would save.  Out: nothing, or an error that names every
difference.
Promise: what passes here was saved by the same kind of object, over the same data, in the same
order; numbers are whole numbers.
Not here: what the numbers mean.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from shardmill.errors import StateMismatchError
from shardmill.loading.exclusion import ExcludedItems, exclusion_facts
from shardmill.records import JSON

State = dict[str, JSON]

VERSION = 1
_LONGEST = 160  # characters of JSON that a state holds in clear; longer ones are hashed


def check_state(state: object, own: Mapping[str, JSON], *, free: Sequence[str], who: str) -> State:
    """`state` if it has the keys of `own` and the same values, but for those in `free`."""
    if not isinstance(state, Mapping):
        raise StateMismatchError(
            f"{who}: a state of type {type(state).__name__}; wanted what state_dict() gave"
        )
    found = dict(state)
    if found.get("kind") != own["kind"]:
        raise StateMismatchError(
            f"{who}: this state is of kind {found.get('kind')!r}, wanted {own['kind']!r}"
        )
    if found.get("version") != own["version"]:
        raise StateMismatchError(
            f"{who}: the state has version {found.get('version')!r}, but this shardmill reads "
            f"version {own['version']}; use the shardmill that wrote it, or a later one"
        )
    wrong = list(_differences(found, own, free))
    if wrong:
        raise StateMismatchError(f"{who}: not the state of this run. " + "; ".join(wrong))
    return found


def position(state: Mapping[str, JSON], name: str, who: str) -> int:
    """A whole number of at least 0 from a state."""
    value = state[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise StateMismatchError(f"{who}: {name}={value!r}, wanted a whole number of at least 0")
    return value


def compact(value: JSON) -> JSON:
    """`value`, or its sha256 when it is long: a state stays under 1 KB with 200 sources."""
    text = json.dumps(value)
    if len(text) <= _LONGEST:
        return value
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def describe_data(dataset: Any) -> State:
    """What tells a dataset from others: its length, and these attributes if it has them."""
    told: State = {"samples": len(dataset)}
    for name in ("fingerprint", "seq_len", "pack_sequences"):
        value = getattr(dataset, name, None)
        if isinstance(value, str | int):
            told[name] = value
    return told


def describe_exclusions(dataset: Any) -> JSON:
    """What tells the exclusions of a dataset, and of those it consists of, from others."""
    return exclusion_facts(_excluded(dataset, ""))


def _excluded(dataset: Any, name: str) -> dict[str, ExcludedItems]:
    found: dict[str, ExcludedItems] = {}
    own = getattr(dataset, "excluded", None)
    if isinstance(own, ExcludedItems):
        found[name] = own
    elif isinstance(own, Mapping):
        found |= {f"{name}/{at}": one for at, one in own.items()}
    for at, part in enumerate(getattr(dataset, "datasets", ())):
        found |= _excluded(part, f"{name}/{at}")
    return found


def _differences(
    found: Mapping[str, JSON], own: Mapping[str, JSON], free: Sequence[str]
) -> list[str]:
    wrong = []
    for name in sorted(found.keys() | own.keys()):
        if name not in found:
            wrong.append(f"{name}: missing in the state")
        elif name not in own:
            wrong.append(f"{name}: the state has it, this shardmill does not know it")
        elif name not in free:
            wrong += _compare(name, found[name], own[name])
    return wrong


def _compare(name: str, found: JSON, own: JSON) -> list[str]:
    if isinstance(found, dict) and isinstance(own, dict):
        told = sorted(found.keys() | own.keys())
        return [
            line for key in told for line in _compare(f"{name}.{key}", found.get(key), own.get(key))
        ]
    if type(found) is type(own) and found == own:
        return []
    return [f"{name}: the state has {found!r}, here it is {own!r}"]
