"""Randomness from a seed and a path of names, hashed; and arguments of orders, checked.

The same seed and path give the same words on any machine and any numpy. Paths never collide by
addition: (seed 1, epoch 1) is unrelated to (seed 2, epoch 0).
"""

from __future__ import annotations

import hashlib
import json
import struct
from typing import SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from shardmill.arguments import whole_number
from shardmill.errors import OptionError
from shardmill.records import JSON

Words: TypeAlias = npt.NDArray[np.uint64]
Indices: TypeAlias = npt.NDArray[np.int64]

MAX_ITEMS = 2**63 - 1
"""Indices are int64."""


def checked_seed(seed: SupportsIndex) -> int:
    """`seed` as an int of 0 to 2**64 - 1."""
    number = whole_number(seed, "seed", least=0)
    if number >= 2**64:
        raise OptionError("{seed}: wanted less than 2**64; hash longer seeds first", seed=number)
    return number


def checked_count(count: SupportsIndex, name: str, *, least: int = 0) -> int:
    """`count` as an int that int64 indices can reach."""
    number = whole_number(count, name, least=least)
    if number > MAX_ITEMS:
        raise OptionError(f"{{{name}}}: wanted at most 2**63 - 1", **{name: number})
    return number


def checked_path(path: tuple[str | SupportsIndex, ...]) -> tuple[str | int, ...]:
    """The path with plain str and int parts; a bool, float or None is refused."""
    for part in path:
        if isinstance(part, bool) or not (isinstance(part, str) or hasattr(part, "__index__")):
            raise OptionError(f"path part {part!r}: wanted a name or a whole number")
    return tuple(str(part) if isinstance(part, str) else int(part) for part in path)


def words_at(seed: int, path: tuple[str | int, ...], num_words: int) -> tuple[int, ...]:
    """`num_words` random 64-bit words for this seed and path."""
    address = hashlib.sha256(repr((seed, *path)).encode()).digest()
    blocks = [hashlib.sha256(address + bytes([i])).digest() for i in range(-(-num_words // 4))]
    return struct.unpack(f"<{num_words}Q", b"".join(blocks)[: 8 * num_words])


def fingerprint_of(**what: JSON) -> str:
    """sha256 hex over everything that decides an order."""
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def as_words(indices: npt.ArrayLike, num_items: int) -> Words:
    """A fresh uint64 array of these indices, checked to be in 0..num_items - 1."""
    array = np.asarray(indices)
    if array.ndim != 1:
        raise OptionError(f"indices have shape {array.shape}, wanted one dimension")
    if not array.size:
        return np.empty(0, np.uint64)
    if array.dtype.kind not in "iu":
        raise OptionError(f"indices have dtype {array.dtype}, wanted integers")
    words = array.astype(np.uint64)  # a negative index becomes too large, as it should
    if words[words.argmax()] >= num_items:
        wrong = int(np.flatnonzero(words >= num_items)[0])
        raise IndexError(f"index {int(array[wrong]):,} of {num_items:,}")
    return words
