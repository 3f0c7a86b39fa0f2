"""A folder that has everything the examples of the help name, and a way to call commands in it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from shardmill.cli import main
from shardmill.remote import push
from shardmill.store import open_store
from shardmill.tokenizers import DEFAULT_SPECIALS, TrainSpec, train_tokenizer
from tests.services import LoopbackS3

Call = Callable[..., tuple[int, str, str]]

STREAM = """
[data]
backend = "files"
files = "data/*.jsonl"

[data.tokenizer]
kind = "sentencepiece"
path = "spm.model"

[train]
seq_len = 32
batch_size = 2

[model]
eos_token_id = 3
"""
TRAIN = """
[data]
tokenizer_path = "spm.model"

[[data.datasets]]
name = "store"
path = "store"
"""


@pytest.fixture
def run_cli(monkeypatch, capsys) -> Call:
    """Run the command where we are; gives (exit code, stdout, stderr)."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["shardmill", *words])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        found = capsys.readouterr()
        return int(end.value.code or 0), found.out, found.err

    return run


@pytest.fixture(scope="session")
def workshop(tmp_path_factory) -> Path:
    """Made once; tests only read it."""
    place = tmp_path_factory.mktemp("workshop")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        _texts(place)
        markers = {"im_start": "<|im_start|>", "im_end": "<|im_end|>"}
        spec = TrainSpec(vocab_size=400, specials={**DEFAULT_SPECIALS, **markers})
        train_tokenizer(place, files=["books/*.txt"], spec=spec)
        ways = ("--tokenizer", "spm.model")
        _run(patch, "build", "data/*.jsonl", "--out", "store", "--val-tokens", "500", *ways)
        _run(patch, "build", "chats", "c.jsonl", "--out", "chats", "--template", "chatml", *ways)
        _run(patch, "pack", "chats", "--seq-len", "4095")
        _run(
            patch,
            *[
                "convert",
                "chats/packs/train-4095.plan",
                "old.npy",
                "--from",
                "plan",
                "--to",
                "legacy",
            ],
        )
        _run(patch, "stream", "stream.toml", "--steps", "3", "--save-state", "state.json")
    for name in ("store-before", "store-now"):
        shutil.copytree(place / "store", place / name)
    (place / "tokens").mkdir()
    (np.arange(5000) % 300 + 5).astype("<u2").tofile(place / "tokens" / "a.bin")
    (place / "tokens" / "meta.json").write_text('{"dtype": "uint16", "vocab_size": 400}')
    return place


@pytest.fixture
def here(workshop, tmp_path, monkeypatch) -> Path:
    """A copy of the workshop, in which the test stands."""
    place = tmp_path / "here"
    shutil.copytree(workshop, place)
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return place


@pytest.fixture(scope="session")
def storage(workshop) -> Iterator[LoopbackS3]:
    """Object storage with a bucket and a pushed store."""
    with LoopbackS3() as s3:
        s3.make_bucket("bucket")
        push(workshop / "store", "s3://bucket/pushed", storage_options=s3.options())
        yield s3


@pytest.fixture
def far(storage, monkeypatch) -> None:
    """The environment in which `s3://` is that storage."""
    for name, value in storage.environment().items():
        if name not in os.environ:
            monkeypatch.setenv(name, value)


def _texts(place: Path) -> None:
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefghij"), rng.integers(2, 8))) for _ in range(300)]

    def text(length: int) -> str:
        return " ".join(rng.choice(words, length))

    for folder in ("data", "books"):
        (place / folder).mkdir()
    for number in range(2):
        rows = [json.dumps({"text": text(60)}) for _ in range(60)]
        (place / "data" / f"{number}.jsonl").write_text("\n".join(rows) + "\n")
        (place / "books" / f"{number}.txt").write_text(text(3000))
    said = [
        [{"role": "user", "content": text(5)}, {"role": "assistant", "content": text(9)}]
        for _ in range(40)
    ]
    chats = [json.dumps({"messages": messages}) for messages in said]
    (place / "c.jsonl").write_text("\n".join(chats) + "\n")
    (place / "stream.toml").write_text(STREAM)
    (place / "train.toml").write_text(TRAIN)


def _run(patch: pytest.MonkeyPatch, *words: str) -> None:
    patch.setattr(sys, "argv", ["shardmill", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code, words
    if words[0] == "build":
        open_store(Path(words[words.index("--out") + 1]))
