"""Plan files: write then read is identity, equal plans are equal bytes, no damage is read."""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import (
    BuildError,
    DamagedStoreError,
    ManifestError,
    OptionError,
    StoreError,
    StoreExistsError,
    StoreNotFoundError,
)
from shardmill.store import (
    PlanOptions,
    find_plan,
    list_plans,
    open_store,
    plans_of,
    read_plan,
    verify,
)
from shardmill.store.plans import (
    NAMES,
    LeftOut,
    PlanArrays,
    PlanFacts,
    PlanMetrics,
    check_plan,
    plan_path,
    plan_problems,
    write_plan,
)
from shardmill.testing.stores import build_small_chat_store, make_examples

EXAMPLES = make_examples(
    [([1], [(2, [(number, True)] * size)]) for number, size in ((5, 3), (6, 6))]
)


def array(*numbers: int, dtype: str = "int64") -> np.ndarray:
    return np.array(numbers, dtype)


def metrics(**changes) -> PlanMetrics:
    """Of the plan below."""
    nothing = LeftOut(pieces=0, tokens=0, labels=0)
    given = {
        "num_rows": 2,
        "lower_bound": 2,
        "num_examples": 2,
        "num_empty": 0,
        "num_pieces": 3,
        "num_tokens": 12,
        "repeated_tokens": 1,
        "trained_labels": 9,
        "num_split": 1,
        "num_truncated": 0,
        "truncated_tokens": 0,
        "truncated_labels": 0,
        "left_out": {"too_long": nothing, "trains_nothing": nothing},
    }
    return PlanMetrics(**(given | changes))


ARRAYS = PlanArrays(  # rows: 0..5 of example 1; example 0 and 4..7 of example 1
    counts=array(1, 2),
    examples=array(1, 0, 1),
    cut_pieces=array(0, 2),
    cut_starts=array(0, 4),
    cut_stops=array(5, 7),
    too_long=array(),
    trains_nothing=array(),
)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    build_small_chat_store(tmp_path / "s", {"train": EXAMPLES})
    return tmp_path / "s"


def facts_of(store: Path, **changes) -> PlanFacts:
    told = PlanFacts(
        store=open_store(store).fingerprint,
        split="train",
        options=PlanOptions(seq_len=7, long="split"),
        metrics=metrics(),
    )
    return msgspec.structs.replace(told, **changes)


@pytest.fixture
def plan(store: Path) -> Path:
    path = plan_path(store, "train", "7")
    write_plan(path, facts_of(store), ARRAYS)
    return path


@st.composite
def stored(draw) -> tuple[PlanFacts, PlanArrays]:
    """Facts and arrays that `plan_problems` finds nothing wrong with, small numbers and large."""
    count = st.integers(0, 2**62)
    most = draw(st.sampled_from([3, 300, 70_000, 2**33]))
    counts = draw(st.lists(st.integers(1, 300), max_size=6))
    pieces = sum(counts)
    numbers = st.integers(0, most - 1)
    cuts = sorted(draw(st.sets(st.integers(0, pieces - 1), max_size=8))) if pieces else []
    starts = [draw(count.filter(lambda number: number < 2**61)) for _ in cuts]
    out = {name: draw(st.lists(numbers, max_size=4)) for name in ("too_long", "trains_nothing")}
    left_out = {
        name: LeftOut(pieces=len(listed), tokens=draw(count), labels=draw(count))
        for name, listed in out.items()
    }
    told = metrics(
        num_rows=len(counts),
        num_pieces=pieces,
        num_examples=most,
        trained_labels=draw(count),
        left_out=left_out,
    )
    facts = PlanFacts(
        store=draw(st.binary(min_size=32, max_size=32)).hex(),
        split=draw(st.text(max_size=5)),
        options=PlanOptions(seq_len=draw(st.integers(300, 2**30)), max_per_row=300),
        metrics=told,
    )
    examples = draw(st.lists(numbers, min_size=pieces, max_size=pieces))
    arrays = PlanArrays(
        counts=array(*counts),
        examples=array(*examples),
        cut_pieces=array(*cuts),
        cut_starts=array(*starts),
        cut_stops=array(*(start + 1 for start in starts)),
        **{name: array(*listed) for name, listed in out.items()},
    )
    return facts, arrays


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(plan=stored())
def test_write_then_read_is_identity(plan) -> None:
    facts, arrays = plan
    with tempfile.TemporaryDirectory() as top:
        path = Path(top, "p.plan")
        size = write_plan(path, facts, arrays)
        found = read_plan(path)
        assert (size, found.path, found.facts) == (path.stat().st_size, path, facts)
        assert found.fingerprint == hashlib.sha256(path.read_bytes()[:-32]).hexdigest()
        for name in NAMES:
            assert getattr(found.arrays, name).tolist() == getattr(arrays, name).tolist()
            assert not getattr(found.arrays, name).flags.writeable
        before = path.read_bytes()
        wide = PlanArrays(**{name: getattr(arrays, name).astype(np.uint64) for name in NAMES})
        write_plan(path, facts, wide)  # the dtypes of a writer leave no trace
        assert path.read_bytes() == before


@pytest.mark.slow
def test_a_flipped_byte_anywhere_is_refused(plan: Path) -> None:
    data = plan.read_bytes()
    for at in range(len(data)):
        for bit in (1, 128):
            plan.write_bytes(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
            with pytest.raises(StoreError):
                read_plan(plan)
    plan.write_bytes(data)
    read_plan(plan)


@pytest.mark.slow
def test_a_cut_or_grown_file_is_refused(plan: Path) -> None:
    data = plan.read_bytes()
    for size in range(len(data)):
        plan.write_bytes(data[:size])
        with pytest.raises(StoreError):
            read_plan(plan)
    plan.write_bytes(data + b"\0")
    with pytest.raises(DamagedStoreError, match="changed or cut off"):
        read_plan(plan)


def sealed(line: bytes, body: bytes = b"") -> bytes:
    """A file as a hostile writer would make it: its checksum is right."""
    line += b" " * (-(len(line) + 1) % 64) + b"\n"
    return line + body + hashlib.sha256(line + body).digest()


def test_a_sealed_file_that_is_no_plan_is_refused(plan: Path) -> None:
    line = plan.read_bytes().partition(b"\n")[0].rstrip()
    head = b'{"format":"shardmill-plan","version":1,'
    cases = {
        sealed(b'{"format":"other"}'): "not a pack plan of ours",
        sealed(head.replace(b"1", b"2") + b"}"): "a pack plan of version 2, but this",
        sealed(head + b"}"): "its first line is no header",
        sealed(head + b'"plan":' + b"[" * 5000): "its first line is no header",
        sealed(line): "goes beyond its end",
        sealed(line, b"\0" * 4096): "there is more after its arrays",
        sealed(line.replace(b'"entries":2', b'"entries":4611686018427387904')): "beyond its end",
        sealed(line.replace(b'"cut_stops"', b'"cut_stop"')): "lists other arrays",
        sealed(line.replace(b'"seq_len":7', b'"seq_len":-7')): "its first line is no header",
    }
    for data, problem in cases.items():
        plan.write_bytes(data)
        with pytest.raises(StoreError, match=problem):
            read_plan(plan)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"counts": array(1, 1)}, "but its metrics say otherwise"),
        ({"counts": array(0, 3)}, "rows of 0 to 3 pieces"),
        ({"examples": array(1, 0, 2)}, "examples: example 2 of 2"),
        ({"too_long": array(0)}, "other pieces are listed as left out"),
        ({"cut_pieces": array(2, 0)}, "its cuts do not rise within the 3 pieces"),
        ({"cut_pieces": array(0, 3)}, "its cuts do not rise within the 3 pieces"),
        ({"cut_stops": array(5, 4)}, "a cut without tokens"),
        ({"cut_stops": array(5)}, "other numbers of starts and stops"),
    ],
)
def test_what_cannot_be_a_plan_is_neither_written_nor_read(store: Path, change, problem) -> None:
    wrong = replace(ARRAYS, **change)
    assert problem in "; ".join(plan_problems(facts_of(store), wrong))
    path = plan_path(store, "train", "7")
    with pytest.raises(BuildError, match=f"refusing to write this plan: .*{problem}"):
        write_plan(path, facts_of(store), wrong)
    assert not path.parent.exists()


@pytest.mark.parametrize(
    "options",
    [
        PlanOptions(seq_len=0),
        PlanOptions(seq_len=7, align_to=2),
        PlanOptions(seq_len=7, align_to=0),
        PlanOptions(seq_len=7, seed=1),
        PlanOptions(seq_len=7, algorithm="first-fit-shuffle"),
        PlanOptions(seq_len=7, max_per_row=1),
        PlanOptions(seq_len=7, max_per_row=0),
        PlanOptions(seq_len=1),
    ],
)
def test_options_that_the_rows_belie_are_found(store: Path, options) -> None:
    rows = replace(ARRAYS, counts=array(3)) if options.seq_len == 1 else ARRAYS
    told = facts_of(store, options=options)
    if options.seq_len == 1:
        told = msgspec.structs.replace(told, metrics=metrics(num_rows=1))
    assert list(plan_problems(told, rows))


def test_another_plan_is_not_replaced_unasked(store: Path, plan: Path) -> None:
    before = plan.read_bytes()
    assert write_plan(plan, facts_of(store), ARRAYS) == len(before)
    other = facts_of(store, metrics=metrics(trained_labels=8))
    with pytest.raises(StoreExistsError, match="another plan is here; choose another name"):
        write_plan(plan, other, ARRAYS)
    assert plan.read_bytes() == before
    write_plan(plan, other, ARRAYS, overwrite=True)
    assert read_plan(plan).facts == other
    assert [path.name for path in plan.parent.iterdir()] == ["train-7.plan"]


def test_a_plan_that_cannot_be_written_leaves_nothing(store: Path) -> None:
    (store / "packs").write_text("in the way")
    with pytest.raises(BuildError, match="cannot write"):
        write_plan(plan_path(store, "train", "7"), facts_of(store), ARRAYS)
    assert (store / "packs").read_text() == "in the way"


def test_plans_are_found_by_name_and_by_path(store: Path, plan: Path) -> None:
    assert list_plans(store) == ["train-7"]
    assert (
        find_plan(store, "train-7") == find_plan(store, plan) == find_plan(store, str(plan)) == plan
    )
    with pytest.raises(StoreNotFoundError, match="no plan 'train-8'; did you mean 'train-7'"):
        find_plan(store, "train-8")
    with pytest.raises(StoreNotFoundError, match="no such plan; make it with `shardmill pack`"):
        read_plan(plan.with_name("train-8.plan"))
    for name in ("", "-x", "a/b", "..", "x" * 101, "\u00e4"):
        with pytest.raises(OptionError, match="plan name"):
            plan_path(store, "train", name)


def test_what_is_no_plain_file_is_no_plan(plan: Path) -> None:
    with pytest.raises(ManifestError, match="not a plain file, so no plan"):
        read_plan(plan.parent)
    empty = plan.with_name("empty.plan")
    empty.touch()
    with pytest.raises(DamagedStoreError, match="empty"):
        read_plan(empty)
    os.mkfifo(plan.with_name("pipe.plan"))
    with pytest.raises(ManifestError, match="not a plain file, so no plan"):
        read_plan(plan.with_name("pipe.plan"))


def test_a_plan_of_other_tokens_is_refused_by_name(store: Path, plan: Path, tmp_path: Path) -> None:
    check_plan(read_plan(plan), open_store(store))
    build_small_chat_store(
        tmp_path / "other", {"train": make_examples([([1], [(2, [(5, True)])])])}
    )
    with pytest.raises(DamagedStoreError, match="a plan of another store, or of this one before"):
        check_plan(read_plan(plan), open_store(tmp_path / "other"))
    for change in ({"split": "val"}, {"metrics": metrics(num_examples=3)}):
        write_plan(plan, facts_of(store, **change), ARRAYS, overwrite=True)
        with pytest.raises(DamagedStoreError):
            check_plan(read_plan(plan), open_store(store))


def test_all_plans_of_a_store_are_listed_sound_or_not(store: Path, plan: Path) -> None:
    plan.with_name("train-bad.plan").write_bytes(plan.read_bytes()[:-1])
    found = dict(plans_of(open_store(store)))
    assert list(found) == ["train-7", "train-bad"]
    assert found["train-7"].facts == read_plan(plan).facts
    assert isinstance(found["train-bad"], DamagedStoreError)


def test_verify_reads_every_plan(store: Path, plan: Path) -> None:
    report = verify(store)
    assert (report.problems, report.files) == ([], 7)  # manifest, tokens, index, three of chats
    plan.write_bytes(plan.read_bytes()[:-1])
    (problem,) = verify(store).problems
    assert problem.startswith("packs/train-7.plan: its sha256 is not the one at its end")


@pytest.mark.parametrize(
    ("change", "told", "problem"),
    [
        (
            {"cut_stops": array(5, 8)},
            {"num_tokens": 13},
            "piece 2 is 4..8 of example 1, which has 7",
        ),
        (
            {"cut_starts": array(0, 3)},
            {"num_tokens": 13},
            "example 1 has tokens in more than one row",
        ),
        ({}, {"num_tokens": 13}, "its pieces have 12 tokens, its metrics say otherwise"),
        (
            {"examples": array(1, 1, 1)},
            {"num_tokens": 15},
            "example 0 is in no row and not left out",
        ),
        ({"counts": array(2, 1)}, {}, "row 0 has 9 tokens, but holds 8"),
        (
            {
                "cut_starts": array(2**64 - 9, 4, dtype="u8"),
                "cut_stops": array(2**64 - 4, 7, dtype="u8"),
            },
            {},
            "piece 0 is -9..-4 of example 1",
        ),
    ],
)
def test_verify_compares_plans_with_their_examples(store, plan, change, told, problem) -> None:
    facts = facts_of(store, metrics=metrics(**told))
    write_plan(plan, facts, replace(ARRAYS, **change), overwrite=True)
    found = verify(store).problems
    assert any(one.startswith(f"packs/train-7.plan: {problem}") for one in found), found
