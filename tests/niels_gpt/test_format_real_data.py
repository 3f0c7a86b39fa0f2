"""Cache, serialised chats and dataset agree on real chats, token by token."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from niels_gpt.cache.build_cache import build_sft_cache
from niels_gpt.cache.sft_dataset import SFTExampleDataset
from niels_gpt.data import iter_dolly_sft, iter_oasst1_sft
from niels_gpt.format.sft import (
    collate_sft_batch,
    pack_sft_ids_and_mask,
    serialize_chat_to_ids,
    sft_loss_mask_for_ids,
)
from niels_gpt.messages import Chat
from niels_gpt.special_tokens import SPECIAL_TOKENS
from niels_gpt.tokenizer import SentencePieceTokenizer, load_tokenizer
from shardmill.tokenizers import TrainSpec, train_tokenizer

DATA = os.environ.get("SHARDMILL_REAL_DATA")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(DATA is None, reason="SHARDMILL_REAL_DATA is not set"),
]
SYSTEM = "answer as you would like to be answered."
FILES = {
    "dolly": ("dolly/databricks-dolly-15k.jsonl", 15_011),
    "oasst1": ("oasst/oasst1_en_validation.messages.jsonl", 979),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    assert DATA is not None
    model = train_tokenizer(
        tmp_path_factory.mktemp("real") / "model",
        files=[Path(DATA) / "wikitext" / "wiki.valid.raw"],
        spec=TrainSpec(vocab_size=2_000, specials=SPECIAL_TOKENS),
    ).model
    return load_tokenizer(model)


def chats_of(name: str) -> Iterable[Chat]:
    assert DATA is not None
    path = Path(DATA) / FILES[name][0]
    return iter_dolly_sft(path) if name == "dolly" else iter_oasst1_sft(path)


@pytest.mark.parametrize("name", ["dolly", "oasst1"])
def test_cache_serialiser_and_dataset_agree_on_real_chats(
    name: str, tokenizer: SentencePieceTokenizer, tmp_path: Path
) -> None:
    chats = list(chats_of(name))
    assert len(chats) == FILES[name][1]
    chats = chats[:: max(1, len(chats) // 1000)]
    given = [[{"role": "system", "content": SYSTEM}, *chat] for chat in chats]
    build_sft_cache(given, str(tmp_path), tokenizer=tokenizer, val_frac=0.1, seed=7)
    wanted = Counter(
        tuple(
            serialize_chat_to_ids(
                {"messages": list(chat)}, tokenizer=tokenizer, default_system_text=SYSTEM
            )
        )
        for chat in chats
    )
    found: Counter[tuple[int, ...]] = Counter()
    for split in ("train", "val"):
        tokens = np.fromfile(tmp_path / f"{split}_tokens.bin", "<u2")
        starts = np.load(tmp_path / f"{split}_idx.npy")
        examples = [tuple(part.tolist()) for part in np.split(tokens, starts[1:])]
        found.update(examples)
        assert_rows_agree(tmp_path, split, examples, tokenizer)
    assert found == wanted


def assert_rows_agree(
    folder: Path, split: str, examples: list[tuple[int, ...]], tokenizer: SentencePieceTokenizer
) -> None:
    """The dataset's rows are the packed and collated ones where nothing is cut."""
    special = tokenizer.special_token_ids()
    names = {f"{name}_id": special[name] for name in SPECIAL_TOKENS}
    longest = max(map(len, examples))
    dataset = SFTExampleDataset(
        str(folder / f"{split}_tokens.bin"),
        str(folder / f"{split}_idx.npy"),
        T=longest - 1,
        device="cpu",
        eot_id=special["eot"],
    )
    assert len(dataset) == len(examples)
    order = iter(np.argsort([len(example) for example in examples]))
    while chosen := list(islice(order, 256)):
        width = len(examples[chosen[-1]])
        packed = []
        for number in chosen:
            ids = list(examples[number])
            mask = sft_loss_mask_for_ids(ids, **names)
            packed.append(pack_sft_ids_and_mask(ids, mask, S=width, pad_id=special["eot"], **names))
        x, y, loss_mask = collate_sft_batch(packed, T=width - 1, device="cpu")
        seen_x, seen_y, seen_masked = dataset.rows(np.array(chosen))
        assert np.array_equal(seen_x[:, : width - 1], x)
        assert np.array_equal(seen_masked[:, : width - 1], y)
        assert np.array_equal(seen_masked[:, : width - 1] != -100, loss_mask)
        assert np.array_equal(seen_y[:, : width - 1][loss_mask], y[loss_mask])
        assert (seen_masked[:, width - 1 :] == -100).all()
