"""Same bytes from many processes, whichever of them does what, and however the work is cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.building import BuildSpec, build_store
from shardmill.store import open_store, verify
from shardmill.store.layout import ORIGINS
from shardmill.tokenizers import open_tokenizer
from tests.building.corpora import feeds_of, write_corpus
from tests.helpers import folder_digest

TOKENIZER = open_tokenizer("byte:1", specials={"eot": "<|eot|>"})
SPEC = BuildSpec(shard_bytes=20_000, append_eot=True)
LIMITS = [None, (2_000, 9_000), (0, 40_000), (500, 10**9)]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks, and many segments in a unit."""
    monkeypatch.setattr("shardmill.building.plan.CHUNK_BYTES", 3_000)
    monkeypatch.setattr("shardmill.building.journal.SEGMENT_TOKENS", 4_000)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def build(corpus: Path, out: Path, limits: tuple[int, int] | None = None, **manner: object) -> str:
    feeds = feeds_of(corpus, limits=limits)
    build_store(feeds, out, tokenizer=TOKENIZER, spec=SPEC, **manner)
    return folder_digest(out)


@pytest.mark.slow
@settings(deadline=None, max_examples=8)
@given(
    unit_bytes=st.sampled_from([1, 2_999, 10_000, 50_000, 10**9]),
    segment_tokens=st.sampled_from([300, 7_777, 10**9]),
    limits=st.sampled_from(LIMITS),
)
def test_the_bytes_do_not_depend_on_the_size_of_units_or_segments(
    tmp_path_factory, corpus, unit_bytes, segment_tokens, limits
):
    folder = tmp_path_factory.mktemp("units")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardmill.building.plan.CHUNK_BYTES", 3_000)
        wanted = build(corpus, folder / "wanted", limits, workers=1)
        patch.setattr("shardmill.building.journal.SEGMENT_TOKENS", segment_tokens)
        assert build(corpus, folder / "s", limits, workers=1, unit_bytes=unit_bytes) == wanted


@pytest.mark.slow
def test_rows_are_named_as_in_the_whole_file(tmp_path, corpus, small):
    """The chunks of this build are parts of files; those of the other are whole sources."""
    build(corpus, tmp_path / "parts", workers=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardmill.building.plan.CHUNK_BYTES", 10**9)
        build(corpus, tmp_path / "whole", workers=1)
    dropped = [(tmp_path / name / "dropped.jsonl").read_text() for name in ("parts", "whole")]
    assert dropped[0] == dropped[1]
    ids = [json.loads(line)["id"] for line in dropped[0].splitlines()]
    assert any(one.startswith("3.jsonl:") for one in ids)
    assert len(set(ids)) == len(ids)
    for name in ("parts", "whole"):
        (tmp_path / name / ORIGINS).unlink()  # it lists chunks, which differ here
    assert folder_digest(tmp_path / "parts") == folder_digest(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("limits", LIMITS)
def test_one_two_three_and_seven_workers_write_the_same_bytes(tmp_path, corpus, small, limits):
    wanted = build(corpus, tmp_path / "one", limits, workers=1)
    assert verify(tmp_path / "one").problems == []
    for workers, unit_bytes in ((2, 20_000), (3, 3_000), (7, 9_000)):
        out = tmp_path / f"s{workers}"
        assert build(corpus, out, limits, workers=workers, unit_bytes=unit_bytes) == wanted
        assert not (tmp_path / f".s{workers}.building").exists()


def test_two_workers_write_the_same_bytes_as_one(tmp_path, corpus, small):
    wanted = build(corpus, tmp_path / "one", (2_000, 9_000), workers=1)
    assert open_store(tmp_path / "one").manifest.ledger.documents.over_budget > 0
    assert build(corpus, tmp_path / "two", (2_000, 9_000), workers=2, unit_bytes=5_000) == wanted
