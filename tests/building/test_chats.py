"""Guarantees 1, 3, 4, 8 and 9 for builds of conversations."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.building import BuildSpec, build_chats, worker
from shardmill.building import chats as render
from shardmill.chat import Rendered, TrainPolicy, bind_template, known_template
from shardmill.chat.proof.prove import prove_mask
from shardmill.errors import (
    BuildError,
    EngineMismatchError,
    LossError,
    MaskProofError,
    OptionError,
    SourceError,
    StoreExistsError,
    TokenRangeError,
    UnfinishedBuildError,
)
from shardmill.records import Conversation, ConversationBatch, Cursor, Drop, Ragged
from shardmill.sources import MemoryChats, open_chats
from shardmill.store import open_store, verify
from shardmill.store.readers import ChatSpace
from shardmill.testing.stores import assert_same_examples, read_examples
from shardmill.tokenizers import open_tokenizer
from tests.building.workplaces import receipts
from tests.helpers import folder_digest

TOKENIZER = open_tokenizer(
    "byte:4", specials={"sys": "<|s|>", "usr": "<|u|>", "asst": "<|a|>", "eot": "<|e|>"}
)
TEMPLATE = bind_template(known_template("four-marker"), TOKENIZER)
PROOF = prove_mask(TEMPLATE, TOKENIZER)
OTHER = bind_template(
    known_template("four-marker"),
    open_tokenizer("byte:4", specials={"usr": "U", "asst": "A", "eot": "E", "sys": "S"}),
)


def chat(*words: str, **fields: object) -> Conversation:
    """User and assistant in turn."""
    messages = [
        {"role": ("user", "assistant")[number % 2], "content": word}
        for number, word in enumerate(words)
    ]
    return Conversation(**{"messages": messages, **fields})


CHATS = [
    chat(
        f"question {n}",
        "yes " * (n % 5) + str(n),
        id=f"chat {n}",
        group=f"g{n // 3}" if n % 2 else None,
    )
    for n in range(60)
]


class Interrupted(Exception):
    """Stands for a process that ends in mid-build."""


class Chats:
    """A source of some conversations a batch, that may die after some of them."""

    name = "chats"

    def __init__(self, chats: list[Conversation | Drop], size: int = 4, stop: int | None = None):
        self.chats, self.size, self.stop = chats, size, stop

    def describe(self) -> dict:
        return {"chats": len(self.chats)}

    def size_hint(self) -> int | None:
        return None

    def batches(self, cursor: Cursor | None = None) -> Iterator[ConversationBatch]:
        first = (cursor or {"next": 0})["next"]
        for start in range(first, len(self.chats), self.size):
            if self.stop is not None and start >= self.stop:
                raise Interrupted
            rows = self.chats[start : start + self.size]
            yield ConversationBatch(
                conversations=tuple(row for row in rows if isinstance(row, Conversation)),
                num_read=len(rows),
                drops=tuple(row for row in rows if isinstance(row, Drop)),
                cursor={"next": start + len(rows)},
            )


def build(source: Chats, folder: Path, *, seed: int = 0, **options: object):
    fields = {"template": TEMPLATE, "tokenizer": TOKENIZER, "val_fraction": 0.3, **options}
    return build_chats(
        source,
        folder,
        spec=BuildSpec(shard_bytes=256, seed=seed),
        **fields,
    )


def said(folder: Path, split: str) -> list[str]:
    """What is trained in each example, as text."""
    found = read_examples(folder, split)
    parts = np.split(np.arange(len(found.mask)), found.ids.offsets[1:-1]) if len(found.ids) else []
    return [TOKENIZER.decode(found.ids.values[part][found.mask[part]]) for part in parts]


def test_a_store_holds_whole_conversations_with_mask_turns_and_a_balanced_ledger(tmp_path):
    rows = [
        chat("hi", "hello", "and?", "more", id="a"),
        Drop(id="b", reason="bad_json"),
        chat("only a question", id="c"),
        chat("x", "y", id="d"),
    ]
    done = build(Chats(rows), tmp_path / "s", val_fraction=0.0, max_loss=0.5)
    assert said(tmp_path / "s", "train") == ["hello<|e|>more<|e|>", "y<|e|>"]
    found = read_examples(tmp_path / "s", "train")
    text = "<|u|>hi<|e|><|a|>hello<|e|><|u|>and?<|e|><|a|>more<|e|>"
    assert TOKENIZER.decode(found.ids[0]) == text
    assert found.turn_roles.tolist() == [1, 2, 1, 2, 1, 2]
    assert found.turn_starts.tolist() == [0, 4, 11, 17, 23, 26]
    ledger = done.manifest.ledger
    assert (ledger.documents.read, ledger.documents.kept) == (4, 2)
    assert ledger.documents.dropped == {"bad_json": 1, "no_assistant": 1}
    assert (ledger.tokens.encoded, ledger.tokens.kept, ledger.tokens.separators) == (29, 29, 0)
    assert (ledger.chat.turns, ledger.chat.trained_tokens) == (6, 13)
    lines = (tmp_path / "s" / "dropped.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["b", "c"]
    assert verify(tmp_path / "s").problems == []
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_the_manifest_says_template_policy_and_proof(tmp_path):
    policy = TrainPolicy(train_on="last-assistant", train_on_eot=False)
    done = build(Chats(CHATS), tmp_path / "s", policy=policy)
    facts = done.manifest.options["chat"]
    assert facts["template"]["name"] == "four-marker"
    assert facts["template"]["sha256"] == TEMPLATE.describe()["sha256"]
    assert facts["marker_ids"] == [0, 1, 2, 3]
    assert (facts["train_on"], facts["train_on_eot"]) == ("last-assistant", False)
    assert facts["val_fraction"] == 0.3
    assert done.manifest.unit == "example"
    assert "group" in done.manifest.split_rule
    proof = done.manifest.produced_by["mask_proof"]
    assert proof["template"]["sha256"] == facts["template"]["sha256"]


words = st.text(alphabet="ab <|e|>\n", max_size=6)
conversations = st.builds(
    lambda contents, group: chat(*contents, id="x", group=group),
    st.lists(words, max_size=5),
    st.none() | st.sampled_from(["g", "h", "i"]),
)
rows = st.lists(conversations | st.just(Drop(id="r", reason="bad_json")), max_size=15)


@pytest.mark.slow
@settings(deadline=None, max_examples=15)
@given(rows=rows, size=st.integers(1, 6), seed=st.integers(0, 3))
def test_every_conversation_is_kept_whole_or_dropped_with_a_reason(
    rows, size, seed, tmp_path_factory
):
    place = tmp_path_factory.mktemp("law4")
    done = build(
        Chats(rows, size), place / "s", seed=seed, certificate=PROOF, allow_empty=True, max_loss=1.0
    )
    chats = [row for row in rows if isinstance(row, Conversation)]
    whole = TEMPLATE.render(chats, TrainPolicy())
    ledger = done.manifest.ledger
    assert ledger.documents.read == len(rows)
    assert ledger.documents.kept == len(whole.examples.ids)
    reasons = Counter(drop.reason for drop in (*whole.drops,))
    reasons["bad_json"] = len(rows) - len(chats)
    assert ledger.documents.dropped == {k: v for k, v in sorted(reasons.items()) if v}
    stored = [part.tolist() for s in ("train", "val") for part in read_examples(place / "s", s).ids]
    assert sorted(stored) == sorted(part.tolist() for part in whole.examples.ids)
    assert ledger.chat.trained_tokens == int(whole.examples.mask.sum())
    other = build(
        Chats(rows, 15), place / "t", seed=seed, certificate=PROOF, allow_empty=True, max_loss=1.0
    )
    for split in ("train", "val"):  # however it is batched
        found = read_examples(place / "t", split)
        assert_same_examples(found, read_examples(place / "s", split))
    assert other.manifest.ledger == ledger


@pytest.mark.parametrize("stop", [4, 8, 20, 40, 56])
def test_a_build_that_stopped_goes_on_to_the_same_bytes(tmp_path, stop):
    rows = [*CHATS[:30], Drop(id="r", reason="bad_json"), chat("no answer", id="z"), *CHATS[30:]]
    build(Chats(rows), tmp_path / "whole", certificate=PROOF)
    with pytest.raises(Interrupted):
        build(Chats(rows, stop=stop), tmp_path / "cut", certificate=PROOF)
    done = build(Chats(rows), tmp_path / "cut", resume=True, certificate=PROOF)
    assert folder_digest(tmp_path / "cut") == folder_digest(tmp_path / "whole")
    assert done.manifest.ledger.chat.turns == 120
    assert not (tmp_path / ".cut.building").exists()


def test_a_damaged_receipt_is_made_again(tmp_path):
    """Of conversations it holds mask, turns and roles."""
    rows = [chat("no answer", id="z"), *CHATS]
    build(Chats(rows), tmp_path / "whole", certificate=PROOF)
    with pytest.raises(Interrupted):
        build(Chats(rows, stop=40), tmp_path / "cut", certificate=PROOF)
    for number, path in enumerate(receipts(tmp_path / "cut")):
        data = bytearray(path.read_bytes())
        data[len(data) * number // 9] ^= 1
        path.write_bytes(data)
    build(Chats(rows), tmp_path / "cut", resume=True, certificate=PROOF)
    assert folder_digest(tmp_path / "cut") == folder_digest(tmp_path / "whole")


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"policy": TrainPolicy(train_on="all")}, "train_on"),
        ({"val_fraction": 0.2}, "val_fraction"),
        ({"seed": 1}, "seed"),
        ({"template": OTHER, "tokenizer": OTHER.encoder}, "template.markers.usr: 1 -> 0"),
    ],
)
def test_a_resume_with_other_options_is_refused_by_name(tmp_path, change, wanted):
    with pytest.raises(Interrupted):
        build(Chats(CHATS, stop=40), tmp_path / "s", certificate=PROOF)
    with pytest.raises(UnfinishedBuildError, match=wanted):
        build(Chats(CHATS), tmp_path / "s", resume=True, **change)


def test_a_finished_store_is_replaced_only_on_request(tmp_path):
    first = build(Chats(CHATS), tmp_path / "s")
    with pytest.raises(StoreExistsError, match="finished store"):
        build(Chats(CHATS[:5]), tmp_path / "s")
    assert build(Chats(CHATS), tmp_path / "s", resume=True).manifest == first.manifest
    build(Chats(CHATS[:5]), tmp_path / "s", overwrite=True)
    assert open_store(tmp_path / "s").manifest.ledger.documents.kept == 5


def test_a_source_or_template_that_loses_a_conversation_is_refused(tmp_path):
    class Loses(Chats):
        def batches(self, cursor=None):
            for batch in super().batches(cursor):
                yield ConversationBatch(
                    conversations=batch.conversations[1:],
                    num_read=batch.num_read,
                    cursor=batch.cursor,
                )

    with pytest.raises(SourceError, match="read 4 conversations, but gave 3 and dropped 0"):
        build(Loses(CHATS), tmp_path / "s", certificate=PROOF)

    class Forgets:
        name, marker_ids, describe = "forgets", TEMPLATE.marker_ids, TEMPLATE.describe

        def render(self, conversations, policy) -> Rendered:
            return TEMPLATE.render(conversations[1:], policy)

    with pytest.raises(BuildError, match="3 examples and 0 drops of 4 conversations"):
        build(Chats(CHATS), tmp_path / "s", template=Forgets(), certificate=PROOF)
    assert not (tmp_path / "s").exists()


def test_a_template_that_trains_the_wrong_turn_is_refused_before_any_work(tmp_path):
    class TrainsTheUser:
        name, marker_ids, describe = "wrong", TEMPLATE.marker_ids, TEMPLATE.describe

        def render(self, conversations, policy) -> Rendered:
            right = TEMPLATE.render(conversations, policy)
            examples = right.examples
            wrong = type(examples)(
                ids=examples.ids,
                mask=np.ones_like(examples.mask),
                turn_starts=examples.turn_starts,
                turn_roles=examples.turn_roles,
            )
            return Rendered(examples=wrong, kept=right.kept, drops=right.drops)

    with pytest.raises(MaskProofError):
        build(Chats(CHATS), tmp_path / "s", template=TrainsTheUser())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 1.5, float("nan"), True, "0.1"])
def test_an_impossible_share_is_refused(tmp_path, fraction):
    with pytest.raises(OptionError, match="val_fraction"):
        build(Chats(CHATS), tmp_path / "s", val_fraction=fraction, certificate=PROOF)


def test_a_conversation_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(render, "MAX_EXAMPLE_TOKENS", 50)  # two billion tokens take too long here
    rows = [chat("q", "a" * 60)]
    with pytest.raises(TokenRangeError, match="a conversation of 65 tokens; one may have 50"):
        build(Chats(rows), tmp_path / "s", certificate=PROOF)


def rows_in(folder: Path, split: str) -> set[int]:
    """The number that each example's answer is."""
    return {int(text.split("<")[0]) for text in said(folder, split)}


@pytest.mark.parametrize("group", [lambda n: f"g{n % 5}", lambda n: n % 5])
def test_rows_of_a_group_are_in_one_split(tmp_path, group):
    rows = [{"question": "q", "answer": f"{n}", "group": group(n)} for n in range(200)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    build(open_chats(path), tmp_path / "s", val_fraction=0.4, certificate=PROOF)
    train, val = (rows_in(tmp_path / "s", split) for split in ("train", "val"))
    assert train | val == set(range(200))
    assert {n % 5 for n in train}.isdisjoint(n % 5 for n in val)


def test_conversations_that_render_alike_are_in_one_split(tmp_path):
    rows = [chat("same", "1") for _ in range(60)]
    for number, row in enumerate(rows):
        row.messages[1]["id"] = number
    build(Chats(rows), tmp_path / "s", val_fraction=0.5, certificate=PROOF)
    assert sorted(len(said(tmp_path / "s", split)) for split in ("train", "val")) == [0, 60]


def test_an_empty_source_is_refused_and_an_empty_split_is_reported(tmp_path, caplog):
    with pytest.raises(LossError, match="nothing is kept of 0 rows"):
        build(Chats([]), tmp_path / "s")
    assert list(tmp_path.iterdir()) == []
    done = build(Chats([]), tmp_path / "s", allow_empty=True)
    assert done.manifest.splits["val"].documents == 0
    assert "split 'val' got no conversation" in caplog.text
    assert verify(tmp_path / "s").problems == []
    assert len(ChatSpace(open_store(tmp_path / "s"), "val")) == 0


def test_a_fast_engine_that_differs_is_replaced_and_its_work_done_again(tmp_path, monkeypatch):
    class Chosen:
        def __init__(self, name: str) -> None:
            self.produced_by = {"engine": name, "versions": {}}
            self.calls = 0

        def encode_batch(self, texts) -> Ragged:
            self.calls += 1
            if self.produced_by["engine"] == "reference":
                return TOKENIZER.encode_batch(texts)
            if self.calls == 10:
                raise EngineMismatchError("fake differs on 'x'")
            return TOKENIZER.encode_batch(["wrong"] * len(texts))

    monkeypatch.setattr(
        worker,
        "choose_encoder",
        lambda tokenizer, *, engine, **others: Chosen("reference" if engine[0] == "r" else "fake"),
    )

    wanted = build(Chats(CHATS), tmp_path / "wanted", engine="reference", any_encoder=True)
    done = build(Chats(CHATS), tmp_path / "s", any_encoder=True)
    for split in ("train", "val"):
        found = read_examples(tmp_path / "s", split)
        assert_same_examples(found, read_examples(tmp_path / "wanted", split))
    assert done.manifest.produced_by["engine"] == "reference"
    assert "fake differs" in done.manifest.produced_by["dropped_engine"]["mismatch"]
    assert wanted.manifest.splits == done.manifest.splits


def test_a_certificate_of_another_policy_or_template_is_refused(tmp_path):
    with pytest.raises(OptionError, match=r"policy\.train_on: 'assistant' -> 'all'"):
        build(
            Chats(CHATS),
            tmp_path / "s",
            policy=TrainPolicy(train_on="all"),
            certificate=PROOF,
        )
    with pytest.raises(OptionError, match="template"):
        build(
            Chats(CHATS),
            tmp_path / "s",
            template=OTHER,
            tokenizer=OTHER.encoder,
            certificate=PROOF,
        )


def test_conversations_with_a_replacement_are_counted_in_the_books(tmp_path):
    half, bad, sound = b"half \\ud83d pair", b"bad \xff byte", b"\\ud83d\\ude00 and NaN"
    with (tmp_path / "chats.jsonl").open("wb") as file:
        for words in (half, sound, bad):
            file.write(
                b'{"score": NaN, "messages": [{"role": "user", "content": "' + words + b'"}, '
                b'{"role": "assistant", "content": "yes"}]}\n'
            )
    source = open_chats(tmp_path / "chats.jsonl", ignore_columns=["score"])
    assert [dict(batch.counts) for batch in source.batches()] == [{"invalid_utf8": 2}]
    manifest = build(source, tmp_path / "store").manifest
    assert manifest.ledger.repaired == {"invalid_utf8": 2}
    memory = MemoryChats([chat("a \ud83d", "b"), chat("c", "d")])
    assert [dict(batch.counts) for batch in memory.batches()] == [{"invalid_utf8": 1}]
    assert build(memory, tmp_path / "other").manifest.ledger.repaired == {"invalid_utf8": 1}
