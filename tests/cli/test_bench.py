"""`shardmill bench` measures what it says, and leaves no file."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.cli.commands.bench import (
    BenchCommand,
    Contender,
    alternate,
    encode_speed,
    measure_reading,
    speed_of,
    take_sample,
)
from shardmill.errors import OptionError
from shardmill.records import Ragged
from shardmill.sources import MemorySource
from shardmill.store import open_store
from shardmill.tokenizers import TrainSpec, open_tokenizer, train_tokenizer

pytestmark = pytest.mark.slow

QUICK = ("--seconds", "0.01", "--seq-len", "32", "--megabytes", "1")


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch) -> Path:
    """Where it builds."""
    place = tmp_path / "scratch"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


@pytest.mark.slow
def test_a_model_without_fast_engine_is_measured_with_the_reference_and_why(here, run_cli, scratch):
    code, out, err = run_cli("bench", "data/*.jsonl", "--tokenizer", "spm.model", *QUICK, "--json")
    assert code == 0, err
    rates = {rate["name"]: rate for rate in json.loads(out)["rates"]}
    assert list(rates) == [
        "tokenise: reference",
        "tokenise: no fast engine",
        "build: 1 process, reference",
        "read: a plain copy",
        "read: random windows",
        "read: shuffled epoch",
    ]
    assert "unigram" in rates["tokenise: no fast engine"]["note"]
    assert rates["build: 1 process, reference"]["limit"] == "tokenise: reference"
    assert rates["read: a plain copy"]["share"] == 1.0
    for name, rate in rates.items():
        numbers = [rate["megabytes"], *([rate["windows"]] if name.startswith("read") else [])]
        assert all(number > 0 for number in numbers if "no fast" not in name)
    assert list(scratch.iterdir()) == []


@pytest.mark.slow
def test_a_fast_engine_is_measured_and_builds_after_its_proof(here, run_cli, scratch):
    pytest.importorskip("fastokens")
    spec = TrainSpec(vocab_size=400, model_type="byte-bpe")
    train_tokenizer(Path("bpe"), files=["books/*.txt"], spec=spec)
    ways = ("--tokenizer", "bpe/tokenizer.json", "--workers", "2", "--store", "store-now")
    code, out, err = run_cli("bench", "data/*.jsonl", *ways, *QUICK)
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].split() == ["MB/s", "windows/s", "share"]
    assert lines[2].startswith("tokenise: fastokens ")
    assert any(line.startswith("build: proof of fast ") for line in lines)
    (built,) = (line for line in lines if line.startswith("build: 2 workers, fast "))
    assert "of tokenise: fastokens " in built
    assert list(scratch.iterdir()) == []


def test_a_store_alone_is_read_and_batches_fit_into_it(here):
    store = open_store(Path("store"))
    shape = {"seq_len": 400, "batch_size": 32, "seconds": 0.01}  # val holds one window of it
    for options in (BenchCommand(**shape), BenchCommand(**shape, reader="pread")):
        rates = list(measure_reading(store, "val", options))
        assert [rate.name.split(":")[0] for rate in rates] == ["read"] * 3
    with pytest.raises(OptionError, match="its largest shard has 500 tokens, a window 501"):
        list(measure_reading(store, "val", BenchCommand(seq_len=500, seconds=0.01)))


def test_a_wrong_reader_is_refused_before_anything_is_built(here, run_cli, scratch):
    code, _, err = run_cli("bench", "data/*.jsonl", "--tokenizer", "spm.model", "--reader", "mmap")
    assert code == 2
    assert "--reader mmap: wanted one of auto, mapped, pread" in err
    code, _, err = run_cli("bench", "--store", "store", "--reader", "pread", *QUICK)
    assert code == 0, err


@given(sizes=st.lists(st.integers(0, 50), max_size=20), wanted=st.integers(1, 300))
def test_a_sample_is_the_beginning_of_the_text(sizes, wanted):
    texts = ["x" * size for size in sizes]
    source = MemorySource(texts)
    if not sum(sizes):
        with pytest.raises(OptionError, match="holds no text"):
            take_sample(source, wanted)
        return
    sample = take_sample(source, wanted)
    found = [text for batch in sample for text in batch.to_pylist()]
    kept = [text for text in texts if text]
    assert found == kept[: len(found)]
    assert sum(map(len, found)) >= min(wanted, sum(sizes))


def test_no_text_is_encoded_twice():
    class Counting:
        def __init__(self) -> None:
            self.seen: list[str] = []

        def encode_batch(self, texts: object) -> Ragged:
            listed = texts if isinstance(texts, list) else texts.to_pylist()  # type: ignore[attr-defined]
            self.seen += listed
            return open_tokenizer("byte").encode_batch(listed)

    sample = [pa.array([f"text {n}"], pa.large_string()) for n in range(5)]
    engine = Counting()
    assert encode_speed(engine, sample, 60.0) > 0
    assert engine.seen == ["warm up", *(f"text {n}" for n in range(5))]


def test_contenders_take_turns_and_every_call_has_its_own_argument():
    calls: list[tuple[str, int]] = []

    def contender(name: str) -> Contender:
        return Contender(name=name, prepare=range, run=lambda number: calls.append((name, number)))

    times = alternate([contender("a"), contender("b")], rounds=2, calls=2)
    assert calls == [(name, n) for name in "abba" for n in (0, 1)]
    assert {name: len(taken) for name, taken in times.items()} == {"a": 2, "b": 2}
    assert speed_of({"a": [1.0, 4.0, 2.0], "b": [2.0, 2.0, 2.0]}, "b", limit="a") == 1.0
