"""torch, or the pip command that brings it."""

from __future__ import annotations

from shardmill.errors import missing_extra

try:
    import torch
except ImportError as missing:
    raise missing_extra("torch", "torch") from missing

__all__ = ["torch"]
