"""The fastokens engine: byte-level BPE from a tokenizer.json. The one importer of fastokens.

In: a text-only tokenizer.json.  Out: an Encoder.
Promise: ids come as one flat array, never as Python ints. Whether they are right is for the proof.
"""

from __future__ import annotations

from importlib.metadata import version

import numpy as np

from shardmill.errors import TokenizerError, missing_extra
from shardmill.protocols import Texts
from shardmill.records import Ragged
from shardmill.tokenizer.texts import as_list, surrogate_error

try:
    import fastokens
except ImportError as missing:
    raise missing_extra("fastokens", "fast") from missing


class FastokensEngine:
    name = "fastokens"

    def __init__(self, config_json: bytes) -> None:
        self.version = version("fastokens")
        try:
            self._engine = fastokens.Tokenizer.from_json_str(config_json.decode())
        except (ValueError, RuntimeError, TypeError) as problem:
            raise TokenizerError(f"fastokens cannot load this model: {problem}") from problem
        self._engine.enable_segment_cache(0)  # an environment variable may have turned it on

    def encode_batch(self, texts: Texts) -> Ragged:
        listed = as_list(texts)
        try:
            ids, offsets = self._engine.encode_batch_flat(
                listed, add_special_tokens=False, split_special_tokens=True
            )
        except (TypeError, UnicodeError) as problem:
            raise surrogate_error(listed) from problem
        return Ragged(np.frombuffer(ids, "<u4"), np.frombuffer(offsets, "<u8").astype(np.int64))
