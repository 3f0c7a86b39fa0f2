"""Which tokens the assistant said: the one place for this rule.

In: ids of rendered conversations.  Out: one bool per token.
Promise: True exactly for the tokens after an assistant's opening token, up to and including the
next end token. The opening token itself is False; so is everything outside.
Not here: shifting to labels, padding, truncation. A caller that pads clears its padding itself.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardmill.errors import OptionError
from shardmill.records import IntArray

BoolArray = npt.NDArray[np.bool_]


def assistant_mask(
    ids: IntArray,
    *,
    open_id: int,
    end_id: int,
    starts: npt.ArrayLike | None = None,
) -> BoolArray:
    """True where the assistant speaks or ends, in the shape of `ids`.

    ids: (n,) one conversation, or (rows, n), each row its own conversation.
    starts: for flat ids that hold several conversations, where each begins; nothing that was
    left open before a start reaches behind it. Not for 2-D ids.
    """
    if open_id == end_id:
        raise OptionError(f"the assistant's opening id and the end id are both {open_id}")
    ids = np.asarray(ids)
    if ids.ndim not in (1, 2):
        raise OptionError(f"ids of shape {ids.shape}: wanted (n,) or (rows, n)")
    if starts is not None and ids.ndim == 2:
        raise OptionError("starts are for flat ids; the rows of 2-D ids are apart already")
    if starts is None:
        starts = np.arange(len(ids)) * ids.shape[-1] if ids.ndim == 2 else ()
    begins = np.asarray(starts, np.int64)
    if begins.size and (begins.min() < 0 or begins.max() > ids.size):
        raise OptionError(f"starts {begins.min():,}..{begins.max():,} of {ids.size:,} ids")
    return _mask(ids.reshape(-1), open_id, end_id, begins).reshape(ids.shape)


def _mask(ids: IntArray, open_id: int, end_id: int, starts: IntArray) -> BoolArray:
    """One running maximum over what each token has just before it.

    Token i sees 4 * i + 1 when token i - 1 opens, 4 * i when it ends, 4 * i + 2 when i is a start
    (stronger than both), else 0. The maximum so far is the last marker, and it is odd exactly
    when that was an opening:

        open = 7, end = 9:  ids    5  7  4  4  9  4
                            sees   0  0  9  0  0 20
                            last   0  0  9  9  9 20
                            said   .  .  x  x  x  .
    """
    is_open = ids == open_id
    dtype = np.int32 if len(ids) < 2**29 else np.int64
    sees: IntArray = np.zeros(len(ids) + 1, dtype)
    np.multiply(np.arange(4, 4 * len(ids) + 4, 4, dtype=dtype), is_open | (ids == end_id), sees[1:])
    sees[1:] += is_open
    sees[starts] = 4 * starts + 2
    np.maximum.accumulate(sees, out=sees)
    said: BoolArray = (sees[:-1] & 1).astype(np.bool_)
    said &= ~is_open
    return said
