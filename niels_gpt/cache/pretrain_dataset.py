"""Random windows of a split's tokens, as batches x, y of shape (B, T).

y is x moved by one. A window is inside one shard, and every window is equally likely, because a
shard is chosen with probability proportional to its number of windows. All randomness comes from
the caller's torch generator. Tokens are mapped, never loaded whole.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from niels_gpt.cache.mmap import find_shards
from shardmill.arguments import whole_number
from shardmill.errors import StoreError
from shardmill.records import OffsetArray, next_token_pairs
from shardmill.store.readers import TokenSpace


class PretrainTokenStreamDataset:
    """Windows of T + 1 tokens from the shards of one split."""

    def __init__(self, shards_dir: str, *, T: int, device: str) -> None:
        """
        shards_dir: a split of a store (`<store>/train`; its meta.json names the shards), or a bare
        folder of shard_*.bin (uint16). T: inputs per row, so windows have T + 1 tokens.
        """
        T = whole_number(T, "T")
        self.shards_dir, self.T, self.device = str(shards_dir), T, device
        files = find_shards(Path(shards_dir))
        sizes = np.array([file.num_tokens for file in files], np.int64)
        # A shard of n tokens holds n - T windows, which start at 0..n - T - 1.
        windows = np.maximum(sizes - T, 0)
        if not windows.any():
            raise StoreError(
                f"{shards_dir}: no shard has enough tokens for a window of T + 1 = {T + 1:,}; the "
                f"longest has {sizes.max():,}: use a smaller T or larger shards"
            )
        self._space = TokenSpace(files)
        # Window w is in the shard with first_window[s] <= w < first_window[s + 1].
        self._first_window = np.concatenate(([0], np.cumsum(windows)))
        self._shift = np.concatenate(([0], np.cumsum(sizes)[:-1])) - self._first_window[:-1]
        self.num_windows = int(self._first_window[-1])
        self.num_tokens = self._space.num_tokens

    def get_batch(
        self, *, B: int, generator: torch.Generator
    ) -> tuple[torch.LongTensor, torch.LongTensor]:
        """x, y of shape (B, T), int64, on the device; drawn with replacement.

        Moves the generator by B draws. x and y are contiguous and share no memory.
        """
        B = whole_number(B, "B")
        drawn = torch.randint(
            self.num_windows, (B,), generator=generator, device=generator.device
        ).cpu()
        tokens = self._space.gather(self._starts(drawn.numpy()), self.T + 1)
        x, y = (torch.from_numpy(part).to(self.device) for part in next_token_pairs(tokens))
        return x, y  # type: ignore[return-value]

    def _starts(self, windows: OffsetArray) -> OffsetArray:
        """Where windows begin in the token space: past all shards before, inside their own."""
        shard = np.searchsorted(self._first_window, windows, side="right") - 1
        starts: OffsetArray = windows + self._shift[shard]
        return starts

    def __repr__(self) -> str:
        return (
            f"PretrainTokenStreamDataset({self.shards_dir!r}, T={self.T}, "
            f"windows={self.num_windows:,})"
        )


__all__ = ["PretrainTokenStreamDataset"]
