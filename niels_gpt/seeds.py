"""The one place where a torch generator is made, so that an invalid seed gets a clear message."""

from __future__ import annotations

import torch

from shardmill.errors import OptionError

_MOST = 2**63


def seeded(seed: int) -> torch.Generator:
    """A generator; equal seeds draw equal numbers."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < _MOST:
        raise OptionError(f"seed={seed!r}: wanted a whole number from 0 to 2**63 - 1")
    return torch.Generator().manual_seed(seed)


__all__ = ["seeded"]
