"""Notes kept as a folder of markdown files, each one document."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from niels_gpt.data.files import VAL_FRAC, Split, split_folder, texts_of


def iter_roam(
    path: str | Path, *, split: Split = "train", val_frac: float = VAL_FRAC, seed: int = 42
) -> Iterator[str]:
    """The notes of one side of the seeded split by file, in the order of their names."""
    return texts_of(split_folder(path, name="roam", val_frac=val_frac, seed=seed)[split])


__all__ = ["iter_roam"]
