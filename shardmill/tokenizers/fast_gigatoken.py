"""The gigatoken engine: BPE from a tokenizer.json or a SentencePiece model. The one importer of it.

In: a text-only tokenizer.json, or a `.model` whose specials are hidden.  Out: an Encoder.
Promise: ids come as one flat array, never as Python ints. Whether they are right is for the proof.
"""

from __future__ import annotations

from importlib.metadata import version

import numpy as np

from shardmill.errors import TokenizerError, missing_extra
from shardmill.protocols import Texts
from shardmill.records import Ragged
from shardmill.tokenizers.texts import EngineSource, as_list, surrogate_error

try:
    import gigatoken
except ImportError as missing:
    raise missing_extra("gigatoken", "fast") from missing


class GigatokenEngine:
    name = "gigatoken"

    def __init__(self, source: EngineSource) -> None:
        self.version = version("gigatoken")
        try:
            if source.kind == "sentencepiece":
                self._engine = gigatoken.Tokenizer.from_sentencepiece(source.model)
            else:
                self._engine = gigatoken.Tokenizer.from_json(source.model)
        except (ValueError, RuntimeError, TypeError) as problem:
            raise TokenizerError(f"gigatoken cannot load this model: {problem}") from problem

    def encode_batch(self, texts: Texts) -> Ragged:
        listed = as_list(texts)
        if not listed:
            return Ragged(np.empty(0, np.uint32), np.zeros(1, np.int64))
        try:
            layout = self._engine.encode_batch(listed, parallel=False).layout
        except (TypeError, UnicodeError) as problem:
            raise surrogate_error(listed) from problem
        offsets = np.asarray(layout.offsets.data).astype(np.int64)
        values = np.asarray(layout.content.data)[offsets[0] : offsets[-1]]
        return Ragged(values, offsets - offsets[0])
