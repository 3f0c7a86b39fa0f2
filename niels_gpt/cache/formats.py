"""The fixed defaults of the cache. Every one has a flag on the command line."""

from __future__ import annotations

SEED = 42

TOKEN_DTYPE = "uint16"
TOKEN_DTYPE_STORED = "uint16-le"
"""How `token_dtype` is written in meta.json."""
INDEX_DTYPE = "<i8"

SHARD_GLOB = "shard_*.bin"
SHARD_BYTES = 128 * 2**20

FINEWEB_TRAIN_TOKENS = 200_000_000
FINEWEB_VAL_TOKENS = 5_000_000
SHUFFLE_BUFFER = 10_000

VAL_FRAC = 0.10
"""Share of the files (roam, gutenberg) or examples (SFT) that goes to val."""

META_FILE = "meta.json"
TOKENIZER_FILE = "spm.model"
TRAINED_TOKENIZER = "artifacts/tokenizer/spm.model"
"""Where the recipe's tokenizer training writes its model, relative to the working folder."""
ROAM_DIR = "data/roam"
"""Where notes are looked for when no folder is named."""

__all__ = [
    "FINEWEB_TRAIN_TOKENS",
    "FINEWEB_VAL_TOKENS",
    "INDEX_DTYPE",
    "META_FILE",
    "ROAM_DIR",
    "SEED",
    "SHARD_BYTES",
    "SHARD_GLOB",
    "SHUFFLE_BUFFER",
    "TOKENIZER_FILE",
    "TOKEN_DTYPE",
    "TOKEN_DTYPE_STORED",
    "TRAINED_TOKENIZER",
    "VAL_FRAC",
]
