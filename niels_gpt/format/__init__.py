"""Chats as the recipe's tokens: one message is its role's token, its words, EOT."""

from __future__ import annotations

from niels_gpt.format.sft import (
    DEFAULT_SYSTEM_TEXT,
    IGNORE_INDEX,
    ChatExample,
    ChatMsg,
    SFTFormatError,
    collate_sft_batch,
    pack_sft_ids_and_mask,
    serialize_chat_to_ids,
    sft_loss_mask_for_ids,
)

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
