"""A build of conversations that is killed and resumed, in real processes, gives the same bytes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from shardmill.errors import StoreNotFoundError
from shardmill.store import open_store, verify
from tests.building.workplaces import receipts
from tests.helpers import folder_digest

KILLED = """
import sys, time
from pathlib import Path
from shardmill.building import BuildSpec, build_chats, plan
from shardmill.chat import bind_template, known_template
from shardmill.sources import BatchLimits, open_chats
from shardmill.tokenizers import open_tokenizer
plan.CHUNK_BYTES = 30_000
corpus, folder = map(Path, sys.argv[1:3])
names = {"sys": "<|s|>", "usr": "<|u|>", "asst": "<|a|>", "eot": "<|e|>"}
tokenizer = open_tokenizer("byte:4", specials=names)
build_chats(
    open_chats(corpus, on_bad="skip", limits=BatchLimits(num_bytes=30_000)),
    folder,
    template=bind_template(known_template("four-marker"), tokenizer),
    tokenizer=tokenizer,
    spec=BuildSpec(shard_bytes=100_000),
    val_fraction=0.3,
    max_loss=1.0,
    resume=True,
    on_progress=lambda _: time.sleep(0.05),
)
"""


def write_corpus(corpus: Path, draw: np.random.Generator) -> None:
    """Conversations of all lengths, some without an answer, some lines that are no JSON."""
    corpus.mkdir()
    for number in range(10):
        rows = []
        for row in range(200):
            turns = int(draw.integers(1, 7))
            messages = [
                {"role": ("user", "assistant")[turn % 2], "content": f"{number}-{row} " * turn}
                for turn in range(turns)
            ]
            rows.append(json.dumps({"messages": messages}) if row % 50 else "{")
        (corpus / f"{number:02d}.jsonl").write_text("\n".join(rows) + "\n")


@pytest.mark.slow
def test_killed_at_random_and_resumed_the_bytes_are_the_same(tmp_path: Path) -> None:
    draw = np.random.default_rng(int(os.environ.get("SHARDMILL_KILL_SEED", "11")))
    write_corpus(tmp_path / "corpus", draw)

    def start(name: str) -> subprocess.Popen[bytes]:
        arguments = [str(tmp_path / "corpus"), str(tmp_path / name)]
        return subprocess.Popen([sys.executable, "-c", KILLED, *arguments])

    before = time.monotonic()
    assert start("whole").wait() == 0
    duration = time.monotonic() - before
    wanted = folder_digest(tmp_path / "whole")
    ledger = open_store(tmp_path / "whole").manifest.ledger
    assert ledger.documents.read == 2000
    assert ledger.documents.dropped["bad_json"] == 40
    assert ledger.documents.dropped["no_assistant"] > 100
    kills = midway = 0
    while True:
        build = start("killed")
        try:
            assert build.wait(timeout=float(draw.uniform(0.4, 0.9)) * duration) == 0
        except subprocess.TimeoutExpired:
            build.send_signal(signal.SIGKILL)
            build.wait()
            kills += 1
            sealed = bool(receipts(tmp_path / "killed"))
            midway += sealed
            duration *= 1 if sealed else 1.3  # the machine is slower now
            if not (tmp_path / "killed").exists():
                with pytest.raises(StoreNotFoundError):
                    open_store(tmp_path / "killed")
            continue
        if kills >= int(os.environ.get("SHARDMILL_KILLS", "3")) and midway >= 2:
            break
        duration *= 0.8  # the machine is faster now
        shutil.rmtree(tmp_path / "killed")
    assert folder_digest(tmp_path / "killed") == wanted
    assert verify(tmp_path / "killed").problems == []
    assert not (tmp_path / ".killed.building").exists()
