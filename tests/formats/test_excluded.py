"""What cannot leave anything out refuses a split with exclusions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from niels_gpt.cache.pretrain_dataset import PretrainTokenStreamDataset
from niels_gpt.cache.sft_dataset import SFTExampleDataset
from shardmill.building import BuildSpec, Feed, build_chats, build_plan, build_store
from shardmill.chat import bind_template, known_template
from shardmill.errors import StoreError
from shardmill.formats.packed.formats import PlanShard
from shardmill.formats.packed.spool import ChatStoreSpool
from shardmill.formats.stores import StoreSplit
from shardmill.records import Conversation
from shardmill.sources import MemoryChats, MemorySource
from shardmill.store import PlanOptions, exclude_documents
from shardmill.store.exclusions import remove_exclusion
from shardmill.testing.stores import build_small_chat_store, make_examples
from shardmill.tokenizers import open_tokenizer

SPECIALS = {"sys": "<|s|>", "usr": "<|u|>", "asst": "<|a|>", "eot": "<|e|>"}
TOKENIZER = open_tokenizer("byte:4", specials=SPECIALS)
TALK = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "answer"}]

READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "documents": ("pages", lambda store: list(StoreSplit(store, "train").batches())),
    "windows": (
        "pages",
        lambda store: PretrainTokenStreamDataset(str(store / "train"), T=4, device="cpu"),
    ),
    "conversations": ("chats", lambda store: ChatStoreSpool(store, "train").lengths()),
    "examples": (
        "examples",
        lambda store: SFTExampleDataset(
            str(store / "train_tokens.bin"),
            str(store / "train_idx.npy"),
            T=8,
            device="cpu",
            eot_id=TOKENIZER.special_token_ids()["eot"],
        ),
    ),
    "rows": ("chats", lambda store: list(PlanShard(next((store / "packs").iterdir())).bins())),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("stores")
    feed = Feed(source=MemorySource(["some words"] * 9), fill=(("train", None),))
    build_store([feed], place / "pages", tokenizer=TOKENIZER, spec=BuildSpec(append_eot=True))
    build_chats(
        MemoryChats([Conversation(messages=TALK)] * 5),
        place / "chats",
        template=bind_template(known_template("four-marker"), TOKENIZER),
        tokenizer=TOKENIZER,
        spec=BuildSpec(),
    )
    build_plan(place / "chats", "train", options=PlanOptions(seq_len=64))
    turns = [(1, [(1, False), (9, False)]), (2, [(2, False), (9, True), (3, True)])]
    build_small_chat_store(place / "examples", {"train": make_examples([([0], turns)] * 5)})
    return place


@pytest.mark.parametrize("name", READERS)
def test_a_reader_that_gives_every_token_refuses_exclusions(place, name):
    folder, read = READERS[name]
    read(place / folder)
    entry = exclude_documents(place / folder, [3], reason="a test")
    try:
        with pytest.raises(
            StoreError, match=r"of split 'train' are excluded, but .* would give every"
        ):
            read(place / folder)
    finally:
        remove_exclusion(place / folder, entry.number)
    read(place / folder)
