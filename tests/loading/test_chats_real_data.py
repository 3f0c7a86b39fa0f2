"""Real conversations, from files to rows: the trained tokens are what the assistant said."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from shardmill.building import BuildSpec, build_chats
from shardmill.chat import bind_template, known_template
from shardmill.loading import ChatRows
from shardmill.records import ROLES, Conversation
from shardmill.sources import open_chats
from shardmill.store import open_store, verify
from shardmill.store.readers import ChatSpace
from shardmill.tokenizers import open_tokenizer

REAL = os.environ.get("SHARDMILL_REAL_DATA")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(REAL is None, reason="SHARDMILL_REAL_DATA is not set"),
]

SPECIALS = {
    "sys": "<|sys|>",
    "usr": "<|usr|>",
    "asst": "<|asst|>",
    "eot": "<|eot|>",
    "im_start": "<|im_start|>",
    "im_end": "<|im_end|>",
}
FILES = {
    "sgd": ("chats/sgd_dev.messages.jsonl", 2_098),
    "glaive": ("chats/glaive_toolcall.sharegpt.jsonl", 300),
    "dolly": ("dolly/databricks-dolly-15k.jsonl", 15_011),
}
ENDS = {"four-marker": "<|eot|>", "chatml": "<|im_end|>"}


def answers(conversation: Conversation) -> list[str]:
    return [m["content"] for m in conversation.messages if m["role"] == "assistant"]


@pytest.mark.parametrize(
    ("data", "template"), [("sgd", "four-marker"), ("glaive", "chatml"), ("dolly", "four-marker")]
)
def test_the_trained_tokens_are_what_the_assistant_said(data, template, tmp_path: Path):
    file, total = FILES[data]
    tokenizer = open_tokenizer("byte:6", specials=SPECIALS)
    source = open_chats(Path(str(REAL)) / file)
    done = build_chats(
        source,
        tmp_path / "s",
        template=bind_template(known_template(template), tokenizer),
        tokenizer=tokenizer,
        spec=BuildSpec(shard_bytes=2**20),
        val_fraction=0.1,
    )
    ledger = done.manifest.ledger
    assert ledger.documents.read == total
    assert ledger.documents.kept + sum(ledger.documents.dropped.values()) == total
    assert verify(tmp_path / "s").problems == []
    given = [chat for batch in source.batches() for chat in batch.conversations]
    wanted: dict[str, int] = {}
    for chat in given:
        if not any(message.get("tool_calls") for message in chat.messages):
            said = "".join(f"{words}{ENDS[template]}" for words in answers(chat))
            wanted[said] = wanted.get(said, 0) + 1
    plain = len(wanted)
    store = open_store(tmp_path / "s")
    kept = 0
    for split in store.splits:
        space = ChatSpace(store, split)
        for start in range(0, len(space), 512):
            part = space.examples(np.arange(start, min(start + 512, len(space))))
            for number in range(len(part.ids)):
                span = slice(*part.ids.offsets[number : number + 2].tolist())
                said = tokenizer.decode(part.ids.values[span][part.mask[span]])
                kept += 1
                if "<tool_call>" not in said:
                    wanted[said] -= 1  # a KeyError: something else is trained
    assert kept == ledger.documents.kept
    assert plain > 0
    if not ledger.documents.dropped:
        assert not any(wanted.values())


@pytest.mark.parametrize("seq_len", [64, 512])
def test_rows_of_real_conversations_all_train(seq_len, tmp_path: Path):
    tokenizer = open_tokenizer("byte:6", specials=SPECIALS)
    build_chats(
        open_chats(Path(str(REAL)) / FILES["sgd"][0]),
        tmp_path / "s",
        template=bind_template(known_template("chatml"), tokenizer),
        tokenizer=tokenizer,
        spec=BuildSpec(),
    )
    rows = ChatRows(tmp_path / "s", seq_len=seq_len)
    assert rows.pad_id == tokenizer.special_token_ids()["im_end"]
    for start in range(0, len(rows), 256):
        batch = rows.batch(np.arange(start, min(start + 256, len(rows))))
        assert batch.input_ids.shape[1] == seq_len
        assert batch.trained().any(axis=1).all()
    counts = rows.fit_counts()
    assert counts.examples == 2_098
    assert not counts.dropped
    roles = rows.space.examples(np.arange(len(rows))).turn_roles
    assert set(roles.tolist()) <= set(range(len(ROLES)))
