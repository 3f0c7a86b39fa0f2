"""Real ranks: two processes of torchrun read a disjoint cover, and three continue it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardmill.compat.kempnerforge import DistributedSampler, MemoryMappedDataset, MixtureSampler
from shardmill.loading import Loader, SampleStream, TokenSource

WORKER = Path(__file__).parent / "torchrun_worker.py"
STARTS = {"a": 0, "b": 100_000}  # the first token of each source
NUM_TOKENS = {"a": 3_209, "b": 169}  # 401 and 21 samples of 8 tokens
NAMES = ["native", "single", "mixed"]


def write_sources(folder: Path) -> None:
    for name, start in STARTS.items():
        (folder / name).mkdir(parents=True)
        tokens = np.arange(start, start + NUM_TOKENS[name], dtype=np.uint32)
        np.save(folder / name / "tokens.npy", tokens)


def torchrun(folder: Path, out: Path, *, ranks: int, batch_size: int, steps: int) -> dict[str, Any]:
    """What the ranks reported; all of them report the same."""
    out.mkdir()
    launch = f"-m torch.distributed.run --log-dir {out / 'logs'} "
    launch += "--standalone --local-addr 127.0.0.1 --nproc-per-node"
    arguments = [str(folder), str(out), str(batch_size), str(steps)]
    done = subprocess.run(
        [sys.executable, *launch.split(), str(ranks), str(WORKER), *arguments],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    reported = [json.loads((out / f"rank_{rank}.json").read_text()) for rank in range(ranks)]
    assert all(one == reported[0] for one in reported)
    assert list(reported[0]) == NAMES
    return reported[0]


def assert_read_in_order(name: str, steps: list[list[list[int]]], wanted: list[int]) -> None:
    """All ranks together read exactly these samples. A rank of the native loader reads a run of
    each step; of PyTorch's samplers every rank gets one of `world` neighbours."""
    if name == "native":
        assert [token for ranks in steps for token in chain(*ranks)] == wanted
        return
    read = [neighbours for ranks in steps for neighbours in zip(*ranks, strict=True)]
    runs = list(batched(wanted, len(steps[0])))
    if name == "mixed":  # its ranks change places, or one of them might see one source alone
        read, runs = [tuple(sorted(one)) for one in read], [tuple(sorted(one)) for one in runs]
    assert read == runs


def batched(values: list[int], size: int) -> Iterator[tuple[int, ...]]:
    return zip(*[iter(values)] * size, strict=True)


def without_rank(state: dict[str, Any]) -> dict[str, Any]:
    """A state as all ranks have it: samplers also tell which rank they are."""
    if "sampler" not in state:
        return state
    sampler = {key: value for key, value in state["sampler"].items() if key != "rank"}
    return {**state, "sampler": sampler}


def global_order(name: str, folder: Path, num_samples: int) -> list[int]:
    """The first tokens of the first samples, as one process without ranks counts them."""
    if name == "native":
        sources = [TokenSource(folder / source, seq_len=8) for source in STARTS]
        stream = SampleStream(sources, weights=[3, 1], phases=[(30, [1, 3])], seed=7)
        with Loader(stream, batch_size=1, num_samples=num_samples, ahead=0) as loader:
            return [int(batch.input_ids[0, 0]) for batch in loader]
    if name == "single":
        data = MemoryMappedDataset(folder / "a", 8)
        samples = list(DistributedSampler(data, 1, 0, seed=7))[:num_samples]
        return [8 * sample for sample in samples]
    mixture = MixtureSampler([0, 401, 422], [3, 1], 1, 0, seed=7)
    samples = list(mixture)[:num_samples]
    return [8 * sample if sample < 401 else 100_000 + 8 * (sample - 401) for sample in samples]


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_two_ranks_cover_the_global_order_and_three_go_on_exactly(tmp_path):
    folder = tmp_path / "data"
    write_sources(folder)
    order = {name: global_order(name, folder, 70) for name in NAMES}
    first = torchrun(folder, tmp_path / "two", ranks=2, batch_size=4, steps=5)
    for name in NAMES:
        assert_read_in_order(name, first[name]["steps"], order[name][:40])
        states = first[name]["states"]
        assert without_rank(states[0]) == without_rank(states[1])
        (folder / f"{name}.json").write_text(json.dumps(states[1]))  # any rank's will do
    reported = torchrun(folder, tmp_path / "then", ranks=3, batch_size=2, steps=5)
    for name in NAMES:
        assert_read_in_order(name, reported[name]["steps"], order[name][40:])
        assert [state["samples"] for state in reported[name]["states"]] == [70] * 3


def test_the_order_that_ranks_are_compared_with_is_a_shuffle_of_both_sources(tmp_path):
    write_sources(tmp_path)
    native = global_order("native", tmp_path, 70)
    from_b = [token >= 100_000 for token in native]
    assert sum(from_b[:28]) == 7  # 3 : 1
    assert sum(from_b[30:70]) == 30  # 1 : 3, from sample 30 on
    assert len({token for token in native if token >= 100_000}) == 21  # more than an epoch of b
    single = global_order("single", tmp_path, 70)
    assert len(set(single)) == 70
    assert single != sorted(single)
    mixed = global_order("mixed", tmp_path, 70)
    assert sum(token >= 100_000 for token in mixed[:68]) == 17
