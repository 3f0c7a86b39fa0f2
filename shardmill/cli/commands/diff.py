"""`shardmill diff`: what differs between two stores; exit 1 when anything does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from shardmill.cli.printing import Answer
from shardmill.inspect.diff import DocumentPlace, SplitDocuments, StoreDiff, diff_stores
from shardmill.protocols import Tokenizer
from shardmill.store import open_store
from shardmill.store.readers import open_tokens
from shardmill.tokenizers import open_tokenizer

_SNIPPET_TOKENS = 24


@dataclass(frozen=True, kw_only=True)
class DiffCommand:
    """Prints one line when they are identical, else a section for each kind of difference. Shards
    of equal hashes are not read: `shardmill verify` checks them against the manifest.

    Example: shardmill diff store-before store-now

    Exit 0: identical. Exit 1: something differs. Exit 2: they cannot be compared.
    """

    a: Annotated[Path, "A", "A store."]
    b: Annotated[Path, "B", "The other one."]
    tokenizer: Annotated[str | None, "Show the text where the order differs: as for build."] = None
    as_json: Annotated[bool, "--json", "Print the report as JSON."] = False

    def run(self) -> Answer:
        opened = open_tokenizer(self.tokenizer) if self.tokenizer else None
        found = diff_stores(self.a, self.b)
        return Answer(asdict(found), _lines(found, opened), found=not found.identical, indent=2)


def _lines(found: StoreDiff, tokenizer: Tokenizer | None) -> Iterator[str]:
    if found.identical:
        total = sum(split.both for split in found.documents)
        yield (
            f"{found.a}, {found.b}: identical, {total:,} documents (by their manifests; `shardmill "
            "verify` reads the contents)"
        )
        return
    yield f"{found.a} -> {found.b}: different"
    for section in ("tokenizer", "template", "options", "sources", "splits", "exclusions"):
        yield from _section(section, found.facts.get(section, ()))
    for split in found.documents:
        yield from _split_lines(found, split, tokenizer)
    if found.moved:
        yield f"  documents in another split: {found.moved:,}"
    yield from _section("ledger", found.facts.get("ledger", ()))
    if found.trained_share is not None:
        before, now = found.trained_share
        yield f"  trained tokens: {before:.2%} -> {now:.2%}"


def _section(name: str, lines: tuple[str, ...]) -> Iterator[str]:
    if lines:
        yield f"  {name}:"
        yield from (f"    {line}" for line in lines)


def _split_lines(
    found: StoreDiff, split: SplitDocuments, tokenizer: Tokenizer | None
) -> Iterator[str]:
    yield f"  documents of {split.split}: {split.both:,} in both"
    for word, count, first in (
        ("only in the first", split.only_a, split.first_only_a),
        ("only in the second", split.only_b, split.first_only_b),
        ("with another mask only", split.other_mask, split.first_other_mask),
    ):
        if count:
            numbers = ", ".join(f"{number:,}" for number in first)
            more = ", ..." if count > len(first) else ""
            yield f"    {word}: {count:,} (number {numbers}{more})"
    if split.order is None:
        if split.both:
            yield "    those in both come in the same order"
        return
    yield "    those in both come in another order, first at"
    for folder, place in ((found.a, split.order.a), (found.b, split.order.b)):
        text = f": {_snippet(folder, place, tokenizer)!r}" if tokenizer else ""
        yield f"      {folder}: document {place.document:,}, token {place.token:,}{text}"


def _snippet(folder: str, place: DocumentPlace, tokenizer: Tokenizer) -> str:
    store = open_store(folder)
    starts, last = store.document_starts(place.split), store.num_tokens(place.split)
    number = place.document + 1
    stop = min(place.token + _SNIPPET_TOKENS, int(starts[number]) if number < len(starts) else last)
    with open_tokens(store, place.split) as space:
        return tokenizer.decode(space.read(place.token, stop))
