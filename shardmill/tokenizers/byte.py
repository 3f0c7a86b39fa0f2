"""Bytes as ids: id = byte + `byte_offset`.

Every text round-trips exactly. Ids below `byte_offset` are free for specials, and no text reaches
them. Encoding is one addition over the Arrow buffer, without a loop over documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from shardmill.errors import OptionError
from shardmill.protocols import Texts
from shardmill.records import IntArray, OffsetArray, Ragged
from shardmill.tokenizers.base import (
    EngineSource,
    TokenizerWithSpecials,
    character_spans,
    fingerprint_of,
    utf8_buffer,
)

MAX_OFFSET = 2**31 - 257


class ByteTokenizer(TokenizerWithSpecials):
    """256 ids for the bytes, after `byte_offset` ids that text cannot reach.

    `specials` maps a name to its literal string; they take the ids 0, 1, ... in order, so there
    may be at most `byte_offset` of them.
    """

    unknown_id: int | None = None
    engine_source: EngineSource | None = None

    def __init__(self, *, byte_offset: int = 0, specials: Mapping[str, str] | None = None) -> None:
        if not 0 <= byte_offset <= MAX_OFFSET:
            raise OptionError(
                f"{{byte_offset}}: wanted 0 to {MAX_OFFSET:,}", byte_offset=byte_offset
            )
        strings = dict(specials or {})
        if len(strings) > byte_offset:
            raise OptionError(
                f"{{byte_offset}}: {len(strings)} specials need at least {len(strings)}: open "
                f"'byte:{len(strings)}'",
                byte_offset=byte_offset,
            )
        self.byte_offset = byte_offset
        self._specials = strings
        self._dtype = np.min_scalar_type(self.vocab_size - 1)
        self.special_names = {name: number for number, name in enumerate(strings)}
        self.special_strings = dict(enumerate(strings.values()))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickles as its options."""
        return partial(type(self), byte_offset=self.byte_offset, specials=self._specials), ()

    @property
    def vocab_size(self) -> int:
        return 256 + self.byte_offset

    @property
    def fingerprint(self) -> str:
        return fingerprint_of({"kind": "byte", "byte_offset": self.byte_offset})

    def encode_batch(self, texts: Texts) -> Ragged:
        buffer, offsets = utf8_buffer(texts)
        return Ragged(buffer.astype(self._dtype) + self._dtype.type(self.byte_offset), offsets)

    def spans(self, text: str) -> OffsetArray:
        """(n, 2) the characters start..stop of each token; a byte gets its whole character."""
        return character_spans(text, np.ones(len(text.encode()), np.int64))

    def round_trips(self, text: str) -> bool:  # noqa: ARG002 - other kinds look at the text
        return True

    def _decode_text(self, ids: IntArray) -> str:
        """Invalid UTF-8 (a window cut inside a character) shows as U+FFFD."""
        self._refuse_unknown(ids, (ids < self.byte_offset) | (ids >= self.vocab_size))
        return (ids - self.byte_offset).astype(np.uint8).tobytes().decode("utf-8", "replace")

    def __repr__(self) -> str:
        return f"ByteTokenizer(byte_offset={self.byte_offset}, vocab_size={self.vocab_size})"
