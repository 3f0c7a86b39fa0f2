"""The recipe's own rules for messages are stricter than the library's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from niels_gpt.cache import build_sft_cache
from shardmill.tokenizers import ByteTokenizer

SPECIALS = {"sys": "<s>", "usr": "<u>", "asst": "<a>", "eot": "<e>"}


def test_only_role_and_content_count_and_both_must_be_exact(tmp_path: Path) -> None:
    call = {"name": "f", "arguments": {}}
    chats: list[Any] = [
        [{"role": "assistant", "content": "a", "train": False, "tool_calls": [call]}],
        [{"role": "Assistant", "content": "b"}],
        [{"role": "gpt", "content": "c"}],
        [{"role": "tool", "content": "d"}, {"role": "assistant", "content": "d"}],
        [{"role": "assistant", "content": [{"type": "text", "text": "e"}]}],
        [{"role": "assistant", "content": None, "tool_calls": [call]}],
        [{"role": "assistant", "tool_calls": [call]}],
        ({"role": "user", "content": "f"}, {"role": "assistant", "content": "f"}),
        "text",
    ]
    folder = tmp_path / "cache"
    tokenizer = ByteTokenizer(byte_offset=4, specials=SPECIALS)
    build_sft_cache(chats, str(folder), tokenizer=tokenizer, val_frac=0.1, seed=0)
    tokens = [np.fromfile(folder / f"{split}_tokens.bin", "<u2") for split in ("train", "val")]
    # The example drawn for val is one of the dropped.
    assert [tokenizer.decode(ids) for ids in tokens] == ["<a>a<e><u>f<e><a>f<e>", ""]
    lines = (folder / "dropped.jsonl").read_text().splitlines()
    assert [(row["id"], row["reason"]) for row in map(json.loads, lines)] == [
        ("example 1", "unknown_role"),
        ("example 2", "unknown_role"),
        ("example 3", "unknown_role"),
        ("example 4", "content_not_text"),
        ("example 5", "content_not_text"),
        ("example 6", "bad_message"),
        ("example 8", "not_a_list"),
    ]
