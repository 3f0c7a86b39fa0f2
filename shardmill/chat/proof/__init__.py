"""Proof of a template's loss mask: a certificate, or the smallest conversation that refutes it.

examples.py        the conversations on which a mask is proved, and one of them rendered
prove.py           `prove_mask` and its checks
counterexample.py  how a failure is made small and shown
"""

from __future__ import annotations

from shardmill.chat.proof.prove import Certificate, prove_mask

__all__ = ["Certificate", "prove_mask"]
