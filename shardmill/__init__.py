"""shardmill: text and chats to training batches, checked at every step.

Importing it loads nothing else: each name is imported on first use.
"""

from typing import TYPE_CHECKING

from shardmill.lazy import lazy_getattr

if TYPE_CHECKING:
    from shardmill.building import BuildReport, BuildSpec, Feed, build_chats, build_store
    from shardmill.building.api import build, pack
    from shardmill.chat import prove_mask
    from shardmill.errors import LossError, ShardmillError
    from shardmill.inspect.look import look
    from shardmill.loading import (
        ChatRows,
        Loader,
        PackSource,
        PreferenceSource,
        SampleStream,
        TokenSource,
    )
    from shardmill.loading.api import load
    from shardmill.loading.streaming.api import stream
    from shardmill.records import IGNORE_INDEX, Ragged, TextBatch, TokenFile
    from shardmill.remote import pull, push
    from shardmill.sources import MemorySource, open_chats, open_source
    from shardmill.store import Manifest, Store, open_store, verify
    from shardmill.store.readers import TokenSpace, Windows, open_tokens
    from shardmill.tokenizers import open_tokenizer, train_tokenizer

__version__ = "0.2.0"
__all__ = [
    "look",
    "build",
    "pack",
    "load",
    "stream",
    "pull",
    "push",
    "BuildReport",
    "BuildSpec",
    "ChatRows",
    "Feed",
    "IGNORE_INDEX",
    "Loader",
    "LossError",
    "Manifest",
    "MemorySource",
    "PackSource",
    "PreferenceSource",
    "Ragged",
    "SampleStream",
    "ShardmillError",
    "Store",
    "TextBatch",
    "TokenFile",
    "TokenSource",
    "TokenSpace",
    "Windows",
    "__version__",
    "build_chats",
    "build_store",
    "open_chats",
    "prove_mask",
    "open_source",
    "open_store",
    "open_tokenizer",
    "open_tokens",
    "train_tokenizer",
    "verify",
]

__getattr__ = lazy_getattr(
    __name__,
    {
        "shardmill.building.api": ("build", "pack"),
        "shardmill.loading.api": ("load",),
        "shardmill.loading.streaming.api": ("stream",),
        "shardmill.remote": ("pull", "push"),
        "shardmill.building": ("BuildReport", "BuildSpec", "Feed", "build_chats", "build_store"),
        "shardmill.chat": ("prove_mask",),
        "shardmill.errors": ("LossError", "ShardmillError"),
        "shardmill.inspect.look": ("look",),
        "shardmill.loading": (
            *("ChatRows", "Loader", "PackSource", "PreferenceSource", "SampleStream"),
            "TokenSource",
        ),
        "shardmill.records": ("IGNORE_INDEX", "Ragged", "TextBatch", "TokenFile"),
        "shardmill.sources": ("MemorySource", "open_chats", "open_source"),
        "shardmill.store": ("Manifest", "Store", "open_store", "verify"),
        "shardmill.store.readers": ("TokenSpace", "Windows", "open_tokens"),
        "shardmill.tokenizers": ("open_tokenizer", "train_tokenizer"),
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
