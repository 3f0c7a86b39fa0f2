"""A unit counts when its receipt is whole, of this very build, and its shards are there.

Everything else is made again: nothing that is damaged, cut, missing or of another build is used.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.building import BuildSpec, Feed, build_store
from shardmill.building.plan import Unit
from shardmill.building.segments import (
    EncodedBatch,
    Receipt,
    SegmentWriter,
    find_receipt,
    read_segment,
    receipt_name,
)
from shardmill.building.workplace import FolderOutput
from shardmill.records import ChatExamples, Drop, Ragged, TextBatch
from shardmill.sources import BatchLimits, JsonlSource, MemorySource
from shardmill.store import open_store, verify
from shardmill.tokenizers import ByteTokenizer
from tests.building.simulated import Draws, simulated
from tests.building.workplaces import receipts, shards
from tests.helpers import folder_digest


class Stopped(Exception):
    """Stands for a process that ends in mid-build."""


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of many units, with rows that are dropped."""
    monkeypatch.setattr("shardmill.building.plan.CHUNK_BYTES", 500)
    rows = [json.dumps({"text": f"{number} " * 20}) for number in range(100)]
    rows[7] = rows[8] = rows[70] = "{"
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + "\n")
    return tmp_path / "a.jsonl"


def build(corpus: Path, name: str, *, stop_at: int | None = None, **options: Any) -> str:
    def tell(progress) -> None:
        if stop_at is not None and progress.documents > stop_at:
            raise Stopped

    source = JsonlSource(corpus, on_bad="skip", limits=BatchLimits(num_documents=4))
    build_store(
        [Feed(source=source, fill=(("val", 900), ("train", None)))],
        corpus.parent / name,
        tokenizer=ByteTokenizer(),
        spec=BuildSpec(shard_bytes=600),
        **{"workers": 1, "unit_bytes": 1_000, "on_progress": tell, **options},
    )
    return folder_digest(corpus.parent / name)


@pytest.fixture
def stopped(corpus: Path) -> Path:
    """Where a build of most of the units was stopped."""
    with pytest.raises(Stopped):
        build(corpus, "s", stop_at=70)
    assert len(receipts(corpus.parent / "s")) > 5
    return corpus.parent / "s"


_whole: list[str] = []


def whole(corpus: Path) -> str:
    """What a build that nothing disturbs makes, once for all tests: their input is the same."""
    if not _whole:
        _whole.append(build(corpus, "whole"))
    return _whole[0]


def resumed(corpus: Path, *, workers: int) -> str:
    if workers == 1:
        return build(corpus, "s", resume=True)
    with simulated(Draws(1)):
        return build(corpus, "s", resume=True, workers=workers)


def first_bit(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])


def last_bit(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def other_text(path: Path) -> None:
    path.write_bytes(b"\xff\xfe not a receipt of ours")


def of_next_unit(path: Path) -> None:
    shutil.copy(sorted(path.parent.glob("*"))[4], path)


RECEIPT_DAMAGE = [first_bit, last_bit, cut, longer, empty, Path.unlink, other_text, of_next_unit]
SHARD_DAMAGE = [first_bit, cut, longer, empty, Path.unlink]


@pytest.mark.parametrize(("unit", "workers"), [(0, 3), (3, 1)])
@pytest.mark.parametrize("damage", RECEIPT_DAMAGE)
def test_a_receipt_that_is_not_as_it_was_written_is_never_used(
    corpus, stopped, damage, unit, workers
):
    wanted = whole(corpus)
    before = receipts(stopped)
    files = {path: written(path) for path in before}
    damage(before[unit])
    seen: dict[Path, tuple[int, int]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardmill.building.run._PAUSES", (0.0,))
        patch.setattr(
            "shardmill.building.workplace.publish_folder",
            look_before(lambda: seen.update((path, written(path)) for path in files)),
        )
        assert resumed(corpus, workers=workers) == wanted
    assert verify(stopped).problems == []
    again = {path for path in files if seen[path] != files[path]}
    if unit == 0 and workers > 1:  # what the next two hold of "val" is a guess now
        again -= {*before[1:3]}
    assert again == {before[unit]}


def written(path: Path) -> tuple[int, int]:
    """Other numbers for a file that was written again: one that is gone may give its inode away."""
    found = path.stat()
    return found.st_ino, found.st_ctime_ns


def look_before(look: Callable[[], None]) -> Callable[..., None]:
    from shardmill.building.workplace import publish_folder

    def publish(*arguments: Any, **options: Any) -> None:
        look()
        publish_folder(*arguments, **options)

    return publish


@pytest.mark.parametrize(("number", "workers"), [(0, 1), (1, 3), (-1, 3)])
@pytest.mark.parametrize("damage", SHARD_DAMAGE)
def test_a_unit_whose_shard_is_not_as_it_was_written_is_made_again(
    corpus, stopped, damage, number, workers
):
    wanted = whole(corpus)
    damage(shards(stopped)[number])
    assert resumed(corpus, workers=workers) == wanted
    assert verify(stopped).problems == []


@pytest.mark.parametrize("workers", [1, 3])
def test_a_shard_without_its_predecessors_receipt_is_looked_at_too(corpus, stopped, workers):
    """Units after a gap are found by the task that would make them, not when the build starts."""
    wanted = whole(corpus)
    receipts(stopped)[0].unlink()
    for path in shards(stopped)[3:]:
        cut(path)
    assert resumed(corpus, workers=workers) == wanted
    assert verify(stopped).problems == []


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    ("what", "damage"),
    [(receipts, cut), (receipts, Path.unlink), (receipts, last_bit), (shards, cut)],
)
def test_what_is_damaged_while_the_build_runs_is_made_again(corpus, what, damage, workers, caplog):
    wanted = whole(corpus)
    harmed: list[Path] = []

    def harm(progress) -> None:
        if progress.documents > 50 and not harmed:
            harmed.extend(what(corpus.parent / "s")[:1])
            damage(harmed[0])

    with pytest.MonkeyPatch.context() as patch, simulated(Draws(1)):
        patch.setattr("shardmill.building.run._PAUSES", (0.0,))
        assert build(corpus, "s", workers=workers, on_progress=harm) == wanted
    assert harmed
    assert "damaged after it was written; it is made again" in caplog.text
    assert verify(corpus.parent / "s").problems == []


def test_what_belongs_to_no_unit_does_not_stay_in_the_store(corpus, stopped):
    wanted = whole(corpus)
    folder = shards(stopped)[0].parent.parent
    for name in ("train/shard_00777.bin", "train/shard_00000_009.bin", "val/.shard_0.bin.a.tmp"):
        (folder / name).write_bytes(b"left over")
    (receipts(stopped)[0].parent / ".x.receipt.1.tmp").write_bytes(b"left over")
    assert build(corpus, "s", resume=True) == wanted


def test_receipts_of_another_input_are_never_used(corpus, stopped, tmp_path):
    """The workplace of one build, filled with the receipts and shards of another."""
    other = tmp_path / "other"
    other.mkdir()
    lines = [json.dumps({"text": f"{number} other " * 9}) for number in range(100)]
    (other / "a.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(Stopped):
        build(other / "a.jsonl", "s", stop_at=70)
    theirs = receipts(other / "s")[0].parent.parent
    shutil.rmtree(theirs)
    shutil.copytree(receipts(stopped)[0].parent.parent, theirs)
    assert build(other / "a.jsonl", "s", resume=True) == build(other / "a.jsonl", "whole")


@pytest.mark.slow
def test_a_unit_of_very_many_shards_is_one_receipt(tmp_path):
    """A shard for each token: the list of shards is larger than the header of a sealed file."""
    feed = Feed(source=MemorySource(["x" * 12_000]), fill=(("train", None),))
    build_store(
        [feed], tmp_path / "s", tokenizer=ByteTokenizer(), spec=BuildSpec(shard_bytes=2), workers=1
    )
    entry = open_store(tmp_path / "s").manifest.splits["train"]
    assert (len(entry.shards), entry.tokens) == (12_000, 12_000)


CHAT = ChatExamples(
    ids=Ragged.from_sequences([[1, 2, 3], [4, 5], [6, 7, 8, 9]]),
    mask=np.array([0, 1, 1, 0, 1, 0, 0, 1, 1], bool),
    turn_starts=np.array([0, 1, 3, 5], np.int64),
    turn_roles=np.array([1, 2, 1, 2], np.uint8),
)


def sealed(folder: Path, *, chat: bool) -> tuple[FolderOutput, Unit, Receipt]:
    """A unit of two batches, of documents or of conversations, in shards of four tokens."""
    output = FolderOutput(store=folder / "store", receipts=folder / "receipts")
    output.store.mkdir(parents=True)
    output.receipts.mkdir()
    unit = Unit(
        feed=2,
        number=5,
        plan="p",
        inputs="i",
        source="source",
        first_chunk=40,
        chunks=(MemorySource([]), MemorySource([])),
        num_bytes=10,
    )
    fill = (("train", None), ("val", None)) if chat else (("val", 4), ("train", None))
    before = (0, 0)
    (read,) = MemorySource(["a"]).batches()
    ids = Ragged(CHAT.ids.values.astype("<u2"), CHAT.ids.offsets)
    examples = ChatExamples(
        ids=ids, mask=CHAT.mask, turn_starts=CHAT.turn_starts, turn_roles=CHAT.turn_roles
    )
    with SegmentWriter(unit, output, fill=fill, before=before, shard_tokens=4) as writer:
        for chunk in (40, 41):
            writer.add(
                EncodedBatch(
                    unit=5,
                    chunk=chunk,
                    read=TextBatch(texts=read.texts, num_read=4, cursor={}),
                    num_given=4,
                    num_bytes=9,
                    documents=ids,
                    void=(1,),
                    drops=(Drop(id="a.jsonl", reason="bad", row=3),),
                    examples=examples if chat else None,
                    splits=np.array([0, 1, 0], np.uint8) if chat else None,
                )
            )
        return output, unit, writer.seal()


def test_a_receipt_says_everything_but_the_tokens(tmp_path):
    output, unit, receipt = sealed(tmp_path, chat=False)
    assert find_receipt(output, 2, 5, itemsize=2) == receipt
    assert receipt.is_of(unit)
    assert (receipt.before, receipt.after, receipt.num_given, receipt.num_tokens) == (
        *((0, 0), (1, 0)),
        *(8, 18),
    )
    data = output.read_receipt(receipt_name(2, 5))
    assert data is not None
    found = read_segment(data, output, itemsize=2)
    assert found is not None
    assert (found.feed, found.mark, found.receipt) == (2, unit.mark, receipt)
    assert [(line.chunk, line.num_read, line.kept) for line in found.lines] == [
        (40, 4, [2, 1]),
        (41, 4, [0, 3]),
    ]
    drops = [(drop.id, drop.reason, drop.row, drop.document) for drop in found.lines[0].drops]
    assert drops == [("a.jsonl", "bad", 3, None), ("source", "no_tokens", None, 1)]
    assert {split: lengths.tolist() for split, lengths in found.lengths.items()} == {
        "val": [3, 1],
        "train": [4, 3, 2, 4],
    }
    names = {split: [s.file for s in part.shards] for split, part in found.splits.items()}
    assert names == {
        "val": ["val/shard_f002_00005.bin"],
        "train": [f"train/shard_f002_00005{part}.bin" for part in ("", "_001", "_002", "_003")],
    }
    assert np.fromfile(output.store / "val/shard_f002_00005.bin", "<u2").tolist() == [1, 2, 3, 4]


def test_a_receipt_of_conversations_has_masks_turns_and_roles(tmp_path):
    output, _, _ = sealed(tmp_path, chat=True)
    data = output.read_receipt(receipt_name(2, 5))
    assert data is not None
    found = read_segment(data, output, itemsize=2)
    assert found is not None
    twice = [*CHAT.mask[[0, 1, 2, 5, 6, 7, 8]]] * 2  # the first and third conversation
    bits = np.unpackbits(found.turns["train"].mask_bits, bitorder="little")
    assert bits[:14].tolist() == twice
    assert not bits[14:].any()
    assert found.turns["train"].turn_starts.tolist() == [0, 1, 3, 7, 8, 10]
    assert found.turns["train"].turn_roles.tolist() == [1, 2, 2, 1, 2, 2]
    assert found.turns["val"].turn_starts.tolist() == [0, 2]
    assert found.splits["train"].trained_tokens == sum(twice)


@pytest.mark.slow
@pytest.mark.parametrize("chat", [False, True])
def test_no_byte_of_a_receipt_can_change_unnoticed(tmp_path, chat):
    output, _, _ = sealed(tmp_path, chat=chat)
    path = output.receipts / receipt_name(2, 5)
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x20]) + data[place + 1 :])
        assert find_receipt(output, 2, 5, itemsize=2) is None
    for stop in range(len(data)):
        assert read_segment(data[:stop], output, itemsize=2) is None
    path.write_bytes(data)
    assert find_receipt(output, 2, 5, itemsize=2) is not None


@settings(max_examples=200)
@given(data=st.binary(max_size=300), head=st.booleans())
def test_no_bytes_are_taken_for_a_receipt(tmp_path_factory, data, head):
    output = FolderOutput(store=Path("none"), receipts=Path("none"))
    if head:
        data = b'{"format":"shardmill-receipt","version":1,' + data
    assert read_segment(data, output, itemsize=2) is None
