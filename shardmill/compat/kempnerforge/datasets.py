"""Flat token files and stores as map-style PyTorch datasets, and several datasets as one.

A sample is `tokens[:-1]` and `tokens[1:]` of `seq_len` tokens, so `seq_len - 1` long: pass
`seq_len + 1` to train on `seq_len` inputs. A batch is one gather per dataset.
"""

from __future__ import annotations

import hashlib
import json
import logging
from abc import abstractmethod
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
from shardmill.compat.kempnerforge.samplers import describe_data
from shardmill.errors import OptionError
from shardmill.loading.config import EVERY_FILE
from shardmill.loading.exclusion import excluded_windows
from shardmill.loading.rows import SplitTokens, check_eos, check_store
from shardmill.protocols import Closing
from shardmill.records import OffsetArray, next_token_pairs
from shardmill.sampling.order import by_value
from shardmill.store.readers import TokenSpace, open_token_folder, open_tokens
from shardmill.store.readers.documents import (
    borders_after,
    find_borders,
    mask_labels,
    number_documents,
)
from shardmill.store.readers.files import part_of, running_edges
from shardmill.store.readers.foreign import dtype_name, folder_fingerprint
from shardmill.store.readers.token_space import ReaderName, as_positions, find_split, item_numbers

logger = logging.getLogger(__name__)

Sample = dict[str, Tensor]
INDEX = "dataset_idx"
_AS_NUMPY = {torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32}


class Samples(Sequence[Sample]):
    """The samples of one batch, as views of it.

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


class _BatchedDataset(Closing, Dataset[Sample]):
    """A dataset that reads many samples at once."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batch(self, indices: npt.ArrayLike) -> Sample:
        """These samples as one batch, in their order, in fresh memory."""

    def __getitem__(self, index: int) -> Sample:
        """Sample `index`; a negative one is an IndexError."""
        number = whole_number(index, "index", least=None)
        return {name: rows[0] for name, rows in self.batch([number]).items()}

    def __getitems__(self, indices: Sequence[int]) -> Samples:
        """Many samples in one gather; PyTorch's loaders call this when it exists."""
        return Samples(self.batch(indices))


class MemoryMappedDataset(SplitTokens, _BatchedDataset):
    """Samples of `seq_len` tokens each, from a folder of `.npy` or `.bin` files or a store's split.

    Every file is cut into `num_tokens // seq_len` samples, files sorted by name, remainders unused;
    the split of a store counts as one file. With `pack_sequences` a label of another document is
    -100 and batches have "doc_ids"; the end-of-document token stays a target of its own document.
    Documents begin where the index of a store says, in other folders after `eos_token_id`. A sample
    with an excluded token is replaced by another one, always the same.

    `dtype_rule` says what decided the dtype; `fingerprint` identifies the data. It pickles by path,
    forks and spawns.
    """

    def __init__(
        self,
        data_dir: str | Path,
        seq_len: int,
        file_pattern: str = EVERY_FILE,
        pack_sequences: bool = False,
        eos_token_id: int | None = None,
        dtype: npt.DTypeLike | None = None,
        *,
        split: str | None = None,
        reader: ReaderName = "auto",
    ) -> None:
        """`dtype`: of `.bin` files that nothing describes. `split`: of a store. `reader`: as in
        `shardmill.TokenSource`."""
        self._epoch = 0
        self.seq_len = whole_number(seq_len, "seq_len", least=2)
        self.pack_sequences = pack_sequences
        self._of = find_split(data_dir, split)
        with ExitStack() as undo:
            if self._of is None:
                found = open_token_folder(Path(data_dir), file_pattern, dtype=dtype)
                self._space = TokenSpace(found.files, reader=reader)
                undo.callback(self._space.close)
                runs = np.array([file.num_tokens for file in found.files], np.int64)
                self.name = found.folder.name
                self.dtype_rule = f"{found.decided.rule}: {found.decided.reason}"
                self.fingerprint = folder_fingerprint(found, self._space)
            else:
                store, named = self._of
                check_store(store, eos_token_id=None)
                names = [file.path.name for file in store.token_files(named)]
                if file_pattern != EVERY_FILE and not all(fnmatch(n, file_pattern) for n in names):
                    raise OptionError(
                        f"{{file_pattern}}, but {store.folder} is a store and is read whole, as "
                        "its manifest lists it; leave out the pattern",
                        file_pattern=file_pattern,
                    )
                if dtype is not None and dtype_name(dtype, "dtype") != store.dtype:
                    raise OptionError(
                        f"{store.folder}: its tokens are {store.dtype}, but {{dtype}}", dtype=dtype
                    )
                self._space = open_tokens(store, named, reader=reader)
                undo.callback(self._space.close)
                runs = np.array([self._space.num_tokens], np.int64)
                self.name = f"{store.folder.name}/{named}"
                self.dtype_rule = f"store: its manifest says {store.dtype}"
                self.fingerprint = f"{store.fingerprint}/{named}"
            self._token_edges = running_edges(runs)
            self._sample_edges = running_edges(runs // self.seq_len)
            self._eos = self._checked_eos(eos_token_id)
            # replacements are those of seed 0 and epoch 0, the same wherever the store is
            self.excluded = excluded_windows(
                self._excluded_spans(),
                name=self.fingerprint,
                num_items=len(self),
                stride=self.seq_len,
                length=self.seq_len,
            )
            undo.pop_all()
        if len(self) == 0:
            logger.warning("%r: no file holds %s tokens", self, f"{self.seq_len:,}")

    def __len__(self) -> int:
        return int(self._sample_edges[-1])

    def batch(self, indices: npt.ArrayLike) -> Sample:
        """These samples as one batch, (n, seq_len - 1) each, contiguous, in fresh memory."""
        starts = self._starts(indices)
        ids = self._space.gather_unchecked(starts, self.seq_len)
        input_ids, labels = next_token_pairs(ids)
        batch = {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}
        if self.pack_sequences:
            documents = self.document_starts()
            if documents is None:
                borders = borders_after(ids, self._eos)
            else:
                borders = find_borders(documents, starts, self.seq_len)
            mask_labels(labels, borders)
            batch["doc_ids"] = torch.from_numpy(number_documents(borders))
        return batch

    def prefetch(self, indices: npt.ArrayLike) -> None:
        """Ask the kernel to read these samples ahead; returns at once."""
        self._space.prefetch(self._starts(indices), self.seq_len)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "total_samples": len(self)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take over the epoch of a dataset with as many samples."""
        _check_keys(state, self.state_dict())
        epoch = whole_number(state["epoch"], "epoch", least=0)
        if state["total_samples"] != len(self):
            raise OptionError(
                f"this state is of a dataset with total_samples={state['total_samples']!r}, but "
                f"{self!r} has {len(self):,}: other files, or another seq_len"
            )
        self._epoch = epoch

    def __repr__(self) -> str:
        return (
            f"MemoryMappedDataset({self.name!r}, seq_len={self.seq_len:,}, samples={len(self):,}, "
            f"reader={self._space.reader!r})"
        )

    def _checked_eos(self, eos_token_id: int | None) -> int:
        """The id that ends a document; -1, which is not a token, when it is not used."""
        if not self.pack_sequences or self._of is not None:
            return -1
        eos = check_eos(self._space, eos_token_id, self.name)
        if eos is None:
            raise OptionError(
                "{pack_sequences} needs {eos_token_id}, the id that ends every document; only a "
                "shardmill store knows where its documents begin without one",
                pack_sequences=True,
                eos_token_id=...,
            )
        return eos

    def _starts(self, indices: npt.ArrayLike) -> OffsetArray:
        """Where these samples begin in the token space."""
        numbers = item_numbers(indices, len(self), "sample")
        if self.excluded is not None:
            numbers = self.excluded.replace(numbers, np.zeros_like(numbers), seed=0)
        if len(self._sample_edges) == 2:
            return numbers * self.seq_len
        run = part_of(self._sample_edges, numbers)
        return self._token_edges[run] + (numbers - self._sample_edges[run]) * self.seq_len


class MixtureDataset(_BatchedDataset):
    """Several datasets end to end, each sample with its dataset's number as "dataset_idx".

    Index `cumulative_sizes[d] + i` is sample `i` of dataset `d`. Give `cumulative_sizes` to
    `MixtureSampler`.
    """

    def __init__(self, datasets: Sequence[Any], names: Sequence[str]) -> None:
        """Samples must be dicts of tensors with the same names, shapes and dtypes: one sample of
        each dataset is read to check this."""
        if not len(datasets):
            raise OptionError("At least one dataset is needed for a mixture")
        if isinstance(names, str) or len(names) != len(datasets):
            raise OptionError(
                f"datasets and names must have the same length: {len(datasets)} datasets, "
                "{names}",
                names=names,
            )
        if len(set(names)) != len(names):
            raise OptionError("{names}: every dataset needs a different name", names=list(names))
        self.datasets = list(datasets)
        self.dataset_names = list(names)
        self._edges = running_edges(np.array([len(each) for each in datasets], np.int64))
        self.cumulative_sizes: list[int] = self._edges.tolist()
        self._check_samples()

    @property
    def fingerprint(self) -> str:
        """sha256 hex over names and fingerprints of all datasets, in order."""
        described = [[name, describe_data(each)] for name, each in self._named()]
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()

    def __len__(self) -> int:
        return self.cumulative_sizes[-1]

    def batch(self, indices: npt.ArrayLike) -> Sample:
        """These samples as one batch, in their order."""
        numbers = item_numbers(indices, len(self), "sample")
        source = part_of(self._edges, numbers)
        within = numbers - self._edges[source]
        mixed: Sample = {}
        for number, chosen in by_value(source):
            part = _read(self.datasets[number], within[chosen])
            if isinstance(chosen, slice):  # all of one dataset: as it was read
                mixed = part
                break
            _put(part, chosen, len(numbers), mixed, self.dataset_names[number])
        return {**mixed, INDEX: torch.from_numpy(source.astype(np.int64, copy=False))}

    def prefetch(self, indices: npt.ArrayLike) -> None:
        """Ask the kernel to read these samples ahead, where a dataset can."""
        numbers = as_positions(indices)
        source = part_of(self._edges, numbers)
        for number, chosen in by_value(source):
            if hasattr(self.datasets[number], "prefetch"):
                self.datasets[number].prefetch(numbers[chosen] - self._edges[number])

    def state_dict(self) -> dict[str, Any]:
        """The state of every dataset that has one, as "dataset_0", "dataset_1", ..."""
        return {
            f"dataset_{number}": each.state_dict()
            for number, each in enumerate(self.datasets)
            if hasattr(each, "state_dict")
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _check_keys(state, self.state_dict())
        for number, each in enumerate(self.datasets):
            if f"dataset_{number}" in state:
                each.load_state_dict(state[f"dataset_{number}"])

    def close(self) -> None:
        """Close every dataset that can be closed; may be called again."""
        for each in self.datasets:
            if hasattr(each, "close"):
                each.close()

    def __repr__(self) -> str:
        return f"MixtureDataset({', '.join(f'{n}: {len(each):,}' for n, each in self._named())})"

    def _named(self) -> list[tuple[str, Any]]:
        return list(zip(self.dataset_names, self.datasets, strict=True))

    def _check_samples(self) -> None:
        """All datasets have the same kind of sample as the first that has one."""
        seen = [(name, _layout(each[0], name)) for name, each in self._named() if len(each)]
        for name, layout in seen[1:]:
            first, wanted = seen[0]
            if layout != wanted:
                raise OptionError(
                    f"samples of {name!r} and {first!r} cannot be in one batch: {layout} and "
                    f"{wanted}; open all datasets with the same seq_len and pack_sequences"
                )


def _check_keys(state: object, own: dict[str, Any]) -> None:
    if not isinstance(state, dict) or state.keys() != own.keys():
        raise OptionError(f"a state with {state!r:.200}; wanted the keys {sorted(own)}")


def _layout(sample: Any, name: str) -> dict[str, str]:
    if not isinstance(sample, dict) or not all(isinstance(v, Tensor) for v in sample.values()):
        raise OptionError(
            f"dataset {name!r}: samples must be dicts of tensors, found {sample!r:.100}"
        )
    if INDEX in sample:
        raise OptionError(f"dataset {name!r}: its samples already have {INDEX!r}")
    return {key: f"{tuple(v.shape)} {v.dtype}" for key, v in sample.items()}


def _read(dataset: Any, indices: npt.NDArray[np.int64]) -> Sample:
    """A batch of one dataset, in one call where it has one."""
    if hasattr(dataset, "batch"):
        batch: Sample = dataset.batch(indices)
        return batch
    numbers = indices.tolist()
    if hasattr(dataset, "__getitems__"):
        return collate(dataset.__getitems__(numbers))
    return collate([dataset[number] for number in numbers])


def _put(
    part: Sample, rows: npt.NDArray[np.int64], num_rows: int, mixed: Sample, name: str
) -> None:
    """Write a dataset's rows into the mixed batch."""
    if not mixed:
        mixed |= {key: v.new_empty((num_rows, *v.shape[1:])) for key, v in part.items()}
    if part.keys() != mixed.keys():
        raise OptionError(f"dataset {name!r}: samples with {sorted(part)}, wanted {sorted(mixed)}")
    for key, values in part.items():
        if values.dtype in _AS_NUMPY and values.device.type == "cpu":
            mixed[key].numpy()[rows] = values.numpy()  # seven times as fast as torch's
        else:
            mixed[key][torch.from_numpy(rows)] = values
