"""Same bytes from many processes, whichever of them does what, and however the work is cut."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardmill.building import BuildSpec, Feed, build_chats, build_store
from shardmill.building.splits import HashSplit
from shardmill.chat import bind_template, known_template
from shardmill.protocols import Source
from shardmill.records import Conversation, Cursor, TextBatch
from shardmill.sources import BatchLimits, JsonlSource, MemoryChats, MemorySource, open_chats
from shardmill.store import open_store, verify
from shardmill.testing.stores import read_documents
from shardmill.tokenizers import open_tokenizer
from tests.building.corpora import SMALL, feeds_of, write_corpus
from tests.helpers import folder_digest

TOKENIZER = open_tokenizer("byte:1", specials={"eot": "<|eot|>"})
SPEC = BuildSpec(shard_bytes=20_000, append_eot=True)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks and units."""
    monkeypatch.setattr("shardmill.building.plan.CHUNK_BYTES", 3_000)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def build(corpus: Path, out: Path, limits: tuple[int, int] | None = None, **manner: object) -> str:
    feeds = feeds_of(corpus, limits=limits)
    build_store(feeds, out, tokenizer=TOKENIZER, spec=SPEC, max_loss=1.0, **manner)
    return folder_digest(out)


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
        assert verify(tmp_path / name).problems == []
    for split in ("train", "val"):
        documents = [read_documents(tmp_path / name, split) for name in ("parts", "whole")]
        assert documents[0] == documents[1]


THREE = HashSplit(seed=3, fractions=(("val", 0.2), ("test", 0.1)))
CHATS = open_tokenizer(
    "byte:4", specials={"sys": "<|s|>", "usr": "<|u|>", "asst": "<|a|>", "eot": "<|e|>"}
)
MESSAGES = [
    [{"role": "user", "content": f"{n} " * (n % 9)}, {"role": "assistant", "content": "yes " * n}]
    for n in range(150)
]


class Generator:
    """A source of the user's own that cannot be cut, and whose batches are a generator."""

    name = "generator"

    def describe(self) -> dict[str, Any]:
        return {"name": self.name}

    def size_hint(self) -> None:
        return None

    def batches(self, cursor: Cursor | None = None) -> Iterator[TextBatch]:
        texts = [f"{number} " * (number % 50) for number in range(400)]
        yield from MemorySource(texts, limits=SMALL).batches(cursor)


def by_hash(source: Source) -> Feed:
    fill = tuple((split, None) for split in THREE.splits)
    return Feed(source=source, fill=fill, by_hash=THREE)


def documents(make: Callable[[Path], list[Feed]]) -> Callable[..., None]:
    def build(corpus: Path, out: Path, **how: Any) -> None:
        build_store(make(corpus), out, tokenizer=TOKENIZER, spec=SPEC, **how)

    return build


def conversations(files: bool) -> Callable[..., None]:
    def build(corpus: Path, out: Path, **how: Any) -> None:
        path, limits = corpus / "chats.jsonl", BatchLimits(num_bytes=3_000)
        if not path.exists():
            rows = [json.dumps({"messages": messages}) for messages in MESSAGES]
            path.write_text("\n".join([*rows[:70], "{", *rows[70:]]) + "\n")
        memory = MemoryChats([Conversation(messages=messages) for messages in MESSAGES])
        build_chats(
            open_chats(path, on_bad="skip", limits=limits) if files else memory,
            out,
            template=bind_template(known_template("four-marker"), CHATS),
            tokenizer=CHATS,
            spec=BuildSpec(shard_bytes=2_000, seed=5),
            val_fraction=0.2,
            test_fraction=0.1,
            **how,
        )

    return build


BUILDS: dict[str, Callable[..., None]] = {
    "limits": documents(lambda corpus: feeds_of(corpus, limits=(2_000, 9_000))),
    "hash": documents(
        lambda corpus: [by_hash(feed.source) for feed in feeds_of(corpus)] + [by_hash(Generator())]
    ),
    "generator": documents(
        lambda corpus: [
            Feed(source=Generator(), fill=(("val", 5_000), ("train", 20_000))),
            Feed(source=JsonlSource(corpus / "pages", on_bad="skip"), fill=(("train", None),)),
            Feed(source=Generator(), fill=(("train", None),)),
        ]
    ),
    "chats of files": conversations(files=True),
    "chats in memory": conversations(files=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BUILDS)
def test_any_number_of_workers_writes_the_same_bytes(tmp_path, corpus, small, kind):
    """Other limits, and more orders of work, are in test_simulated.py."""
    BUILDS[kind](corpus, tmp_path / "one", workers=1)
    wanted = folder_digest(tmp_path / "one")
    assert verify(tmp_path / "one").problems == []
    seven = ((7, 1),) if kind == "limits" else ()
    for workers, unit_bytes in ((1, 1), (3, 10**4), *seven):
        out = tmp_path / f"s{workers}"
        BUILDS[kind](corpus, out, workers=workers, unit_bytes=unit_bytes)
        assert folder_digest(out) == wanted
        assert not (tmp_path / f".s{workers}.building").exists()


def test_two_workers_write_the_same_bytes_as_one(tmp_path, corpus, small):
    wanted = build(corpus, tmp_path / "one", (2_000, 9_000), workers=1)
    assert open_store(tmp_path / "one").manifest.ledger.documents.over_budget > 0
    assert build(corpus, tmp_path / "two", (2_000, 9_000), workers=2, unit_bytes=5_000) == wanted
