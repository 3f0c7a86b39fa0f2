"""One rank of test_torchrun.py: reads some steps and tells what all ranks read.

Not a test: test_torchrun.py starts it with FOLDER OUT BATCH_SIZE STEPS. In FOLDER lie token files
in which every token is another, so the first token of a sample names it; and perhaps states.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardmill.compat.kempnerforge import (
    DistributedSampler,
    MemoryMappedDataset,
    MixtureDataset,
    MixtureSampler,
    StatefulDataLoader,
)
from shardmill.loading import Loader, SampleStream, TokenSource

SEQ_LEN = 8
SEED = 7
PHASE = 30  # global sample from which the native mixture has other weights


def native(folder: Path, batch_size: int) -> Loader:
    sources = [TokenSource(folder / name, seq_len=SEQ_LEN) for name in ("a", "b")]
    stream = SampleStream(sources, weights=[3, 1], phases=[(PHASE, [1, 3])], seed=SEED)
    rank, world = dist.get_rank(), dist.get_world_size()
    return Loader(stream, batch_size=batch_size, rank=rank, world=world)


def single(folder: Path, batch_size: int) -> StatefulDataLoader:
    data = MemoryMappedDataset(folder / "a", SEQ_LEN)
    sampler = DistributedSampler(data, seed=SEED)  # it asks torch.distributed for its rank
    return StatefulDataLoader(data, batch_size, sampler)


def mixed(folder: Path, batch_size: int) -> StatefulDataLoader:
    datasets = [MemoryMappedDataset(folder / name, SEQ_LEN) for name in ("a", "b")]
    data = MixtureDataset(datasets, ["a", "b"])
    ranks = dist.get_world_size(), dist.get_rank()
    sampler = MixtureSampler(data.cumulative_sizes, [3, 1], *ranks, seed=SEED)
    return StatefulDataLoader(data, batch_size, sampler)


LOADERS = {"native": native, "single": single, "mixed": mixed}


def first_tokens(loader: Any, steps: int) -> Iterator[list[int]]:
    batches = iter(loader)
    for _ in range(steps):
        batch = next(batches)
        inputs = batch["input_ids"] if isinstance(batch, dict) else batch.input_ids
        yield [int(row[0]) for row in inputs]


def gather(value: object) -> list[Any]:
    """The value of every rank, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def main(folder: Path, out: Path, batch_size: int, steps: int) -> None:
    told: dict[str, Any] = {}
    for name, make in LOADERS.items():
        loader = make(folder, batch_size)
        before = folder / f"{name}.json"
        if before.exists():
            loader.load_state_dict(json.loads(before.read_text()))
        told[name] = {
            "steps": [gather(tokens) for tokens in first_tokens(loader, steps)],
            "states": gather(loader.state_dict()),
        }
    (out / f"rank_{dist.get_rank()}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    dist.destroy_process_group()
