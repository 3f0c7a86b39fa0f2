"""Books as a folder of text files, each one document, with all the text the files hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from niels_gpt.data.files import VAL_FRAC, Split, split_folder, texts_of


def iter_gutenberg(
    path: str | Path, *, split: Split = "train", val_frac: float = VAL_FRAC, seed: int = 42
) -> Iterator[str]:
    """The books of one side of the seeded split by file, in the order of their names."""
    return texts_of(split_folder(path, name="gutenberg", val_frac=val_frac, seed=seed)[split])


__all__ = ["iter_gutenberg"]
