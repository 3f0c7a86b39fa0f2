"""Train byte-level BPE, written as a tokenizer.json.

In: chunks of text.  Out: the bytes of a tokenizer.json.
Promise: the specials are ids 0, 1, ... and the 256 bytes follow; every text comes back exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardmill.errors import TokenizerError
from shardmill.tokenizer.huggingface import library


def train_byte_bpe(
    chunks: Sequence[str], vocab_size: int, specials: Mapping[str, str]
) -> tuple[bytes, tuple[str, str]]:
    byte_level = library.pre_tokenizers.ByteLevel
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(specials.values()),
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chunks, trainer, length=len(chunks))
    size = tokenizer.get_vocab_size()
    if size < vocab_size:
        raise TokenizerError(
            f"vocab_size={vocab_size:,} is more than this text can fill; the largest possible is "
            f"{size:,}: give that, or more text"
        )
    return tokenizer.to_str(pretty=True).encode(), ("tokenizers", library.__version__)
