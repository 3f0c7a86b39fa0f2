"""Flat token files as a PyTorch dataset.

In: a folder of `.npy` or `.bin` token files, or a store.  Out: `{"input_ids", "labels"}` tensors,
with packing also `"doc_ids"`; int64.
Promise: every file is cut into `num_tokens // seq_len` samples of `seq_len` tokens, files sorted by
name, rests unused; a sample is `tokens[:-1]` and `tokens[1:]`, so `seq_len - 1` long: pass
`seq_len + 1` to train on `seq_len` inputs. With packing a label of another document is -100, and
the end-of-document token stays a target of its own document. A batch is one gather. It pickles by
path, forks and spawns. A sample with an excluded token of a store is never given: another one,
always the same, stands in for it, and no other sample moves.
Not here: order (samplers), position within an epoch (loaders).

The split of a store counts as one file, since its documents go on from shard to shard. Its document
index says where documents begin; in other folders `eos_token_id` does.

The samples of one batch, which were read together and need not be put together again.

In: tensors of a whole batch.  Out: one sample after another, or the batch as it was.
Promise: samples are views of the batch; `collate` copies nothing that was read as one batch.
Not here: reading.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from shardmill.arguments import whole_number
from shardmill.errors import OptionError
from shardmill.loading.exclusion import ExcludedItems, excluded_windows
from shardmill.loading.rows import check_eos
from shardmill.protocols import Closing
from shardmill.records import OffsetArray, next_token_pairs
from shardmill.store import Store, read_exclusions
from shardmill.store.readers import TokenSpace, open_token_folder, open_tokens
from shardmill.store.readers.documents import (
    borders_after,
    checked_starts,
    find_borders,
    mask_labels,
    number_documents,
)
from shardmill.store.readers.files import part_of, running_edges
from shardmill.store.readers.foreign import dtype_name, folder_fingerprint
from shardmill.store.readers.pread import held_by
from shardmill.store.readers.token_space import ReaderName, as_positions, find_split, first_outside

Sample = dict[str, Tensor]


class Samples(Sequence[Sample]):
    """A list of samples, made of their batch when somebody asks for one.

    Keeping a single sample keeps the memory of its whole batch: `clone()` what stays.
    """

    def __init__(self, batch: Sample) -> None:
        self.batch = batch  # every tensor (n, ...), with the same n
        self._rows: list[Sample] | None = None

    def __len__(self) -> int:
        return len(next(iter(self.batch.values())))

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if self._rows is None:
            names = tuple(self.batch)
            columns = [torch.unbind(tensor) for tensor in self.batch.values()]
            self._rows = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
        return self._rows[index]


def collate(samples: Sequence[Sample]) -> Sample:
    """The batch of these samples: as it was read, or stacked if they come one by one.

    Pass it as `DataLoader(..., collate_fn=collate)`.
    """
    if isinstance(samples, Samples):
        return samples.batch
    stacked: Sample = default_collate(list(samples))
    return stacked


logger = logging.getLogger(__name__)


class MemoryMappedDataset(Closing, Dataset[Sample]):
    """Samples of `seq_len` tokens each, from a folder of token files or a store's split.

    `dtype_rule` says what decided the dtype; `fingerprint` tells two datasets apart.
    """

    def __init__(
        self,
        data_dir: str | Path,
        seq_len: int,
        file_pattern: str = "*.npy",
        pack_sequences: bool = False,
        eos_token_id: int | None = None,
        dtype: npt.DTypeLike | None = None,
        *,
        split: str | None = None,
        reader: ReaderName = "auto",
    ) -> None:
        """`dtype`: for `.bin` files, when nothing beside them says it. `split`: of a store.
        `reader`: as in `shardmill.TokenSource`."""
        self._space: TokenSpace | None = None
        self._epoch = 0
        self._reader: ReaderName = reader
        self.seq_len = whole_number(seq_len, "seq_len", least=2)
        self.pack_sequences = pack_sequences
        self._of = find_split(data_dir, split)  # the store and the split
        self._documents: OffsetArray | None = None  # mapped at first use, in every process anew
        self.excluded: ExcludedItems | None = None  # samples that are not given
        with ExitStack() as undo:
            undo.callback(self.close)
            if self._of is not None:
                runs = self._open_split(*self._of, file_pattern, dtype)
            else:
                runs = self._open_folder(Path(data_dir), file_pattern, dtype)
            self._token_edges = running_edges(runs)
            self._sample_edges = running_edges(runs // self.seq_len)
            self._eos = self._checked_eos(eos_token_id)
            self.excluded = self._find_excluded()
            undo.pop_all()
        if len(self) == 0:
            logger.warning("%r: no file holds %s tokens", self, f"{self.seq_len:,}")

    def __len__(self) -> int:
        return int(self._sample_edges[-1])

    def __getitem__(self, index: int) -> Sample:
        """Sample `index`; a negative one is an IndexError, like one behind the end."""
        number = whole_number(index, "index", least=None)
        return {name: rows[0] for name, rows in self.batch([number]).items()}

    def __getitems__(self, indices: Sequence[int]) -> Samples:
        """Many samples in one gather; what PyTorch's loaders call when it is there."""
        return Samples(self.batch(indices))

    def batch(self, indices: npt.ArrayLike) -> Sample:
        """These samples as one batch, (n, seq_len - 1) each, contiguous, in fresh memory."""
        starts = self._starts(indices)
        ids = self._opened().gather_unchecked(starts, self.seq_len)
        input_ids, labels = next_token_pairs(ids)
        batch = {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}
        if self.pack_sequences:
            documents = self._document_starts()
            if documents is None:
                borders = borders_after(ids, self._eos)
            else:
                borders = find_borders(documents, starts, self.seq_len)
            mask_labels(labels, borders)
            batch["doc_ids"] = torch.from_numpy(number_documents(borders))
        return batch

    def prefetch(self, indices: npt.ArrayLike) -> None:
        """Ask the kernel to read these samples ahead; returns at once."""
        self._opened().prefetch(self._starts(indices), self.seq_len)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "total_samples": len(self)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take over the epoch of a dataset with as many samples."""
        wanted = self.state_dict()
        if not isinstance(state, dict) or state.keys() != wanted.keys():
            raise OptionError(f"a state with {state!r:.200}; wanted the keys {sorted(wanted)}")
        epoch = whole_number(state["epoch"], "epoch", least=0)
        if state["total_samples"] != len(self):
            raise OptionError(
                f"this state is of a dataset with total_samples={state['total_samples']!r}, but "
                f"{self!r} has {len(self):,}: other files, or another seq_len"
            )
        self._epoch = epoch

    def close(self) -> None:
        """Let go of all maps; may be called again."""
        if self._space is not None:
            self._space.close()
        self._documents = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_documents": None}  # a mapped array would pickle by value

    def __repr__(self) -> str:
        return (
            f"MemoryMappedDataset({self.name!r}, seq_len={self.seq_len:,}, samples={len(self):,}, "
            f"reader={self._opened().reader!r})"
        )

    def _open_split(
        self, store: Store, split: str, file_pattern: str, dtype: npt.DTypeLike | None
    ) -> OffsetArray:
        """The lengths of the runs of tokens that samples are cut from: here, one."""
        if store.is_chat:
            raise OptionError(
                f"{store.folder}: a store of conversations. Here every token would be trained; "
                f"read it with shardmill.loading, which keeps to its loss mask"
            )
        files = store.token_files(split)
        missed = [file for file in files if not fnmatch(file.path.name, file_pattern)]
        if missed and file_pattern != "*.npy":
            raise OptionError(
                f"file_pattern={file_pattern!r} leaves out {missed[0].path.name}, but a store is "
                f"read whole, as its manifest lists it; leave the pattern away"
            )
        if dtype is not None and dtype_name(dtype, "dtype") != store.dtype:
            raise OptionError(f"{store.folder}: its tokens are {store.dtype}, but dtype={dtype!r}")
        self._space = open_tokens(store, split, reader=self._reader)
        self.name = f"{store.folder.name}/{split}"
        self.dtype_rule = f"store: its manifest says {store.dtype}"
        self.fingerprint = f"{store.fingerprint}/{split}"
        return np.array([self._space.num_tokens], np.int64)

    def _open_folder(
        self, folder: Path, file_pattern: str, dtype: npt.DTypeLike | None
    ) -> OffsetArray:
        found = open_token_folder(folder, file_pattern, dtype=dtype)
        self._space = TokenSpace(found.files, reader=self._reader)
        self.name = found.folder.name
        self.dtype_rule = f"{found.decided.rule}: {found.decided.reason}"
        self.fingerprint = folder_fingerprint(found, self._space)
        return np.array([file.num_tokens for file in found.files], np.int64)

    def _find_excluded(self) -> ExcludedItems | None:
        """Stand-ins are those of seed 0 and epoch 0, and the same wherever the store lies."""
        if self._of is None:
            return None
        store, split = self._of
        return excluded_windows(
            read_exclusions(store).spans(split),
            name=self.fingerprint,
            num_items=len(self),
            stride=self.seq_len,
            length=self.seq_len,
        )

    def _checked_eos(self, eos_token_id: int | None) -> int:
        """The id that closes a document; -1, which no token is, when nobody needs it."""
        if not self.pack_sequences or self._of is not None:
            return -1
        if eos_token_id is None:
            raise OptionError(
                "pack_sequences=True needs eos_token_id, the id that ends every document; only a "
                "shardmill store knows where its documents begin without one"
            )
        eos = check_eos(self._opened(), eos_token_id, self.name)
        assert eos is not None, "it was given"
        return eos

    def _opened(self) -> TokenSpace:
        assert self._space is not None, "set by the constructor"
        return self._space

    def _document_starts(self) -> OffsetArray | None:
        if self._of is not None and self._documents is None:
            store, split = self._of
            starts = store.document_starts(split)
            checked = checked_starts(starts, self._opened().num_tokens)
            self._documents = held_by(self._opened().reader, checked)
        return self._documents

    def _starts(self, indices: npt.ArrayLike) -> OffsetArray:
        """Where these samples begin in the token space."""
        numbers = as_positions(indices)
        row = first_outside(numbers, len(self) - 1)
        if row is not None:
            raise IndexError(f"sample {numbers[row]:,} of {len(self):,}")
        if self.excluded is not None:
            numbers = self.excluded.replace(numbers, np.zeros_like(numbers), seed=0)
        if len(self._sample_edges) == 2:
            return numbers * self.seq_len
        run = part_of(self._sample_edges, numbers)
        return self._token_edges[run] + (numbers - self._sample_edges[run]) * self.seq_len
