"""Sampling: in which order items come, which rank reads them, and how sources are mixed.

An order is a pure function of (seed, epoch, index). Nothing is stored that grows with the data, so
any index of any epoch costs the same, and the position of a run is one number.
"""

from __future__ import annotations

from shardmill.sampling.block_shuffle import BlockShuffle, items_per_block
from shardmill.sampling.mixture import MixedSamples, Mixture
from shardmill.sampling.order import InOrder, Order, OrderFactory, Permutation, epochs, rank_slice

__all__ = [
    "BlockShuffle",
    "InOrder",
    "MixedSamples",
    "Mixture",
    "Order",
    "OrderFactory",
    "Permutation",
    "epochs",
    "items_per_block",
    "rank_slice",
]
