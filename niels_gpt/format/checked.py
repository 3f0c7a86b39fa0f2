"""Checks of what a caller passes: a chat, ids and a mask. An error says where the problem is.

Nothing is repaired except a missing system message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from niels_gpt.special_tokens import ROLE_NAMES
from shardmill.chat.policy import normal_role
from shardmill.errors import ShardmillError
from shardmill.records import BoolArray, OffsetArray


class SFTFormatError(ShardmillError, ValueError):
    """A chat, or ids and a mask, that cannot become training data."""


def where_of(ex: object) -> str:
    """How errors about this chat begin."""
    name = ex.get("id") if isinstance(ex, Mapping) else None
    return "" if name is None else f"example_id={name}: "


def turns_of(ex: object, default_system_text: object, where: str) -> list[tuple[str, str]]:
    """Role and content of each turn, the system's first."""
    messages = ex.get("messages") if isinstance(ex, Mapping) else None
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise SFTFormatError(f"{where}found {ex!r:.80}, wanted an object with a list of messages")
    turns = [_turn(message, number, where) for number, message in enumerate(messages)]
    roles = [role for role, _ in turns]
    if "system" in roles[1:]:
        raise SFTFormatError(
            f"{where}message {roles.index('system', 1)} is a system message; only the first may be"
        )
    if "assistant" not in roles:
        raise SFTFormatError(
            f"{where}no assistant turn among {len(roles)} messages, so nothing could be trained"
        )
    if roles[0] != "system":
        turns.insert(0, ("system", _text(default_system_text, f"{where}default_system_text")))
    return turns


def _turn(message: object, number: int, where: str) -> tuple[str, str]:
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        raise SFTFormatError(
            f"{where}message {number} is {message!r:.80}, wanted an object with role and content"
        )
    role = normal_role(message["role"])
    if role not in ROLE_NAMES:
        raise SFTFormatError(
            f"{where}message {number}: unknown role {message['role']!r:.40}, wanted one of "
            f"{', '.join(ROLE_NAMES)} (also prompter, human, gpt, bot; any case)"
        )
    return role, _text(message["content"], f"{where}message {number} ({role}): content")


def _text(content: object, what: str) -> str:
    if not isinstance(content, str):
        raise SFTFormatError(f"{what} is {type(content).__name__}, wanted a string")
    try:
        content.encode()
    except UnicodeEncodeError as problem:
        raise SFTFormatError(
            f"{what} holds a lone surrogate at character {problem.start}, which has no bytes"
        ) from problem
    return content


def check_distinct(sys: int, usr: int, asst: int, eot: int) -> None:
    if len({sys, usr, asst, eot}) < 4:
        raise SFTFormatError(
            f"special ids sys={sys}, usr={usr}, asst={asst}, eot={eot}: wanted four different ids"
        )


def as_ids(ids: Sequence[int]) -> OffsetArray:
    tokens = np.asarray(ids)
    if not tokens.size:
        return np.empty(0, np.int64)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or tokens.min() < 0:
        raise SFTFormatError(f"ids {str(ids)[:60]}: wanted a flat list of whole numbers from 0 up")
    return tokens.astype(np.int64)


def as_mask(mask: Sequence[bool], length: int) -> BoolArray:
    trained = np.asarray(mask, None if len(mask) else np.bool_)
    if trained.dtype != np.bool_ or trained.shape != (length,):
        raise SFTFormatError(
            f"mask of {len(mask):,} values {str(mask)[:40]} for {length:,} ids: wanted one bool "
            "for each; sft_loss_mask_for_ids makes it"
        )
    return trained


def check_ends_in_eot(tokens: OffsetArray, asst_id: int, eot_id: int) -> None:
    opened, ended = np.flatnonzero(tokens == asst_id), np.flatnonzero(tokens == eot_id)
    if len(opened) and opened[-1] > (ended[-1] if len(ended) else -1):
        raise SFTFormatError(
            f"the last assistant turn, from id {opened[-1]:,} of {len(tokens):,}, has no EOT "
            f"({eot_id}), so the model could not learn to stop; pack whole chats, and let S cut"
        )


__all__ = [
    "SFTFormatError",
    "as_ids",
    "as_mask",
    "check_distinct",
    "check_ends_in_eot",
    "turns_of",
    "where_of",
]
