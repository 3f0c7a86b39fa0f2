"""`shardmill info`: what is in a store, as a table."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardmill.cli.exclude_print import entry_facts, excluded_lines
from shardmill.cli.pack import listed_facts, listed_line
from shardmill.shards import Ledger, Store, open_store, plans_of, read_exclusions


def info(
    folder: Annotated[Path, typer.Argument(help="The store to describe.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False,
) -> None:
    """Show the splits, the tokenizer, the ledger, pack plans and exclusions of a store.

    Prints a table of splits and a list of facts. Names and sizes of all files are checked;
    `shardmill verify` checks their contents.

    Example: shardmill info store

    Example: shardmill info store --json

    Exit 0: told. Exit 2: no finished store there, or one that does not match its manifest.
    """
    store = open_store(folder)
    if as_json:
        print(json.dumps(_facts(store), indent=2, sort_keys=True))
        return
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    console.print(_splits(store))
    console.print(_rest(store))


def _facts(store: Store) -> dict[str, Any]:
    """The manifest, its lists of shards counted, its totals flat as in meta.json."""
    facts: dict[str, Any] = msgspec.to_builtins(store.manifest)
    for name, entry in facts["splits"].items():
        entry["shards"] = len(entry["shards"])
        facts[f"{name}_tokens"] = entry["tokens"]
        facts[f"{name}_{store.manifest.unit}s"] = entry["documents"]
    facts["plans"] = [listed_facts(name, plan) for name, plan in plans_of(store)]
    facts["exclusions"] = [entry_facts(entry) for entry in read_exclusions(store).entries]
    return facts | {"store": str(store.folder), "fingerprint": store.fingerprint}


def _splits(store: Store) -> Table:
    unit = store.manifest.unit + "s"
    table = Table(title=Text(str(store.folder)), title_justify="left")
    table.add_column("split")
    for name in (unit, "tokens", "mean", "shards", "bytes"):
        table.add_column(name, justify="right")
    for name, split in store.manifest.splits.items():
        mean = f"{split.tokens / split.documents:,.1f}" if split.documents else "-"
        size = sum(file.num_bytes for file in store.token_files(name))
        numbers = (split.documents, split.tokens)
        table.add_row(
            name,
            *(f"{number:,}" for number in numbers),
            mean,
            f"{len(split.shards):,}",
            f"{size:,}",
        )
    return table


def _rest(store: Store) -> Table:
    manifest = store.manifest
    name = " ".join(filter(None, (manifest.dataset_name, manifest.dataset_config)))
    specials = ", ".join(f"{k}={v}" for k, v in manifest.special_token_ids.items())
    vocabulary = "unknown" if manifest.vocab_size is None else f"{manifest.vocab_size:,} ids"
    rows = {
        "data": name or "-",
        "revision": manifest.dataset_revision or "-",
        "split rule": manifest.split_rule or "-",
        "dtype": store.dtype,
        "shard bytes": "one file" if manifest.shard_bytes is None else f"{manifest.shard_bytes:,}",
        "tokenizer": f"{vocabulary}, sha256 {(manifest.tokenizer_sha256 or 'unknown')[:16]}",
        "special ids": specials or "-",
        "end token": "behind each document" if manifest.append_eot else "not appended",
        "seed": str(manifest.seed),
        **_chat(manifest.options.get("chat", {})),
        **_ledger(manifest.ledger),
        "fingerprint": store.fingerprint[:16],
        **{f"plan {name}": listed_line(plan) for name, plan in plans_of(store)},
        **excluded_lines(store),
    }
    table = Table(show_header=False, box=None)
    for label, value in rows.items():
        table.add_row(label, Text(value))  # not markup: names may hold square brackets
    return table


def _chat(chat: dict[str, Any]) -> dict[str, str]:
    """How conversations were rendered, when they were."""
    if not chat:
        return {}
    end = "with" if chat["train_on_eot"] else "without"
    return {
        "template": f"{chat['template']['name']}, sha256 {chat['template']['sha256'][:16]}",
        "trained on": f"{chat['train_on']}, {end} the end of a turn",
    }


def _ledger(ledger: Ledger) -> dict[str, str]:
    """Where everything went, one line for documents and one for tokens."""
    documents, tokens = ledger.documents, ledger.tokens
    left_out = {"empty": documents.empty, "over budget": documents.over_budget, **documents.dropped}
    parts = "".join(f" + {count:,} {why}" for why, count in left_out.items() if count)
    rows = {
        "documents": f"{documents.read:,} read = {documents.kept:,} kept{parts}",
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
