"""The recipe on all cores: the same bytes as in one process, and parts that travel."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.cache import build_sft_cache, read_meta
from niels_gpt.cache.cli import main
from niels_gpt.cache_tokenizer import CacheTokenizer
from niels_gpt.data.wikitext import ArticleFiles, ArticleSource, articles
from niels_gpt.tokenizer import load_tokenizer
from shardmill.building import BuildSpec, Feed, build_store
from shardmill.building.plan import cut_source, read_units
from shardmill.building.scheduler import FeedWork
from shardmill.sources import BatchLimits, MemorySource, TextSource
from shardmill.tokenizers import ByteTokenizer
from tests.helpers import folder_digest
from tests.niels_gpt.conftest import EXAMPLES


@pytest.mark.slow
def test_the_recipes_tokenizer_travels_to_a_worker(model: Path) -> None:
    tokenizer = CacheTokenizer(load_tokenizer(model, num_threads=3))
    code = (
        "import pickle, sys\n"
        "found = pickle.load(sys.stdin.buffer)\n"
        "print(found.fingerprint, found.encode('tea'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(tokenizer), capture_output=True, check=True
    )
    assert done.stdout.decode().strip() == f"{tokenizer.fingerprint} {tokenizer.encode('tea')}"


LINES = st.sampled_from([" = Title = ", " = Other = ", " = = Part = = ", " words ", "", "  ", "x"])


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(
    lines=st.lists(LINES, max_size=40),
    num_files=st.integers(1, 3),
    piece=st.integers(1, 120),
)
def test_the_pieces_of_articles_are_the_articles(tmp_path_factory, lines, num_files, piece):
    folder = tmp_path_factory.mktemp("wiki")
    for number in range(num_files):
        (folder / f"{number}.txt").write_text("\n".join(lines[number::num_files]))
    rows = TextSource(folder, split="line", limits=BatchLimits(num_documents=3))
    source = ArticleFiles(rows)
    wanted = [text for batch in ArticleSource(rows).batches() for text in batch.texts.to_pylist()]
    found = [
        text
        for part in source.cut(piece)
        for batch in pickle.loads(pickle.dumps(part)).batches()
        for text in batch.texts.to_pylist()
    ]
    assert found == wanted
    whole = [line for number in range(num_files) for line in lines[number::num_files]]
    assert wanted == list(articles(whole))


@pytest.mark.slow
def test_articles_are_built_alike_by_any_number_of_workers(tmp_path, monkeypatch):
    path = tmp_path / "wiki.train.raw"
    path.write_text(
        "".join(f" = Number {n} = \n" + " some words here \n" * (n % 50) for n in range(400))
    )
    rows = TextSource(path, split="line", name="wiki")
    wanted = None
    monkeypatch.setattr("shardmill.building.plan.CHUNK_BYTES", 10_000)
    for name, source, workers in (
        ("whole", ArticleSource(rows), 1),
        ("one", ArticleFiles(rows), 1),
        ("two", ArticleFiles(rows), 2),
    ):
        build_store(
            [Feed(source=source, fill=(("train", None),))],
            tmp_path / name,
            tokenizer=ByteTokenizer(),
            spec=BuildSpec(exact_shards=True, shard_bytes=40_000),
            workers=workers,
            unit_bytes=30_000,
        )
        wanted = wanted or folder_digest(tmp_path / name)
        assert folder_digest(tmp_path / name) == wanted
    assert read_meta(str(tmp_path / "two" / "meta.json"))["train_documents"] == 400


@pytest.mark.slow
def test_build_all_writes_the_same_bytes_with_one_worker_and_two(tmp_path, model, wiki):
    for workers in (1, 2):
        words = [
            *("build-all", "--cache-dir", str(tmp_path / str(workers)), "--tokenizer", str(model)),
            *("--roam-dir", str(EXAMPLES / "notes"), "--wikitext-path", str(wiki)),
            *("--only", "roam,wikitext", "--engine", "reference", "--workers", str(workers)),
        ]
        assert main(words) == 0
    assert folder_digest(tmp_path / "1") == folder_digest(tmp_path / "2")


def test_units_of_a_stream_are_at_work_together_while_the_budget_is_far() -> None:
    texts = MemorySource(["some words"] * 100, limits=BatchLimits(num_documents=5))
    feed = cut_source(texts, (("val", 10**6), ("train", None)))
    with FeedWork(feed) as work:
        work.begin(read_units(feed, 0, plan="", first=0, cursor=None))
        found = [work.take(10**9, most_held=4) for _ in range(6)]
        taken = [([unit.number for unit in one[0]], one[1]) for one in found if one is not None]
    assert taken == [([0], (0, 0)), ([1], (0, None)), ([2], (0, None)), ([3], (0, None))]


def test_a_senseless_number_of_workers_is_refused(tmp_path, model, capsys):
    words = ["build-all", "--cache-dir", str(tmp_path), "--tokenizer", str(model), "--workers", "0"]
    assert main(words) == 2
    assert "--workers 0: wanted 1 or more" in capsys.readouterr().err


@pytest.mark.slow
def test_chats_are_read_while_others_are_rendered(tmp_path, model):
    """Rendering waits here for the reader to be in the second batch: one thread would never be."""
    tokenizer = load_tokenizer(model)
    ahead = threading.Event()

    class Waiting:
        model_path = tokenizer.model_path
        vocab_size = tokenizer.vocab_size
        special_token_ids = staticmethod(tokenizer.special_token_ids)

        def encode(self, text: str) -> list[int]:
            assert text != "first" or ahead.wait(600)
            return tokenizer.encode(text)

    def chats():
        for number in range(3000):
            if number == 2000:
                ahead.set()
            question = {"role": "user", "content": "first" if number == 0 else str(number)}
            yield [question, {"role": "assistant", "content": "answer"}]

    build_sft_cache(chats(), str(tmp_path / "s"), tokenizer=Waiting(), val_frac=0.1, seed=1)
    assert read_meta(str(tmp_path / "s" / "meta.json"))["train_examples"] == 2700
