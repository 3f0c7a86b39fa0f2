"""Chats to fixed-size training batches, one list of ids at a time.

SYS comes first, then the turns in order. The loss is on the assistant's words and their EOT. A
packed row has length S, trains at least one token and holds the last assistant's EOT. Text never
becomes a special id, whatever the tokenizer does with the literal strings. The mask follows
`shardmill.chat.policy`; what is left out of a row follows `shardmill.chat.fit`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NotRequired, TypeAlias, TypedDict

import numpy as np
import torch

from niels_gpt.format.checked import (
    SFTFormatError,
    as_ids,
    as_mask,
    check_distinct,
    check_ends_in_eot,
    turns_of,
    where_of,
)
from niels_gpt.messages import Message
from niels_gpt.special_tokens import ROLE_NAMES, SPECIAL_TOKENS
from shardmill.arguments import whole_number
from shardmill.chat.fit import Fit, fit_rows
from shardmill.chat.policy import assistant_mask
from shardmill.records import IGNORE_INDEX, ROLES, ChatExamples, Ragged, next_token_pairs
from shardmill.tokenizers import adapt_tokenizer, probe
from shardmill.tokenizers.base import short_name

DEFAULT_SYSTEM_TEXT = "you are a helpful assistant."

_ANY_LITERAL = re.compile("|".join(f"(?={re.escape(text)})" for text in SPECIAL_TOKENS.values()))

ChatMsg: TypeAlias = Message


class ChatExample(TypedDict):
    """One chat. Its id, when it has one, is in every error about it."""

    messages: list[ChatMsg]
    id: NotRequired[str]


def serialize_chat_to_ids(
    ex: ChatExample, *, tokenizer: Any, default_system_text: str
) -> list[int]:
    """
    returns token ids for the whole chat using token-native template.
    must include <|ngpt_sys_84a5023f67d74cf29cc4001becde983c|> ... <|ngpt_eot_84a5023f67d74cf29cc4001becde983c|> first.

    Roles in any case and under their other names (human, gpt, ...). A literal special string in a
    content is text: where the tokenizer would make a special id of it, the string is encoded in
    two pieces. tokenizer: anything with encode(text); open a library's own object once with
    shardmill.open_tokenizer, or it is opened again in every call.
    """  # noqa: E501
    where = where_of(ex)
    turns = turns_of(ex, default_system_text, where)
    opened = adapt_tokenizer(tokenizer)
    special = _specials(opened.special_token_ids(), opened.encode, where)
    structure = frozenset(special.values())
    ids: list[int] = []
    for number, (role, content) in enumerate(turns):
        words = _encode_text(content, opened.encode, structure)
        if not structure.isdisjoint(words):
            raise SFTFormatError(
                f"{where}turn {number} ({role}): the tokenizer makes special ids "
                f"{sorted(structure & set(words))} out of its text, and text must never become "
                "structure; open the model with shardmill.open_tokenizer, which keeps them apart"
            )
        ids += [special[ROLE_NAMES[role]], *words, special["eot"]]
    return ids


def sft_loss_mask_for_ids(
    ids: list[int], *, sys_id: int, usr_id: int, asst_id: int, eot_id: int
) -> list[bool]:
    """
    returns mask per token-position in ids (same length).
    mask True only for assistant content tokens + assistant-ending eot.
    """
    check_distinct(sys_id, usr_id, asst_id, eot_id)
    tokens = as_ids(ids)
    mask = assistant_mask(tokens, open_id=asst_id, end_id=eot_id)
    mask &= (tokens != sys_id) & (tokens != usr_id)
    said: list[bool] = mask.tolist()
    return said


def pack_sft_ids_and_mask(
    ids: list[int],
    mask: list[bool],
    *,
    S: int,
    sys_id: int,
    usr_id: int,
    asst_id: int,
    eot_id: int,
    pad_id: int,
) -> tuple[list[int], list[bool]]:
    """
    enforces length exactly S:
      - left-truncate by whole turns where possible (drop oldest usr+asst pairs)
      - if still too long, hard left-truncate
      - right-pad with pad_id if too short
    returns (ids_packed, mask_packed)

    A hard cut starts at a role token when one fits. ids and mask are cut together, so the rest of
    a huge assistant turn is still trained. Ids that train nothing, or whose last assistant turn
    has no EOT, are an error. S: 2 or more.
    """
    check_distinct(sys_id, usr_id, asst_id, eot_id)
    S = whole_number(S, "S", least=2)
    tokens, trained = as_ids(ids), as_mask(mask, len(ids))
    check_ends_in_eot(tokens, asst_id, eot_id)
    opens = {sys_id: "system", usr_id: "user", asst_id: "assistant"}
    starts = np.flatnonzero(np.isin(tokens, list(opens)))
    roles = [ROLES.index(opens[token]) for token in tokens[starts].tolist()]
    examples = ChatExamples(
        ids=Ragged.from_lengths(tokens, [len(tokens)]),
        mask=trained,
        turn_starts=starts,
        turn_roles=np.array(roles, np.uint8),
    )
    rows = fit_rows(examples, S - 1, fit=Fit.DROP_OLDEST_TURNS, pad_id=pad_id)
    if not len(rows.ids):
        raise SFTFormatError(
            f"{len(tokens):,} ids with {int(trained.sum()):,} trained, none of which is a label: "
            "such a row would train nothing; leave chats without an assistant's words out"
        )
    return rows.ids[0].tolist(), rows.mask[0].tolist()


def collate_sft_batch(
    packed: list[tuple[list[int], list[bool]]],
    *,
    T: int,
    device: str,
    ignore_index: int = IGNORE_INDEX,
) -> tuple[torch.LongTensor, torch.LongTensor, torch.BoolTensor]:
    """
    packed items have length S=T+1.
    returns:
      x: (B,T)
      y: (B,T) with ignore_index where loss_mask is False
      loss_mask: (B,T)
    """
    S = whole_number(T, "T") + 1
    for number, (ids, mask) in enumerate(packed):
        if len(ids) != S or len(mask) != S:
            raise SFTFormatError(
                f"packed item {number} has {len(ids):,} ids and {len(mask):,} mask values, wanted "
                f"S = T + 1 = {S:,} of each; pack it with pack_sft_ids_and_mask(..., S={S})"
            )
    tokens = as_ids([token for ids, _ in packed for token in ids]).reshape(-1, S)
    trained = as_mask([said for _, mask in packed for said in mask], tokens.size).reshape(-1, S)
    pairs = next_token_pairs(tokens, trained, ignore_index=ignore_index)
    parts = (*pairs, trained[:, 1:].copy())
    x, y, loss_mask = (torch.from_numpy(part).to(device) for part in parts)
    return x, y, loss_mask  # type: ignore[return-value]


def _specials(
    named: Mapping[str, int], encode: Callable[[str], list[int]], where: str
) -> dict[str, int]:
    """The four ids by name: from the tokenizer's own table, else from encoding the strings."""
    ids: dict[str, int] = {}
    for name, text in SPECIAL_TOKENS.items():
        known = [named[key] for key in (text, short_name(text), name) if key in named]
        found = known[:1] or probe(encode, text) or []
        if len(found) != 1:
            raise SFTFormatError(
                f"{where}no id for {name!r}: special_token_ids() has {sorted(named)}, and {text} "
                f"encodes to {len(found)} ids, wanted 1; give the tokenizer special_token_ids(), "
                "or train it with the strings of niels_gpt.special_tokens"
            )
        ids[name] = found[0]
    check_distinct(**ids)
    return ids


def _encode_text(
    content: str, encode: Callable[[str], list[int]], special: frozenset[int]
) -> list[int]:
    """The ids of a content whose literal special strings are text.

    A tokenizer that makes a special id of such a string, or refuses it, gets it in two pieces:
    every occurrence is cut after its first character, so no piece holds one.
    """
    cuts = [match.start() + 1 for match in _ANY_LITERAL.finditer(content)]
    if not cuts:
        return encode(content)
    whole = probe(encode, content)
    if whole is not None and special.isdisjoint(whole):
        return whole
    pieces = [content[start:stop] for start, stop in pairwise([0, *cuts, len(content)])]
    return [token for piece in pieces for token in encode(piece)]


__all__ = [
    "DEFAULT_SYSTEM_TEXT",
    "IGNORE_INDEX",
    "ChatExample",
    "ChatMsg",
    "SFTFormatError",
    "collate_sft_batch",
    "pack_sft_ids_and_mask",
    "serialize_chat_to_ids",
    "sft_loss_mask_for_ids",
]
