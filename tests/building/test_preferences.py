"""Builds of preferences: each answer whole, each prompt once, the same bytes in any build."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardmill
from shardmill.building import BuildSpec, build_chats
from shardmill.errors import OptionError
from shardmill.sources import open_chats
from shardmill.store import open_store, verify
from tests.building.workplaces import receipts
from tests.helpers import folder_digest
from tests.preferences import (
    TEMPLATE,
    TOKENIZER,
    PlainRecord,
    Row,
    build_preferences,
    pair,
    plain_prompt,
    ranked_lists,
    records_of,
    rows_of_pairs,
    words,
    write_rows,
)


def plain_records(rows: Sequence[Row]) -> list[PlainRecord]:
    """What rows of strings become, without a look at the code under test."""
    found = []
    for row in rows:
        if "chosen" in row:
            answers = [(row["chosen"], 0), (row["rejected"], 1)]
        elif "label" in row:
            answers = [(row["completion"], int(row["label"]))]
        else:
            best_first = sorted({*row["scores"]}, reverse=True)
            ranks = [best_first.index(score) for score in row["scores"]]
            answers = sorted(zip(row["completions"], ranks, strict=True), key=lambda one: one[1])
        prompt = plain_prompt([("user", row["prompt"])])
        found.append(PlainRecord(prompt, [(f"{text}<|e|>", value) for text, value in answers]))
    return found


labelled = st.builds(
    lambda prompt, text, label: {"prompt": prompt, "completion": text, "label": label},
    st.sampled_from(["why", "how so"]),
    words,
    st.booleans(),
)


@settings(max_examples=15, deadline=None)
@given(rows=rows_of_pairs() | ranked_lists() | st.lists(labelled, min_size=1, max_size=12))
def test_every_answer_is_kept_whole_and_every_prompt_stands_once(rows: list[Row]) -> None:
    with tempfile.TemporaryDirectory() as place:
        report = build_preferences(Path(place), rows)
        folder = Path(place) / "store"
        assert verify(folder).problems == []
        assert records_of(folder) == plain_records(rows)
        links = open_store(folder).branches("train")
        wanted = [row["prompt"] for row in rows]
        changes = 1 + sum(one != two for one, two in pairwise(wanted))
        assert len({prefix for _, prefix, _, _ in links.tolist()}) == changes
        entry = report.manifest.splits["train"]
        assert entry.chat is not None
        assert entry.chat.preference is not None
        answers = [len(record.answers) for record in plain_records(rows)]
        lengths = [len(TOKENIZER.encode(prompt)) + 3 for prompt in wanted]  # two turns' markers
        twice = sum(n * size for n, size in zip(answers, lengths, strict=True))
        saved = entry.chat.preference.saved_tokens
        stored = entry.tokens - entry.chat.trained_tokens
        assert saved == twice - stored
        kept = report.manifest.ledger.documents
        assert (kept.read, kept.kept) == (len(rows), len(rows))


@settings(max_examples=10, deadline=None)
@given(rows=rows_of_pairs(30), groups=st.booleans())
def test_a_prompt_is_never_in_two_splits(rows: list[Row], groups: bool) -> None:
    if groups:
        rows = [{**row, "group": len(row["prompt"])} for row in rows]
    with tempfile.TemporaryDirectory() as place:
        build_preferences(Path(place), rows, val_fraction=0.4)
        folder = Path(place) / "store"
        found = {split: records_of(folder, split) for split in ("train", "val")}
        prompts = [{record.prompt for record in records} for records in found.values()]
        assert not prompts[0] & prompts[1]
        every = sorted(found["train"] + found["val"])
        assert every == sorted(plain_records(rows))
        assert verify(folder).problems == []


def test_what_cannot_be_compared_is_dropped_by_name(tmp_path: Path) -> None:
    rows = [
        pair("why", "same", "same"),
        pair("why", "good", "bad"),
        # the answers before the last one differ, so the last ones do not follow the same tokens
        {
            "chosen": _talk("why", "a", "and", "good"),
            "rejected": _talk("why", "b", "and", "bad"),
        },
        {"prompt": "why", "completions": ["a", "b", "a"], "scores": [1, 2, 3]},
        {"prompt": "why", "completions": ["a", "b", "a"], "scores": [1, 2, 1]},
        pair("why", "good", None),  # type: ignore[arg-type]
        {"prompt": "why", "chosen": {"role": "robot", "content": "x"}, "rejected": "bad"},
    ]
    report = build_preferences(tmp_path, rows, on_bad="skip")
    assert report.manifest.ledger.documents.dropped == {
        "no_answer": 1,
        "other_shape": 1,
        "prompts_differ": 1,
        "same_answers": 2,
    }
    dropped = (tmp_path / "store" / "dropped.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in dropped] == [
        f"rows.jsonl:{number}" for number in (6, 7, 1, 3, 4)
    ]
    assert len(records_of(tmp_path / "store")) == 2


def test_a_file_of_which_nothing_is_left_is_an_empty_store(tmp_path: Path) -> None:
    rows = [pair("why", "same", "same")]
    report = build_preferences(tmp_path, rows)
    assert report.manifest.version == 3
    assert report.manifest.ledger.documents.dropped == {"same_answers": 1}
    assert verify(tmp_path / "store").problems == []
    assert records_of(tmp_path / "store") == []


def _talk(*said: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": text} for at, text in enumerate(said)]


def test_longer_conversations_train_the_last_answer_alone(tmp_path: Path) -> None:
    rows = [{"chosen": _talk("a", "b", "c", "good"), "rejected": _talk("a", "b", "c", "bad")}]
    build_preferences(tmp_path, rows)
    talk = [("user", "a"), ("assistant", "b"), ("user", "c")]
    wanted = PlainRecord(plain_prompt(talk), [("good<|e|>", 0), ("bad<|e|>", 1)])
    assert records_of(tmp_path / "store") == [wanted]


@pytest.mark.parametrize("option", [{"train_on": "all"}, {"fan_out": True}])
def test_other_answers_are_not_trained(tmp_path: Path, option: dict[str, object]) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [pair("why", "good", "bad")])
    options = {"tokenizer": TOKENIZER, "template": "four-marker", **option}
    with pytest.raises(OptionError, match=next(iter(option))):
        shardmill.build(path, tmp_path / "store", **options)  # type: ignore[arg-type]


def many_rows(num: int = 3000) -> list[Row]:
    draw = random.Random(0)
    return [
        pair(f"why {number // 3}", "yes " * draw.randint(1, 40), "no " * draw.randint(1, 40))
        for number in range(num)
    ]


KILLED = """
import sys, time
from pathlib import Path
from shardmill.building import BuildSpec, build_chats, plan
from shardmill.sources import BatchLimits, open_chats
from tests.preferences import TEMPLATE, TOKENIZER
plan.CHUNK_BYTES = 30_000
rows, folder = map(Path, sys.argv[1:3])
build_chats(
    open_chats(rows, limits=BatchLimits(num_bytes=30_000)),
    folder,
    template=TEMPLATE,
    tokenizer=TOKENIZER,
    spec=BuildSpec(shard_bytes=100_000),
    val_fraction=0.3,
    resume=True,
    workers=int(sys.argv[3]),
    on_progress=lambda _: time.sleep(float(sys.argv[4])),
)
"""


def run(rows: Path, folder: Path, workers: int, pause: float) -> subprocess.Popen[bytes]:
    arguments = (str(rows), str(folder), str(workers), str(pause))
    return subprocess.Popen([sys.executable, "-c", KILLED, *arguments], start_new_session=True)


@pytest.mark.slow
def test_the_bytes_are_the_same_with_two_workers_and_after_a_kill(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", many_rows())
    assert run(rows, tmp_path / "one", 1, 0).wait() == 0
    assert run(rows, tmp_path / "two", 2, 0).wait() == 0
    killed = run(rows, tmp_path / "killed", 1, 0.3)
    while not receipts(tmp_path / "killed") and killed.poll() is None:
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not (tmp_path / "killed").exists()
    assert receipts(tmp_path / "killed")
    assert run(rows, tmp_path / "killed", 2, 0).wait() == 0
    digests = {folder_digest(tmp_path / name) for name in ("one", "two", "killed")}
    assert len(digests) == 1
    assert verify(tmp_path / "one").problems == []


@pytest.mark.skipif("SHARDMILL_REAL_DATA" not in os.environ, reason="no real data")
def test_real_pairs_share_a_third_of_the_tokens_with_each_other(tmp_path: Path) -> None:
    path = Path(os.environ["SHARDMILL_REAL_DATA"]) / "preference" / "dpo_en_demo.json"
    report = build_chats(
        open_chats(path),
        tmp_path / "store",
        template=TEMPLATE,
        tokenizer=TOKENIZER,
        spec=BuildSpec(),
    )
    rows = json.loads(path.read_text())
    found = records_of(tmp_path / "store")
    for record, row in zip(found, rows, strict=True):
        turns = [(_ROLES[turn["from"]], turn["value"]) for turn in row["conversations"]]
        answers = [f"{row[name]['value']}<|e|>" for name in ("chosen", "rejected")]
        assert record == PlainRecord(plain_prompt(turns), [(answers[0], 0), (answers[1], 1)])
    (entry,) = report.manifest.splits.values()
    assert entry.chat is not None
    assert entry.chat.preference is not None
    assert entry.chat.preference.records == 300
    assert (entry.tokens, entry.chat.preference.saved_tokens) == (1_458_411, 561_752)
    assert verify(tmp_path / "store").problems == []


_ROLES = {"system": "system", "human": "user", "gpt": "assistant"}
