"""What a build takes is known before, bounded, and refused by name if it is too much."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardmill.building import BuildSpec, Feed, build_store, plan_store
from shardmill.building.resources import (
    DOCUMENT_BYTES,
    MIB,
    PROCESS_BYTES,
    Resources,
    open_resources,
)
from shardmill.errors import BuildError, OptionError, SourceError
from shardmill.protocols import Tokenizer
from shardmill.sources import BatchLimits, JsonlSource, MemorySource, ParquetSource
from shardmill.tokenizers import ByteTokenizer, TrainSpec, open_tokenizer, train_tokenizer
from tests.building.corpora import write_corpus

SPEC = BuildSpec(dtype="uint16")
NOTES = Path(__file__).parent.parent.parent / "examples" / "notes"


def feed_of(path: Path, limit: int | None = None) -> Feed:
    source = JsonlSource(path, limits=BatchLimits(num_documents=10))
    return Feed(source=source, fill=(("train", limit),))


def write_texts(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def planned(**options: int) -> Resources:
    with open_resources(**options) as resources:
        return resources


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk is not allowed here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_build_that_the_disk_cannot_hold_is_refused_before_it_starts(tmp_path, tiny_disk):
    path = write_texts(tmp_path / "a.jsonl", ["word " * 100] * 400)
    with pytest.raises(BuildError, match=r"0\.2 MB are free.*takes about 0\.4 MB"):
        build_store([feed_of(path)], tiny_disk / "s", tokenizer=ByteTokenizer(), spec=SPEC)
    assert not list(tiny_disk.iterdir())
    limited = feed_of(path, limit=20_000)
    build_store([limited], tiny_disk / "s", tokenizer=ByteTokenizer(), spec=SPEC)


@pytest.mark.parametrize("limit", [None, 1000])
def test_a_plan_gives_units_tokens_and_disk_and_builds_nothing(tmp_path, monkeypatch, limit):
    monkeypatch.setattr("shardmill.building.plan.CHUNK_BYTES", 2_000)
    path = write_texts(tmp_path / "a.jsonl", ["word " * 10] * 200)
    plan = plan_store(
        [feed_of(path, limit)],
        tmp_path / "deep/s",
        tokenizer=ByteTokenizer(),
        spec=SPEC,
        workers=3,
        unit_bytes=4_000,
    )
    (feed,) = plan.feeds
    assert feed.num_bytes == path.stat().st_size
    assert feed.num_units == 7
    assert feed.num_tokens is not None
    assert feed.disk_bytes is not None
    assert 0.8 < feed.num_tokens / (limit or 10_000) < 1.25
    assert feed.disk_bytes >= 2 * feed.num_tokens
    assert plan.disk_bytes == feed.disk_bytes
    assert (plan.workers, plan.memory_bytes) == (3, 4 * PROCESS_BYTES)
    assert [one.name for one in tmp_path.iterdir()] == ["a.jsonl"]


def test_what_is_unknown_is_not_guessed(tmp_path):
    write_corpus(tmp_path / "corpus")
    feeds = [
        Feed(source=MemorySource(iter(["once"])), fill=(("train", None),)),
        Feed(source=ParquetSource(tmp_path / "corpus/tables"), fill=(("train", None),)),
    ]
    plan = plan_store(feeds, tmp_path / "s", tokenizer=ByteTokenizer(), spec=SPEC)
    assert [feed.num_tokens is None for feed in plan.feeds] == [True, False]
    assert plan.disk_bytes is None
    # it was not read
    build_store(feeds, tmp_path / "s", tokenizer=ByteTokenizer(), spec=SPEC, max_loss=0.1)


def test_no_more_workers_than_memory_allows(tmp_path, monkeypatch):
    monkeypatch.setattr("shardmill.building.resources.num_cores", lambda: 8)
    assert planned(memory=4 * PROCESS_BYTES).workers == 3
    assert planned(memory=PROCESS_BYTES).workers == 1
    with pytest.raises(OptionError, match="8 workers take about"):
        planned(workers=8, memory=4 * PROCESS_BYTES)
    path = write_texts(tmp_path / "a.jsonl", ["x"])
    for memory in (0, -1):
        with pytest.raises(OptionError, match=f"memory={memory}: one process takes about 536,870,"):
            planned(memory=memory)
    for wrong in ({"workers": "2"}, {"workers": True}, {"unit_bytes": 1.5}, {"memory": "1GiB"}):
        with pytest.raises(OptionError, match="wanted a whole number"):
            planned(**wrong)
    with pytest.raises(OptionError, match="memory=1,000"):
        build_store(
            [feed_of(path)], tmp_path / "s", tokenizer=ByteTokenizer(), spec=SPEC, memory=1000
        )


@pytest.mark.parametrize("workers", [1, 2])
def test_a_document_that_memory_does_not_hold_is_refused_by_file_and_size(
    tmp_path, monkeypatch, workers
):
    monkeypatch.setattr("shardmill.building.plan.CHUNK_BYTES", 2_000)
    path = write_texts(tmp_path / "a.jsonl", ["small " * 50, "large " * 300_000, *["x" * 999] * 9])
    share = PROCESS_BYTES + 16 * MIB  # a document of one MiB fits
    with pytest.raises(SourceError, match=r"a\.jsonl.*a document of 1,800,000 bytes.*1,048,576"):
        build_store(
            [feed_of(path)],
            tmp_path / "s",
            tokenizer=ByteTokenizer(),
            spec=SPEC,
            workers=workers,
            unit_bytes=2_000,
            memory=share if workers == 1 else 3 * share,
        )


HUGE = """
import sys
from pathlib import Path
from shardmill.building import BuildSpec, Feed, build_store
from shardmill.building.resources import PROCESS_BYTES
from shardmill.sources import JsonlSource
from shardmill.tokenizers import ByteTokenizer
path = Path(sys.argv[1])
build_store(
    [Feed(source=JsonlSource(path), fill=(("train", None),))],
    path.parent / "s",
    tokenizer=ByteTokenizer(),
    spec=BuildSpec(),
    workers=2,
    memory=PROCESS_BYTES * 3 + 3 * 2**27,
)
"""


@pytest.mark.parametrize("first", [b"", b'{"text": "b"}\n'])
def test_a_line_larger_than_the_memory_of_a_worker_is_one_clear_error(tmp_path, first):
    """Met by the first process, which looks at the first row, or by a worker."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(first)
    with path.open("r+b") as file:
        file.truncate(3 * 2**30)
    command = [sys.executable, "-c", HUGE, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    words = done.stderr.splitlines()[-1]
    number, begin = (2, len(first)) if first else (1, 0)
    assert words.startswith(f"shardmill.errors.SourceError: {path}, line {number} (byte {begin}): ")
    assert "bytes and no end of the line; with the available memory" in words


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """A small model of each library."""
    texts = [path.read_text() for path in sorted(NOTES.glob("*.md"))]
    made = {}
    for library, kind in (("sentencepiece", "unigram"), ("tokenizers", "byte-bpe")):
        folder = tmp_path_factory.mktemp(library)
        spec = TrainSpec(vocab_size=500, model_type=kind)
        model = train_tokenizer(folder, texts=texts, texts_name="notes", spec=spec).model
        made[library] = open_tokenizer(str(model))
    return made


def test_a_document_may_be_as_large_as_its_tokenizer_leaves_memory_for(models):
    """Libraries hold a text in many forms at once; ours does not."""
    plan = planned(workers=1, memory=PROCESS_BYTES + 1024 * MIB)
    assert plan.max_document(ByteTokenizer()) == 64 * MIB
    for library, model in models.items():
        assert plan.max_document(model) == 1024 * MIB // DOCUMENT_BYTES[library]
    small = planned(workers=1, memory=PROCESS_BYTES)
    assert {small.max_document(one) for one in (ByteTokenizer(), *models.values())} == {MIB}


@pytest.mark.slow
@pytest.mark.parametrize("library", sorted(DOCUMENT_BYTES))
def test_documents_as_large_as_allowed_are_built_in_that_memory(tmp_path, models, library):
    """The kernel keeps workers to it. Arrow must not reserve more than it needs for that."""
    memory = 3 * (PROCESS_BYTES + 640 * MIB)
    most = planned(workers=2, memory=memory).max_document(models[library])
    note = (NOTES / "Bread.md").read_text()
    texts = [(note * (most // len(note) + 1)).encode()[:most].decode("utf-8", "ignore")] * 4
    path = write_texts(tmp_path / "a.jsonl", texts)
    done = build_store(
        [Feed(source=JsonlSource(path), fill=(("train", None),))],
        tmp_path / "s",
        tokenizer=models[library],
        spec=SPEC,
        engine="reference",
        workers=2,
        unit_bytes=1,
        memory=memory,
    )
    assert done.manifest.ledger.documents.kept == 4
    assert done.cost is not None
    assert done.cost.num_workers == 2
