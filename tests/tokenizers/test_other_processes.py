"""A tokenizer travels to another process by its model, and an engine by its name."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardmill.errors import EngineMismatchError, OptionError, TokenizerError
from shardmill.protocols import Tokenizer
from shardmill.tokenizers import (
    ByteTokenizer,
    ChosenEncoder,
    adapt_tokenizer,
    choose_encoder,
    engines,
    open_tokenizer,
    reopen_encoder,
    thread_limits,
)
from shardmill.tokenizers.battery import short_texts
from shardmill.tokenizers.engines import Candidates
from shardmill.tokenizers.sentencepiece import SentencePieceTokenizer
from tests.tokenizers.conftest import HF_KINDS, KINDS
from tests.tokenizers.test_engines import CORPUS, Liar

Facts = tuple[Any, ...]


def facts(tokenizer: Any) -> Facts:
    """Everything that anyone asks of a tokenizer."""
    ids = tokenizer.encode_batch(short_texts())
    specials = tokenizer.special_token_ids()
    return (
        type(tokenizer).__name__,
        repr(tokenizer),
        tokenizer.fingerprint,
        tokenizer.vocab_size,
        tokenizer.unknown_id,
        getattr(tokenizer, "model_sha256", None),
        list(specials.items()),
        [tokenizer.decode([number]) for number in specials.values()],
        [tokenizer.marker_id(tokenizer.decode([number])) for number in specials.values()],
        [tokenizer.round_trips(text) for text in short_texts()],
        ids.values.tobytes(),
        ids.values.dtype,
        ids.offsets.tolist(),
        [tokenizer.decode(one) for one in ids],
    )


@pytest.mark.parametrize("kind", [*KINDS, *HF_KINDS])
def test_a_pickled_tokenizer_is_the_same_and_no_larger_than_its_model(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = tokenizers[kind]
    sent = pickle.dumps(tokenizer)
    again = pickle.loads(sent)

    assert facts(again) == facts(tokenizer)
    assert facts(pickle.loads(pickle.dumps(again))) == facts(tokenizer)
    assert len(sent) < len(getattr(tokenizer, "model_bytes", b"")) + 600


@pytest.mark.slow
def test_a_new_process_unpickles_the_same_tokenizers(tokenizers: dict[str, Tokenizer]) -> None:
    kinds = [*KINDS, *HF_KINDS]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.map(facts, [tokenizers[kind] for kind in kinds])

    assert found == [facts(tokenizers[kind]) for kind in kinds]


def test_names_given_by_the_caller_are_pickled(trained: dict[str, Path]) -> None:
    for folder in trained.values():
        for specials in ({"end": "<|eot|>"}, {}):
            tokenizer = open_tokenizer(folder, specials=specials)
            again = pickle.loads(pickle.dumps(tokenizer))
            assert again.special_token_ids() == tokenizer.special_token_ids()
            assert facts(again) == facts(tokenizer)


def test_sentencepiece_pickles_its_threads_and_needs_no_file(
    trained: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "spm.model"
    path.write_bytes((trained["bpe"] / "spm.model").read_bytes())
    tokenizer = SentencePieceTokenizer(path, num_threads=3)
    path.unlink()
    again = pickle.loads(pickle.dumps(tokenizer))

    assert again._num_threads == 3
    assert facts(again) == facts(tokenizer)


class Letters:
    """A user's own tokenizer."""

    vocab_size = 0x110000

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def test_an_adapted_object_pickles_if_the_object_does() -> None:
    tokenizer = adapt_tokenizer(Letters())
    again = pickle.loads(pickle.dumps(tokenizer))

    assert again.fingerprint == tokenizer.fingerprint
    assert again.encode_batch(["ab", ""]) == tokenizer.encode_batch(["ab", ""])


def short_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        engines, "battery_texts", lambda specials, added: [*short_texts(), *specials, *added]
    )


def sent_through_json(chosen: ChosenEncoder) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(json.dumps(chosen.produced_by))
    return record


@pytest.mark.parametrize("kind", ["byte", "unigram", "bpe", "byte-bpe", "hf unigram"])
@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_a_worker_opens_the_engine_that_was_chosen(
    tokenizers: dict[str, Tokenizer], kind: str, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_proof(monkeypatch)
    chosen = choose_encoder(tokenizers[kind], engine=engine, corpus=CORPUS)
    # No proof can be made any more, so none is.
    monkeypatch.setattr(engines, "battery_texts", None)
    again = reopen_encoder(pickle.loads(pickle.dumps(tokenizers[kind])), sent_through_json(chosen))

    assert again.is_fast == chosen.is_fast
    assert again.produced_by == chosen.produced_by
    assert again.encode_batch(CORPUS) == chosen.encode_batch(CORPUS)
    assert again.bytes_compared == chosen.bytes_compared


def test_some_engine_is_fast(tokenizers: dict[str, Tokenizer]) -> None:
    """Else the test above would show nothing of fast engines."""
    pytest.importorskip("fastokens")
    pytest.importorskip("gigatoken")
    assert [engine.name for engine in engines.fast_candidates(tokenizers["byte-bpe"]).engines] == [
        "fastokens",
        "gigatoken",
    ]


def test_a_reopened_engine_is_still_compared(
    tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    short_proof(monkeypatch)
    liar = Liar(tokenizers["byte-bpe"], "trigger")
    monkeypatch.setattr(engines, "fast_candidates", lambda _: Candidates((liar,), ()))
    monkeypatch.setattr(engines, "_names", lambda _: ["liar"])
    monkeypatch.setattr(engines, "FastEngine", lambda name, _: {"liar": liar}[name])
    record = sent_through_json(choose_encoder(tokenizers["byte-bpe"], engine="fast"))

    for check in ("sample", "full"):
        again = reopen_encoder(tokenizers["byte-bpe"], record, check=check)  # type: ignore[arg-type]
        assert again.encode_batch(["fine"]) == tokenizers["byte-bpe"].encode_batch(["fine"])
        with pytest.raises(EngineMismatchError, match=r"liar 1\.0 is not this tokenizer"):
            again.encode_batch(["a trigger" * 1000])


def test_another_version_or_engine_is_refused(
    tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fastokens")
    short_proof(monkeypatch)
    record = sent_through_json(choose_encoder(tokenizers["byte-bpe"], engine="fast"))
    for engine in ("fastokens", "tokenizers"):
        other = {**record, "versions": {**record["versions"], engine: "0.0.1"}}
        with pytest.raises(TokenizerError, match=r"proved with .*'0\.0\.1'.* but this process has"):
            reopen_encoder(tokenizers["byte-bpe"], other)
    with pytest.raises(TokenizerError, match="'fastokens' is no fast engine for ByteTokenizer"):
        reopen_encoder(ByteTokenizer(), record)
    with pytest.raises(TokenizerError, match="'quickest' is no fast engine"):
        reopen_encoder(tokenizers["byte-bpe"], {**record, "engine": "quickest"})
    with pytest.raises(TokenizerError, match="not the record of a chosen engine"):
        reopen_encoder(tokenizers["byte-bpe"], {})
    with pytest.raises(OptionError, match="wanted sample or full"):
        reopen_encoder(tokenizers["byte-bpe"], record, check="none")  # type: ignore[arg-type]


def test_an_engine_cannot_be_pickled(tokenizers: dict[str, Tokenizer]) -> None:
    chosen = choose_encoder(tokenizers["byte"], engine="reference")
    with pytest.raises(TokenizerError, match=r"stays in its process; .* reopen_encoder"):
        pickle.dumps(chosen)


COUNT = """
import os, pickle, sys
from pathlib import Path
import numpy
def threads():
    return len(os.listdir("/proc/self/task"))
import fastokens, shardmill.tokenizers.huggingface
before = threads()
from shardmill.tokenizers import choose_encoder, open_tokenizer
from shardmill.tokenizers.engines import FastEngine
tokenizer = open_tokenizer(sys.argv[1])
tokenizer.encode_batch(["some text"] * 1000)
middle = threads()
FastEngine("fastokens", tokenizer.engine_source).encode_batch(["some text " * 5000] * 100)
print(middle - before, threads() - middle)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
@pytest.mark.parametrize("num_threads", [1, 3])
def test_thread_limits_bound_the_threads_of_a_process(
    trained: dict[str, Path], num_threads: int
) -> None:
    pytest.importorskip("fastokens")
    found = subprocess.run(
        [sys.executable, "-c", COUNT, str(trained["byte-bpe"])],
        env={**os.environ, **thread_limits(num_threads)},
        capture_output=True,
        text=True,
        check=True,
    )
    beside = 0 if num_threads == 1 else num_threads
    tokenizers_threads, fastokens_threads = map(int, found.stdout.split())
    assert tokenizers_threads == beside
    assert fastokens_threads <= num_threads


def test_zero_threads_are_refused() -> None:
    with pytest.raises(OptionError, match="wanted at least 1"):
        thread_limits(0)
