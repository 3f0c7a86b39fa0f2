"""Every constant of the recipe, each with the words of its flag.

`Settings()` is the recipe as prescribed; the command line makes a flag of each field.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from niels_gpt.cache import formats
from niels_gpt.data import dolly, fineweb_edu, oasst1, rows, wikitext
from niels_gpt.messages import SplitUnit
from shardmill.building.loss import MAX_LOSS
from shardmill.cli.options import parse_bytes
from shardmill.tokenizers import EngineCheck, EngineChoice


def _flag(
    words: str, parse: Callable[[str], Any] = str, choices: tuple[str, ...] | None = None
) -> dict[str, Any]:
    return {"help": words, "parse": parse, "choices": choices}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is built, from what, and where."""

    cache_dir: Path = field(default=Path("cache"), metadata=_flag("where the cache goes", Path))
    tokenizer: Path | None = field(
        default=None,
        metadata=_flag(
            "spm.model to copy into the cache (default: the one in the cache, else "
            f"{formats.TRAINED_TOKENIZER})",
            Path,
        ),
    )
    seed: int = field(default=formats.SEED, metadata=_flag("seed of every shuffle and split", int))
    shard_bytes: int = field(
        default=formats.SHARD_BYTES,
        metadata=_flag(
            "size of a pretraining shard, e.g. 128MiB", partial(parse_bytes, option="shard_bytes")
        ),
    )
    append_eot: bool = field(
        default=True, metadata=_flag("put EOT after each pretraining document")
    )

    fineweb_path: Path | None = field(
        default=None, metadata=_flag("read pages from here, not from the hub", Path)
    )
    fineweb_dataset: str = field(default=fineweb_edu.DATASET, metadata=_flag("hub dataset"))
    fineweb_config: str = field(default=fineweb_edu.CONFIG, metadata=_flag("its configuration"))
    fineweb_revision: str | None = field(default=None, metadata=_flag("its commit, branch or tag"))
    fineweb_train_tokens: int = field(
        default=formats.FINEWEB_TRAIN_TOKENS, metadata=_flag("tokens for train", int)
    )
    fineweb_val_tokens: int = field(
        default=formats.FINEWEB_VAL_TOKENS, metadata=_flag("tokens for val", int)
    )
    shuffle_buffer: int = field(
        default=formats.SHUFFLE_BUFFER,
        metadata=_flag("documents in the shuffle buffer; 0: keep the order", int),
    )

    wikitext_path: Path | None = field(
        default=None, metadata=_flag("folder with wiki.train.raw, wiki.valid.raw", Path)
    )
    wikitext_dataset: str = field(default=wikitext.DATASET, metadata=_flag("hub dataset"))
    wikitext_config: str = field(default=wikitext.CONFIG, metadata=_flag("its configuration"))
    wikitext_revision: str | None = field(default=None, metadata=_flag("its commit, branch or tag"))

    roam_dir: Path | None = field(
        default=None,
        metadata=_flag(
            f"folder of notes (default: {formats.ROAM_DIR}; a stub when it is not there)", Path
        ),
    )
    roam_val_frac: float = field(
        default=formats.VAL_FRAC, metadata=_flag("share of the notes for val", float)
    )

    gutenberg_path: Path | None = field(
        default=None, metadata=_flag("folder of books; without it: a stub", Path)
    )
    gutenberg_val_frac: float = field(
        default=formats.VAL_FRAC, metadata=_flag("share of the books for val", float)
    )

    val_frac: float = field(
        default=formats.VAL_FRAC, metadata=_flag("share of the chats for val", float)
    )
    sft_split: SplitUnit = field(
        default="example",
        metadata=_flag(
            "what the chat split counts: single chats, or whole trees of chats, so that answers "
            "to one question stay on one side (recommended for oasst1)",
            choices=("example", "tree"),
        ),
    )
    dolly_path: Path | None = field(
        default=None, metadata=_flag("read dolly from this .jsonl", Path)
    )
    dolly_dataset: str = field(default=dolly.DATASET, metadata=_flag("hub dataset"))
    dolly_revision: str | None = field(default=None, metadata=_flag("its commit, branch or tag"))
    oasst1_path: Path | None = field(
        default=None, metadata=_flag("read flat messages from this .jsonl", Path)
    )
    oasst1_dataset: str = field(default=oasst1.DATASET, metadata=_flag("hub dataset"))
    oasst1_revision: str | None = field(default=None, metadata=_flag("its commit, branch or tag"))
    oasst1_split: str = field(default="train", metadata=_flag("its split"))
    oasst1_lang: str = field(
        default="en", metadata=_flag("language of the messages; 'any' for all")
    )
    oasst1_max_messages: int = field(
        default=oasst1.MAX_MESSAGES, metadata=_flag("messages in a thread, at most", int)
    )

    max_loss: float = field(
        default=MAX_LOSS,
        metadata=_flag("share of a source's rows that may be lost before it fails", float),
    )
    allow_empty: bool = field(
        default=False, metadata=_flag("a pretraining source that keeps nothing may be built")
    )
    hub_retries: int = field(
        default=rows.MAX_RETRIES,
        metadata=_flag("tries again when the hub does not answer", int),
    )
    workers: int | None = field(
        default=None,
        metadata=_flag("processes, and tokenizer threads of a stream; default: all cores", int),
    )
    engine: EngineChoice = field(
        default="auto", metadata=_flag("tokenizer engine", choices=("reference", "fast", "auto"))
    )
    engine_check: EngineCheck = field(
        default="sample",
        metadata=_flag("how much a fast engine is compared", choices=("sample", "full")),
    )


__all__ = ["Settings"]
