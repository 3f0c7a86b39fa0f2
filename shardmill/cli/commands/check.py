"""`shardmill check`: can these tokens be trained on, and how are they named in a config?"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

from shardmill.arguments import whole_number
from shardmill.cli.options import Split
from shardmill.cli.printing import named_tokenizer
from shardmill.cli.terminal import safe_bars, visible
from shardmill.cli.tokens import FoundTokens, IdScan, find_tokens, scan_ids
from shardmill.cli.wording import as_flag
from shardmill.errors import StoreError, StoreNotFoundError
from shardmill.loading.config import DataConfig, config_flags, config_toml
from shardmill.loading.rows import EVERY_FILE


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """What `shardmill check` takes."""

    folder: Annotated[Path, typer.Argument(help="A folder of .npy or .bin files, or a store.")]
    file_pattern: Annotated[
        str | None, typer.Option(help="Which files. Default: '*.npy' or '*.bin', what is there.")
    ] = None
    dtype: Annotated[
        Literal["uint16", "uint32"] | None, typer.Option(help="Of .bin files without metadata.")
    ] = None
    tokenizer: Annotated[
        str | None, typer.Option(help="Compare the ids with the vocabulary of this tokenizer.")
    ] = None
    special: Annotated[
        list[str] | None, typer.Option(help="NAME=STRING: special tokens it does not name itself.")
    ] = None
    split: Split = None
    seq_len: Annotated[int | None, typer.Option(help="Count the windows of this length.")] = None
    sample: Annotated[
        int | None, typer.Option(help="Look at about so many tokens, not at all of them.")
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vocabulary:
    size: int | None
    source: str  # what gave the size
    tokenizer: str | None


def check(options: CheckOptions) -> None:
    """Check a folder of tokens; print the flags and the TOML that name it in a training config.

    Prints what was found: files, tokens, dtype, vocabulary, largest id; problems on stderr. The
    flags can be passed to examples/train_tiny_gpt.py. The bytes of a store are compared with its
    manifest by `shardmill verify`.

    Example: shardmill check tokens --file-pattern '*.bin' --seq-len 1024

    Exit 0: it can be trained on. Exit 1: damaged or impossible, one line for each problem. Exit 2:
    a mistake in the call, or no such folder.
    """
    for name, number in (("seq_len", options.seq_len), ("sample", options.sample)):
        if number is not None:
            whole_number(number, name)
    try:
        found = find_tokens(
            options.folder,
            file_pattern=options.file_pattern,
            dtype=options.dtype,
            split=options.split,
        )
        vocabulary = _vocabulary(found, options)
        with found.open() as space, _progress() as on_progress:
            scan = scan_ids(
                space, vocab_size=vocabulary.size, sample=options.sample, on_progress=on_progress
            )
    except StoreNotFoundError:
        raise  # a mistake in the call
    except StoreError as error:
        _print(options, {}, [error.worded(as_flag).replace("dtype='uint", "--dtype 'uint")])
        raise typer.Exit(1) from error
    problems = list(_problems(found, scan, vocabulary, options))
    _print(options, _facts(found, scan, vocabulary, options), problems)
    if problems:
        raise typer.Exit(1)


def _vocabulary(found: FoundTokens, options: CheckOptions) -> _Vocabulary:
    """That of the tokenizer that was named, else what the folder records."""
    name = options.tokenizer
    if name is None:
        return _Vocabulary(
            size=found.vocab_size, source=found.recorded_by, tokenizer=found.tokenizer
        )
    opened = named_tokenizer(name, options.special, *([found.store] if found.store else []))
    return _Vocabulary(size=opened.vocab_size, source=name, tokenizer=name)


def _problems(
    found: FoundTokens, scan: IdScan, vocabulary: _Vocabulary, options: CheckOptions
) -> Iterator[str]:
    if scan.first_outside is not None:
        position, number = scan.first_outside
        advice = "; if that leaves out added tokens, compare with the tokenizer itself: --tokenizer"
        if vocabulary.source == vocabulary.tokenizer:
            advice = ""
        yield (
            f"{found.location(position)}: id {number:,}, but the vocabulary has "
            f"{vocabulary.size:,} ids ({vocabulary.source}); {scan.num_outside:,} of "
            f"{scan.num_seen:,} ids are outside: another tokenizer, another dtype, or "
            f"damage{advice}"
        )
    if found.decided.doubt and options.dtype is None:
        yield (
            f"read as {found.decided.dtype}, because {found.decided.reason}, but "
            f"{found.decided.doubt}; correct the metadata, or pass --dtype"
        )
    if found.num_tokens == 0:
        yield f"{found.folder}: holds no token"
    elif options.seq_len is not None and not _windows(found, options.seq_len):
        yield (
            f"--seq-len {options.seq_len:,}: no window: {found.num_tokens:,} tokens, wanted at "
            f"least {options.seq_len + 1:,}"
        )


def _windows(found: FoundTokens, seq_len: int) -> int:
    return max(0, (found.num_tokens - 1) // seq_len)


def _facts(
    found: FoundTokens, scan: IdScan, vocabulary: _Vocabulary, options: CheckOptions
) -> dict[str, Any]:
    tokenizer, seq_len = vocabulary.tokenizer, options.seq_len
    if tokenizer is not None and os.path.lexists(tokenizer):
        tokenizer = str(Path(tokenizer).absolute())  # valid in every folder
    config = DataConfig(
        dataset_path=str(found.folder),
        file_pattern=found.file_pattern or EVERY_FILE,
        dtype=options.dtype if found.store is None else None,
        split=found.split,
        tokenizer_path=tokenizer,
    )
    facts: dict[str, Any] = {
        "shards": len(found.files),
        "bytes": sum(file.num_bytes for file in found.files),
        "tokens": found.num_tokens,
        "dtype": found.decided.dtype,
        "dtype_rule": found.decided.rule,
        "dtype_reason": found.decided.reason,
        "file_pattern": found.file_pattern,
        "split": found.split,
        "tokenizer": vocabulary.tokenizer,
        "vocab_size": vocabulary.size,
        "vocab_size_from": vocabulary.source if vocabulary.size is not None else None,
        "vocab_size_declared": found.vocab_size,
        "largest_id": scan.largest_id if scan.num_seen else None,
        "largest_id_at": found.location(scan.largest_at) if scan.num_seen else None,
        "tokens_seen": scan.num_seen,
        "ids_outside_vocabulary": scan.num_outside if vocabulary.size is not None else None,
        "toml": config_toml(config),
        "flags": config_flags(config),
    }
    if seq_len is not None:
        facts["windows"] = _windows(found, seq_len)
        facts["samples_of_files"] = sum(f.num_tokens // (seq_len + 1) for f in found.files)
    return facts


def _print(options: CheckOptions, facts: dict[str, Any], problems: list[str]) -> None:
    folder = str(options.folder)
    if options.as_json:
        head = {"folder": folder, "ok": not problems, "problems": problems}
        print(json.dumps({**head, **facts}, indent=2))
        return
    count = f"{len(problems)} {'problem' if len(problems) == 1 else 'problems'}"
    print(f"{visible(folder)}: {f'REFUSED, {count}' if problems else 'ok'}")
    for label, value in _lines(facts) if facts else ():
        print(f"  {label:12} {visible(value)}")
    if facts and not problems:
        print(f"\n{' '.join(facts['flags'])}\n\n{facts['toml']}", end="")
    for problem in problems:
        print(f"  {visible(problem)}", file=sys.stderr)


def _lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "shards", f"{facts['shards']:,}, {facts['bytes']:,} bytes"
    yield "tokens", f"{facts['tokens']:,}"
    yield "dtype", f"{facts['dtype']}: {facts['dtype_reason']}"
    yield "tokenizer", facts["tokenizer"] or "not recorded"
    if facts["vocab_size"] is None:
        yield "vocabulary", "not recorded, so no id could be refused; name it with --tokenizer"
    else:
        other = facts["vocab_size_declared"]
        more = f"; the metadata says {other:,}" if other not in (None, facts["vocab_size"]) else ""
        yield "vocabulary", f"{facts['vocab_size']:,} ids ({facts['vocab_size_from']}){more}"
    if facts["largest_id"] is not None:
        yield "largest id", f"{facts['largest_id']:,} ({facts['largest_id_at']})"
    part = facts["tokens_seen"] < facts["tokens"]
    seen = f"only {facts['tokens_seen']:,} of {facts['tokens']:,} tokens, as --sample asks"
    yield "looked at", seen if part else "every token"
    if "windows" in facts:
        yield "windows", f"{facts['windows']:,} over all files, one after another"
        yield "samples", f"{facts['samples_of_files']:,} when each file is cut separately"


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar of tokens on stderr."""
    columns = (TextColumn("check"), BarColumn(bar_width=30), TaskProgressColumn())
    with safe_bars(*columns, TimeRemainingColumn()) as bars:
        task = bars.add_task("check", total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
