"""Segments that are made without the journal and carried to it are those that are made in it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.building import BuildSpec, Feed
from shardmill.building.journal import Receipt, Segment, keep_segment, read_receipts
from shardmill.building.plan import cut_feed, make_unit
from shardmill.building.worker import ChunkEncoder, TokenRules, UnitTask, WorkerTools
from shardmill.errors import BuildError
from shardmill.sources import JsonlSource
from shardmill.tokenizers import ByteTokenizer, choose_encoder
from tests.building.corpora import SMALL, write_corpus
from tests.helpers import folder_digest


@pytest.fixture(autouse=True, scope="module")
def _untimed() -> Iterator[None]:
    """No segment is sealed because a machine is slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardmill.building.journal.SEGMENT_SECONDS", 1e9)
        yield


class Died(Exception):
    """As a worker that is gone."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"), num_files=2)


def task_of(corpus: Path, folder: Path, *, segment_tokens: int, most: int | None) -> UnitTask:
    source = JsonlSource(corpus / "pages", on_bad="skip", limits=SMALL)
    feed = cut_feed(Feed(source=source, fill=(("train", most),)))
    rules = TokenRules.of(BuildSpec(), ByteTokenizer())
    return UnitTask(
        unit=make_unit(feed, 0, 0, len(feed.chunks), plan="p"),
        folder=folder,
        encoder=ChunkEncoder(rules=rules, max_document=2**30),
        segment_tokens=segment_tokens,
    )


TOKENIZER = ByteTokenizer()
CHOSEN = choose_encoder(TOKENIZER).produced_by
TOOLS = WorkerTools(tokenizer=TOKENIZER, produced_by=CHOSEN, check="sample")
IN_THREADS = replace(TOOLS, has_spare_cores=True)


def write(task: UnitTask, num_receipts: int | None = None) -> list[Receipt]:
    """One attempt where the journal is, with cores to spare; it dies after some receipts."""
    emitted: list[Receipt] = []

    def emit(segment: Segment) -> None:
        assert segment.parts is None, "the journal has them"
        emitted.append(segment.receipt)
        if len(emitted) == num_receipts:
            raise Died

    if num_receipts == 0:
        return []
    with suppress(Died):
        task.run(IN_THREADS, emit)
    return emitted


def carry(task: UnitTask, num_segments: int | None = None) -> list[Segment]:
    """One attempt in a process that sees nothing of the journal; it dies after some segments."""
    far = pickle.loads(pickle.dumps(task.detached()))
    arrived: list[Segment] = []

    def emit(segment: Segment) -> None:
        if num_segments is not None and len(arrived) >= num_segments:
            raise Died
        arrived.append(pickle.loads(pickle.dumps(segment)))
        keep_segment(task.folder, arrived[-1])

    with suppress(Died):
        far.run(TOOLS, emit)
    return arrived


@pytest.mark.slow
@settings(deadline=None, max_examples=12)
@given(
    segment_tokens=st.sampled_from([1, 500, 3_000, 10**9]),
    most=st.sampled_from([None, 1, 4_000]),
    deaths=st.lists(st.integers(0, 6), max_size=3),
)
def test_carried_by_any_number_of_attempts_the_journal_is_the_same(
    tmp_path_factory, corpus, segment_tokens, most, deaths
):
    place = tmp_path_factory.mktemp("units")
    here = task_of(corpus, place / "here", segment_tokens=segment_tokens, most=most)
    there = replace(here, folder=place / "there")
    for after in deaths:
        write(here, after)
        carry(there, after)
    assert [segment.receipt for segment in carry(there)] == write(here)
    assert folder_digest(place / "there") == folder_digest(place / "here")


def test_a_segment_that_changed_on_its_way_does_not_count(tmp_path, corpus):
    task = task_of(corpus, tmp_path / "unit", segment_tokens=500, most=None)
    sent: list[Segment] = []
    task.detached().run(TOOLS, sent.append)
    keep_segment(task.folder, sent[0])
    parts = dict(sent[1].parts or {})
    parts["tokens"] = parts["tokens"][:-1] + b"\xff"
    with pytest.raises(
        BuildError, match=r"000001\.tokens: this segment did not arrive as it was sent"
    ):
        keep_segment(task.folder, replace(sent[1], parts=parts))
    assert read_receipts(task.folder, task.unit.key) == [sent[0].receipt]
