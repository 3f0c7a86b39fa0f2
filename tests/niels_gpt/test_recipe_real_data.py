"""The whole recipe on real data: it builds, verifies, decodes back, and the ledger balances."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from niels_gpt.cache.cli import main
from niels_gpt.data import iter_dolly_sft, iter_gutenberg, iter_oasst1_sft, iter_roam, iter_wikitext
from niels_gpt.special_tokens import EOT, ROLE_NAMES, SPECIAL_TOKENS
from niels_gpt.tokenizer import load_tokenizer
from shardmill.store import Store, open_store, verify
from shardmill.tokenizers import TrainSpec, train_tokenizer

DATA = os.environ.get("SHARDMILL_REAL_DATA")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(DATA is None, reason="SHARDMILL_REAL_DATA is not set"),
]
STORES = (
    "pretrain/fineweb_edu",
    "pretrain/roam",
    "pretrain/wikitext",
    "pretrain/gutenberg",
    "sft/dolly15k",
    "sft/oasst1",
)


@pytest.fixture(scope="module")
def data() -> Path:
    assert DATA is not None
    return Path(DATA)


@pytest.fixture(scope="module")
def cache(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("real")
    model = train_tokenizer(
        root / "model",
        files=[data / "wikitext" / "wiki.valid.raw"],
        spec=TrainSpec(vocab_size=2_000, specials=SPECIAL_TOKENS),
    ).model
    flags = {
        "--cache-dir": root / "cache",
        "--tokenizer": model,
        "--fineweb-path": data / "fineweb" / "fineweb_sample_2800.parquet",
        "--fineweb-train-tokens": 200_000_000,
        "--fineweb-val-tokens": 100_000,
        "--shuffle-buffer": 500,
        "--wikitext-path": data / "wikitext",
        "--roam-dir": data / "notes" / "logseq-docs",
        "--gutenberg-path": data / "gutenberg",
        "--dolly-path": data / "dolly" / "databricks-dolly-15k.jsonl",
        "--oasst1-path": data / "oasst" / "oasst1_en_validation.messages.jsonl",
        "--shard-bytes": "4MiB",
        "--sft-split": "tree",
    }
    words = [str(word) for flag in flags.items() for word in flag]
    assert main(["build-all", *words]) == 0
    return root / "cache"


def documents(store: Store, split: str) -> list[np.ndarray]:
    """The ids of each document or example of a split."""
    tokens = np.concatenate([np.fromfile(file.path, "<u2") for file in store.token_files(split)])
    edges = [*store.document_starts(split).tolist(), store.num_tokens(split)]
    return [tokens[start:stop] for start, stop in pairwise(edges)]


@pytest.mark.parametrize("store", STORES)
def test_every_store_verifies_and_its_ledger_balances(cache: Path, store: str) -> None:
    assert verify(cache / store).problems == []
    manifest = open_store(cache / store).manifest
    read, kept = manifest.ledger.documents, manifest.ledger.tokens
    assert read.read == read.kept + read.empty + read.over_budget + sum(read.dropped.values())
    assert kept.encoded + kept.separators == kept.kept + kept.over_budget
    assert kept.kept == sum(split.tokens for split in manifest.splits.values())


@pytest.mark.parametrize(
    ("store", "read"),
    [
        ("pretrain/fineweb_edu", 2_800),
        ("pretrain/roam", 313),
        ("pretrain/gutenberg", 16),
        ("sft/dolly15k", 15_011),
        ("sft/oasst1", 979),
    ],
)
def test_every_record_is_read_and_none_is_lost(cache: Path, store: str, read: int) -> None:
    ledger = open_store(cache / store).manifest.ledger.documents
    assert (ledger.read, ledger.dropped, ledger.over_budget) == (read, {}, 0)


def test_the_account_of_the_oasst1_messages(cache: Path) -> None:
    messages = open_store(cache / "sft" / "oasst1").manifest.options["messages"]
    assert messages["read"] == 2_022
    assert messages["left_out"]["missing_parent"] == 3
    assert messages["used"] + sum(messages["left_out"].values()) == 2_022


@pytest.mark.parametrize("store", ["dolly15k", "oasst1"])
def test_chats_decode_to_what_was_said(cache: Path, data: Path, store: str) -> None:
    tokenizer = load_tokenizer(cache / "tokenizer")
    chats = {
        "dolly15k": lambda: iter_dolly_sft(data / "dolly" / "databricks-dolly-15k.jsonl"),
        "oasst1": lambda: iter_oasst1_sft(data / "oasst" / "oasst1_en_validation.messages.jsonl"),
    }[store]()
    wanted = sorted(
        "".join(
            f"{SPECIAL_TOKENS[ROLE_NAMES[message['role']]]}{message['content']}{EOT}"
            for message in chat
        )
        for chat in chats
    )
    opened = open_store(cache / "sft" / store)
    found = sorted(
        tokenizer.decode(ids) for split in ("train", "val") for ids in documents(opened, split)
    )
    assert found == wanted


@pytest.mark.parametrize("split", ["train", "val"])
def test_texts_decode_to_themselves(cache: Path, data: Path, split: str) -> None:
    tokenizer = load_tokenizer(cache / "tokenizer")
    for name, texts in (
        ("roam", iter_roam(data / "notes" / "logseq-docs", split=split)),  # type: ignore[arg-type]
        ("wikitext", iter_wikitext(data / "wikitext", split=split)),  # type: ignore[arg-type]
        ("gutenberg", iter_gutenberg(data / "gutenberg", split=split)),  # type: ignore[arg-type]
    ):
        found = documents(open_store(cache / "pretrain" / name), split)
        wanted = [f"{text}{EOT}" for text in texts if text]
        assert [tokenizer.decode(ids) for ids in found] == wanted


def test_siblings_of_a_tree_are_on_one_side(cache: Path, data: Path) -> None:
    path = data / "oasst" / "oasst1_en_validation.messages.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    questions = {row["text"]: row["message_tree_id"] for row in rows if row["parent_id"] is None}
    tokenizer = load_tokenizer(cache / "tokenizer")
    opened = open_store(cache / "sft" / "oasst1")
    sides = []
    for split in ("train", "val"):
        starts = [
            tokenizer.decode(ids[1 : ids.tolist().index(4)]) for ids in documents(opened, split)
        ]
        sides.append({questions[start] for start in starts})
    assert len(sides[1]) == 18
    assert not sides[0] & sides[1]
