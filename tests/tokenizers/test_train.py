"""Training: the same bytes every time, specials in order, exact text, clear refusals."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import OptionError, TokenizerError
from shardmill.tokenizers import TrainSpec, open_tokenizer, sentencepiece, train_tokenizer
from shardmill.tokenizers.train import CHUNK_CHARACTERS, TrainingText, find_files
from tests.tokenizers.conftest import LANGUAGES, stdlib_files

TYPES = ("unigram", "bpe", "byte-bpe")


def small(**changes: Any) -> TrainSpec:
    return TrainSpec(**{"vocab_size": 400, **changes})


def contents(folder: Path) -> dict[str, str]:
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.iterdir())
    }


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_another_process_trains_the_same_bytes(tmp_path: Path, model_type: str) -> None:
    """Another hash seed, another number of cores and threads: the same two files."""
    inputs = [str(path) for path in stdlib_files()]
    code = (
        "import os, sys; from shardmill.tokenizers import TrainSpec, train_tokenizer\n"
        "cores = sorted(os.sched_getaffinity(0))\n"
        "os.sched_setaffinity(0, cores[:1 if os.environ['PYTHONHASHSEED'] == '0' else 8])\n"
        "train_tokenizer(sys.argv[1], files=sys.argv[3:], "
        "spec=TrainSpec(vocab_size=400, model_type=sys.argv[2]))"
    )
    for number, order in enumerate((inputs, inputs[::-1])):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": str(number),
            "RAYON_NUM_THREADS": str(number + 1),
        }
        command = [sys.executable, "-c", code, str(tmp_path / str(number)), model_type, *order]
        subprocess.run(command, check=True, env=environment)
    assert contents(tmp_path / "0") == contents(tmp_path / "1")
    assert len(contents(tmp_path / "0")) == 2


@pytest.mark.parametrize("model_type", TYPES)
def test_the_four_specials_are_single_consecutive_ids_in_order(
    trained: dict[str, Path], model_type: str
) -> None:
    ids = open_tokenizer(trained[model_type]).special_token_ids()
    first = 0 if model_type == "byte-bpe" else 1
    assert ids == {"sys": first, "usr": first + 1, "asst": first + 2, "eot": first + 3}


def test_the_order_of_the_specials_does_not_depend_on_the_caller(tmp_path: Path) -> None:
    specials = {"tool": "[t]", "eot": "[e]", "asst": "[a]", "usr": "[u]", "sys": "[s]"}
    spec = small(model_type="bpe", specials=specials)
    done = train_tokenizer(tmp_path, texts=[LANGUAGES * 20], spec=spec)
    assert done.meta["special_token_ids"] == {"sys": 1, "usr": 2, "asst": 3, "eot": 4, "tool": 5}


def test_meta_records_how_the_model_was_trained(tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "b.txt").write_text(LANGUAGES * 10)
    (tmp_path / "in" / "deep" / "a.md").write_text("# Title\n" + LANGUAGES)
    done = train_tokenizer(
        tmp_path / "out", files=[tmp_path / "in"], spec=small(model_type="bpe", seed=7)
    )
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert meta == done.meta
    import sentencepiece

    size_b, size_a = len((LANGUAGES * 10).encode()), len(("# Title\n" + LANGUAGES).encode())
    assert meta == {
        "format": "shardmill-tokenizer",
        "version": 1,
        "model_file": "spm.model",
        "model_sha256": hashlib.sha256((tmp_path / "out" / "spm.model").read_bytes()).hexdigest(),
        "model_type": "bpe",
        "vocab_size": 400,
        "special_tokens": {
            "sys": "<|sys|>",
            "usr": "<|usr|>",
            "asst": "<|asst|>",
            "eot": "<|eot|>",
        },
        "special_token_ids": {"sys": 1, "usr": 2, "asst": 3, "eot": 4},
        "seed": 7,
        "max_bytes": 256 * 2**20,
        "library": {"name": "sentencepiece", "version": sentencepiece.__version__},
        "inputs": [
            {
                "name": "b.txt",
                "sha256": hashlib.sha256((LANGUAGES * 10).encode()).hexdigest(),
                "bytes": size_b,
            },
            {
                "name": "deep/a.md",
                "sha256": hashlib.sha256(("# Title\n" + LANGUAGES).encode()).hexdigest(),
                "bytes": size_a,
            },
        ],
        "bytes_read": size_a + size_b,
        "bytes_used": size_a + size_b,
    }


@pytest.mark.parametrize("model_type", TYPES)
def test_a_too_large_vocabulary_is_refused_with_the_largest_possible(
    tmp_path: Path, model_type: str
) -> None:
    spec = small(vocab_size=30_000, model_type=model_type)
    with pytest.raises(TokenizerError, match=r"the largest possible is [\d,]+: ") as caught:
        train_tokenizer(tmp_path, texts=[LANGUAGES], spec=spec)
    largest = int(str(caught.value).split("possible is ")[1].split(":")[0].replace(",", ""))
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    spec = small(vocab_size=largest, model_type=model_type)
    train_tokenizer(tmp_path, texts=[LANGUAGES], spec=spec)
    assert open_tokenizer(tmp_path).vocab_size == largest


def test_a_too_small_vocabulary_is_refused_with_the_smallest_possible(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"the smallest possible is (\d+)"):
        train_tokenizer(tmp_path, texts=[LANGUAGES], spec=small(vocab_size=270))


def test_no_matching_input_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for pattern in (tmp_path / "*.txt", tmp_path / "missing.txt", tmp_path / "empty"):
        with pytest.raises(TokenizerError, match="no input matched") as caught:
            train_tokenizer(tmp_path / "out", files=[pattern], spec=small())
        assert str(pattern) in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_input_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" \n\n")
    with pytest.raises(TokenizerError, match="only whitespace"):
        train_tokenizer(tmp_path / "out", files=[tmp_path / "a.txt"], spec=small())
    with pytest.raises(OptionError, match="exactly one"):
        train_tokenizer(tmp_path / "out", spec=small())
    with pytest.raises(TokenizerError, match="not plain text"):
        find_files([_touch(tmp_path / "a.jsonl")])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"specials": {}}, "no special tokens"),
        ({"specials": {"eot": "a b"}}, "no whitespace"),
        ({"specials": {"eot": "x,y"}}, "comma"),
        ({"specials": {"eot": "x"}}, "two or more"),
        ({"specials": {"eot": "<unk>"}}, "not <unk>"),
        ({"specials": {"eot": "<0x41>"}}, "byte's name"),
        ({"specials": {"eot": "<e>", "sys": "<e>"}}, "same string"),
        ({"vocab_size": 260}, "wanted at least 261"),
        ({"model_type": "word"}, "model_type='word'"),
        ({"max_bytes": 0}, "max_bytes=0"),
    ],
)
def test_an_invalid_spec_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        train_tokenizer(tmp_path, texts=[LANGUAGES], spec=small(**changes))


def test_a_special_that_is_not_one_id_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_specials(chunks: Any, vocab_size: int, _: Any, *, model_type: str) -> Any:
        return real(chunks, vocab_size, {"x": "[x]"}, model_type=model_type)

    real: Callable[..., Any] = sentencepiece.train_sentencepiece
    monkeypatch.setattr(sentencepiece, "train_sentencepiece", without_specials)
    with pytest.raises(TokenizerError, match=r"'<\|sys\|>' is not one piece"):
        train_tokenizer(tmp_path, texts=[LANGUAGES * 10], spec=small(model_type="bpe"))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_a_model_is_replaced_only_on_request(tmp_path: Path) -> None:
    train_tokenizer(tmp_path, texts=[LANGUAGES * 10], spec=small(model_type="bpe"))
    before = contents(tmp_path)
    spec = small(model_type="byte-bpe")
    with pytest.raises(TokenizerError, match=r"holds meta\.json, spm\.model already"):
        train_tokenizer(tmp_path, texts=[LANGUAGES * 10], spec=spec)
    assert contents(tmp_path) == before
    train_tokenizer(tmp_path, texts=[LANGUAGES * 10], spec=spec, overwrite=True)
    assert sorted(contents(tmp_path)) == ["meta.json", "tokenizer.json"]


def test_a_stores_meta_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text('{"format": "shardmill-store"}')
    with pytest.raises(TokenizerError, match="not a tokenizer's"):
        train_tokenizer(tmp_path, texts=[LANGUAGES], spec=small(), overwrite=True)
    assert (tmp_path / "meta.json").read_text() == '{"format": "shardmill-store"}'


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        train_tokenizer(
            tmp_path, texts=[LANGUAGES], spec=small(model_type="byte-bpe", vocab_size=300)
        )
    assert list(tmp_path.iterdir()) == []


# -- the input


def test_training_text_is_cleaned_as_in_sources(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\xff\r\n\r\nthree")
    text = TrainingText(seed=0, max_bytes=None)
    text.read_files([tmp_path / "a.txt"])
    assert text.chunks() == ["one\ntwo\ufffd\n\nthree"]


@settings(deadline=None, max_examples=60)
@given(
    texts=st.lists(st.text("ab\n \u00e9", max_size=60_000), max_size=4),
    limit=st.none() | st.integers(1, 100_000),
)
def test_chunks_are_the_text_or_a_sample_of_it(texts: list[str], limit: int | None) -> None:
    text = TrainingText(seed=1, max_bytes=limit)
    text.read_texts(texts, "t")
    try:
        chunks = text.chunks()
    except TokenizerError:
        return
    whole = "".join(texts)
    sizes = [len(chunk.encode()) for chunk in chunks]
    assert text.bytes_read == len(whole.encode())
    assert text.bytes_used == sum(sizes)
    assert all(len(chunk) <= CHUNK_CHARACTERS for chunk in chunks)
    place = 0
    for chunk in chunks:
        place = whole.index(chunk, place) + len(chunk)
    if limit is None or limit >= text.bytes_read:
        assert "".join(chunks) == whole
    else:
        assert text.bytes_used <= limit or len(chunks) == 1


def test_the_seed_draws_from_the_whole_input() -> None:
    texts = [f"line {number}\n" * 1000 for number in range(200)]
    one, again, other = (TrainingText(seed, max_bytes=200_000) for seed in (1, 1, 2))
    one.read_texts(texts, "t")
    again.read_texts(iter(texts), "t")
    other.read_texts(texts, "t")
    assert (one.chunks(), one.inputs) == (again.chunks(), again.inputs)
    assert (one.bytes_read, one.bytes_used) == (again.bytes_read, again.bytes_used)
    assert one.chunks() != other.chunks()
    numbers = [int(chunk.split()[1]) for chunk in one.chunks()]
    assert numbers == sorted(numbers)
    assert numbers[0] < 60 < 140 < numbers[-1]


def _touch(path: Path) -> Path:
    path.write_text("{}")
    return path
