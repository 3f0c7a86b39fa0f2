"""`shardmill.stream`: text to batches in one call."""

from __future__ import annotations

import json
import pickle
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardmill.compat.chomp import open_stream
from shardmill.errors import OptionError, StateMismatchError
from shardmill.loading.streaming import TextStream, join_states, stream
from shardmill.sources import MemorySource
from shardmill.tokenizers import ByteTokenizer

TEXTS = [f"document {number} " + "x" * (number % 17) for number in range(90)]


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    lines = [json.dumps({"text": text, "body": text.upper()}) for text in TEXTS]
    (tmp_path / "pages.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path / "pages.jsonl"


def opened(pages: Path, **options: Any) -> TextStream:
    found = stream(
        pages, **({"tokenizer": "byte", "seq_len": 31, "batch_size": 3, "seed": 4} | options)
    )
    assert isinstance(found, TextStream)
    return found


def texts_of(batches: Any) -> list[str]:
    """Documents that are in one row each, rebuilt from inputs and labels."""
    found = []
    for batch in batches:
        for inputs, labels, segments in zip(
            batch.input_ids, batch.labels, batch.segment_ids, strict=True
        ):
            for segment in range(1, segments.max() + 1):
                ids = inputs[segments == segment].tolist()
                ids += labels[segments == segment][-1:].tolist()
                found.append(bytes(token for token in ids if 0 <= token < 256).decode())
    return found


@pytest.mark.parametrize("pack", ["sequential", "first-fit", "best-fit"])
def test_a_stream_resumes_exactly(pages: Path, pack: Any) -> None:
    with opened(pages, pack=pack) as whole:
        batches = list(islice(whole, 4))
        state = json.dumps(whole.state_dict())
        following = list(islice(whole, 40))  # into the next epoch
    assert batches[0].input_ids.shape == batches[0].labels.shape == (3, 31)
    assert len(state) < 4096
    with opened(pages, pack=pack) as resumed:
        resumed.load_state_dict(json.loads(state))
        for one, other in zip(islice(resumed, 40), following, strict=True):
            assert all((one.arrays()[name] == other.arrays()[name]).all() for name in one.arrays())
        copy = pickle.loads(pickle.dumps(resumed))
        with copy:
            np.testing.assert_array_equal(next(copy).input_ids, next(resumed).input_ids)
    with (
        opened(pages, pack=pack, seed=5) as other_seed,
        pytest.raises(StateMismatchError, match="seed: the state has 4, this stream 5"),
    ):
        other_seed.load_state_dict(json.loads(state))


@pytest.mark.parametrize("name", ["max_doc_tokens", "seq_len", "batch_size", "num_streams"])
def test_a_size_of_nothing_is_refused(pages: Path, name: str) -> None:
    with pytest.raises(OptionError, match=f"{name}=0: wanted at least 1"):
        opened(pages, **{name: 0})


def test_every_document_comes_once_in_an_epoch_over_all_ranks(pages: Path) -> None:
    options = {"pack": "first-fit", "repeat": False, "world": 2}
    found, states = [], []
    for rank in range(2):
        with opened(pages, rank=rank, **options) as one:
            found += texts_of(one)
            states.append(one.state_dict())
    assert sorted(found) == sorted(TEXTS)
    with opened(pages, pack="first-fit", repeat=False) as alone:
        alone.load_state_dict(join_states(states))
        assert list(alone) == []


def test_the_state_of_a_stream_is_that_of_the_same_config_of_chomp(pages: Path) -> None:
    config = {
        "data": {"backend": "files", "files": str(pages), "seed": 4, "tokenizer": {"kind": "byte"}},
        "train": {"seq_len": 31, "batch_size": 3},
    }
    with opened(pages) as native, open_stream(config) as chomp:
        for _ in range(3):
            batch, other = next(native), next(chomp)
        np.testing.assert_array_equal(batch.labels, other.labels[0])
        differences = {
            name
            for name, value in native.state_dict()["data"].items()  # type: ignore[union-attr]
            if chomp.state_dict()["data"][name] != value  # type: ignore[index,call-overload]
        }
        assert differences == set()
        chomp.load_state_dict(native.state_dict())


def test_options_of_the_input_and_of_the_end_token(pages: Path) -> None:
    with opened(pages, field="body", shuffle=False, append_eot=False, repeat=False) as upper:
        first = next(upper)
    assert bytes(first.input_ids[0].tolist()).decode().startswith("DOCUMENT 0")
    assert 256 not in first.input_ids
    with opened(MemorySource(TEXTS, name="texts"), tokenizer=ByteTokenizer()) as memory:  # type: ignore[arg-type]
        assert 256 in next(memory).input_ids
    with opened(pages, max_doc_tokens=4, repeat=False) as cut:
        list(cut)
        assert cut.stats().total.truncated_documents == len(TEXTS)


def test_rank_and_world_come_from_torchrun(pages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with opened(pages) as one:
        assert (one.rank, one.world) == (1, 2)
    with opened(pages, rank=0, world=1) as alone:
        assert (alone.rank, alone.world) == (0, 1)


def test_tensors_on_request(pages: Path) -> None:
    torch = pytest.importorskip("torch")
    tensors: Any = stream(pages, tokenizer="byte", seq_len=31, batch_size=3, seed=4, to="torch")
    first = next(iter(tensors))
    with opened(pages) as plain:
        assert torch.equal(first["labels"], torch.from_numpy(next(plain).labels))
    assert tensors.state_dict()["totals"]["rows"] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pack": "first"}, "pack='first': did you mean 'first-fit'"),
        ({"to": "tf"}, "to='tf': wanted: numpy, torch"),
        ({"seq_len": 0}, "seq_len=0: wanted at least 1"),
        ({"batch_size": 1.5}, "batch_size=1.5"),
        ({"tokenizer": ByteTokenizer(), "eot": "<e>"}, "eot='<e>': the tokenizer is open already"),
        (
            {"tokenizer": ByteTokenizer(byte_offset=1, specials={"usr": "<u>"})},
            "append_eot=True: .* names no end token",
        ),
        ({"rank": 2, "world": 2}, "rank=2: wanted 0 to 1, since world=2"),
        ({"num_streams": 3, "rank": 0, "world": 2}, "num_streams=3 cannot be shared by 2"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(
    pages: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        opened(pages, **options)
