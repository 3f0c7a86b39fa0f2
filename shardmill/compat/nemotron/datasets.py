"""Datasets of packed bins and their batches, under the names and conventions of Megatron.

Opening reads manifests only, and an item costs what it holds. Each process that unpickles a dataset
maps the files itself. A negative index is a padding sample, whose mask is all zero. The order of
`max_num_samples` is a pure function of (seed, epoch, position). A row of a plan with an excluded
token is never given: another row, always the same, takes its place.

In a batch a label is always the next token of the same sequence, and `loss_mask[j]` weighs the
label `ids[j + 1]`. Positions restart with every sequence.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from inspect import signature
from itertools import accumulate
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from shardmill.arguments import whole_number
from shardmill.errors import OptionError, StoreError
from shardmill.formats.packed import MemmapShard, PackedShard, open_packed
from shardmill.formats.packed.files import MANIFEST, read_json
from shardmill.formats.packed.formats import PlanShard, packed_format, refuse_spool
from shardmill.formats.packed.records import path_to_read
from shardmill.loading.exclusion import ExcludedItems, excluded_rows
from shardmill.protocols import Closing
from shardmill.records import IntArray, OffsetArray
from shardmill.sampling import Permutation
from shardmill.store import read_exclusions
from shardmill.store.readers import open_pack

logger = logging.getLogger(__name__)

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
    ids, mask, bounds = _checked_items(batch)
    before = np.cumsum([0, *(len(row) for row in ids[:-1])])  # where each item starts
    edges = [own + shift for own, shift in zip(bounds, before, strict=True)]
    starts = np.concatenate([each[:-1] for each in edges])
    ends = np.concatenate([each[1:] for each in edges])
    flat, weights = np.concatenate(ids), np.concatenate(mask)
    labels = np.full(len(flat), pad_id, np.int64)
    labels[:-1] = flat[1:]
    labels[ends - 1] = pad_id  # the first token of the next sequence is no label
    weights[ends - 1] = 0
    kept = np.ones(len(flat), np.bool_)
    if not keep_last:
        kept[ends - 1] = False
    used = np.add.reduceat(kept, before, dtype=np.int64)
    length = _row_length(used, pad_to, multiple_of)
    filled = np.arange(length) < used[:, None]

    def rows(values: npt.NDArray[np.int64], fill: int) -> Tensor:
        made = np.full(filled.shape, fill, np.int64)
        made[filled] = values[kept]
        return torch.from_numpy(made)

    inputs = ends - starts - (0 if keep_last else 1)
    counts = np.array([len(each) - 1 for each in bounds])
    return {
        "tokens": rows(flat, pad_id),
        "labels": rows(labels, pad_id),
        "loss_mask": rows(weights, 0),
        "position_ids": rows(np.arange(len(flat)) - np.repeat(starts, ends - starts), 0),
        "token_count": torch.from_numpy(used),
        "attention_mask": torch.ones(len(batch), dtype=torch.int64),
        **_cu_seqlens(inputs, counts, used, length),
    }


Rows = list[npt.NDArray[np.int64]]


def _checked_items(batch: Sequence[Item]) -> tuple[Rows, Rows, Rows]:
    """Ids, masks and boundaries of all items."""
    if not len(batch):
        raise OptionError("collate_packed: an empty batch; give it at least one item")
    names = ("input_ids", "loss_mask", "seq_boundaries")
    ids, masks, bounds = ([np.asarray(item[name], np.int64) for item in batch] for name in names)
    for number, (row, mask, edges) in enumerate(zip(ids, masks, bounds, strict=True)):
        sound = len(edges) > 1 and edges[0] == 0 and edges[-1] == len(row)
        if not sound or (np.diff(edges) < 1).any() or len(mask) != len(row):
            raise OptionError(
                f"item {number}: seq_boundaries {edges[:8].tolist()}.. and a mask of "
                f"{len(mask):,} for {len(row):,} tokens; wanted boundaries that rise from 0 to the "
                "end, and a mask for every token"
            )
    return ids, masks, bounds


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


def _cu_seqlens(
    inputs: OffsetArray, counts: OffsetArray, used: OffsetArray, length: int
) -> dict[str, Tensor]:
    """Where sequences begin and end in their rows, the padding as one more of them.

    inputs: the length of every sequence.  counts: (B,) sequences of each row.  used: (B,) inputs.
    """
    padded = used < length
    columns = int((counts + padded).max()) + 2  # 0 first, at least one -1 last
    lengths = np.zeros((len(used), columns), np.int64)
    lengths[:, 1:][np.arange(columns - 1) < counts[:, None]] = inputs
    edges = np.cumsum(lengths, axis=1)
    rows = np.flatnonzero(padded)
    edges[rows, counts[rows] + 1] = length
    argmin = 1 + counts + padded
    unused = np.arange(columns) >= argmin[:, None]
    edges[unused] = -1
    longest = np.where(unused[:, 1:], -1, np.diff(edges, axis=1)).max(axis=1, keepdims=True)
    return {
        "cu_seqlens": torch.from_numpy(edges.astype(np.int32)),
        "cu_seqlens_argmin": torch.from_numpy(argmin[:, None].astype(np.int64)),
        "max_seqlen": torch.from_numpy(longest.astype(np.int32)),
    }


class PackedDataset(Closing, Dataset[dict[str, Any]]):
    """Bins of one or more packed shards, of any format, one after the other.

    `samples_mapping`: which bin each sample is, in place of all bins in order.
    `max_num_samples`: the length of the dataset, epoch after epoch, each shuffled by `seed`.
    `max_seq_length`, `pad_to_max_length`, `pad_seq_length_to_mult`: for `collate_fn`.
    `pack_size`, `loss_mask_alignment`: for shards that do not say them.
    """

    _open_shard: Callable[..., PackedShard] = staticmethod(open_packed)

    def __init__(
        self,
        paths: Sequence[str | Path],
        tokenizer: Any = None,
        *,
        samples_mapping: npt.ArrayLike | None = None,
        max_num_samples: SupportsIndex | None = None,
        seed: SupportsIndex = 1234,
        max_seq_length: SupportsIndex | None = None,
        pad_to_max_length: bool = False,
        pad_seq_length_to_mult: SupportsIndex = 16,
        pack_size: SupportsIndex | None = None,
        loss_mask_alignment: str | None = None,
    ) -> None:
        """`tokenizer` is kept, and its `eos_id` pads batches; nothing is encoded with it."""
        self.tokenizer = tokenizer
        self._paths = [str(path_to_read(path)) for path in paths]
        options = {"pack_size": pack_size, "loss_mask_alignment": loss_mask_alignment}
        self._shards = [self._open_shard(path, **options) for path in self._paths]
        self.excluded = _find_excluded(self._shards)  # by shard: the bins that are not given
        self._edges = [0, *accumulate(len(shard) for shard in self._shards)]
        self.pack_size = max((shard.pack_size for shard in self._shards), default=0)
        self.loss_mask_alignment = self._one_alignment(self._shards)
        self.seed = whole_number(seed, "seed", least=0)
        self._order: tuple[int, Permutation] | None = None  # of the epoch used last
        self.samples_mapping = self._checked_mapping(samples_mapping)
        self.max_num_samples = self._checked_count(max_num_samples)
        self._padding = (max_seq_length, bool(pad_to_max_length), pad_seq_length_to_mult)
        if pad_to_max_length and max_seq_length is None:
            raise OptionError("pad_to_max_length=True: say to which length, with max_seq_length")

    def __len__(self) -> int:
        if self.max_num_samples is not None:
            return self.max_num_samples
        return self.num_bins if self.samples_mapping is None else len(self.samples_mapping)

    @property
    def num_bins(self) -> int:
        """In all shards."""
        return self._edges[-1]

    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]:
        """`input_ids` (L,) int32, `loss_mask` (L,) uint8, `seq_boundaries`: starts and L.

        A bin with an id of 2**31 or more, which int32 does not hold, has int64 `input_ids`. Index
        -1 is the last sample, but with a mask of zeros: samplers fill up batches with it.
        """
        number = whole_number(index, "index", least=None)
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number:,} of {len(self):,}")
        chosen = self._bin_of(number % len(self))
        padding = number < 0 or chosen < 0
        chosen %= self.num_bins
        shard = bisect.bisect_right(self._edges, chosen) - 1
        found = self._shards[shard].read_bin(self._given(shard, chosen - self._edges[shard]))
        return {
            "input_ids": _as_int32(found.input_ids),
            "seq_boundaries": found.seq_boundaries,
            "loss_mask": np.zeros_like(found.loss_mask) if padding else found.loss_mask.copy(),
        }

    def collate_fn(self, batch: Sequence[Item]) -> dict[str, Tensor]:
        """`collate_packed` with this dataset's padding."""
        length, to_most, multiple = self._padding
        pad_id = getattr(self.tokenizer, "eos_id", 0) if self.tokenizer is not None else 0
        pad_to = length if to_most else None
        return collate_packed(batch, pad_to=pad_to, multiple_of=multiple, pad_id=int(pad_id))

    def close(self) -> None:
        """Release all maps; the next item opens them again."""
        for shard in self._shards:
            shard.close()

    def __repr__(self) -> str:
        name = Path(self._paths[0]).name if len(self._paths) == 1 else f"{len(self._paths)} shards"
        return f"{type(self).__name__}({name!r}, samples={len(self):,})"

    def _given(self, shard: int, number: int) -> int:
        """The bin of a shard, or the one that takes its place."""
        excluded = self.excluded.get(shard)
        if excluded is None:
            return number
        return int(excluded.replace(np.array([number]), np.array([0]), seed=0)[0])

    def _one_alignment(self, shards: Sequence[PackedShard]) -> str:
        found = sorted({shard.loss_mask_alignment for shard in shards})
        if len(found) != 1:
            raise OptionError(
                f"{len(shards)} shards with loss masks aligned {found}; wanted shards of one "
                "alignment"
            )
        if found == ["roll_right"]:
            logger.warning(
                "%s: loss masks are rolled right over the whole bin, so the labels that weigh are "
                "not those of the unpacked examples; pack with loss_mask_alignment='label'",
                self._paths[0],
            )
        return found[0]

    def _checked_mapping(self, mapping: npt.ArrayLike | None) -> npt.NDArray[np.int64] | None:
        if mapping is None:
            return None
        found = np.asarray(mapping)
        if found.ndim != 1 or found.dtype.kind not in "iu" or not len(found):
            raise OptionError(
                f"samples_mapping of shape {found.shape} and dtype {found.dtype}: wanted one bin "
                "number for each sample"
            )
        outside = (found < -self.num_bins) | (found >= self.num_bins)
        if outside.any():
            raise OptionError(
                f"samples_mapping names bin {int(found[outside][0]):,} of {self.num_bins:,}"
            )
        return found.astype(np.int64)

    def _checked_count(self, count: SupportsIndex | None) -> int | None:
        if count is None:
            return None
        if not self.num_bins:
            raise OptionError(f"max_num_samples={count}, but there is no bin to take samples from")
        return whole_number(count, "max_num_samples")

    def _bin_of(self, position: int) -> int:
        """Which bin sample `position` is; negative for a padding sample of the mapping."""
        if self.max_num_samples is not None:
            size = self.num_bins if self.samples_mapping is None else len(self.samples_mapping)
            epoch, at = divmod(position, size)
            order = self._order  # another thread may replace it at any moment
            if order is None or order[0] != epoch:
                order = epoch, Permutation(size, self.seed, "packed", "epoch", epoch)
                self._order = order
            position = order[1][at]
        return position if self.samples_mapping is None else int(self.samples_mapping[position])


class GPTSFTPackedDataset(PackedDataset):
    """One legacy `.npy` file. The options are those of `PackedDataset`."""

    def __init__(self, file_path: str | Path, tokenizer: Any = None, **kwargs: Any) -> None:
        if packed_format(file_path) != "legacy":
            raise StoreError(f"{file_path}: no legacy .npy file; create_sft_dataset opens any")
        self.file_path = str(file_path)
        super().__init__([file_path], tokenizer, **_known(kwargs))


class GPTSFTPackedMemmapDataset(PackedDataset):
    """One memmap_padded_v1 shard. The options are those of `PackedDataset`.

    `shard_dir`: the folder, as it was given. `manifest`: what is in its manifest.json.
    """

    _open_shard = MemmapShard

    def __init__(self, file_path: str | Path, tokenizer: Any = None, **kwargs: Any) -> None:
        self.file_path = self.shard_dir = str(file_path)
        super().__init__([file_path], tokenizer, **_known(kwargs))
        self.manifest, _ = read_json(Path(file_path), "packed shard")


class GPTSFTPackedMultiShardDataset(PackedDataset):
    """Several packed shards as one dataset; the options count for all of them together.

    `shards`: each as a separate dataset, with all its bins in order. `shard_offsets`:
    (shards + 1,) the number of the first bin of each, and of all bins.
    """

    def __init__(
        self, shard_dirs: Sequence[str | Path], tokenizer: Any = None, **kwargs: Any
    ) -> None:
        if isinstance(shard_dirs, str | Path) or not len(shard_dirs):
            raise OptionError(f"shard_dirs={shard_dirs!r}: wanted a list of at least one shard")
        super().__init__(shard_dirs, tokenizer, **_known(kwargs))
        self.shard_offsets = np.array(self._edges)

    @cached_property
    def shards(self) -> list[PackedDataset]:
        return [
            create_sft_dataset(
                *(path, self.tokenizer),
                pack_size=shard.pack_size,
                loss_mask_alignment=shard.loss_mask_alignment,
            )
            for path, shard in zip(self._paths, self._shards, strict=True)
        ]

    def close(self) -> None:
        super().close()
        for dataset in self.__dict__.get("shards", ()):
            dataset.close()


def create_sft_dataset(path: str | Path, tokenizer: Any = None, **kwargs: Any) -> PackedDataset:
    """The dataset of whatever packed data is at `path`: a memmap shard, a folder of such shards,
    Parquet, the `.plan` of a chat store, whose rows are made as they are asked for, or a legacy
    `.npy` file, which only the restricted reader touches."""
    path = path_to_read(path)
    shards = [] if (path / MANIFEST).exists() else sorted(path.glob(f"*/{MANIFEST}"))
    folders = [found.parent for found in shards if not found.parent.name.startswith(".")]
    for folder in folders:
        refuse_spool(folder)
    if folders:
        return GPTSFTPackedMultiShardDataset(folders, tokenizer, **kwargs)
    if packed_format(path) == "memmap":
        return GPTSFTPackedMemmapDataset(path, tokenizer, **kwargs)
    if packed_format(path) == "legacy":
        return GPTSFTPackedDataset(path, tokenizer, **kwargs)
    return PackedDataset([path], tokenizer, **_known(kwargs))


def _as_int32(ids: IntArray) -> IntArray:
    """A copy as int32, or as int64 if an id does not fit: numpy would wrap it without a word."""
    fits = np.can_cast(ids.dtype, np.int32) or not len(ids) or int(ids.max()) < 2**31
    return ids.astype(np.int32 if fits else np.int64)


def _known(options: dict[str, Any]) -> dict[str, Any]:
    known = [*signature(PackedDataset.__init__).parameters][3:]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise OptionError(
            f"{', '.join(unknown)}: no option of packed datasets, whose samples are tokenised and "
            f"masked already; known are {', '.join(known)}"
        )
    return options


def _find_excluded(shards: Sequence[PackedShard]) -> dict[int, ExcludedItems]:
    """By shard. The rows of a plan are looked at only if something is excluded in its store."""
    found: dict[int, ExcludedItems] = {}
    for number, shard in enumerate(shards):
        if not isinstance(shard, PlanShard):
            continue
        exclusions = read_exclusions(shard.path.parent.parent)
        if exclusions.entries:
            with closing(open_pack(shard.path)) as space:
                spans = exclusions.spans(space.split)
                excluded = excluded_rows(spans, space, name=shard.fingerprint)
            found |= {} if excluded is None else {number: excluded}
    return found
