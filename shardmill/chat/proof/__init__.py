"""Is a template's mask right? A certificate, or the smallest conversation that shows not.

battery.py  the conversations on which a mask is proved
example.py  one of them rendered, its turns matched with its messages
reader.py   tokens as text
shape.py    how the template writes a trained turn
judge.py    the checks
show.py     a failure made small, token by token
prove.py    all of it: `prove_mask`
"""

from __future__ import annotations

from shardmill.chat.proof.prove import Certificate, prove_mask

__all__ = ["Certificate", "prove_mask"]
