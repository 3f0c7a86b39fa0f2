"""meta.json: the file that makes a folder a store.

Equal manifests are equal bytes. A manifest that `read_manifest` returns has known keys only,
possible numbers, sums that agree and names inside the folder, and is what was written, to the
byte. Whether the listed files exist and match is checked by `open_store` and `verify`.
"""

from __future__ import annotations

import hashlib
import math
import re
import stat
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from shardmill.arguments import refuse_url
from shardmill.errors import BuildError, ManifestError, StoreExistsError, StoreNotFoundError
from shardmill.records import PreferenceKind
from shardmill.storage.atomic import atomic_write, cannot_write, sync_folder
from shardmill.store.branches import BRANCH_BYTES
from shardmill.store.layout import (
    DTYPES,
    FILE_NAME,
    FORMAT,
    INDEX_HEADER_BYTES,
    ITEMSIZE,
    MAX_COUNT,
    META,
    SPLIT_NAME,
    STORED,
    VERSIONS,
    StoredDtype,
    check_shape,
    looks_like_data,
)

MAX_META_BYTES = 2**30
_SEAL_KEY = "manifest_sha256"
_SEAL = re.compile(rb'"manifest_sha256": "([0-9a-f]{64})"')
_NO_SEAL = b"0" * 64
_TOTAL_KEY = re.compile(r".+_(tokens|documents|examples)")
_AGAIN = "it was changed or damaged after the build: copy it again or build the store again"

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Sha256: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


class WrittenShard(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False
):  # there may be 100,000 of them, and they hold only strings and numbers
    """One file of raw tokens, complete."""

    file: str  # relative to the store, for instance "train/shard_00000.bin"
    tokens: Count
    sha256: Sha256


class ShardEntry(WrittenShard, frozen=True, kw_only=True, forbid_unknown_fields=True, gc=False):
    """A shard in its split."""

    documents: Count  # documents that start in this shard
    first_document: Count | None  # first and last document with a token in it; null when empty
    last_document: Count | None


class ListedFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One other file. Its entries are documents (index), lines (dropped rows), bits (loss mask)
    or turns (their starts and roles)."""

    file: str
    entries: Count
    sha256: Sha256


class PreferenceEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a split of preferences has beside its conversations."""

    branches: ListedFile  # which examples are branches, of what; the others are prefixes
    kind: PreferenceKind
    records: Count  # prompts with their answers
    saved_tokens: Count  # that prefixes would have if each branch had its own


class ChatEntry(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """What a split of conversations has beside its tokens."""

    mask: ListedFile  # one bit per token: is it a training target?
    turns: ListedFile  # where turns start in the token space of the split
    roles: ListedFile  # who speaks in each turn
    num_turns: Count
    trained_tokens: Count  # bits that are 1
    preference: PreferenceEntry | None = None  # of every split of version 3


class SplitEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One token space: its shards in order, and where its documents start."""

    tokens: Count
    documents: Count
    index: ListedFile
    shards: list[ShardEntry]
    chat: ChatEntry | None  # of every split, or of none


class DocumentLedger(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """read == kept + empty + filtered + over_budget + sum(dropped.values())"""

    read: Count
    kept: Count
    empty: Count
    over_budget: Count
    dropped: dict[str, Count]  # reason -> rows
    filtered: Count = 0  # rows for which the filter of a source was not true; not listed


class TokenLedger(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """encoded + separators == kept + over_budget"""

    encoded: Count
    separators: Count
    kept: Count
    over_budget: Count


class ChatLedger(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """What the kept conversations hold; the sums over all splits."""

    turns: Count
    trained_tokens: Count
    repeated_tokens: Count = 0  # of beginnings, where a conversation was fanned out


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
    """meta.json without its per-split totals and its own checksum."""

    format: Literal["shardmill-store"]
    version: Literal[1, 2, 3]
    # 1: all shards but the last hold `shard_bytes`; 2: at most; 3: that, and preferences
    built: bool  # False: a placeholder for a store that is not built yet
    token_dtype: StoredDtype
    shard_bytes: Count | None  # None: one file per split
    splits: dict[str, SplitEntry]
    dropped: ListedFile | None


class DroppedRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of dropped.jsonl: an input row that gave no document."""

    id: str
    reason: str


_KEYS = frozenset(Manifest.__struct_fields__)


def kept_ledger(documents: int, tokens: int) -> Ledger:
    """A ledger of documents that were all kept, as they came."""
    counts = {"read": documents, "kept": documents, "empty": 0, "over_budget": 0}
    return Ledger(
        documents=DocumentLedger(**counts, dropped={}),
        tokens=TokenLedger(encoded=tokens, separators=0, kept=tokens, over_budget=0),
        repaired={},
        chat=None,
    )


def given_facts(documents: int, tokens: int, **known: Any) -> StoreFacts:
    """Facts of a store whose tokens no build made: all were kept, and no more than `known` is
    known of them."""
    fields: dict[str, Any] = {
        "dataset_name": None,
        "dataset_config": None,
        "dataset_revision": None,
        "streaming": False,
        "split_rule": "given",
        "seed": 0,
        "shuffle_buffer": None,
        "append_eot": False,
        "unit": "document",
        "tokenizer_sha256": None,
        "tokenizer_fingerprint": None,
        "vocab_size": None,
        "special_token_ids": {},
        "sources": [],
        "options": {},
        "ledger": kept_ledger(documents, tokens),
        "produced_by": {},
    }
    return StoreFacts(**(fields | known))


def make_manifest(facts: StoreFacts, **fields: Any) -> Manifest:
    """The facts of the builder and the account of the files, as one record."""
    known = {name: getattr(facts, name) for name in StoreFacts.__struct_fields__}
    manifest = Manifest(format=FORMAT, version=1, **known, **fields)
    if _preferences(manifest):
        return msgspec.structs.replace(manifest, version=3)
    if not any(_short_shards(manifest, split.shards) for split in manifest.splits.values()):
        return manifest  # older readers know it
    return msgspec.structs.replace(manifest, version=2)


def fingerprint(manifest: Manifest) -> str:
    """sha256 over what the tokens are: equal fingerprints, equal splits, documents and ids.

    Facts that do not change the tokens (names, ledger, engine) are left out on purpose.
    """
    identity = {
        "format": manifest.format,
        "version": manifest.version,
        "token_dtype": manifest.token_dtype,
        "tokenizer_sha256": manifest.tokenizer_sha256,
        "splits": manifest.splits,
    }
    return hashlib.sha256(msgspec.json.encode(identity, order="sorted")).hexdigest()


def listed_files(manifest: Manifest) -> Iterator[tuple[ListedFile | ShardEntry, int | None]]:
    """Every file the manifest lists, in its order, and its bytes; None where they are not fixed."""
    size = ITEMSIZE[DTYPES[manifest.token_dtype]]
    for split in manifest.splits.values():
        yield split.index, INDEX_HEADER_BYTES + 8 * split.index.entries
        if split.chat:
            yield split.chat.mask, -(-split.tokens // 8)
            yield split.chat.turns, INDEX_HEADER_BYTES + 8 * split.chat.turns.entries
            yield split.chat.roles, split.chat.roles.entries
            if split.chat.preference:
                branches = split.chat.preference.branches
                yield branches, BRANCH_BYTES * branches.entries
        yield from ((shard, shard.tokens * size) for shard in split.shards)
    if manifest.dropped:
        yield manifest.dropped, None


def encode_manifest(manifest: Manifest, *, totals: dict[str, int] | None = None) -> bytes:
    """meta.json, to the byte: sorted keys, two spaces, sealed with its own sha256."""
    plain: dict[str, Any] = msgspec.to_builtins(manifest, order="sorted")
    plain.update(_totals(manifest) if totals is None else totals)
    plain[_SEAL_KEY] = _NO_SEAL.decode()
    compact = msgspec.json.encode(plain, order="sorted")
    body = msgspec.json.format(compact, indent=2) + b"\n"
    marker = f'"{_SEAL_KEY}": "'.encode()
    seal = hashlib.sha256(body).hexdigest().encode()
    return body.replace(marker + _NO_SEAL, marker + seal, 1)


def write_manifest(
    folder: Path, manifest: Manifest, *, totals: dict[str, int] | None = None
) -> None:
    """Finish a store: checked, atomic, durable. Everything it lists must be on disk before.

    `totals`: the per-split totals of a placeholder, which lists no splits.
    """
    folder = Path(folder)
    problems = list(manifest_problems(manifest))
    if problems:
        raise BuildError(f"{folder}: refusing to finish this store: " + "; ".join(problems))
    try:
        data = encode_manifest(manifest, totals=totals)
        decode_manifest(data)  # what we write, we can read
    except (ManifestError, msgspec.MsgspecError, UnicodeEncodeError, TypeError) as error:
        raise BuildError(f"{folder}: these facts do not fit a manifest: {error}") from error
    try:
        with atomic_write(folder / META) as file:
            file.write(data)
        sync_folder(folder.absolute().parent)
    except OSError as error:
        raise cannot_write(folder / META, error) from error


def write_placeholder(
    folder: Path,
    facts: StoreFacts,
    splits: Sequence[str],
    *,
    dtype: str = "uint16",
    shard_bytes: int | None = None,
) -> Manifest:
    """Reserve a folder for a store that is not built yet: split folders and a meta.json."""
    folder, splits = Path(folder), tuple(splits)
    check_shape(splits, dtype, shard_bytes)
    if (folder / META).exists() and read_manifest(folder).built:
        raise StoreExistsError(
            f"{folder}: already holds a finished store; a placeholder never replaces one"
        )
    manifest = make_manifest(
        facts,
        built=False,
        token_dtype=STORED[dtype],
        shard_bytes=shard_bytes,
        splits={},
        dropped=None,
    )
    for split in splits:
        (folder / split).mkdir(parents=True, exist_ok=True)
    kinds = ("tokens", f"{facts.unit}s")
    totals = {f"{split}_{kind}": 0 for split in splits for kind in kinds}
    write_manifest(folder, manifest, totals=totals)
    return manifest


def refuse_remote(folder: str | Path) -> None:
    """Say what to do with a store at a URL where one on this machine is wanted."""
    refuse_url(
        folder,
        "the store",
        instead="copy it with `shardmill pull URL DIR`, or read it through a cache with "
        "shardmill.remote.open_remote; `shardmill info` and `verify` take a URL",
    )


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of `folder`, checked for everything that needs no other file."""
    refuse_remote(folder)
    path = Path(folder) / META
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _missing_store(path.parent) from error
    except (OSError, ValueError) as error:  # a name too long, or with a NUL
        raise StoreNotFoundError(f"{str(path)[:200]}: cannot be looked up: {error}") from error
    data = read_plain_file(path, MAX_META_BYTES)
    if data is None:
        raise _missing_store(path.parent)
    return decode_manifest(data, where=str(path))


def decode_manifest(data: bytes, *, where: str = META) -> Manifest:
    """The manifest in these bytes; ManifestError says what is wrong and what to do."""
    keys = _top_level(data, where)
    _check_seal(data, where)
    totals = {k: v for k, v in keys.items() if k not in _KEYS and _TOTAL_KEY.fullmatch(k)}
    unknown = sorted(keys.keys() - _KEYS - totals.keys() - {_SEAL_KEY})
    if unknown:
        raise ManifestError(
            f"{where}: unknown keys {unknown}; versions 1 to 3 do not have them. A newer "
            "shardmill may have written it, or it was edited: upgrade, or build the store again"
        )
    known = {k: v for k, v in keys.items() if k in _KEYS}
    try:
        manifest = msgspec.json.decode(msgspec.json.encode(known), type=Manifest)
        claimed = {k: msgspec.json.decode(v, type=int) for k, v in totals.items()}
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ManifestError(
            f"{where}: {error}; no store of version 1 to 3 has this: build it again"
        ) from error
    wanted = _totals(manifest) if manifest.built else dict.fromkeys(claimed, 0)
    problems = [
        *manifest_problems(manifest),
        *(
            f"{key} is {claimed.get(key)}, but the splits add up to {wanted.get(key)}"
            for key in sorted(wanted.keys() | claimed.keys())
            if wanted.get(key) != claimed.get(key)
        ),
    ]
    if problems:
        more = f" (and {len(problems) - 1:,} more problems)" if len(problems) > 1 else ""
        raise ManifestError(f"{where}: {problems[0]}{more}; build the store again")
    return manifest


def read_plain_file(path: Path, max_bytes: int) -> bytes | None:
    """The bytes of a plain file of at most `max_bytes`; None if there is none. Follows no link."""
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode):
            raise ManifestError(f"{path}: not a plain file (a link?); put the file itself there")
        if found.st_size > max_bytes:
            raise ManifestError(f"{path}: {found.st_size:,} bytes, wanted at most {max_bytes:,}")
        with path.open("rb") as file:
            return file.read(found.st_size)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read: {error.strerror}") from error


def _totals(manifest: Manifest) -> dict[str, int]:
    """The per-split totals that people look for first: train_tokens, train_documents, ..."""
    splits = manifest.splits.items()
    totals = {f"{name}_tokens": split.tokens for name, split in splits}
    return totals | {f"{name}_{manifest.unit}s": split.documents for name, split in splits}


def _top_level(data: bytes, where: str) -> dict[str, msgspec.Raw]:
    """The keys of a JSON object that claims to be a store of our version."""
    try:
        keys = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        name, version = (
            msgspec.json.decode(keys.get(key, msgspec.Raw(b"null")))
            for key in ("format", "version")
        )
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ManifestError(
            f"{where}: not a JSON object ({error}); the file is damaged or not ours: build the "
            "store again or copy it again"
        ) from error
    if name != FORMAT:
        raise ManifestError(
            f'{where}: "format" is {name!r}, wanted {FORMAT!r}; this is not a shardmill store'
        )
    if version not in VERSIONS or isinstance(version, bool):
        raise ManifestError(
            f'{where}: "version" is {version!r}, but this shardmill reads versions 1 to 3; '
            "upgrade shardmill, or build the store again"
        )
    return keys


def _check_seal(data: bytes, where: str) -> None:
    seals = list(_SEAL.finditer(data))
    if len(seals) != 1:
        raise ManifestError(
            f"{where}: {len(seals)} {_SEAL_KEY} keys with 64 hex digits, wanted one; {_AGAIN}"
        )
    start, stop = seals[0].span(1)
    found = hashlib.sha256(data[:start] + _NO_SEAL + data[stop:]).hexdigest()
    wanted = seals[0][1].decode()
    if found != wanted:
        raise ManifestError(f"{where}: its sha256 is {found}, but it says {wanted}; {_AGAIN}")


def _missing_store(folder: Path) -> StoreNotFoundError:
    """Why there is no store at `folder`, in the words that fit what is there."""
    if not folder.is_dir():
        return StoreNotFoundError(f"{folder}: no such folder; build a store there first")
    paths = (*sorted(folder.glob("*")), *sorted(folder.glob("*/*")))
    found = next((path for path in paths if looks_like_data(path.name)), None)
    if found is not None:
        return StoreNotFoundError(
            f"{folder}: no {META}, so no store or an unfinished one, with files like "
            f"{found.relative_to(folder)}; "
            "`shardmill check` is for folders of token files, and a store whose manifest is lost "
            "is built or copied again"
        )
    return StoreNotFoundError(f"{folder}: no {META} here, so it is not a store; check the path")


def manifest_problems(manifest: Manifest) -> Iterator[str]:
    """Every number or name in a manifest that cannot be true, the most telling first."""
    for name in manifest.splits:
        if not SPLIT_NAME.fullmatch(name):
            yield f"split {name!r} is not a possible name"
    seen = {META}
    for entry, _ in listed_files(manifest):
        file, folded = entry.file, entry.file.lower()
        if not FILE_NAME.fullmatch(file):
            yield f"file {file!r} is not a plain path inside the store"
        if folded in seen:
            yield f"file {file!r} is listed twice"
        seen.add(folded)
    for name in ("sources", "options", "produced_by"):
        yield from (f"{name}: {problem}" for problem in _json_problems(getattr(manifest, name)))
    if not manifest.built and (manifest.splits or manifest.dropped):
        yield '"built" is false, but splits or dropped rows are listed'
    for name, split in manifest.splits.items():
        yield from (f"split {name!r}: {problem}" for problem in _split_problems(manifest, split))
    yield from _ledger_problems(manifest)


def _ledger_problems(manifest: Manifest) -> Iterator[str]:
    """Every input document and token must be in exactly one bucket."""
    documents, tokens = manifest.ledger.documents, manifest.ledger.tokens
    chat, splits = manifest.ledger.chat, manifest.splits.values()
    chats = [split.chat for split in splits if split.chat is not None]
    dropped = sum(documents.dropped.values())
    listed = manifest.dropped.entries if manifest.dropped else 0
    read = documents.kept + documents.empty + documents.filtered + documents.over_budget + dropped
    made, kept = tokens.encoded + tokens.separators, tokens.kept + tokens.over_budget
    preferences = _preferences(manifest)
    what = "records" if preferences else "documents"
    counted = [one.records for one in preferences] or [split.documents for split in splits]
    stored = sum(counted), sum(split.tokens for split in splits)
    sums = [
        ("documents read", documents.read, "kept + empty + filtered + over budget + dropped", read),
        ("tokens encoded + separators", made, "kept + over budget", kept),
        ("documents kept", documents.kept, f"{what} in all splits", stored[0]),
        ("tokens kept", tokens.kept, "tokens in all splits", stored[1]),
        ("documents dropped", dropped, "rows listed", listed),
    ]
    if manifest.built:
        if len(chats) not in (0, len(splits)):
            yield f"{len(chats)} of {len(splits)} splits hold conversations; all must, or none"
        elif chats and manifest.unit != "example":
            yield f'conversations are counted as examples, but "unit" is {manifest.unit!r}'
        yield from _preference_problems(manifest, preferences)
        if (chat is None) != (not chats):
            yield "the ledger must count turns if the splits hold conversations, and only then"
        elif chat is not None:
            turns = sum(entry.num_turns for entry in chats)
            trained = sum(entry.trained_tokens for entry in chats)
            sums += [
                ("turns", chat.turns, "turns in all splits", turns),
                ("trained tokens", chat.trained_tokens, "trained tokens in all splits", trained),
            ]
    for left, found, right, wanted in sums:
        if found != wanted:
            yield f"the ledger does not balance: {left} is {found:,}, but {right} is {wanted:,}"


def _preferences(manifest: Manifest) -> list[PreferenceEntry]:
    chats = (split.chat for split in manifest.splits.values())
    return [chat.preference for chat in chats if chat is not None and chat.preference is not None]


def _preference_problems(manifest: Manifest, found: list[PreferenceEntry]) -> Iterator[str]:
    if len(found) not in (0, len(manifest.splits)):
        yield f"{len(found)} of {len(manifest.splits)} splits hold preferences; all must, or none"
    if (manifest.version == 3) != bool(found):
        yield f"version {manifest.version}, but stores of preferences have version 3, and no other"
    if len({one.kind for one in found}) > 1:
        yield "some splits hold ranks and some labels; wanted one of them"
    for one in found:
        least = 2 if one.kind == "ranks" else 1
        most = one.branches.entries if one.kind == "ranks" else one.records
        if not least * one.records <= one.branches.entries <= most:
            yield (
                f"{one.branches.file}: {one.branches.entries:,} branches of {one.records:,} "
                f"records with {one.kind} are impossible"
            )


def _json_problems(value: object) -> Iterator[str]:
    """What in `value` JSON would change."""
    if isinstance(value, dict):
        yield from (f"key {key!r} is not a string" for key in value if not isinstance(key, str))
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        for item in value:  # one level of the stack for each level of the value
            yield from _json_problems(item)
    elif isinstance(value, str):
        if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            yield f"{value!r} is not valid Unicode"
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield f"{value} is not a number in JSON"
    elif value is not None and not isinstance(value, int):
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
        first, last = shard.first_document, shard.last_document
        if first is None or last is None:
            if shard.tokens or first is not None or last is not None:
                yield f"{shard.file}: first and last document are null for an empty shard only"
        elif not shard.tokens or first > last or last >= split.documents:
            of = f"of {split.documents:,}"
            yield f"{shard.file}: documents {first:,}..{last:,} {of} are impossible"
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
    branches = chat.preference.branches.entries if chat.preference else split.documents
    if not branches <= split.documents <= 2 * branches:
        yield f"{branches:,} branches and their prefixes cannot be {split.documents:,} examples"
    if not branches <= chat.trained_tokens <= split.tokens:
        yield (
            f"{chat.trained_tokens:,} trained tokens of {split.tokens:,} in "
            f"{split.documents:,} examples are impossible"
        )
    if chat.num_turns < split.documents:
        yield f"{chat.num_turns:,} turns in {split.documents:,} examples, wanted one in each"


def _cut_problems(manifest: Manifest, shards: list[ShardEntry]) -> Iterator[str]:
    """No shard is larger than `shard_bytes`; without that there is exactly one."""
    size = ITEMSIZE[DTYPES[manifest.token_dtype]]
    if manifest.shard_bytes is None:
        if len(shards) != 1:
            yield f"{len(shards)} shards, but shard_bytes is null, which means one file"
        return
    full, rest = divmod(manifest.shard_bytes, size)
    if full == 0 or rest:
        yield f"shard_bytes {manifest.shard_bytes:,} is no positive multiple of {size}"
        return
    for shard in shards:
        if shard.tokens > full:
            yield f"{shard.file} has {shard.tokens:,} tokens; a shard holds at most {full:,}"
        elif shard.tokens == 0 and len(shards) > 1:
            yield f"{shard.file} is empty, but not the only shard"
    for shard in _short_shards(manifest, shards) if manifest.version == 1 else ():
        yield (
            f"{shard.file} has {shard.tokens:,} tokens; in version 1 all shards but the last are "
            f"cut at {full:,}"
        )


def _short_shards(manifest: Manifest, shards: list[ShardEntry]) -> list[ShardEntry]:
    """Those that make a store one of version 2: not full, and not the last of their split."""
    full = (manifest.shard_bytes or 0) // ITEMSIZE[DTYPES[manifest.token_dtype]]
    return [shard for shard in shards[:-1] if shard.tokens != full]
