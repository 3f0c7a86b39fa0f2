"""`shardmill info` and `shardmill verify`: what is in a store, and whether it is still whole.

Its plans and exclusions in words and as JSON, for other commands too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from rich.table import Table
from rich.text import Text

from shardmill.arguments import is_url
from shardmill.cli.printing import Answer, num_problems
from shardmill.cli.terminal import one_bar, one_line
from shardmill.errors import StoreError
from shardmill.store import (
    Exclusions,
    Ledger,
    Manifest,
    StoredPlan,
    open_store,
    plans_of,
    read_exclusions,
)
from shardmill.store import verify as verify_store
from shardmill.store.exclusions import ExcludeEntry
from shardmill.store.layout import DTYPES, ITEMSIZE
from shardmill.store.manifest import fingerprint
from shardmill.urls import Url


@dataclass(frozen=True, kw_only=True)
class InfoCommand:
    """Prints a table of splits and a list of facts. Names and sizes of all files are checked;
    `shardmill verify` checks their contents. Of a store at a URL only the manifest and the
    exclusions are read.

    Example: shardmill info store

    Example: shardmill info store --json

    Exit 0: shown. Exit 2: no finished store there, or one that does not match its manifest.
    """

    folder: Annotated[str, "FOLDER", "The store to describe. A folder, or a URL."]
    as_json: Annotated[bool, "--json", "Print the facts as JSON."] = False

    def run(self) -> Answer:
        store = _read(self.folder)
        return Answer(lambda: _facts(store), _tables(store), indent=2)


@dataclass(frozen=True, kw_only=True)
class VerifyCommand:
    """Prints one line: ok, or DAMAGED; each problem on stderr.

    A store at a URL is read once, and nothing of it is kept here.

    Example: shardmill verify store

    Exit 0: every byte is as it was written. Exit 1: damage, one line for each problem. Exit 2: no
    finished store there.
    """

    folder: Annotated[str, "FOLDER", "The store to check: a folder, or a URL."]
    as_json: Annotated[bool, "--json", "Print the report as JSON."] = False

    def run(self) -> Answer:
        folder = self.folder
        with one_bar("verify") as on_progress:
            if is_url(folder):
                from shardmill.remote import verify_remote

                name, report = str(Url(folder)), verify_remote(folder, on_progress=on_progress)
            else:
                name, report = str(Path(folder)), verify_store(folder, on_progress=on_progress)
        counts = f"{report.documents:,} documents, {report.tokens:,} tokens, {report.files:,} files"
        found = f"ok, {counts}" if report.ok else f"DAMAGED, {num_problems(report.problems)}"
        return Answer(
            {"store": name, "ok": report.ok, **asdict(report)},
            [f"{name}: {found}"],
            report.problems,
            found=not report.ok,
            indent=2,
        )


@dataclass(frozen=True, slots=True)
class _Described:
    """A store, here or at a URL."""

    folder: str  # its path or URL, for people
    manifest: Manifest
    exclusions: Exclusions
    plans: list[tuple[str, StoredPlan | StoreError]]  # they stay where they were made


def _read(folder: str) -> _Described:
    if is_url(folder):
        from shardmill.remote import remote_manifest

        return _Described(str(Url(folder)).rstrip("/"), *remote_manifest(folder), [])
    store = open_store(folder)
    return _Described(
        str(store.folder), store.manifest, read_exclusions(store), list(plans_of(store))
    )


def _facts(store: _Described) -> dict[str, Any]:
    """The manifest, its lists of shards counted, its totals flat as in meta.json."""
    facts: dict[str, Any] = msgspec.to_builtins(store.manifest)
    for name, entry in facts["splits"].items():
        entry["shards"] = len(entry["shards"])
        facts[f"{name}_tokens"] = entry["tokens"]
        facts[f"{name}_{store.manifest.unit}s"] = entry["documents"]
    facts["plans"] = [{"name": name, **plan_facts(plan)} for name, plan in store.plans]
    facts["exclusions"] = [entry_facts(entry) for entry in store.exclusions.entries]
    facts |= {"store": store.folder, "fingerprint": fingerprint(store.manifest)}
    return dict(msgspec.to_builtins(facts, order="sorted"))


def _tables(store: _Described) -> Iterator[Table]:
    table = Table(title=Text(one_line(store.folder)), title_justify="left")
    table.add_column("split")
    for name in (f"{store.manifest.unit}s", "tokens", "mean", "shards", "bytes"):
        table.add_column(name, justify="right")
    for name, split in store.manifest.splits.items():
        mean = f"{split.tokens / split.documents:,.1f}" if split.documents else "-"
        size = split.tokens * ITEMSIZE[DTYPES[store.manifest.token_dtype]]
        counts = [f"{one:,}" for one in (split.documents, split.tokens, len(split.shards), size)]
        table.add_row(Text(one_line(name)), *counts[:2], mean, *counts[2:])
    yield table
    table = Table(show_header=False, box=None)
    for label, value in _rows(store).items():
        # not markup: names may hold square brackets
        table.add_row(Text(one_line(label)), Text(one_line(value)))
    yield table


def _rows(store: _Described) -> dict[str, str]:
    manifest = store.manifest
    name = " ".join(filter(None, (manifest.dataset_name, manifest.dataset_config)))
    specials = ", ".join(f"{k}={v}" for k, v in manifest.special_token_ids.items())
    vocabulary = "unknown" if manifest.vocab_size is None else f"{manifest.vocab_size:,} ids"
    rows = {
        "data": name or "-",
        "revision": manifest.dataset_revision or "-",
        "split rule": manifest.split_rule or "-",
        "dtype": DTYPES[manifest.token_dtype],
        "shard bytes": "one file" if manifest.shard_bytes is None else f"{manifest.shard_bytes:,}",
        "tokenizer": f"{vocabulary}, sha256 {(manifest.tokenizer_sha256 or 'unknown')[:16]}"
        if manifest.tokenizer_fingerprint or manifest.tokenizer_sha256
        else "not recorded; name it with `show --tokenizer`",
        "special ids": specials or "-",
        "end token": "after each document" if manifest.append_eot else "not appended",
        "seed": str(manifest.seed),
        **_chat(manifest.options.get("chat", {})),
        **_ledger(manifest.ledger, "records" if manifest.version == 3 else "documents"),
        **_preferences(manifest),
        "fingerprint": fingerprint(manifest)[:16],
        **{f"plan {name}": plan_line(plan) for name, plan in store.plans},
    }
    entries = Counter(entry.split for entry in store.exclusions.entries)
    for split, count in entries.items():
        tokens, total = store.exclusions.num_tokens(split), manifest.splits[split].tokens
        rows[f"excluded {split}"] = (
            f"{tokens:,} of {total:,} tokens, by {count:,} entries (shardmill exclude --list)"
        )
    return rows


def _chat(chat: Any) -> dict[str, str]:
    """How conversations were rendered, when they were. A manifest may say anything here."""
    template = chat.get("template") if isinstance(chat, dict) else None
    if not isinstance(template, dict):
        return {}
    end = "with" if chat.get("train_on_eot") else "without"
    name, sha256 = (str(template.get(key, "unknown")) for key in ("name", "sha256"))
    return {
        "template": f"{name}, sha256 {sha256[:16]}",
        "trained on": f"{chat.get('train_on', 'unknown')}, {end} the end of a turn",
    }


def _preferences(manifest: Manifest) -> dict[str, str]:
    """Of a store of preferences what its examples are, and what shared prompts save."""
    rows = {}
    for name, split in manifest.splits.items():
        found = split.chat.preference if split.chat else None
        if found is not None:
            branches = found.branches.entries
            share = f"{found.saved_tokens / max(1, split.tokens + found.saved_tokens):.1%}"
            rows[f"preferences {name}"] = (
                f"{found.records:,} records with {found.kind}: {branches:,} answers to "
                f"{split.documents - branches:,} prompts; {found.saved_tokens:,} tokens saved by "
                f"shared prompts ({share})"
            )
    return rows


def _ledger(ledger: Ledger, what: str) -> dict[str, str]:
    """Where everything went, one line for documents and one for tokens."""
    documents, tokens = ledger.documents, ledger.tokens
    left_out = {"empty": documents.empty, "filtered": documents.filtered}
    left_out |= {"over budget": documents.over_budget, **documents.dropped}
    parts = "".join(f" + {count:,} {why}" for why, count in left_out.items() if count)
    rows = {
        what: f"{documents.read:,} read = {documents.kept:,} kept{parts}",
        "tokens": f"{tokens.encoded:,} encoded + {tokens.separators:,} separators = "
        f"{tokens.kept:,} kept + {tokens.over_budget:,} over budget",
    }
    if ledger.chat is not None:
        share = f"{ledger.chat.trained_tokens / max(1, tokens.kept):.1%}"
        rows["trained"] = (
            f"{ledger.chat.trained_tokens:,} of {tokens.kept:,} tokens ({share}), in "
            f"{ledger.chat.turns:,} turns"
        )
    if ledger.repaired:
        rows["repaired"] = ", ".join(f"{count:,} {why}" for why, count in ledger.repaired.items())
    return rows


# plans and exclusions


def plan_line(plan: StoredPlan | StoreError) -> str:
    """One line on a plan of a list, which may be unusable."""
    if isinstance(plan, StoreError):
        return f"CANNOT BE USED: {plan}"
    metrics = plan.facts.metrics
    return (
        f"{metrics.num_rows:,} rows of {plan.facts.row_len:,} tokens, "
        f"{plan.facts.utilisation:.2%} full, {metrics.num_pieces:,} pieces"
    )


def plan_facts(plan: StoredPlan | StoreError) -> dict[str, Any]:
    """The same as JSON, with everything the plan records."""
    if isinstance(plan, StoreError):
        return {"problem": str(plan)}
    recorded: dict[str, Any] = msgspec.to_builtins(plan.facts)
    return {
        "plan": str(plan.path),
        "bytes": plan.path.stat().st_size,
        **recorded,
        "utilisation": plan.facts.utilisation,
        "fingerprint": plan.fingerprint,
    }


def entry_facts(entry: ExcludeEntry) -> dict[str, Any]:
    """An entry as JSON."""
    return {**msgspec.to_builtins(entry), "tokens": entry.num_tokens}


def first_few(numbers: Any) -> str:
    """The first five of some numbers."""
    few = ", ".join(f"{number:,}" for number in numbers[:5])
    return f"{few}, ..." if len(numbers) > 5 else few
