"""Proof of a template's loss mask: a certificate, or the smallest conversation that refutes it.

examples.py  the conversations on which a mask is proved: one rendered, and one that fails shown
prove.py     `prove_mask` and its checks
"""

from __future__ import annotations

from shardmill.chat.proof.prove import Certificate, prove_mask

__all__ = ["Certificate", "prove_mask"]
