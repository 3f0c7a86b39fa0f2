"""What a manifest says, as frozen records.

In: nothing.  Out: the classes that meta.json is made of, field by field as FORMAT.md lists them.
Promise: the types alone refuse unknown keys, missing keys, negative and absurd numbers.
Not here: whether the numbers agree with one another (checks.py) or with the files (store.py).

Do the numbers of a manifest agree with one another?

In: a manifest.  Out: a list of sentences, empty when all is well.
Promise: pure; every sum that FORMAT.md promises is checked, for writing and for reading.
Not here: files (scan.py), types and ranges of single numbers (entries.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from shardmill.store.layout import (
    DTYPES,
    ITEMSIZE,
    MAX_COUNT,
    META,
    StoredDtype,
    is_file_name,
    is_split_name,
)

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


def manifest_problems(manifest: Manifest) -> list[str]:
    """Everything in this manifest that cannot be true, most telling first."""
    problems = [*_name_problems(manifest), *_json_problems(manifest)]
    if not manifest.built and (manifest.splits or manifest.dropped):
        problems.append('"built" is false, but splits or dropped rows are listed')
    for name, split in manifest.splits.items():
        problems += (f"split {name!r}: {problem}" for problem in _split_problems(manifest, split))
    return [*problems, *ledger_problems(manifest), *_chat_ledger_problems(manifest)]


def ledger_problems(manifest: Manifest) -> list[str]:
    """Law 4: every input document and token lies in exactly one bucket."""
    ledger = manifest.ledger
    listed = manifest.dropped.entries if manifest.dropped else 0
    stored_documents = sum(split.documents for split in manifest.splits.values())
    stored_tokens = sum(split.tokens for split in manifest.splits.values())
    sums = _ledger_sums(ledger)
    sums += [
        ("documents kept", ledger.documents.kept, "documents in all splits", stored_documents),
        ("tokens kept", ledger.tokens.kept, "tokens in all splits", stored_tokens),
        ("documents dropped", sum(ledger.documents.dropped.values()), "rows listed", listed),
    ]
    return [
        f"the ledger does not balance: {left} is {found:,}, but {right} is {wanted:,}"
        for left, found, right, wanted in sums
        if found != wanted
    ]


def _chat_ledger_problems(manifest: Manifest) -> Iterator[str]:
    """A store is one of conversations or not; if it is, the books know their turns."""
    entries = [split.chat for split in manifest.splits.values()]
    chats = [entry for entry in entries if entry is not None]
    books = manifest.ledger.chat
    if not manifest.built:
        return
    if len(chats) not in (0, len(entries)):
        yield f"{len(chats)} of {len(entries)} splits hold conversations; all do, or none"
    elif chats and manifest.unit != "example":
        yield f'conversations are counted as examples, but "unit" is {manifest.unit!r}'
    if (books is None) != (not chats):
        yield "the ledger knows turns exactly when the splits hold conversations"
    elif books is not None:
        for name, found, stored in (
            ("turns", books.turns, sum(entry.num_turns for entry in chats)),
            ("trained tokens", books.trained_tokens, sum(entry.trained_tokens for entry in chats)),
        ):
            if found != stored:
                yield (
                    f"the ledger does not balance: {name} is {found:,}, but all splits hold "
                    f"{stored:,}"
                )


def _ledger_sums(ledger: Ledger) -> list[tuple[str, int, str, int]]:
    documents, tokens = ledger.documents, ledger.tokens
    kept_or_not = documents.kept + documents.empty + documents.over_budget
    return [
        (
            "documents read",
            documents.read,
            "kept + empty + over budget + dropped",
            kept_or_not + sum(documents.dropped.values()),
        ),
        (
            "tokens encoded + separators",
            tokens.encoded + tokens.separators,
            "kept + over budget",
            tokens.kept + tokens.over_budget,
        ),
    ]


def file_names(manifest: Manifest) -> Iterator[str]:
    """Every file the manifest lists, in its order."""
    for split in manifest.splits.values():
        yield split.index.file
        if split.chat:
            yield from (split.chat.mask.file, split.chat.turns.file, split.chat.roles.file)
        yield from (shard.file for shard in split.shards)
    if manifest.dropped:
        yield manifest.dropped.file


def _name_problems(manifest: Manifest) -> Iterator[str]:
    for name in manifest.splits:
        if not is_split_name(name):
            yield f"split {name!r} is not a possible name"
    seen = {META}
    for file in file_names(manifest):
        if not is_file_name(file):
            yield f"file {file!r} is not a plain path inside the store"
        folded = file.lower()
        if folded in seen:
            yield f"file {file!r} is listed twice"
        seen.add(folded)


def _json_problems(manifest: Manifest) -> Iterator[str]:
    for name in ("sources", "options", "produced_by"):
        yield from (f"{name}: {problem}" for problem in json_problems(getattr(manifest, name)))


def json_problems(value: object) -> Iterator[str]:
    """What in `value` would not survive a trip through JSON unchanged."""
    match value:
        case None | bool() | int():
            return
        case str():
            if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
                yield f"{value!r} is not valid Unicode"
        case float():
            if not math.isfinite(value):
                yield f"{value} is not a number that JSON knows"
        case list() | tuple():
            for item in value:
                yield from json_problems(item)
        case dict():
            for key, item in value.items():
                if not isinstance(key, str):
                    yield f"key {key!r} is not a string"
                yield from json_problems(key)
                yield from json_problems(item)
        case _:
            yield f"{value!r} ({type(value).__name__}) is not JSON"


def _split_problems(manifest: Manifest, split: SplitEntry) -> Iterator[str]:
    tokens = sum([shard.tokens for shard in split.shards])
    documents = sum([shard.documents for shard in split.shards])
    if tokens != split.tokens:
        yield f"its shards hold {tokens:,} tokens, but it claims {split.tokens:,}"
    if documents != split.documents:
        yield f"{documents:,} documents start in its shards, but it claims {split.documents:,}"
    if split.index.entries != split.documents:
        yield f"{split.documents:,} documents, but {split.index.entries:,} index entries"
    if split.tokens and not split.documents:
        yield f"{split.tokens:,} tokens that belong to no document"
    if split.chat:
        yield from _chat_problems(split, split.chat)
    yield from _cut_problems(manifest, split.shards)
    for shard in split.shards:
        yield from _range_problems(shard, split.documents)
    filled = [shard for shard in split.shards if shard.tokens]
    for left, right in pairwise(filled):
        if (right.first_document or 0) < (left.last_document or 0):
            yield f"{right.file} begins before document {left.last_document} of {left.file}"


def _chat_problems(split: SplitEntry, chat: ChatEntry) -> Iterator[str]:
    """Every example has a turn and trains a token, so these counts are bounded on both sides."""
    if chat.mask.entries != split.tokens:
        yield f"{split.tokens:,} tokens, but a loss mask of {chat.mask.entries:,} bits"
    for name, entry in (("starts", chat.turns), ("roles", chat.roles)):
        if entry.entries != chat.num_turns:
            yield f"{chat.num_turns:,} turns, but {entry.entries:,} {name} of turns"
    if not split.documents <= chat.trained_tokens <= split.tokens:
        yield (
            f"{chat.trained_tokens:,} trained tokens of {split.tokens:,} in "
            f"{split.documents:,} examples are impossible"
        )
    if chat.num_turns < split.documents:
        yield f"{chat.num_turns:,} turns in {split.documents:,} examples, wanted one in each"


def _cut_problems(manifest: Manifest, shards: list[ShardEntry]) -> Iterator[str]:
    """All shards but the last are full; without `shard_bytes` there is exactly one."""
    size = ITEMSIZE[DTYPES[manifest.token_dtype]]
    if manifest.shard_bytes is None:
        if len(shards) != 1:
            yield f"{len(shards)} shards, but shard_bytes is null, which means one file"
        return
    full, rest = divmod(manifest.shard_bytes, size)
    if full == 0 or rest:
        yield f"shard_bytes {manifest.shard_bytes:,} is no positive multiple of {size}"
        return
    for number, shard in enumerate(shards):
        if shard.tokens > full or (number < len(shards) - 1 and shard.tokens != full):
            yield f"{shard.file} has {shard.tokens:,} tokens; shards are cut at {full:,}"
    if len(shards) > 1 and shards[-1].tokens == 0:
        yield f"{shards[-1].file} is empty, but not the only shard"


def _range_problems(shard: ShardEntry, documents: int) -> Iterator[str]:
    first, last = shard.first_document, shard.last_document
    if first is None or last is None:
        if shard.tokens or first is not None or last is not None:
            yield f"{shard.file}: first and last document are null for an empty shard only"
    elif not shard.tokens or first > last or last >= documents:
        yield f"{shard.file}: documents {first:,}..{last:,} of {documents:,} are impossible"
