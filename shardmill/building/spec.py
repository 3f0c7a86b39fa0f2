"""What a build is asked for, and what it reports.

`Feed` and `BuildSpec` hold everything that changes the bytes: equal ones over equal input give
equal stores. How the work is done (engine, workers, resume) is passed as plain arguments.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from shardmill.errors import OptionError
from shardmill.protocols import Source, Tokenizer
from shardmill.records import JSON
from shardmill.store import Ledger, Manifest, StoreFacts
from shardmill.tokenizers import model_sha256_of, vocab_size_of

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """One source and the splits it fills, in this order."""

    source: Source
    fill: tuple[tuple[str, int | None], ...]
    # (split, most tokens); None: no limit, so only the last one can have it. A document that
    # reaches a limit is cut there; its rest is counted as over budget and goes nowhere.


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSpec:
    """Everything about a store that is not the input. Recorded in its manifest."""

    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_revision: str | None = None
    streaming: bool | None = None
    split_rule: str = ""
    seed: int = 0
    shuffle_buffer: int | None = None  # as the source was shuffled; recorded, not applied here
    shard_bytes: int = 128 * MIB
    dtype: str | None = None  # "uint16" or "uint32"; None: by vocabulary
    append_eot: bool = False  # the tokenizer's "eot" after each document
    options: Mapping[str, JSON] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a build has come, for a progress bar."""

    source: str
    documents: int
    tokens: int
    share: float | None  # of this source that is done, about; None when unknown
    feed: int = 0  # its number: two feeds may have sources of the same name


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildCost:
    """What a build used."""

    num_workers: int  # processes that encoded at the same time; 1: only this one
    num_cores: int  # that this process may use
    cpu_seconds: float  # of this process and all workers
    peak_bytes: int  # resident memory of the largest process, since it began


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildReport:
    """A finished build. Times are here and never in the store."""

    folder: Path
    manifest: Manifest
    seconds: float
    resumed: bool  # True when work of an earlier run was used
    cost: BuildCost | None = None  # None: not measured, or nothing was left to do
    url: str | None = None  # where the store was sent, without secrets; `folder` is then scratch
    sent_files: int = 0
    sent_bytes: int = 0

    @property
    def utilisation(self) -> float | None:
        """The share of all cores' time that the build used."""
        if self.cost is None or not self.seconds:
            return None
        return self.cost.cpu_seconds / (self.seconds * self.cost.num_cores)

    def to_json(self) -> dict[str, Any]:
        """What a store never holds (when, where, how long), and the counts."""
        ledger, cost = self.manifest.ledger, self.cost
        facts: dict[str, Any] = {
            "store": self.url or str(self.folder),
            "seconds": round(self.seconds, 3),
            "resumed": self.resumed,
            "workers": cost.num_workers if cost else None,
            "cores": cost.num_cores if cost else None,
            "cpu_seconds": round(cost.cpu_seconds, 3) if cost else None,
            "utilisation": None if self.utilisation is None else round(self.utilisation, 3),
            "peak_bytes": cost.peak_bytes if cost else None,
            "ledger": msgspec.to_builtins(ledger),
            "machine": platform.platform(),
            "python": platform.python_version(),
        }
        if ledger.chat is None:
            facts |= {
                "documents_kept": ledger.documents.kept,
                "documents_read": ledger.documents.read,
                "tokens_kept": ledger.tokens.kept,
            }
        else:
            splits = self.manifest.splits.items()
            facts |= {
                "conversations_read": ledger.documents.read,
                "conversations_kept": ledger.documents.kept,
                "dropped": ledger.documents.dropped,
                "turns": ledger.chat.turns,
                "tokens_kept": ledger.tokens.kept,
                "trained_tokens": ledger.chat.trained_tokens,
                "splits": {name: split.documents for name, split in splits},
            }
        facts["produced_by"] = self.manifest.produced_by
        if self.url is not None:
            facts |= {"sent_files": self.sent_files, "sent_bytes": self.sent_bytes}
        return facts


def choose_dtype(dtype: str | None, vocab_size: int | None) -> str:
    """The dtype of the shards: as asked, else the narrowest that holds the vocabulary."""
    if dtype not in (None, "uint16", "uint32"):
        raise OptionError("{dtype}: wanted 'uint16' or 'uint32'", dtype=dtype)
    if vocab_size is None:
        if dtype is None:
            raise OptionError(
                "this tokenizer does not know its vocab_size, so the dtype of the shards cannot be "
                "chosen: give {dtype}, 'uint16' or 'uint32'",
                dtype=...,
            )
        return dtype
    needed = "uint16" if vocab_size <= 2**16 else "uint32"
    if dtype == "uint16" and needed == "uint32":
        raise OptionError(
            f"{vocab_size:,} ids do not fit uint16 shards (65,536): build with {{dtype}}",
            dtype="uint32",
        )
    return dtype or needed


def end_id(spec: BuildSpec, tokenizer: Tokenizer) -> int | None:
    """The id appended to each document, or None."""
    if not spec.append_eot:
        return None
    specials = tokenizer.special_token_ids()
    if "eot" not in specials:
        raise OptionError(
            "this tokenizer names no 'eot' token to append to each document (it names "
            f"{sorted(specials) or 'none'}): name one with {{eot}} ('byte:1' in place of 'byte' "
            "has an id for it), or build with {append_eot}",
            eot=...,
            append_eot=False,
        )
    return specials["eot"]


def check_feeds(feeds: Sequence[Feed]) -> tuple[str, ...]:
    """The splits of a build, in order of first mention; refuses fills that make no sense."""
    if not feeds:
        raise OptionError("nothing to build: no source was given")
    for feed in feeds:
        if not feed.fill:
            raise OptionError(f"source {feed.source.name!r} fills no split")
        for position, (split, limit) in enumerate(feed.fill):
            if not split.isidentifier():
                raise OptionError(f"split {split!r}: wanted a name such as 'train'")
            if limit is None and position < len(feed.fill) - 1:
                raise OptionError(
                    f"split {split!r} has no token limit, so those after it stay empty"
                )
            if limit is not None and (not isinstance(limit, int) or limit < 0):
                raise OptionError(f"split {split!r}: token limit {limit!r}, wanted 0 or more")
        if len({split for split, _ in feed.fill}) < len(feed.fill):
            raise OptionError(f"source {feed.source.name!r} names a split twice: {feed.fill}")
    return tuple(dict.fromkeys(split for feed in feeds for split, _ in feed.fill))


def plan_json(
    feeds: Sequence[Feed], spec: BuildSpec, tokenizer: Tokenizer, dtype: str
) -> dict[str, JSON]:
    """Everything that determines the bytes: what a resume must find unchanged."""
    return {
        "feeds": [
            {"source": feed.source.describe(), "fill": [list(part) for part in feed.fill]}
            for feed in feeds
        ],
        "spec": {**asdict(spec), "dtype": dtype, "options": dict(spec.options)},
        "tokenizer": tokenizer.fingerprint,
    }


def store_facts(
    spec: BuildSpec,
    tokenizer: Tokenizer,
    *,
    sources: list[dict[str, JSON]],
    ledger: Ledger,
    produced_by: dict[str, JSON],
    options: dict[str, JSON],
    unit: Literal["document", "example"] = "document",
) -> StoreFacts:
    """What the manifest says besides the files."""
    return StoreFacts(
        dataset_name=spec.dataset_name,
        dataset_config=spec.dataset_config,
        dataset_revision=spec.dataset_revision,
        streaming=spec.streaming,
        split_rule=spec.split_rule,
        seed=spec.seed,
        shuffle_buffer=spec.shuffle_buffer,
        append_eot=spec.append_eot,
        unit=unit,
        tokenizer_sha256=model_sha256_of(tokenizer) or tokenizer.fingerprint,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=vocab_size_of(tokenizer),
        special_token_ids=tokenizer.special_token_ids(),
        sources=sources,
        options={**spec.options, **options},
        ledger=ledger,
        produced_by=produced_by,
    )


def plan_sha256(plan: dict[str, JSON]) -> str:
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()


def describe_difference(before: JSON, now: JSON, path: str = "") -> list[str]:
    """Each leaf in which two JSON values differ, as 'path: before -> now'.

    Lists of files are compared by file name: 'a.jsonl: bytes 10 -> 12'.
    """
    if isinstance(before, dict) and isinstance(now, dict):
        keys = dict.fromkeys([*before, *now])
        return [
            line
            for key in keys
            for line in describe_difference(before.get(key), now.get(key), f"{path}.{key}")
        ]
    old_files, new_files = _files_in(before), _files_in(now)
    if old_files is not None and new_files is not None:
        return _file_differences(old_files, new_files)
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return [
            line
            for index, (old, new) in enumerate(zip(before, now, strict=True))
            for line in describe_difference(old, new, f"{path}[{index}]")
        ]
    return [] if before == now else [f"{path.lstrip('.')}: {before!r} -> {now!r}"]


def _files_in(value: JSON) -> dict[str, JSON] | None:
    """Files by name, of a list as `fingerprint_files` or a source's `stamp` makes it; else None."""
    if not isinstance(value, list) or not value:
        return None
    files: dict[str, JSON] = {}
    for one in value:
        if isinstance(one, dict) and isinstance(one.get("file"), str):
            files[str(one["file"])] = {key: one[key] for key in one if key != "file"}
        elif isinstance(one, list) and len(one) == 2 and isinstance(one[0], str):
            files[one[0]] = {
                "last written" if isinstance(one[1], int) else "content": _time(one[1])
            }
        else:
            return None
    return files if len(files) == len(value) else None


def _time(stamp: JSON) -> JSON:
    """Nanoseconds since 1970 as text; anything else as it is."""
    if not isinstance(stamp, int):
        return stamp
    seconds, rest = divmod(stamp, 10**9)
    shown = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    return f"{shown}.{rest:09d} UTC"


def _file_differences(before: dict[str, JSON], now: dict[str, JSON]) -> list[str]:
    if before.keys() == now.keys() and list(before) != list(now):
        first = next(old for old, new in zip(before, now, strict=True) if old != new)
        return [f"the files are in another order, from {first} on"]
    lines = []
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        if old is None or new is None:
            was, is_now = (
                ("was an input", "is none") if new is None else ("was none", "is an input")
            )
            lines.append(f"{name}: {was} -> {is_now}")
        elif isinstance(old, dict) and isinstance(new, dict):
            lines += [
                f"{name}: {key} {old.get(key)} -> {new.get(key)}"
                for key in dict.fromkeys([*old, *new])
                if old.get(key) != new.get(key)
            ]
    return lines
