"""Several datasets behind one another, each sample with its dataset's number.

In: datasets with the same kind of samples, and names.  Out: one dataset.
Promise: index `cumulative_sizes[d] + i` is sample i of dataset d, with `dataset_idx` d; a batch is
one gather a dataset that it touches.
Not here: which samples come (mixture_sampler).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from shardmill.arguments import whole_number
from shardmill.compat.kempnerforge.dataset import Sample, Samples, collate
from shardmill.compat.kempnerforge.samplers import describe_data
from shardmill.errors import OptionError
from shardmill.sampling.order import by_value
from shardmill.store.readers.files import part_of, running_edges
from shardmill.store.readers.token_space import as_positions, first_outside

INDEX = "dataset_idx"
_AS_NUMPY = {torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32}


class MixtureDataset(Dataset[Sample]):
    """A map-style dataset over several; give its `cumulative_sizes` to `MixtureSampler`."""

    def __init__(self, datasets: Sequence[Any], names: Sequence[str]) -> None:
        """Samples must be dicts of tensors with the same names, shapes and dtypes: one sample of
        each dataset is read to see it."""
        if not len(datasets):
            raise OptionError("At least one dataset is needed for a mixture")
        if isinstance(names, str) or len(names) != len(datasets):
            raise OptionError(
                f"datasets and names must have the same length: {len(datasets)} datasets, "
                f"names={names!r}"
            )
        if len(set(names)) != len(names):
            raise OptionError(f"names={list(names)}: every dataset needs a name of its own")
        self.datasets = list(datasets)
        self.dataset_names = list(names)
        self._edges = running_edges(np.array([len(each) for each in datasets], np.int64))
        self.cumulative_sizes: list[int] = self._edges.tolist()
        self._check_samples()

    @property
    def fingerprint(self) -> str:
        """sha256 hex over names and fingerprints of all datasets, in order."""
        told = [[name, describe_data(each)] for name, each in self._named()]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    def __len__(self) -> int:
        return self.cumulative_sizes[-1]

    def __getitem__(self, index: int) -> Sample:
        number = whole_number(index, "index", least=None)
        return {name: rows[0] for name, rows in self.batch([number]).items()}

    def __getitems__(self, indices: Sequence[int]) -> Samples:
        return Samples(self.batch(indices))

    def batch(self, indices: npt.ArrayLike) -> Sample:
        """These samples as one batch, in their order."""
        numbers = as_positions(indices)
        row = first_outside(numbers, len(self) - 1)
        if row is not None:
            raise IndexError(f"sample {numbers[row]:,} of {len(self):,}")
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
        wanted = self.state_dict().keys()
        if not isinstance(state, dict) or state.keys() != wanted:
            raise OptionError(f"a state with {state!r:.200}; wanted the keys {sorted(wanted)}")
        for number, each in enumerate(self.datasets):
            if f"dataset_{number}" in state:
                each.load_state_dict(state[f"dataset_{number}"])

    def close(self) -> None:
        """Close every dataset that can be closed; may be called again."""
        for each in self.datasets:
            if hasattr(each, "close"):
                each.close()

    def __repr__(self) -> str:
        told = ", ".join(f"{name}: {len(each):,}" for name, each in self._named())
        return f"MixtureDataset({told})"

    def _named(self) -> list[tuple[str, Any]]:
        return list(zip(self.dataset_names, self.datasets, strict=True))

    def _check_samples(self) -> None:
        """All datasets give the same kind of sample as the first that has one."""
        seen = [(name, _layout(each[0], name)) for name, each in self._named() if len(each)]
        for name, layout in seen[1:]:
            first, wanted = seen[0]
            if layout != wanted:
                raise OptionError(
                    f"samples of {name!r} and {first!r} cannot be in one batch: {layout} and "
                    f"{wanted}; open all datasets with the same seq_len and pack_sequences"
                )


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
            mixed[key].numpy()[rows] = values.numpy()  # a seventh of the price of torch's
        else:
            mixed[key][torch.from_numpy(rows)] = values
