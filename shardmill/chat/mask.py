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
    """Runs between markers, each spoken when the marker before it opens.

        open = 7, end = 9:  ids    5  7  4  4  9  4
                            runs   .  .| x  x  x| .

    A start begins a run that is not spoken; where it meets a marker's run, the start wins.
    """
    is_open = ids == open_id
    markers = np.flatnonzero(is_open | (ids == end_id))
    opens = is_open[markers]
    edges = np.concatenate(([0], markers + 1, starts))
    spoken = np.concatenate(([False], opens, np.zeros(len(starts), np.bool_)))
    order = np.argsort(edges, kind="stable")
    said: BoolArray = np.repeat(spoken[order], np.diff(edges[order], append=len(ids)))
    said[markers[opens]] = False
    return said
