"""A stream in PyTorch's loaders: disjoint workers, exact resume."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from shardmill.compat.chomp import open_stream
from shardmill.errors import StateMismatchError
from shardmill.trainers.torch import StreamingDataset

pytestmark = [  # of torchdata and torch, not of ours
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

TEXTS = [f"<{number}>" + "x" * (number % 11) for number in range(60)]


def config(**data: Any) -> dict[str, Any]:
    chosen: dict[str, Any] = {"backend": "local_text", "local_text": TEXTS, "repeat": False}
    chosen |= {"shuffle_buffer_size": 8, "state_update_interval": 5, "mask_boundary_loss": False}
    chosen |= {"tokenizer": {"kind": "byte", "byte_offset": 1}}
    return {
        "data": chosen | data,
        "train": {"seq_len": 15, "batch_size": 1, "grad_accum": 2},
        "model": {"eos_token_id": 0},
    }


def loader(num_workers: int, **options: Any) -> StatefulDataLoader[Any]:
    data = options.pop("data", {})
    return StatefulDataLoader(
        StreamingDataset(open_stream(config(**data), **options)),
        batch_size=None,
        num_workers=num_workers,
    )


def texts_of(batches: Iterable[dict[str, torch.Tensor]]) -> list[str]:
    """Documents rebuilt from bins: none is longer than a row, so each is in one segment."""
    found = []
    for batch in batches:
        rows = [batch[name].reshape(2, -1).tolist() for name in ("input_ids", "labels")]
        segments = batch["segment_ids"].reshape(2, -1).tolist()
        for inputs, labels, numbers in zip(*rows, segments, strict=True):
            tokens = [*inputs, labels[-1]]
            each = [*numbers, numbers[-1] if labels[-1] >= 0 else 0]
            text = bytes(t - 1 if t else 0 for t, m in zip(tokens, each, strict=True) if m)
            found += text.decode().split("\0")[:-1]
    return sorted(found)


def assert_same(found: Any, wanted: Any) -> None:
    found, wanted = list(found), list(wanted)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_batches_are_those_of_the_stream_as_tensors() -> None:
    with open_stream(config()) as plain:
        wanted = [batch.arrays() for batch in plain]
    batches = list(StreamingDataset(open_stream(config())))
    assert len(batches) == len(wanted) > 10
    for batch, right in zip(batches, wanted, strict=True):
        assert {name: tensor.tolist() for name, tensor in batch.items()} == {
            name: array.tolist() for name, array in right.items()
        }
    assert {name: tensor.dtype for name, tensor in batches[0].items()} == {
        "input_ids": torch.int32,
        "labels": torch.int32,
        "attention_mask": torch.bool,
        "segment_ids": torch.int32,
    }
    assert batches[0]["input_ids"].shape == (2, 1, 15)


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
def test_the_workers_of_all_processes_share_every_document(num_workers: int) -> None:
    found: list[str] = []
    for index in range(2):
        dataset = StreamingDataset(
            open_stream(config(packing_mode="bin"), process_index=index, process_count=2)
        )
        found += texts_of(DataLoader(dataset, batch_size=None, num_workers=num_workers))
    assert sorted(found) == sorted(TEXTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_workers", "steps"), [(0, 1), (0, 7), (1, 4), (2, 0), (2, 1), (2, 4), (2, 7)]
)
def test_a_stateful_loader_resumes_exactly(num_workers: int, steps: int) -> None:
    undisturbed = list(loader(num_workers))
    assert len(undisturbed) > 10
    running = loader(num_workers)
    batches = iter(running)
    assert_same(islice(batches, steps), undisturbed[:steps])
    state = pickle.loads(pickle.dumps(running.state_dict()))
    resumed = loader(num_workers)
    resumed.load_state_dict(state)
    assert_same(resumed, undisturbed[steps:])
    again = loader(num_workers)
    again.load_state_dict(state)
    batches = iter(again)
    assert_same(islice(batches, 2), undisturbed[steps : steps + 2])
    last = loader(num_workers)
    last.load_state_dict(again.state_dict())
    assert_same(last, undisturbed[steps + 2 :])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_after_the_end_of_a_resumed_loader_the_next_iteration_is_whole(num_workers: int) -> None:
    undisturbed = list(loader(num_workers))
    running = loader(num_workers)
    list(islice(running, 5))
    resumed = loader(num_workers)
    resumed.load_state_dict(running.state_dict())
    assert_same(resumed, undisturbed[5:])
    assert_same(resumed, undisturbed)


def test_the_dataset_alone_resumes_exactly() -> None:
    undisturbed = list(StreamingDataset(open_stream(config())))
    dataset = StreamingDataset(open_stream(config()))
    list(islice(dataset, 3))
    resumed = StreamingDataset(open_stream(config()))
    resumed.load_state_dict(dataset.state_dict())
    assert resumed.state_dict() == dataset.state_dict()
    assert_same(resumed, undisturbed[3:])
    assert_same(resumed, undisturbed)


def test_a_state_of_another_run_is_refused_when_it_is_loaded() -> None:
    dataset = StreamingDataset(open_stream(config()))
    state = dataset.state_dict()
    other = StreamingDataset(open_stream(config(seed=5)))
    with pytest.raises(StateMismatchError, match="seed: the state has 0, this stream 5"):
        other.load_state_dict(state)
    with pytest.raises(StateMismatchError, match=r"1 streams, which 2 processes"):
        StreamingDataset(open_stream(config(), process_index=0, process_count=2)).load_state_dict(
            state
        )


@pytest.mark.slow  # torchdata waits long for the workers of a loader that could not begin
def test_a_state_of_another_number_of_workers_is_refused_not_misread() -> None:
    running = loader(1)
    list(islice(running, 3))
    state = running.state_dict()
    del running  # or it is collected with the other: torchdata waits 5 s for each of their workers
    resumed = loader(2)
    resumed.load_state_dict(state)
    with pytest.raises(StateMismatchError, match="the state has 1 streams, which 2 processes"):
        next(iter(resumed))
