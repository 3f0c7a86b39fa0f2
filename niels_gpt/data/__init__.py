"""The recipe's data, one function per set: texts, or conversations as lists of messages.

Each reads the hub, or a local `path` in its place.
"""

from __future__ import annotations

from niels_gpt.data.dolly import iter_dolly_sft
from niels_gpt.data.fineweb_edu import iter_fineweb_edu
from niels_gpt.data.gutenberg import iter_gutenberg
from niels_gpt.data.oasst1 import iter_oasst1_sft
from niels_gpt.data.roam import iter_roam
from niels_gpt.data.wikitext import iter_wikitext

__all__ = [
    "iter_dolly_sft",
    "iter_fineweb_edu",
    "iter_gutenberg",
    "iter_oasst1_sft",
    "iter_roam",
    "iter_wikitext",
]
