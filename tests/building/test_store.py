"""Guarantees 1, 3, 4 and 10 for builds: same bytes, done is done, nothing lost, bounded memory."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.building import BuildSpec, Feed, build_store, has_unfinished_build
from shardmill.building import worker as task
from shardmill.errors import (
    BuildError,
    BuildLockedError,
    EngineMismatchError,
    OptionError,
    ShardmillError,
    SourceError,
    StoreExistsError,
    StoreNotFoundError,
    TokenRangeError,
    UnfinishedBuildError,
)
from shardmill.records import Cursor, Ragged, TextBatch
from shardmill.sources import MemorySource, open_source
from shardmill.store import open_store, verify
from shardmill.testing.stores import read_documents
from shardmill.tokenizers import adapt_tokenizer, open_tokenizer
from tests.helpers import folder_digest

TOKENIZER = open_tokenizer("byte:1", specials={"eot": "<|eot|>"})
TEXTS = [f"document {number}: " + "ab" * (number % 7) for number in range(120)]


def source(texts: list[str] = TEXTS, name: str = "memory") -> MemorySource:
    return MemorySource(lambda: iter(texts), name=name)


def feed(texts: list[str] = TEXTS, **limits: int | None) -> Feed:
    return Feed(source=source(texts), fill=tuple(limits.items()) or (("train", None),))


def spec(**changes: object) -> BuildSpec:
    return BuildSpec(**{"shard_bytes": 512, "append_eot": True, **changes})


def stored(folder: Path, split: str) -> list[bytes]:
    """The texts of a split, without their end tokens."""
    return [bytes(int(t) - 1 for t in ids if t) for ids in read_documents(folder, split)]


class Interrupted(Exception):
    """Stands for a process that ends in mid-build."""


class StopsAfter:
    """A source of one document a batch that dies after some of them."""

    name = "stops"

    def __init__(self, texts: list[str], stop: int | None) -> None:
        self.texts, self.stop = texts, stop

    def describe(self) -> dict:
        return {"texts": len(self.texts)}

    def size_hint(self) -> int | None:
        return 0

    def batches(self, cursor: Cursor | None = None) -> Iterator[TextBatch]:
        for number in range((cursor or {"next": 0})["next"], len(self.texts)):
            if number == self.stop:
                raise Interrupted
            (batch,) = MemorySource([self.texts[number]]).batches()
            yield TextBatch(
                texts=batch.texts,
                num_read=1,
                counts=batch.counts,
                drops=batch.drops,
                cursor={"next": number + 1},
            )


def test_a_store_holds_the_documents_each_with_its_end_and_a_balanced_ledger(tmp_path):
    texts = ["one", "", "two\r\nlines", "three"]
    done = build_store([feed(texts)], tmp_path / "s", tokenizer=TOKENIZER, spec=spec())
    assert stored(tmp_path / "s", "train") == [b"one", b"two\nlines", b"three"]
    ledger = done.manifest.ledger
    assert (ledger.documents.read, ledger.documents.kept, ledger.documents.empty) == (4, 3, 1)
    assert (ledger.tokens.encoded, ledger.tokens.separators, ledger.tokens.kept) == (17, 3, 20)
    assert verify(tmp_path / "s").problems == []
    assert not has_unfinished_build(tmp_path / "s")
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(
    texts=st.lists(st.text(max_size=12), max_size=25),
    val=st.integers(0, 40),
    train=st.one_of(st.none(), st.integers(1, 80)),
    end=st.booleans(),
)
def test_every_document_and_token_is_in_one_bucket(tmp_path_factory, texts, val, train, end):
    folder = tmp_path_factory.mktemp("law4") / "s"
    done = build_store(
        [feed(texts, val=val, train=train)],
        folder,
        tokenizer=TOKENIZER,
        spec=spec(append_eot=end),
        allow_empty=True,
    )
    ledger = done.manifest.ledger
    clean = [text.removeprefix("\ufeff").replace("\r\n", "\n") for text in texts]
    whole = [text.encode() for text in clean if text]
    assert ledger.documents.read == len(texts)
    assert ledger.documents.empty == len(texts) - len(whole)
    kept = stored(folder, "val") + stored(folder, "train")
    assert all(full.startswith(part) for part, full in zip(kept, whole, strict=False))
    assert ledger.documents.kept + ledger.documents.over_budget == len(whole)
    made = sum(map(len, whole)) + end * len(whole)
    assert ledger.tokens.kept + ledger.tokens.over_budget == made
    assert done.manifest.splits["val"].tokens <= val
    if train is None:
        assert sum(split.tokens for split in done.manifest.splits.values()) == ledger.tokens.kept


@pytest.mark.parametrize("stop", [0, 1, 7, 63, 119])
def test_a_build_that_stopped_goes_on_to_the_same_bytes(tmp_path, stop):
    def run(name: str, stop: int | None, **options: bool) -> str:
        feeds = [
            Feed(source=StopsAfter(TEXTS, stop), fill=(("val", 200), ("train", None))),
            Feed(source=source(name="second"), fill=(("train", 900),)),
        ]
        build_store(feeds, tmp_path / name, tokenizer=TOKENIZER, spec=spec(), **options)
        return folder_digest(tmp_path / name)

    whole = run("whole", None)
    with pytest.raises(Interrupted):
        run("cut", stop)
    with pytest.raises(StoreNotFoundError):
        open_store(tmp_path / "cut")
    assert run("cut", None, resume=True) == whole
    assert run("cut", None, resume=True) == whole, "resuming a finished build changes nothing"


def test_a_budget_counts_what_was_done_before_the_stop(tmp_path):
    def run(name: str, stop: int | None, **options: bool) -> str:
        feeds = [Feed(source=StopsAfter(TEXTS, stop), fill=(("val", 300), ("train", 1000)))]
        build_store(feeds, tmp_path / name, tokenizer=TOKENIZER, spec=spec(), **options)
        return folder_digest(tmp_path / name)

    whole = run("whole", None)
    assert open_store(tmp_path / "whole").manifest.ledger.documents.read < len(TEXTS)
    with pytest.raises(Interrupted):
        run("cut", 30)
    assert run("cut", None, resume=True) == whole


def test_no_reader_sees_a_store_before_it_is_whole(tmp_path):
    seen = []

    def look(progress) -> None:
        seen.append(progress.tokens)
        with pytest.raises(StoreNotFoundError):
            open_store(tmp_path / "s")

    build_store([feed()], tmp_path / "s", tokenizer=TOKENIZER, spec=spec(), on_progress=look)
    assert seen == sorted(seen)
    assert seen[-1] == open_store(tmp_path / "s").manifest.ledger.tokens.kept
    open_store(tmp_path / "s")


def test_a_finished_store_is_replaced_only_on_request(tmp_path):
    def run(texts: list[str], **options: bool) -> None:
        build_store([feed(texts)], tmp_path / "s", tokenizer=TOKENIZER, spec=spec(), **options)

    run(["x" * 5000])
    with pytest.raises(StoreExistsError, match="overwrite"):
        run(["new"])
    with pytest.raises(StoreExistsError, match="other input or options"):
        build_store([feed()], tmp_path / "s", tokenizer=TOKENIZER, spec=spec(seed=1), resume=True)
    assert stored(tmp_path / "s", "train") == [b"x" * 5000]
    run(["new"], overwrite=True)
    assert stored(tmp_path / "s", "train") == [b"new"]
    assert len(list((tmp_path / "s/train").iterdir())) == 1, "no shard of the old store is left"


def test_a_folder_with_other_things_in_it_is_refused_before_any_work(tmp_path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s/thesis.txt").write_text("mine")
    with pytest.raises(ShardmillError, match=r"thesis\.txt"):
        build_store([feed()], tmp_path / "s", tokenizer=TOKENIZER, spec=spec())
    assert not (tmp_path / ".s.building").exists()


def test_a_resume_with_other_options_is_refused_by_name(tmp_path):
    feeds = [Feed(source=StopsAfter(TEXTS, 50), fill=(("train", None),))]
    with pytest.raises(Interrupted):
        build_store(feeds, tmp_path / "s", tokenizer=TOKENIZER, spec=spec())
    with pytest.raises(UnfinishedBuildError, match=r"spec\.shard_bytes: 512 -> 1024"):
        build_store(
            feeds, tmp_path / "s", tokenizer=TOKENIZER, spec=spec(shard_bytes=1024), resume=True
        )


def _rewrite(path: Path) -> None:
    path.write_text(path.read_text() + '{"text": "one more"}\n')


def _touch(path: Path) -> None:
    os.utime(path, ns=(0, 86_400 * 10**9))


def _rename(path: Path) -> None:
    path.rename(path.with_name("moved.jsonl"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_rewrite, [r"5\.jsonl: bytes 222 -> 243", r"5\.jsonl: last written 20\d\d-.* -> 20"]),
        (_touch, [r"5\.jsonl: last written 20\d\d-.* -> 1970-01-02 00:00:00"]),
        (_rename, [r"5\.jsonl: was an input -> is none", r"moved\.jsonl: was none -> is an input"]),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_resume_with_changed_input_names_the_file_and_what_changed(
    tmp_path, monkeypatch, change, says, nested
):
    monkeypatch.setattr("shardmill.building.plan.CHUNK_BYTES", 200)
    for number in range(6):
        lines = [json.dumps({"text": "some text"}) + "\n"] * 10
        path = tmp_path / f"in/{number}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(lines) + "{\n" * (number == 5))
    inputs: list[Path] = [tmp_path / "in"]
    if nested:
        (tmp_path / "more.txt").write_text("more")
        inputs.append(tmp_path / "more.txt")

    def run(**options: bool) -> None:
        feeds = [Feed(source=open_source(inputs), fill=(("train", None),))]
        build_store(feeds, tmp_path / "s", tokenizer=TOKENIZER, spec=spec(), **options)

    with pytest.raises(SourceError, match=r"5\.jsonl, line 11"):
        run()
    change(tmp_path / "in/5.jsonl")
    with pytest.raises(UnfinishedBuildError) as refused:
        run(resume=True)
    for words in says:
        assert re.search(words, str(refused.value)), refused.value
    assert "[" not in str(refused.value)
    assert re.search("overwrite=True|--overwrite", str(refused.value))


def test_a_finished_store_of_changed_input_is_refused_with_the_file_that_changed(tmp_path):
    for number in range(3):
        path = tmp_path / f"in/{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text("some text")

    def run(**options: bool) -> None:
        feeds = [Feed(source=open_source(tmp_path / "in"), fill=(("train", None),))]
        build_store(feeds, tmp_path / "s", tokenizer=TOKENIZER, spec=spec(), **options)

    run()
    (tmp_path / "in/1.txt").write_text("some other text")
    with pytest.raises(StoreExistsError, match=r"other input or options.*1\.txt: bytes 9 -> 15"):
        run(resume=True)


@pytest.mark.slow
def test_a_second_builder_is_refused_while_the_first_lives(tmp_path):
    def try_too(progress) -> None:
        with pytest.raises(BuildLockedError, match="another process"):
            build_store([feed()], tmp_path / "s", tokenizer=TOKENIZER, spec=spec())

    build_store([feed()], tmp_path / "s", tokenizer=TOKENIZER, spec=spec(), on_progress=try_too)


def test_an_id_that_does_not_fit_names_source_document_and_id(tmp_path):
    class Wide:
        def encode(self, text: str) -> list[int]:
            return [70_000] if text == "bad" else [1]

    texts = ["good", "good", "bad"]
    with pytest.raises(TokenRangeError, match=r"memory, document 2.*70,000.*uint16"):
        build_store(
            [feed(texts)],
            tmp_path / "s",
            tokenizer=adapt_tokenizer(Wide()),
            spec=spec(dtype="uint16", append_eot=False),
        )


def test_a_document_without_a_token_is_listed_with_its_reason(tmp_path):
    class Picky:
        vocab_size = 10

        def encode(self, text: str) -> list[int]:
            return [] if text == "?" else [1, 2]

    build_store(
        [feed(["a", "?", "b"])],
        tmp_path / "s",
        tokenizer=adapt_tokenizer(Picky()),
        spec=spec(append_eot=False),
        max_loss=0.5,
    )
    manifest = open_store(tmp_path / "s").manifest
    assert manifest.ledger.documents.dropped == {"no_tokens": 1}
    (line,) = (tmp_path / "s/dropped.jsonl").read_text().splitlines()
    assert json.loads(line) == {"id": "memory: document 1", "reason": "no_tokens"}


def test_an_end_token_must_be_named_by_the_tokenizer(tmp_path):
    with pytest.raises(OptionError, match="names no 'eot'"):
        build_store([feed()], tmp_path / "s", tokenizer=open_tokenizer("byte"), spec=spec())


@pytest.mark.slow
def test_a_fast_engine_that_is_caught_out_is_replaced_and_its_work_done_again(
    tmp_path, monkeypatch
):
    class Chosen:
        is_fast = True

        def __init__(self, name: str) -> None:
            self.produced_by = {"engine": name, "versions": {}}
            self.calls = 0

        def encode_unwatched(self, texts) -> Ragged:
            if self.produced_by["engine"] == "reference":
                return TOKENIZER.encode_batch(texts)
            return TOKENIZER.encode_batch(["wrong"] * len(texts))

        def watch(self, texts, ids, sizes=None) -> None:
            self.calls += 1
            if self.produced_by["engine"] == "fake" and self.calls == 40:
                raise EngineMismatchError("fake differs on 'x'")

    def choose(tokenizer, *, engine: str, **others) -> Chosen:
        return Chosen("reference" if engine == "reference" else "fake")

    feeds = [Feed(source=StopsAfter(TEXTS, None), fill=(("train", None),))]
    build_store(feeds, tmp_path / "wanted", tokenizer=TOKENIZER, spec=spec(), engine="reference")
    monkeypatch.setattr(task, "choose_encoder", choose)
    done = build_store(feeds, tmp_path / "s", tokenizer=TOKENIZER, spec=spec())
    assert stored(tmp_path / "s", "train") == stored(tmp_path / "wanted", "train")
    assert done.manifest.produced_by["engine"] == "reference"
    assert "fake differs" in done.manifest.produced_by["dropped_engine"]["mismatch"]


def test_a_resume_with_another_engine_is_refused(tmp_path, monkeypatch):
    feeds = [Feed(source=StopsAfter(TEXTS, 50), fill=(("train", None),))]
    with pytest.raises(Interrupted):
        build_store(feeds, tmp_path / "s", tokenizer=TOKENIZER, spec=spec())
    note = tmp_path / ".s.building/produced_by.json"
    note.write_text(json.dumps({**json.loads(note.read_text()), "engine": "other"}))
    feeds = [Feed(source=StopsAfter(TEXTS, None), fill=(("train", None),))]
    with pytest.raises(BuildError, match="used engine 'other'"):
        build_store(feeds, tmp_path / "s", tokenizer=TOKENIZER, spec=spec(), resume=True)


@pytest.mark.parametrize("left", [["lock", "plan.json", "run-0123456789abcdef"], ["lock"], []])
def test_what_a_kill_after_publishing_left_is_swept_up_by_a_resume(tmp_path, left):
    def build(**options):
        feeds = [Feed(source=StopsAfter(TEXTS, options.pop("stop", None)), fill=(("train", None),))]
        return build_store(feeds, tmp_path / "s", tokenizer=TOKENIZER, spec=spec(), **options)

    work = tmp_path / ".s.building"
    with pytest.raises(Interrupted):
        build(stop=50)
    plan = (work / "plan.json").read_bytes()
    build(resume=True)
    assert not work.exists()
    (work / "run-0123456789abcdef/store").mkdir(parents=True)
    for name in ("lock", "plan.json"):
        (work / name).write_bytes(plan if name == "plan.json" else b"")
    for path in [*work.iterdir()]:
        if path.name not in left:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    build(resume=True)
    assert not work.exists()


KILLED = """
import sys, time
from pathlib import Path
from shardmill.building import BuildSpec, Feed, build_store, plan
from shardmill.sources import BatchLimits, open_source
from shardmill.tokenizers import open_tokenizer
plan.CHUNK_BYTES = 40_000
corpus, folder = map(Path, sys.argv[1:3])
source = open_source(str(corpus / "*.jsonl"), limits=BatchLimits(num_bytes=40_000))
build_store(
    [Feed(source=source, fill=(("val", 50_000), ("train", None)))],
    folder,
    tokenizer=open_tokenizer("byte"),
    spec=BuildSpec(shard_bytes=100_000),
    resume=True,
    on_progress=lambda _: time.sleep(0.01),
)
"""


@pytest.mark.slow
def test_killed_at_random_and_resumed_the_bytes_are_the_same(tmp_path):
    rng = np.random.default_rng(int(os.environ.get("SHARDMILL_KILL_SEED", "7")))
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(20):
        rows = [
            json.dumps({"text": f"{number}-{row} " + "word " * int(rng.integers(1, 60))})
            for row in range(200)
        ]
        (corpus / f"{number:02d}.jsonl").write_text("\n".join(rows) + "\n")

    def start(folder: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", KILLED, str(corpus), str(folder)])

    before = time.monotonic()
    assert start(tmp_path / "whole").wait() == 0
    duration = time.monotonic() - before
    wanted = folder_digest(tmp_path / "whole")
    kills, most = 0, int(os.environ.get("SHARDMILL_KILLS", "6"))
    while True:
        build = start(tmp_path / "killed")
        try:
            wait = float(rng.uniform(0.2, duration)) if kills < most else None
            assert build.wait(timeout=wait) == 0
        except subprocess.TimeoutExpired:
            build.send_signal(signal.SIGKILL)
            build.wait()
            kills += 1
            if not (tmp_path / "killed").exists():
                with pytest.raises(StoreNotFoundError):
                    open_store(tmp_path / "killed")
            continue
        assert folder_digest(tmp_path / "killed") == wanted
        assert verify(tmp_path / "killed").problems == []
        assert {path.name for path in tmp_path.iterdir()} == {"corpus", "whole", "killed"}
        if kills == most:
            return
        shutil.rmtree(tmp_path / "killed")


def test_a_glob_of_files_builds_from_the_real_sources(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    (tmp_path / "b.txt").write_bytes(b"bad \xff byte")
    feeds = [Feed(source=open_source(str(tmp_path / "*.txt")), fill=(("train", None),))]
    done = build_store(feeds, tmp_path / "s", tokenizer=TOKENIZER, spec=spec())
    assert stored(tmp_path / "s", "train") == [b"one\ntwo", "bad \ufffd byte".encode()]
    assert done.manifest.ledger.repaired == {"invalid_utf8": 1}
