"""Packed bins become a batch in Megatron's conventions.

In: items with input_ids, loss_mask (aligned to labels) and seq_boundaries.  Out: tensors.
Promise: a label is always the next token of the same sequence; positions restart with every
sequence; `cu_seqlens` are int32, end at the row's length, and are filled up with -1.
Not here: reading, and whether a mask is right: `loss_mask[j]` weighs the label `ids[j + 1]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardmill.arguments import whole_number
from shardmill.errors import OptionError
from shardmill.records import BoolArray, OffsetArray

Item = Mapping[str, Any]


def collate_packed(
    batch: Sequence[Item],
    *,
    pad_to: SupportsIndex | None = None,
    multiple_of: SupportsIndex = 16,
    pad_id: int = 0,
    keep_last: bool = False,
) -> dict[str, Tensor]:
    """`tokens`, `labels`, `loss_mask`, `position_ids`: (B, T) int64; `attention_mask`: (B,) ones.

    `cu_seqlens`: (B, S) int32, 0 first, then the end of every sequence, then T when the row is
    padded, then -1; `cu_seqlens_argmin`: (B, 1) where the -1 begin; `max_seqlen`: (B, 1) int32;
    `token_count`: (B,) inputs without padding.

    A sequence of n tokens gives n - 1 inputs. With `keep_last` it gives n, so that sequences of
    bins packed with `align_to` stay multiples of it; the label of the last is `pad_id`, untrained.
    T is `pad_to`, or the longest row rounded up to `multiple_of`.
    """
    flat = _flat(batch)
    kept = np.ones(len(flat.ids), np.bool_)
    if not keep_last:
        kept[flat.ends - 1] = False
    labels = np.full(len(flat.ids), pad_id, np.int64)
    labels[:-1] = flat.ids[1:]
    labels[flat.ends - 1] = pad_id  # the first token of the next sequence is nobody's label
    mask = flat.mask.copy()
    mask[flat.ends - 1] = 0
    positions = np.arange(len(flat.ids)) - np.repeat(flat.starts, flat.ends - flat.starts)
    used = np.add.reduceat(kept, flat.row_starts, dtype=np.int64)
    length = _row_length(used, pad_to, multiple_of)
    places = np.arange(length) < used[:, None]
    rows = {
        "tokens": (flat.ids, pad_id),
        "labels": (labels, pad_id),
        "loss_mask": (mask, 0),
        "position_ids": (positions, 0),
    }
    made = {name: _rows(values[kept], places, fill) for name, (values, fill) in rows.items()}
    made["token_count"] = torch.from_numpy(used)
    made["attention_mask"] = torch.ones(len(batch), dtype=torch.int64)
    return {**made, **_cu_seqlens(flat, used, length, keep_last)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Flat:
    """All items behind one another."""

    ids: npt.NDArray[np.int64]
    mask: npt.NDArray[np.int64]
    row_starts: OffsetArray  # (B,) where each item starts
    starts: OffsetArray  # (sequences,) where each sequence starts
    ends: OffsetArray
    counts: OffsetArray  # (B,) sequences of each item


def _flat(batch: Sequence[Item]) -> _Flat:
    if not len(batch):
        raise OptionError("collate_packed: an empty batch; give it at least one item")
    ids = [np.asarray(item["input_ids"], np.int64) for item in batch]
    masks = [np.asarray(item["loss_mask"], np.int64) for item in batch]
    bounds = [np.asarray(item["seq_boundaries"], np.int64) for item in batch]
    for number, (row, mask, edges) in enumerate(zip(ids, masks, bounds, strict=True)):
        sound = len(edges) > 1 and edges[0] == 0 and edges[-1] == len(row)
        if not sound or (np.diff(edges) < 1).any() or len(mask) != len(row):
            raise OptionError(
                f"item {number}: seq_boundaries {edges[:8].tolist()}.. and a mask of "
                f"{len(mask):,} for {len(row):,} tokens; wanted boundaries that rise from 0 to the "
                "end, and a mask for every token"
            )
    before = np.cumsum([0, *(len(row) for row in ids[:-1])])
    shifted = [edges + shift for edges, shift in zip(bounds, before, strict=True)]
    return _Flat(
        ids=np.concatenate(ids),
        mask=np.concatenate(masks),
        row_starts=before,
        starts=np.concatenate([edges[:-1] for edges in shifted]),
        ends=np.concatenate([edges[1:] for edges in shifted]),
        counts=np.array([len(edges) - 1 for edges in bounds]),
    )


def _row_length(used: OffsetArray, pad_to: SupportsIndex | None, multiple_of: SupportsIndex) -> int:
    longest, step = int(used.max()), whole_number(multiple_of, "multiple_of")
    if pad_to is None:
        return max(-(-longest // step) * step, step)
    length = whole_number(pad_to, "pad_to")
    if longest > length:
        raise OptionError(
            f"pad_to={length:,}, but a row has {longest:,} tokens; nothing is cut: pack into "
            "shorter bins or pad to more"
        )
    return length


def _rows(values: npt.NDArray[np.int64], places: BoolArray, fill: int) -> Tensor:
    rows = np.full(places.shape, fill, np.int64)
    rows[places] = values
    return torch.from_numpy(rows)


def _cu_seqlens(flat: _Flat, used: OffsetArray, length: int, keep_last: bool) -> dict[str, Tensor]:
    """Where sequences begin and end in their rows, the padding as one more of them."""
    inputs = flat.ends - flat.starts - (0 if keep_last else 1)
    padded = used < length
    columns = int((flat.counts + padded).max()) + 2  # 0 before, at least one -1 behind
    lengths = np.zeros((len(used), columns), np.int64)
    lengths[:, 1:][np.arange(columns - 1) < flat.counts[:, None]] = inputs
    edges = np.cumsum(lengths, axis=1)
    rows = np.flatnonzero(padded)
    edges[rows, flat.counts[rows] + 1] = length
    argmin = 1 + flat.counts + padded
    behind = np.arange(columns) >= argmin[:, None]
    edges[behind] = -1
    longest = np.where(behind[:, 1:], -1, np.diff(edges, axis=1)).max(axis=1, keepdims=True)
    return {
        "cu_seqlens": torch.from_numpy(edges.astype(np.int32)),
        "cu_seqlens_argmin": torch.from_numpy(argmin[:, None].astype(np.int64)),
        "max_seqlen": torch.from_numpy(longest.astype(np.int32)),
    }
