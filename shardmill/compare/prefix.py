"""How many documents two splits begin with in common, told without reading tokens.

In: two stores, a split of both.  Out: a number of documents.
Promise: those documents have equal tokens (their shards have equal hashes), borders and masks.
There may be more: this is what comes for free, for instance after files were added to a store.
Not here: documents that are equal elsewhere (documents.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shardmill.records import OffsetArray
from shardmill.shards import Store

_CHUNK = 2**20


def common_prefix(a: Store, b: Store, split: str, *, masks: bool) -> int:
    """Documents 0..n of the split that are surely equal."""
    num_tokens = _equal_tokens(a, b, split)
    if not num_tokens:
        return 0
    left, right = (store.document_starts(split) for store in (a, b))
    equal = _first_difference(left, right)
    if masks:
        bits = [store.chat_arrays(split).mask_bits for store in (a, b)]
        num_tokens = min(num_tokens, 8 * _first_difference(bits[0], bits[1], whole=True))
    ends = [_end(left, equal, a.num_tokens(split)), _end(right, equal, b.num_tokens(split))]
    if ends[0] == ends[1] <= num_tokens:
        return equal
    # the last of the equal starts may belong to documents that end at different places
    inside = int(np.searchsorted(left[:equal], num_tokens, side="right"))
    return max(0, min(inside, equal) - 1)


def _equal_tokens(a: Store, b: Store, split: str) -> int:
    """Tokens of the shards at the front that have equal hashes."""
    if a.dtype != b.dtype:
        return 0
    total = 0
    for left, right in zip(*(s.manifest.splits[split].shards for s in (a, b)), strict=False):
        if (left.tokens, left.sha256) != (right.tokens, right.sha256):
            break
        total += left.tokens
    return total


def _end(starts: OffsetArray, documents: int, num_tokens: int) -> int:
    """Where the last of the first so many documents ends."""
    return int(starts[documents]) if documents < len(starts) else num_tokens


def _first_difference(a: npt.NDArray[Any], b: npt.NDArray[Any], *, whole: bool = False) -> int:
    """How many entries are equal from the front. `whole`: of arrays that are equal as a whole,
    one more than there are, since what lies behind both is nothing."""
    shorter = min(len(a), len(b))
    for low in range(0, shorter, _CHUNK):
        high = min(low + _CHUNK, shorter)
        differ = np.flatnonzero(a[low:high] != b[low:high])
        if len(differ):
            return low + int(differ[0])
    return shorter + int(whole and len(a) == len(b))
