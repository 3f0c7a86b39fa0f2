"""The writer: nothing wraps, nothing is lost, memory stays bounded, failure publishes nothing."""

from __future__ import annotations

import resource
import subprocess
import sys
import tracemalloc
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import BuildError, OptionError, StoreExistsError, TokenRangeError
from shardmill.records import Drop, Ragged
from shardmill.store import StoreWriter, open_store
from shardmill.store.layout import check_tokens, fit_tokens
from shardmill.testing.stores import build_small_store, plain_facts, read_documents


def writer(folder: Path, **changes) -> StoreWriter:
    options = {"splits": ["train"], "dtype": "uint16", "shard_bytes": 8} | changes
    return StoreWriter(folder, **options)


@settings(deadline=None, max_examples=150)
@given(
    ids=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 2**16 + 2), min_size=1),
    dtype=st.sampled_from(["uint16", "uint32"]),
    vocab_size=st.none() | st.integers(1, 2**17),
)
def test_an_id_is_kept_or_refused_and_never_wrapped(ids, dtype, vocab_size) -> None:
    ragged = Ragged.from_sequences([[], ids[:1], ids[1:]])
    limit = min(int(np.iinfo(dtype).max) + 1, vocab_size or 2**64)
    if all(0 <= number < limit for number in ids):
        fitted = fit_tokens(ragged, dtype, vocab_size=vocab_size)
        assert fitted.values.tolist() == ids
        assert fitted.values.dtype == dtype
    else:
        first = next(n for n, number in enumerate(ids) if not 0 <= number < limit)
        with pytest.raises(TokenRangeError) as error:
            fit_tokens(ragged, dtype, vocab_size=vocab_size, where="a.txt", first=100)
        start = f"a.txt, document {101 + (first > 0)}: token id {ids[first]:,} does not fit"
        assert str(error.value).startswith(start)


@pytest.mark.parametrize("name", ["packs", "Packs"])
def test_a_split_is_not_called_as_the_folder_of_plans(tmp_path: Path, name: str) -> None:
    with pytest.raises(OptionError, match=f"split '{name}': .*the folder of pack plans"):
        writer(tmp_path / "s", splits=["train", name])
    assert not (tmp_path / "s").exists()


def test_an_id_that_does_not_fit_names_source_document_and_way_out(tmp_path: Path) -> None:
    with writer(tmp_path) as out:
        out.append("train", Ragged.from_sequences([[1], [2]]))
        for dtype in (np.int64, np.int32, np.uint32, np.uint64):
            bad = Ragged.from_sequences([[3], [4, 65536]], dtype=dtype)
            with pytest.raises(
                TokenRangeError, match=r"wiki, document 3: token id 65,536 .*dtype='uint32'"
            ):
                out.append("train", bad, where="wiki")
        with pytest.raises(TokenRangeError, match=r"document 2: token id -1 .*never negative"):
            out.append("train", Ragged.from_sequences([[-1]]))
        # the refused calls wrote nothing: the store holds the two good documents
        out.finish(plain_facts({"train": Ragged.from_sequences([[1], [2]])}))
    assert [part.tolist() for part in read_documents(tmp_path, "train")] == [[1], [2]]


def test_the_largest_ids_fit(tmp_path: Path) -> None:
    for dtype, last in (("uint16", 65535), ("uint32", 4294967295)):
        ragged = Ragged.from_sequences([[0, last]])
        build_small_store(tmp_path / dtype, {"a": ragged}, dtype=dtype)
        assert read_documents(tmp_path / dtype, "a").values.tolist() == [0, last]


@pytest.mark.parametrize(
    ("values", "offsets", "wanted"),
    [
        (np.array([1.0, 2.0]), [0, 2], "wanted 1-d integers"),
        (np.array([True, False]), [0, 2], "wanted 1-d integers"),
        (np.array([[1, 2]]), [0, 1], "wanted 1-d integers"),
        (np.array([1, 2]), [0, 1], "from 0 to 2"),
        (np.array([1, 2]), [1, 2], "from 0 to 2"),
        (np.array([1, 2]), [], "from 0 to 2"),
        (np.array([1, 2, 3]), [0, 2, 1, 3], "offsets decrease"),
    ],
)
def test_documents_that_make_no_sense_are_refused(tmp_path, values, offsets, wanted) -> None:
    with writer(tmp_path) as out, pytest.raises(OptionError, match=wanted):
        out.append("train", Ragged(values, np.array(offsets, np.int64)))


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"dtype": "int16"}, "'uint16' or 'uint32'"),
        ({"splits": []}, "at least one"),
        ({"splits": ["a", "A"]}, "each once"),
        ({"splits": ["../a"]}, "a split's name is"),
        ({"splits": [""]}, "a split's name is"),
        ({"shard_bytes": 7}, "for instance 6"),
        ({"shard_bytes": 0}, "positive multiple of 2"),
        ({"shard_bytes": 2**63}, "positive multiple of 2"),
        ({"shard_bytes": -2}, "positive multiple of 2"),
        ({"shard_bytes": 6, "dtype": "uint32"}, "for instance 4"),
    ],
)
def test_a_store_that_cannot_be_is_refused_before_a_file_exists(tmp_path, changes, wanted) -> None:
    with pytest.raises(OptionError, match=wanted):
        writer(tmp_path / "s", **changes)
    assert not (tmp_path / "s").exists()


def test_an_unknown_split_is_refused(tmp_path: Path) -> None:
    with writer(tmp_path) as out, pytest.raises(OptionError, match=r"no split 'val'"):
        out.append("val", Ragged.from_sequences([[1]]))


LEDGERS = {
    "documents.read": ("documents read is 9", {"read": 9}, {}),
    "documents.kept": ("documents kept is 3", {"read": 3, "kept": 3}, {}),
    "tokens.encoded": ("tokens encoded . separators is 9", {}, {"encoded": 9}),
    "tokens.kept": ("tokens kept is 4", {}, {"encoded": 4, "kept": 4}),
    "dropped": ("ledger says dropped", {"read": 3, "dropped": {"bad": 1}}, {}),
}


@pytest.mark.parametrize("name", LEDGERS)
def test_a_ledger_that_does_not_balance_publishes_nothing(tmp_path: Path, name: str) -> None:
    wanted, documents, tokens = LEDGERS[name]
    ragged = Ragged.from_sequences([[1], [2, 3]])
    facts = plain_facts({"train": ragged})
    ledger = msgspec.structs.replace(
        facts.ledger,
        documents=msgspec.structs.replace(facts.ledger.documents, **documents),
        tokens=msgspec.structs.replace(facts.ledger.tokens, **tokens),
    )
    with writer(tmp_path) as out:
        out.append("train", ragged)
        with pytest.raises(BuildError, match=wanted):
            out.finish(msgspec.structs.replace(facts, ledger=ledger))
    assert not (tmp_path / "meta.json").exists()


def test_a_dropped_row_that_the_ledger_forgets_is_refused(tmp_path: Path) -> None:
    with writer(tmp_path) as out:
        out.record_drops([Drop(id="x", reason="bad")])
        with pytest.raises(BuildError, match="every dropped row"):
            out.finish(plain_facts({}))


def test_a_finished_store_is_not_written_again(tmp_path: Path) -> None:
    ragged = Ragged.from_sequences([[1]])
    with writer(tmp_path) as out:
        out.append("train", ragged)
        out.finish(plain_facts({"train": ragged}))
        for call in (
            lambda: out.append("train", ragged),
            lambda: out.finish(plain_facts({"train": ragged})),
            lambda: out.record_drops([]),
        ):
            with pytest.raises(BuildError, match="this writer is finished"):
                call()
    with pytest.raises(StoreExistsError, match=r"meta\.json is here already"):
        writer(tmp_path)
    assert open_store(tmp_path).num_tokens("train") == 1


def test_an_error_in_the_block_leaves_no_manifest_and_no_open_file(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(KeyboardInterrupt), writer(tmp_path) as out:  # noqa: PT012
        out.append("train", Ragged.from_sequences([[1, 2, 3, 4, 5]]))
        out.record_drops([Drop(id="x", reason="bad")])
        raise KeyboardInterrupt
    assert not (tmp_path / "meta.json").exists()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    with pytest.raises(BuildError, match="this writer is failed"):
        out.append("train", Ragged.from_sequences([[1]]))


FULL_DISK = """
import resource, sys
import numpy as np
from pathlib import Path
from shardmill.errors import BuildError
from shardmill.records import Ragged
from shardmill.store import StoreWriter
from shardmill.testing.stores import plain_facts
resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, 4_000_000))
documents = Ragged(np.zeros(10**6, np.int64), np.array([0, 10**6]))
with StoreWriter(Path(sys.argv[1]), splits=["a"], dtype="uint16", shard_bytes=None) as out:
    try:
        for _ in range(9):
            out.append("a", documents)
    except BuildError as error:
        print(error)
    try:
        out.finish(plain_facts({"a": documents}))
    except BuildError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_disk_that_takes_no_more_ends_the_build_with_advice(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FULL_DISK, str(tmp_path / "s")],
        capture_output=True,
        check=True,
        text=True,
    )
    first, second = done.stdout.splitlines()
    assert "a_tokens.bin: cannot write: File too large; nothing was published" in first
    assert "this writer is failed" in second
    assert done.stderr == ""
    assert not (tmp_path / "s" / "meta.json").exists()


def test_appending_takes_a_few_mebibytes_whatever_the_size(tmp_path: Path) -> None:
    tokens = Ragged(np.arange(12_000_000) % 60_000, np.array([0, 12_000_000]))
    offsets = np.arange(4_000_001)
    short = Ragged(np.ones(4_000_000, np.int64), offsets)
    with writer(tmp_path, shard_bytes=10_000_000) as out:
        tracemalloc.start()
        out.append("train", tokens)  # 96 MB in
        out.append("train", short)  # 64 MB in
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 40e6


def test_many_shards_hold_one_open_file(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir()))
    ragged = Ragged.from_sequences([range(200)])
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 6, hard))
    try:
        build_small_store(tmp_path / "s", {"a": ragged}, shard_bytes=2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(open_store(tmp_path / "s").token_files("a")) == 200


def test_checking_does_not_copy() -> None:
    values = np.zeros(4_000_000, np.int64)
    ragged = Ragged(values, np.array([0, len(values)]))
    tracemalloc.start()
    check_tokens(ragged, "uint16")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1e6
    same = Ragged(values.astype(np.uint16), ragged.offsets)
    assert fit_tokens(same, "uint16").values is same.values
