"""The fastokens engine: byte-level BPE from a tokenizer.json. The one importer of fastokens.

In: a text-only tokenizer.json.  Out: an Encoder.
Its threads: all cores but one, which stays for what reads and writes beside it. It would take them
all, and a build on two cores took a fifth longer for it. FASTOKENS_BPE_THREADS overrides.
Promise: ids come as one flat array, never as Python ints. Whether they are right is for the proof.
"""

from __future__ import annotations

import os
from importlib.metadata import version

import numpy as np

from shardmill.errors import TokenizerError, missing_extra
from shardmill.protocols import Texts
from shardmill.records import Ragged
from shardmill.tokenizers.texts import as_list, surrogate_error

try:
    import fastokens
except ImportError as missing:
    raise missing_extra("fastokens", "fast") from missing


THREADS = "FASTOKENS_BPE_THREADS"
"""The engine looks at this variable once, when it encodes for the first time."""


class FastokensEngine:
    name = "fastokens"

    def __init__(self, config_json: bytes) -> None:
        self.version = version("fastokens")
        os.environ.setdefault(THREADS, str(max(1, _num_cores() - 1)))
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


def _num_cores() -> int:
    """Cores that this process may use; only some systems can tell them from all there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
