"""Whole conversations as rows, with the loss on what the assistant said.

A row is one example from its start, cut after T + 1 tokens or padded with EOT. `y_masked` keeps the
targets inside assistant spans, their closing EOT included, and is -100 elsewhere. Padding is never
trained, and every row trains at least one token: examples that cannot, because the cut comes before
the assistant speaks, are not drawn, and the log says how many.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch

from niels_gpt.cache.mmap import find_examples
from shardmill.arguments import whole_number
from shardmill.chat import assistant_mask
from shardmill.errors import OptionError, StoreError
from shardmill.records import IntArray, OffsetArray, next_token_pairs
from shardmill.store.readers import TokenSpace

log = logging.getLogger(__name__)

_SCAN_TOKENS = 4 * 2**20


class SFTExampleDataset:
    """The examples of one split of a chat cache."""

    def __init__(
        self,
        tokens_path: str,
        idx_path: str,
        *,
        T: int,
        device: str,
        eot_id: int,
        asst_id: int | None = None,
    ) -> None:
        """
        tokens_path: concatenated tokens; idx_path: int64 starts of the examples.
        asst_id: the assistant's opening token; without it the meta.json beside the tokens says
        it, else it is taken to be eot_id - 1 (sys, usr, asst, eot are consecutive), with a warning.
        Reads the tokens once, in pieces, to find the examples that can be trained at this T.
        """
        T = whole_number(T, "T")
        self.tokens_path, self.T, self.device = str(tokens_path), T, device
        file, self._starts, meta = find_examples(Path(tokens_path), Path(idx_path))
        self.eot_id = eot_id
        self.asst_id = _assistant_id(tokens_path, meta, eot_id, asst_id)
        self._space = TokenSpace([file])
        ends = np.append(self._starts[1:], file.num_tokens)
        self._lengths = np.minimum(ends - self._starts, T + 1)
        self._drawable = _trainable(self._space, self._starts, self._lengths, self.asst_id)
        self.num_examples = len(self._starts)
        self._report_untrainable()

    def get_batch(
        self, *, B: int, generator: torch.Generator
    ) -> tuple[torch.LongTensor, torch.LongTensor, torch.LongTensor]:
        """x, y, y_masked of shape (B, T), int64, on the device; drawn with replacement.

        Moves the generator by B draws. The three are contiguous and share no memory.
        """
        B = whole_number(B, "B")
        drawn = torch.randint(
            len(self._drawable), (B,), generator=generator, device=generator.device
        ).cpu()
        rows = self.rows(self._drawable[drawn.numpy()])
        x, y, y_masked = (torch.from_numpy(part).to(self.device) for part in rows)
        return x, y, y_masked  # type: ignore[return-value]

    def rows(self, examples: IntArray) -> tuple[OffsetArray, OffsetArray, OffsetArray]:
        """x, y, y_masked of the given examples."""
        tokens, real = self._padded(examples)
        said = assistant_mask(tokens, open_id=self.asst_id, end_id=self.eot_id) & real
        x, y = next_token_pairs(tokens)
        return x, y, next_token_pairs(tokens, said)[1]

    def _padded(
        self, examples: IntArray
    ) -> tuple[OffsetArray, np.ndarray[Any, np.dtype[np.bool_]]]:
        """(n, T + 1) tokens, EOT after each example, and where the tokens are the example's."""
        starts, column = self._starts[examples], np.arange(self.T + 1)
        width = min(self.T + 1, self._space.num_tokens)
        # A row near the file's end is gathered further left and read from `shift` on.
        left = np.minimum(starts, self._space.num_tokens - width)
        raw = self._space.gather(left, width)
        shift = starts - left
        if width <= self.T or shift.any():
            place = np.minimum(column + shift[:, None], width - 1)
            raw = np.take_along_axis(raw, place, axis=1)
        real = column < self._lengths[examples][:, None]
        return np.where(real, raw, np.int64(self.eot_id)), real

    def _report_untrainable(self) -> None:
        left_out = self.num_examples - len(self._drawable)
        if not len(self._drawable):
            raise StoreError(
                f"{self.tokens_path}: in none of {self.num_examples:,} examples does the assistant "
                f"(token {self.asst_id}) speak within the first T + 1 = {self.T + 1:,} tokens, so "
                "nothing could be trained: use a larger T, and check eot_id and asst_id"
            )
        if left_out:
            log.warning(
                "%s: %d of %d examples are never drawn: the assistant says nothing within the "
                "first %d tokens",
                self.tokens_path,
                left_out,
                self.num_examples,
                self.T + 1,
            )

    def __len__(self) -> int:
        """Examples that can be drawn."""
        return len(self._drawable)

    def __repr__(self) -> str:
        return f"SFTExampleDataset({self.tokens_path!r}, T={self.T}, examples={len(self):,})"


def _trainable(
    space: TokenSpace, starts: OffsetArray, lengths: OffsetArray, asst_id: int
) -> OffsetArray:
    """The examples in whose first `lengths` tokens the assistant says something, ascending.

    That is where an opening token is followed, inside the row, by anything but another one.
    """
    found = np.zeros(len(starts), np.bool_)
    for first in range(0, space.num_tokens, _SCAN_TOKENS):
        # One token more than the piece, to see what follows its last one.
        tokens = space.read(first, min(first + _SCAN_TOKENS + 1, space.num_tokens))
        opens = tokens == asst_id
        place = first + np.flatnonzero(opens[:-1] & ~opens[1:])
        example = np.searchsorted(starts, place, side="right") - 1
        held = example >= 0
        place, example = place[held], example[held]
        found[example[place + 1 < starts[example] + lengths[example]]] = True
    return np.flatnonzero(found)


def _assistant_id(
    tokens_path: str, meta: dict[str, Any] | None, eot_id: int, asst_id: int | None
) -> int:
    special = (meta or {}).get("special_token_ids") or {}
    if not isinstance(special, dict) or not all(isinstance(i, int) for i in special.values()):
        raise StoreError(f"{tokens_path}: special_token_ids in its meta.json is no map to ids")
    for name, given in (("eot", eot_id), ("asst", asst_id)):
        if given is not None and special.get(name, given) != given:
            raise OptionError(
                f"{tokens_path}: {name}_id={given}, but its meta.json says {special[name]}; these "
                "tokens were made with another tokenizer, or the argument is wrong"
            )
    found = special.get("asst") if asst_id is None else asst_id
    if found is None:
        found = eot_id - 1
        log.warning(
            "%s: nothing says which token opens the assistant's messages; taking eot_id - 1 = %d "
            "(sys, usr, asst, eot are consecutive). Pass asst_id to be sure",
            tokens_path,
            found,
        )
    if found == eot_id or min(found, eot_id) < 0:
        raise OptionError(f"asst_id={found}, eot_id={eot_id}: wanted two different ids from 0 up")
    return int(found)


__all__ = ["SFTExampleDataset"]
