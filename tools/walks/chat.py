"""A conversation becomes a chat store, a pack plan and a batch."""

import json
import sys
import tempfile
import threading
from pathlib import Path

import shardmill as sm
from shardmill.cli import main

hook = sys.getprofile()


def run(*words: object) -> None:
    sys.argv = ["shardmill", *map(str, words)]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"}]
    (folder / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 40)
    letters = "".join(map(chr, range(32, 127)))
    (folder / "text.txt").write_text("hi hello there user assistant " * 200 + letters)
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]  # training a tokenizer is another walk
    train = ("tokenizer", "train", folder / "text.txt", "--out", folder / "tok")
    run(*train, "--vocab-size", 400, "--model-type", "bpe")
    threading.setprofile(hook)
    sys.setprofile(hook)
    build = ("build", "chats", folder / "chats.jsonl", "--out", folder / "store")
    run(*build, "--tokenizer", folder / "tok/spm.model", "--template", "four-marker")
    run("pack", folder / "store", "--seq-len", 64)
    batch = next(iter(sm.load(folder / "store", seq_len=64, batch_size=2)))
    assert batch.input_ids.shape == (2, 64)
