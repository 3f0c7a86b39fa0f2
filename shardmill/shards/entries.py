"""What a manifest says, as frozen records.

In: nothing.  Out: the classes that meta.json is made of, field by field as FORMAT.md lists them.
Promise: the types alone refuse unknown keys, missing keys, negative and absurd numbers.
Not here: whether the numbers agree with one another (checks.py) or with the files (store.py).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from shardmill.shards.layout import MAX_COUNT, StoredDtype

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Sha256: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


class ShardEntry(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False
):  # there may be 100,000 of them, and they hold only strings and numbers
    """One file of raw tokens."""

    file: str  # relative to the store, for instance "train/shard_00000.bin"
    tokens: Count
    documents: Count  # documents that start in this shard
    first_document: Count | None  # first and last document with a token in it; null when empty
    last_document: Count | None
    sha256: Sha256


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One other file. Its entries are documents (index), lines (dropped rows), bits (loss mask)
    or turns (their starts and roles)."""

    file: str
    entries: Count
    sha256: Sha256


class ChatEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a split of conversations has beside its tokens."""

    mask: FileEntry  # one bit per token: is it a training target?
    turns: FileEntry  # where turns start in the token space of the split
    roles: FileEntry  # who speaks in each turn
    num_turns: Count
    trained_tokens: Count  # bits that are 1


class SplitEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One token space: its shards, one behind the other, and where its documents start."""

    tokens: Count
    documents: Count
    index: FileEntry
    shards: list[ShardEntry]
    chat: ChatEntry | None  # of every split, or of none


class DocumentLedger(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """read == kept + empty + over_budget + sum(dropped.values())"""

    read: Count
    kept: Count
    empty: Count
    over_budget: Count
    dropped: dict[str, Count]  # reason -> rows


class TokenLedger(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """encoded + separators == kept + over_budget"""

    encoded: Count
    separators: Count
    kept: Count
    over_budget: Count


class ChatLedger(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the kept conversations hold; the sums over all splits."""

    turns: Count
    trained_tokens: Count


class Ledger(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where every input document and token went."""

    documents: DocumentLedger
    tokens: TokenLedger
    repaired: dict[str, Count]  # kept documents that were changed: reason -> documents
    chat: ChatLedger | None  # null when the splits hold no conversations


class StoreFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the builder knows and the bytes do not say."""

    dataset_name: str | None
    dataset_config: str | None
    dataset_revision: str | None
    streaming: bool | None
    split_rule: str
    seed: int
    shuffle_buffer: Count | None
    append_eot: bool
    unit: Literal["document", "example"]
    tokenizer_sha256: Sha256 | None  # of the model's file; the fingerprint when there is none
    tokenizer_fingerprint: Sha256 | None  # over everything that decides ids, versions included
    vocab_size: Count | None  # one more than the largest id; None when the tokenizer cannot say
    special_token_ids: dict[str, Count]
    sources: list[dict[str, Any]]
    options: dict[str, Any]
    ledger: Ledger
    produced_by: dict[str, Any]


class Manifest(StoreFacts, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """meta.json without its per-split convenience keys and its own checksum."""

    format: Literal["shardmill-store"]
    version: Literal[1]
    built: bool  # False: a placeholder that reserves the place
    token_dtype: StoredDtype
    shard_bytes: Count | None  # None: one file per split
    splits: dict[str, SplitEntry]
    dropped: FileEntry | None


def empty_ledger() -> Ledger:
    """A ledger of nothing read."""
    return Ledger(
        documents=DocumentLedger(read=0, kept=0, empty=0, over_budget=0, dropped={}),
        tokens=TokenLedger(encoded=0, separators=0, kept=0, over_budget=0),
        repaired={},
        chat=None,
    )
