"""The online half: what a store holds becomes rows for training.

In: a store, sequence length, a fit.  Out: numpy arrays of one shape.
Promise: nothing is written; a new sequence length needs no new build.
Not here: order and epochs (sampling), tensors.
"""

from __future__ import annotations

from shardmill.loading.chats import ChatRows

__all__ = ["ChatRows"]
