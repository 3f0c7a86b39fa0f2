"""Build the cache: texts to a token stream, conversations to examples.

Plain iterables become a finished folder with meta.json, or nothing. The result depends on the seed
and the input's order alone (torch's generator). Every document, example and token that was read is
accounted for in meta.json. An id that does not fit uint16 is an error. A finished folder is
replaced only with `overwrite`. Memory holds one shuffle buffer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from niels_gpt.cache.formats import TOKEN_DTYPE
from niels_gpt.cache_tokenizer import CacheTokenizer
from niels_gpt.data.shuffle import ShuffledSource
from niels_gpt.examples import SplitRule, write_examples
from niels_gpt.messages import Message, SplitUnit
from shardmill.building import BuildSpec, Feed, build_store
from shardmill.errors import OptionError
from shardmill.protocols import Source
from shardmill.sources import MemorySource

UNNAMED = "unnamed"


def build_pretrain_cache(
    texts: Iterable[str],
    out_dir: str,
    *,
    tokenizer: Any,
    max_train_tokens: int,
    max_val_tokens: int,
    shard_bytes: int,
    seed: int,
    shuffle_buffer: int | None,
    source_name: str | None = None,
    source_config: str | None = None,
    streaming: bool | None = None,
    append_eot: bool = False,
    overwrite: bool = False,
) -> None:
    """
    writes:
      out_dir/train/shard_*.bin
      out_dir/val/shard_*.bin
      out_dir/meta.json
    token dtype: uint16 little-endian
    deterministic given seed + identical input stream order.

    The first max_val_tokens go to val, the next max_train_tokens to train. The document at a
    border is in one split only: what does not fit of it is counted as over budget. Reading stops
    when both are full. With shuffle_buffer the texts are drawn through a buffer of that size;
    None and 0 keep their order.
    Without append_eot the shards hold exactly the tokenised texts.
    """
    fill = budget(max_train_tokens, max_val_tokens)
    source: Source = MemorySource(texts, name=source_name or UNNAMED)
    if shuffle_buffer:
        source = ShuffledSource(source, seed=seed, buffer_size=shuffle_buffer)
    build_store(
        [Feed(source=source, fill=fill)],
        out_dir,
        tokenizer=CacheTokenizer(tokenizer),
        spec=BuildSpec(
            dataset_name=source_name or UNNAMED,
            dataset_config=source_config,
            streaming=streaming,
            split_rule=stream_rule(max_train_tokens, max_val_tokens),
            seed=seed,
            shuffle_buffer=shuffle_buffer or None,
            shard_bytes=whole_tokens(shard_bytes),
            dtype=TOKEN_DTYPE,
            append_eot=append_eot,
            exact_shards=True,
        ),
        engine="reference",
        overwrite=overwrite,
        max_loss=1.0,
        allow_empty=True,
    )


def build_sft_cache(
    examples: Iterable[list[Message]],
    out_dir: str,
    *,
    tokenizer: Any,
    val_frac: float,
    seed: int,
    source_name: str | None = None,
    source_config: str | None = None,
    streaming: bool | None = None,
    append_eot: bool = False,
    overwrite: bool = False,
    sft_split: SplitUnit = "example",
) -> None:
    """
    writes:
      out_dir/train_tokens.bin, out_dir/train_idx.npy
      out_dir/val_tokens.bin,   out_dir/val_idx.npy
      out_dir/meta.json
    where idx is offsets into tokens.bin (int64), offsets-only (length inferred).
    deterministic given seed + identical input stream order.

    A message is its role's token, its content, EOT; no system message is invented. An example
    ends in EOT as it is, so append_eot is recorded and adds nothing. A conversation that cannot
    be rendered is dropped and listed in dropped.jsonl with a reason. See `SplitRule` for the split:
    by example, or with sft_split="tree" by group, for a `Chat` that has one.
    """
    rule = SplitRule(val_frac=val_frac, seed=seed, unit=sft_split)
    write_examples(
        examples,
        out_dir,
        tokenizer=CacheTokenizer(tokenizer),
        rule=rule,
        spec=BuildSpec(
            dataset_name=source_name or UNNAMED,
            dataset_config=source_config,
            streaming=streaming,
            split_rule=str(rule),
            seed=seed,
            dtype=TOKEN_DTYPE,
            append_eot=append_eot,
            options={"val_frac": val_frac},
        ),
        overwrite=overwrite,
    )


def budget(max_train_tokens: int, max_val_tokens: int) -> tuple[tuple[str, int], ...]:
    """The order in which a stream fills the splits."""
    for limit in (max_train_tokens, max_val_tokens):
        if not isinstance(limit, int) or limit < 0:
            raise OptionError(f"token limit {limit!r}: wanted a whole number from 0 up")
    return ("val", max_val_tokens), ("train", max_train_tokens)


def stream_rule(max_train_tokens: int, max_val_tokens: int) -> str:
    return (
        f"in stream order: the first {max_val_tokens:,} tokens to val, the next "
        f"{max_train_tokens:,} to train; a document is in one split only"
    )


def whole_tokens(shard_bytes: int) -> int:
    """The target size of a shard, down to a whole token."""
    if shard_bytes < 2:
        raise OptionError(f"shard_bytes={shard_bytes}: wanted at least 2, the size of one token")
    return shard_bytes - shard_bytes % 2


__all__ = ["Message", "build_pretrain_cache", "build_sft_cache"]
