"""Budgets of tokens when units are made before it is known what comes before them.

The scheduler guesses which split a unit belongs to. However wrong the guess, the store is that of
one process, and nothing of a wrong unit is left in it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardmill.building import BuildReport, BuildSpec, Feed, build_store
from shardmill.building.segments import Receipt
from shardmill.building.splits import Fill, FillState, state_after
from shardmill.sources import BatchLimits, JsonlSource
from shardmill.store import open_store, verify
from shardmill.tokenizers import ByteTokenizer
from tests.building.parts import Dense, Sparse
from tests.building.simulated import Draws, simulated
from tests.helpers import folder_digest


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardmill.building.plan.CHUNK_BYTES", 1_000)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    rows = [json.dumps({"text": f"{number} " * 25}) for number in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + "\n")
    return tmp_path / "a.jsonl"


def build(corpus: Path, name: str, fill: Fill, **options: Any) -> BuildReport:
    source = JsonlSource(corpus, on_bad=options.pop("on_bad", "skip"), limits=options.pop("limits"))
    return build_store(
        [Feed(source=source, fill=fill)],
        corpus.parent / name,
        spec=BuildSpec(shard_bytes=options.pop("shard_bytes", 700)),
        **{"tokenizer": ByteTokenizer(), **options},
    )


LIMITS = BatchLimits(num_documents=5)


@pytest.fixture
def rejected(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Units that were made for another state than they had."""
    found: list[int] = []

    def watched(fill: Fill, now: FillState, made: Receipt) -> FillState | None:
        after = state_after(fill, now, made)
        if after is None:
            found.append(made.unit)
        return after

    monkeypatch.setattr("shardmill.building.scheduler.state_after", watched)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokenizer", "share"),
    [
        (Sparse(), (0.3, None)),
        (Sparse(), (0.5, 0.1, 0.0, 0.2)),
        (ByteTokenizer(), (0.2, 0.3)),
        (Dense(), (0.1, 0.2, None)),
        (Dense(), (0.0, 0.9)),
    ],
)
def test_a_wrong_guess_of_the_split_changes_no_byte(corpus, rejected, tokenizer, share):
    """A token for forty bytes, for one, or three tokens for each: the first guess is a quarter."""
    how = {"tokenizer": tokenizer, "limits": LIMITS}
    whole = build(corpus, "whole", (("train", None),), workers=1, **how)
    tokens = whole.manifest.splits["train"].tokens
    fill = tuple(
        (f"s{number}", None if part is None else int(part * tokens))
        for number, part in enumerate(share)
    )
    build(corpus, "one", fill, workers=1, **how)
    assert rejected == []
    for seed in range(4):
        with simulated(Draws(seed)):
            name = f"s{seed}"
            build(corpus, name, fill, workers=seed + 2, unit_bytes=[1, 3_000][seed % 2], **how)
        assert folder_digest(corpus.parent / name) == folder_digest(corpus.parent / "one")
        assert verify(corpus.parent / name).problems == []
    assert rejected, "the guess was always right, so this test tests nothing"


def test_the_shards_of_a_wrong_unit_do_not_stay_in_the_store(corpus, rejected):
    """Wrong ones are larger, or in the folder of another split."""
    fill = (("val", 3_000), ("train", None))
    with simulated(Draws(3)):
        build(corpus, "s", fill, workers=4, unit_bytes=1, limits=LIMITS)
    assert rejected
    store = corpus.parent / "s"
    listed = {
        shard.file for split in open_store(store).manifest.splits.values() for shard in split.shards
    }
    assert {path.relative_to(store).as_posix() for path in store.glob("*/*")} == listed


def test_rows_that_are_dropped_after_the_last_kept_token_are_not_counted(tmp_path, rejected):
    """The limit is reached exactly at the end of a document, and the same unit goes on with a batch
    of nothing but broken rows: one process never reads that."""
    rows = [json.dumps({"text": "x" * 50}) for _ in range(40)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([*rows[:30], *["{"] * 10, *rows[30:]]) + "\n")
    how: dict[str, Any] = {"fill": (("train", 1_500),), "limits": BatchLimits(num_documents=1)}
    one = build(path, "one", workers=1, **how)
    assert one.manifest.ledger.documents.dropped == {}
    for seed in range(6):
        with simulated(Draws(seed)):
            done = build(path, f"s{seed}", workers=4, unit_bytes=1, **how)
        assert done.manifest.ledger == one.manifest.ledger
        assert folder_digest(tmp_path / f"s{seed}") == folder_digest(tmp_path / "one")
    assert rejected


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("unit_bytes", [1, 10**9])
def test_what_comes_after_the_last_kept_batch_may_be_broken(tmp_path, workers, unit_bytes):
    """Whether it is in the same unit, in the same task, or with another worker."""
    rows = [json.dumps({"text": "x" * 50}) for _ in range(60)]
    limits = BatchLimits(num_documents=5)
    for broken in (10, 12, 20, 37):
        path = tmp_path / f"{broken}.jsonl"
        path.write_text("\n".join([*rows[:broken], "{", *rows[broken:]]) + "\n")
        with simulated(Draws(broken)):
            done = build(
                path,
                f"s{broken}",
                (("train", 500),),
                on_bad="error",
                workers=workers,
                unit_bytes=unit_bytes,
                limits=limits,
            )
        assert done.manifest.ledger.documents.read == 10
