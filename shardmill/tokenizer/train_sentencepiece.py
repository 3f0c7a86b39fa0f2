"""Train SentencePiece so that every text comes back exactly.

In: chunks of text.  Out: the bytes of a `.model`.
Promise: id 0 is unknown (never given: bytes stand in), then the specials as control pieces, then
the 256 bytes. No character is changed, no whitespace removed, no space put before a text: so the
ids of two texts joined decode to the two texts joined. The bytes do not depend on the machine.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence

from shardmill.errors import TokenizerError
from shardmill.tokenizer.sentencepiece_model import library

_QUIET = 2  # errors only
_THREADS = 8
"""Fixed: thread n sums the lines n, n + 8, ... and the sums are added in order, so the bytes depend
on this number and not on the machine's cores."""


def train_sentencepiece(
    chunks: Sequence[str], vocab_size: int, specials: Mapping[str, str], *, model_type: str
) -> tuple[bytes, tuple[str, str]]:
    writer = io.BytesIO()
    try:
        library.SentencePieceTrainer.train(
            sentence_iterator=_lines(chunks),
            model_writer=writer,
            model_type=model_type,
            vocab_size=vocab_size,
            control_symbols=list(specials.values()),
            bos_id=-1,
            eos_id=-1,
            byte_fallback=True,
            character_coverage=1.0,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=2**20,
            num_threads=_THREADS,
            minloglevel=_QUIET,
        )
    except RuntimeError as problem:
        raise TokenizerError(_explain(str(problem), vocab_size)) from problem
    return writer.getvalue(), ("sentencepiece", library.__version__)


def _lines(chunks: Sequence[str]) -> Iterator[str]:
    """Non-empty lines without their end: a newline is its own byte id."""
    for chunk in chunks:
        for line in chunk.split("\n"):
            if line:
                yield line


def _explain(message: str, vocab_size: int) -> str:
    high = re.search(r"Vocabulary size too high .*?<= (\d+)", message)
    if high:
        return (
            f"vocab_size={vocab_size:,} is more than this text can fill; the largest possible is "
            f"{int(high[1]):,}: give that, or more text"
        )
    low = re.search(r"smaller than required_chars\. \d+ vs (\d+)", message)
    if low:
        return (
            f"vocab_size={vocab_size:,} is less than the specials, bytes and characters of this "
            f"text need; the smallest possible is {int(low[1]):,}"
        )
    return f"SentencePiece could not train: {message}"
