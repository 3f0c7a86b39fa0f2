"""The front door: the names of the package are a list, and each is there."""

from __future__ import annotations

import shardmill

NAMES = """
    BuildReport BuildSpec ChatRows Feed IGNORE_INDEX Loader LossError Manifest MemorySource
    PackSource PreferenceSource Ragged SampleStream ShardmillError Store TextBatch TokenFile
    TokenSource TokenSpace Windows
    __version__ build_chats build_store open_chats open_source open_store open_tokenizer open_tokens
    build load look pack prove_mask pull push stream train_tokenizer verify
"""


def test_the_front_door_has_exactly_these_names() -> None:
    assert sorted(shardmill.__all__) == sorted(NAMES.split())
    assert all(hasattr(shardmill, name) for name in shardmill.__all__)
