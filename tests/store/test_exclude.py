"""Exclusions on disk: what is written is read, by many at a time, or refused with a reason."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardmill.errors import ManifestError, OptionError, StoreError, StoreExistsError
from shardmill.records import Ragged
from shardmill.store import (
    check_target,
    exclude_documents,
    exclude_spans,
    open_store,
    read_exclusions,
    verify,
)
from shardmill.store.exclusions import (
    ExcludedSteps,
    add_exclusion,
    as_spans,
    count_tokens,
    cover_spans,
    encode_exclusions,
    merge_spans,
    remove_exclusion,
    touched,
    write_exclusions,
)
from shardmill.testing.stores import build_small_store
from tests.store.test_format import reader

DOCUMENTS = [[1, 2, 3], [], [4, 5], [6], [7, 8, 9, 10]]  # starts 0 3 3 5 6, 10 tokens
STEPS = ExcludedSteps(
    source="s", start=3, stop=5, world=2, batch_size=4, seq_len=8, seed=2**64 - 1, shuffle="none"
)
EXAMPLES = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    splits = {"train": Ragged.from_sequences(DOCUMENTS), "val": Ragged.from_sequences([[1, 2]])}
    build_small_store(tmp_path / "store", splits, shard_bytes=8)
    return tmp_path / "store"


def test_what_a_killed_one_left_is_removed_by_the_next(store):
    (store / ".exclude.json.0123456789abcdef.tmp").write_bytes(b"half")
    exclude_documents(store, [0], reason="a test")
    assert verify(store).problems == []


@pytest.mark.parametrize("reason", ["", " ", "x" * 1001, "\udcff"])
def test_a_reason_that_is_none_is_refused(store, reason):
    with pytest.raises(OptionError, match="reason="):
        exclude_documents(store, [0], reason=reason)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_documents_become_spans_and_the_store_stays_as_it_is(store: Path) -> None:
    before = files_of(store)
    entry = exclude_documents(store, [4, 2, 1, 2], reason="takedown 4711")
    assert (entry.number, entry.split, entry.reason) == (1, "train", "takedown 4711")
    assert (entry.documents, entry.spans, entry.num_tokens) == ((1, 2, 4), ((3, 5), (6, 10)), 6)
    after = files_of(store)
    assert after.keys() - before.keys() == {str(store / "exclude.json")}
    assert all(after[path] == data for path, data in before.items())
    found = read_exclusions(open_store(store))
    assert found.entries == (entry,)
    assert found.spans("train").tolist() == [[3, 5], [6, 10]]
    assert found.spans("val").tolist() == []
    assert (found.num_tokens("train"), found.num_tokens("val")) == (6, 0)


def test_without_a_file_nothing_is_excluded(store: Path) -> None:
    found = read_exclusions(store)
    assert (found.entries, found.sha256, found.spans("train").tolist()) == ((), None, [])


def test_entries_add_up_and_are_taken_back_by_number(store: Path) -> None:
    exclude_documents(store, [0], reason="a")
    exclude_spans(store, [(2, 4), (4, 6)], reason="b", steps=STEPS)
    exclude_documents(store, [0], reason="c", split="val")
    assert read_exclusions(store).spans("train").tolist() == [[0, 6]]
    assert remove_exclusion(store, 1).reason == "a"
    found = read_exclusions(store)
    assert [entry.number for entry in found.entries] == [2, 3]
    assert found.entries[0].steps == STEPS
    assert found.spans("train").tolist() == [[2, 6]]
    assert exclude_documents(store, [1], reason="d").number == 4
    for number in (2, 3, 4):
        remove_exclusion(store, number)
    assert not (store / "exclude.json").exists()
    with pytest.raises(OptionError, match="no entry 2; its entries are: none"):
        remove_exclusion(store, 2)


def test_the_same_entry_is_written_once(store: Path) -> None:
    first = exclude_documents(store, [0], reason="a")
    data = (store / "exclude.json").read_bytes()
    assert exclude_documents(store, [0, 0], reason="a") == first
    assert (store / "exclude.json").read_bytes() == data
    assert exclude_documents(store, [0], reason="another").number == 2


def test_equal_entries_are_equal_bytes_and_say_what_they_are(store: Path) -> None:
    exclude_documents(store, [3], reason='a "word"')
    exclude_spans(store, [(0, 2)], reason="steps", steps=STEPS)
    data = (store / "exclude.json").read_bytes()
    found = read_exclusions(store)
    write_exclusions(store, ())
    assert not (store / "exclude.json").exists()
    assert write_exclusions(store, found.entries) == found
    assert (store / "exclude.json").read_bytes() == data
    parsed = json.loads(data)
    assert data.startswith(b'{"format":"shardmill-exclude","version":1,"sha256":"')
    zeroed = data.replace(parsed["sha256"].encode(), b"0" * 64)
    assert parsed["sha256"] == hashlib.sha256(zeroed).hexdigest() == found.sha256
    assert parsed["store"] == open_store(store).fingerprint
    assert parsed["entries"][0] == {
        "number": 1,
        "split": "train",
        "reason": 'a "word"',
        "documents": [3],
        "steps": None,
        "spans": [[5, 6]],
    }


@EXAMPLES
@given(data=st.data())
def test_any_changed_byte_is_refused_and_found(store: Path, data) -> None:
    path = store / "exclude.json"
    if not path.exists():
        exclude_documents(store, [0, 4], reason="test")
    sound = path.read_bytes()
    at, bit = data.draw(st.integers(0, len(sound) - 1)), data.draw(st.integers(0, 7))
    cut = data.draw(st.booleans())
    path.write_bytes(
        sound[:at] if cut else sound[:at] + bytes([sound[at] ^ 1 << bit]) + sound[at + 1 :]
    )
    with pytest.raises(ManifestError, match=r"exclude\.json"):
        read_exclusions(store)
    (problem,) = verify(store).problems
    assert problem.startswith("exclude.json: ")
    path.write_bytes(sound)
    assert verify(store).problems == []


def test_exclusions_of_another_store_are_refused(store: Path, tmp_path: Path) -> None:
    build_small_store(tmp_path / "other", {"train": Ragged.from_sequences(DOCUMENTS)})
    exclude_documents(tmp_path / "other", [0], reason="test")
    shutil.copy(tmp_path / "other" / "exclude.json", store)
    with pytest.raises(ManifestError, match="of another store, or of this one before it was built"):
        read_exclusions(store)


def sealed(store: Path, **changes: object) -> None:
    """A file with a right seal and one entry that shardmill never writes."""
    entry = {"number": 1, "split": "train", "reason": "x", "documents": None, "steps": None}
    entry |= {"spans": [[0, 1]], **changes}
    body = encode_exclusions(open_store(store).fingerprint, [entry])  # type: ignore[list-item]
    (store / "exclude.json").write_bytes(body)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"number": 0}, "numbered"),
        ({"split": "test"}, "split 'test'; the store has"),
        ({"spans": [[0, 11]]}, "reaches token 11 of 10"),
        ({"spans": [[2, 2]]}, "its spans are empty, touch, or are not ascending"),
        ({"spans": [[0, 2], [2, 3]]}, "its spans are empty, touch"),
        ({"spans": [[4, 5], [0, 2]]}, "are not ascending"),
        ({"spans": [[-1, 2]]}, "Expected `int` >= 0"),
        ({"reason": " "}, "a reason of 1 characters"),
        ({"documents": [2, 2]}, "its documents are not ascending"),
        ({"documents": [5]}, "document 5 of 5"),
        ({"documents": [0], "steps": {**STEPS.__class__.__annotations__}}, "Expected"),
        ({"more": 1}, "unknown field"),
    ],
)
def test_impossible_entries_are_refused_even_when_sealed(store: Path, changes, words) -> None:
    sealed(store)
    assert read_exclusions(store).num_tokens("train") == 1
    sealed(store, **changes)
    with pytest.raises(ManifestError, match=words):
        read_exclusions(store)
    assert not verify(store).ok


def test_a_file_without_entries_or_of_a_later_version_is_refused(store: Path) -> None:
    path = store / "exclude.json"
    path.write_bytes(encode_exclusions(open_store(store).fingerprint, []))
    with pytest.raises(ManifestError, match="wanted at least one"):
        read_exclusions(store)
    sealed(store)
    path.write_bytes(path.read_bytes().replace(b'"version":1', b'"version":2'))
    with pytest.raises(ManifestError, match="version 2, but this shardmill reads version 1"):
        read_exclusions(store)


def test_verify_compares_documents_with_their_tokens(store: Path) -> None:
    exclude_documents(store, [0, 2], reason="test")
    report = verify(store)
    assert (report.ok, report.files) == (True, 8)
    sealed(store, documents=[2], spans=[[3, 6]])
    assert read_exclusions(store).spans("train").tolist() == [[3, 6]]
    assert verify(store).problems == ["exclude.json: entry 1: other tokens than its documents have"]


def test_links_and_folders_are_no_lists(store: Path, tmp_path: Path) -> None:
    exclude_documents(store, [0], reason="test")
    (store / "exclude.json").rename(tmp_path / "elsewhere.json")
    (store / "exclude.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(ManifestError, match="not a plain file"):
        read_exclusions(store)
    (store / "exclude.json").unlink()
    (store / "exclude.json").mkdir()
    with pytest.raises(ManifestError, match="not a plain file"):
        read_exclusions(store)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s: exclude_documents(s, [5], reason="x"), r"document 5 of 5 in split 'train'"),
        (lambda s: exclude_documents(s, [-1], reason="x"), r"document -1 of 5"),
        (
            lambda s: exclude_documents(s, [0.5], reason="x"),
            "wanted whole numbers, found float64",
        ),
        (lambda s: exclude_documents(s, [0], reason="  "), "reason='  ': wanted 1 to 1,000"),
        (lambda s: exclude_documents(s, [0], reason="x" * 1001), "wanted 1 to 1,000 characters"),
        (lambda s: exclude_documents(s, [0], reason="x", split="no"), "no split 'no'"),
        (lambda s: exclude_spans(s, [(3, 11)], reason="x"), r"spans of 3\.\.11, but split 'train'"),
    ],
)
def test_what_cannot_be_excluded_is_refused_and_nothing_is_written(store, call, words) -> None:
    with pytest.raises(OptionError, match=words):
        call(store)
    assert not (store / "exclude.json").exists()


def test_a_new_store_never_takes_exclusions_with_it_in_silence(store: Path) -> None:
    assert check_target(store, overwrite=True)
    exclude_documents(store, [0], reason="test")
    with pytest.raises(StoreExistsError, match=r"exclude\.json: lists what was excluded"):
        check_target(store, overwrite=True)


def test_a_folder_that_cannot_be_written_is_one_error(store: Path, monkeypatch) -> None:
    exclude_documents(store, [0], reason="test")
    before = files_of(store)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="No space left on device; the exclusions are as they"):
        exclude_documents(store, [2], reason="test")
    assert files_of(store) == before


def add_some(store: Path, worker: int, barrier) -> None:
    barrier.wait(600)
    for number in range(10):
        exclude_documents(store, [number % 5], reason=f"{worker} {number}")
    if worker == 0:
        remove_exclusion(store, read_exclusions(store).entries[0].number)


@pytest.mark.slow
def test_many_commands_at_a_time_lose_nothing(store: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    workers = [context.Process(target=add_some, args=(store, n, barrier)) for n in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(600)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    found = read_exclusions(store)
    assert len(found.entries) == 29
    assert len({entry.reason for entry in found.entries}) == 29
    assert verify(store).problems == []


def test_an_entry_of_another_hand_is_added_as_it_is(store: Path, tmp_path: Path) -> None:
    shutil.copytree(store, tmp_path / "copy")
    entry = exclude_spans(store, [(1, 3)], reason="x", steps=STEPS)
    exclude_documents(tmp_path / "copy", [4], reason="own")
    assert add_exclusion(tmp_path / "copy", entry).number == 2
    copy = read_exclusions(tmp_path / "copy")
    assert copy.covers(read_exclusions(store))
    assert not read_exclusions(store).covers(copy)


@given(
    left=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=6),
    right=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=6),
)
def test_spans_are_sets_of_tokens(left, right) -> None:
    sets = [{t for start, stop in pairs for t in range(start, stop)} for pairs in (left, right)]
    spans = [merge_spans(as_spans(pairs)) for pairs in (left, right)]
    for tokens, found in zip(sets, spans, strict=True):
        assert {t for start, stop in found.tolist() for t in range(start, stop)} == tokens
        edges = found.reshape(-1)
        assert (np.diff(edges) > 0).all()
        assert count_tokens(found) == len(tokens)
    assert cover_spans(*spans) == (sets[1] <= sets[0])
    pairs = as_spans(right)
    met = touched(spans[0], pairs[:, 0], pairs[:, 1]).tolist()
    assert met == [bool(sets[0] & set(range(start, stop))) for start, stop in right]


def test_the_reader_in_the_format_reads_exclusions(store: Path) -> None:
    read = reader()["read_exclusions"]
    assert read(store) == {}
    exclude_documents(store, [2, 4], reason="a")
    exclude_spans(store, [(1, 4)], reason="b")
    exclude_documents(store, [0], reason="c", split="val")
    assert read(store) == {"train": [[1, 5], [6, 10]], "val": [[0, 2]]}
    path = store / "exclude.json"
    path.write_bytes(path.read_bytes().replace(b"[1,4]", b"[1,3]"))
    with pytest.raises(ValueError, match="damaged"):
        read(store)
