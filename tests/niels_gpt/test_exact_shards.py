"""The prescribed layout: shards of exactly `shard_bytes`, however the work was divided."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardmill.building import BuildReport, BuildSpec, Feed, build_chats, build_store
from shardmill.building.finish import ExactShards, ShardTask
from shardmill.building.workplace import workplace_of
from shardmill.errors import OptionError
from shardmill.records import Ragged
from shardmill.sources import JsonlSource
from shardmill.store import open_store, verify
from shardmill.tokenizers import ByteTokenizer
from tests.helpers import folder_digest

TEXTS = [f"document {n} " * (n % 7 + 1) for n in range(300)]
BUDGETS = (("val", 3_001), ("train", 15_000))


class StoppedError(BaseException):
    """As if the process ended."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several units in a few kilobytes."""
    monkeypatch.setattr("shardmill.building.plan.CHUNK_BYTES", 2_000)


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    path = tmp_path / "pages.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def build(pages: Path, folder: Path, **options: Any) -> BuildReport:
    tokenizer = options.pop("tokenizer", ByteTokenizer())
    fill = options.pop("fill", BUDGETS)
    spec = BuildSpec(
        dtype="uint16", shard_bytes=options.pop("shard_bytes", 2_000), exact_shards=True
    )
    feeds = [Feed(source=JsonlSource(pages), fill=fill)]
    return build_store(feeds, folder, tokenizer=tokenizer, spec=spec, **options)


def tokens(folder: Path, split: str) -> list[np.ndarray]:
    return [np.fromfile(path, "<u2") for path in sorted((folder / split).iterdir())]


def stop_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """End the build when it comes to the copy `number`."""
    calls, run = iter(range(10**6)), ShardTask.run

    def stopping(task: ShardTask, tools: object, emit: Any) -> None:
        if next(calls) == number:
            raise StoppedError
        run(task, tools, emit)

    monkeypatch.setattr(ShardTask, "run", stopping)


def build_until(pages: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """A build that ends at the copy `number`."""
    with monkeypatch.context() as patch:
        stop_at(patch, number)
        with pytest.raises(StoppedError):
            build(pages, folder)


@pytest.mark.parametrize("shard_bytes", [2, 998, 2_000, 10**6])
def test_all_shards_but_the_last_have_the_prescribed_size(
    tmp_path: Path, pages: Path, shard_bytes: int
) -> None:
    limits = (("val", 31), ("train", 120)) if shard_bytes == 2 else BUDGETS
    build(pages, tmp_path / "s", fill=limits, shard_bytes=shard_bytes)
    stream = np.frombuffer("".join(TEXTS).encode(), np.uint8).astype("<u2")
    (_, val), (_, train) = limits
    store = open_store(tmp_path / "s")
    start = np.flatnonzero(np.cumsum([len(text) for text in TEXTS]) >= val)[0] + 1
    wanted = {"val": stream[:val], "train": stream[sum(map(len, TEXTS[:start])) :][:train]}
    for split, values in wanted.items():
        found = tokens(tmp_path / "s", split)
        assert [len(part) for part in found[:-1]] == [shard_bytes // 2] * (len(found) - 1)
        assert np.array_equal(np.concatenate(found), values)
        names = [f"{split}/shard_{n:05d}.bin" for n in range(len(found))]
        assert [shard.file for shard in store.manifest.splits[split].shards] == names
    assert store.manifest.version == 1
    assert verify(tmp_path / "s").ok


@pytest.mark.parametrize("number", [0, 1, 4, 12, 16])
def test_a_build_that_ended_while_it_copied_resumes_without_encoding_again(
    tmp_path: Path, pages: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    class Silent(ByteTokenizer):
        def encode_batch(self, _texts: Any) -> Ragged:
            raise AssertionError("all is encoded")

    build(pages, tmp_path / "whole")
    build_until(pages, tmp_path / "s", monkeypatch, number)
    assert not (tmp_path / "s").exists()
    done = build(pages, tmp_path / "s", resume=True, tokenizer=Silent())
    assert done.resumed
    assert folder_digest(tmp_path / "s") == folder_digest(tmp_path / "whole")
    assert not workplace_of(tmp_path / "s").exists()


def test_files_of_units_are_removed_while_others_are_copied(
    tmp_path: Path, pages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_until(pages, tmp_path / "s", monkeypatch, 12)
    (run,) = workplace_of(tmp_path / "s").glob("run-*")
    held = sum(path.stat().st_size for path in run.glob("[es]*/*/*.bin"))
    assert held < 2 * (3_001 + 15_000) + 3 * 2_000
    assert len(list((run / "exact").glob("*/*.bin"))) == 12


@pytest.mark.parametrize("what", ["store", "exact"])
def test_a_file_that_was_lost_after_a_stop_is_made_again(
    tmp_path: Path, pages: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    build(pages, tmp_path / "whole")
    build_until(pages, tmp_path / "s", monkeypatch, 6)
    (run,) = workplace_of(tmp_path / "s").glob("run-*")
    sorted(run.glob(f"{what}/train/*.bin"))[0].unlink()
    build(pages, tmp_path / "s", resume=True)
    assert folder_digest(tmp_path / "s") == folder_digest(tmp_path / "whole")


def test_a_receipt_that_is_damaged_after_the_copies_leads_to_the_same_bytes(
    tmp_path: Path, pages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(pages, tmp_path / "whole")
    cut = ExactShards.cut

    def damaging(self: ExactShards, *args: Any) -> str | None:
        found = cut(self, *args)
        monkeypatch.setattr(ExactShards, "cut", cut)
        (receipt,) = workplace_of(tmp_path / "s").glob("run-*/receipts/000-00000001.receipt")
        receipt.write_bytes(receipt.read_bytes()[:-1])
        return found

    monkeypatch.setattr(ExactShards, "cut", damaging)
    build(pages, tmp_path / "s")
    assert ExactShards.cut is cut
    assert folder_digest(tmp_path / "s") == folder_digest(tmp_path / "whole")


@pytest.mark.slow
def test_workers_copy_and_the_coordinator_does_not(
    tmp_path: Path, pages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(pages, tmp_path / "one")
    stop_at(monkeypatch, 0)  # in this process; workers have their own
    build(pages, tmp_path / "two", workers=2, unit_bytes=3_000)
    assert folder_digest(tmp_path / "two") == folder_digest(tmp_path / "one")


def test_conversations_have_no_prescribed_layout(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="exact_shards=True: only for documents"):
        build_chats(
            None,  # type: ignore[arg-type]
            tmp_path / "s",
            template=None,  # type: ignore[arg-type]
            tokenizer=ByteTokenizer(),
            spec=BuildSpec(exact_shards=True),
        )
