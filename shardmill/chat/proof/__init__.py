"""Proof of a template's loss mask: a certificate, or the smallest conversation that refutes it.

battery.py  the conversations on which a mask is proved
example.py  one of them rendered, its turns matched with its messages
judge.py    the checks
prove.py    `prove_mask`, and how a failure is made small and shown
"""

from __future__ import annotations

from shardmill.chat.proof.prove import Certificate, prove_mask

__all__ = ["Certificate", "prove_mask"]
