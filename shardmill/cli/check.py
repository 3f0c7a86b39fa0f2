"""`shardmill check`: can these tokens be trained on, and how are they named in a config?"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

from shardmill.arguments import whole_number
from shardmill.cli.check_scan import FoundTokens, IdScan, OnProgress, find_tokens, scan_ids
from shardmill.cli.completing import complete_split
from shardmill.cli.decoding import named_tokenizer
from shardmill.cli.show_text import visible
from shardmill.cli.stdout import safe_bars
from shardmill.errors import StoreError, StoreNotFoundError
from shardmill.loading.config import DataConfig, config_flags, config_toml
from shardmill.loading.sources import EVERY_FILE


def check(
    folder: Annotated[Path, typer.Argument(help="A folder of .npy or .bin files, or a store.")],
    file_pattern: Annotated[
        str | None, typer.Option(help="Which files. Default: '*.npy' or '*.bin', what is there.")
    ] = None,
    dtype: Annotated[
        Literal["uint16", "uint32"] | None, typer.Option(help="Of .bin files without metadata.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Compare the ids with the vocabulary of this tokenizer.")
    ] = None,
    special: Annotated[
        list[str] | None, typer.Option(help="NAME=STRING: special tokens it does not name itself.")
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="Of a store. Default: 'train'.", autocompletion=complete_split),
    ] = None,
    seq_len: Annotated[int | None, typer.Option(help="Count the windows of this length.")] = None,
    sample: Annotated[
        int | None, typer.Option(help="Look at about so many tokens, not at all of them.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False,
) -> None:
    """Check a folder of tokens; print the flags and the TOML that name it in a training config.

    Prints what was found: files, tokens, dtype, vocabulary, largest id; problems on stderr. The
    flags can be pasted behind examples/train_tiny_gpt.py. The bytes of a store are compared with
    its manifest by `shardmill verify`.

    Example: shardmill check tokens --file-pattern '*.bin' --seq-len 1024

    Exit 0: it can be trained on. Exit 1: damaged or impossible, one line for each problem. Exit 2:
    a mistake in the call, or no such folder.
    """
    for name, number in (("--seq-len", seq_len), ("--sample", sample)):
        if number is not None:
            whole_number(number, name)
    try:
        found = find_tokens(folder, file_pattern=file_pattern, dtype=dtype, split=split)
        vocabulary = _vocabulary(found, tokenizer, special)
        with found.open() as space, _progress() as on_progress:
            scan = scan_ids(
                space, vocab_size=vocabulary.size, sample=sample, on_progress=on_progress
            )
    except StoreNotFoundError:
        raise  # a mistake in the call
    except StoreError as error:
        _tell(folder, {}, [_as_flags(str(error))], as_json)
        raise typer.Exit(1) from error
    problems = _problems(found, scan, vocabulary, dtype, seq_len)
    _tell(folder, _facts(found, scan, vocabulary, dtype, seq_len), problems, as_json)
    if problems:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vocabulary:
    size: int | None
    source: str  # who says it
    declared: int | None  # what the metadata says, when a tokenizer was opened
    tokenizer: str | None


def _vocabulary(found: FoundTokens, name: str | None, special: list[str] | None) -> _Vocabulary:
    """The tokenizer that was named knows best; else what the folder says."""
    if name is None:
        return _Vocabulary(
            size=found.vocab_size,
            source=found.said_by,
            declared=found.vocab_size,
            tokenizer=found.tokenizer,
        )
    opened = named_tokenizer(name, special, *([found.store] if found.store else []))
    return _Vocabulary(
        size=opened.vocab_size, source=name, declared=found.vocab_size, tokenizer=name
    )


def _problems(
    found: FoundTokens,
    scan: IdScan,
    vocabulary: _Vocabulary,
    dtype: str | None,
    seq_len: int | None,
) -> list[str]:
    problems = []
    if scan.first_outside is not None:
        place, number = scan.first_outside
        advice = (
            ""
            if vocabulary.source == vocabulary.tokenizer
            else (
                "; if that leaves out added tokens, compare with the tokenizer itself: --tokenizer"
            )
        )
        problems.append(
            f"{found.place(place)}: id {number:,}, but the vocabulary has {vocabulary.size:,} ids "
            f"({vocabulary.source}); {scan.num_outside:,} of {scan.num_seen:,} ids are outside: "
            f"another tokenizer, another dtype, or damage{advice}"
        )
    if found.decided.doubt and dtype is None:
        problems.append(
            f"read as {found.decided.dtype}, because {found.decided.reason}, but "
            f"{found.decided.doubt}; correct the metadata, or say --dtype"
        )
    if found.num_tokens == 0:
        problems.append(f"{found.folder}: holds no token")
    elif seq_len is not None and not _windows(found, seq_len):
        problems.append(
            f"--seq-len {seq_len:,}: no window: {found.num_tokens:,} tokens, wanted at least "
            f"{seq_len + 1:,}"
        )
    return problems


def _windows(found: FoundTokens, seq_len: int) -> int:
    return max(0, (found.num_tokens - 1) // seq_len)


def _config(found: FoundTokens, vocabulary: _Vocabulary, dtype: str | None) -> DataConfig:
    return DataConfig(
        dataset_path=str(found.folder),
        file_pattern=found.file_pattern or EVERY_FILE,
        dtype=dtype if found.store is None else None,
        split=found.split,
        tokenizer_path=_from_anywhere(vocabulary.tokenizer),
    )


def _from_anywhere(tokenizer: str | None) -> str | None:
    """A path that also holds in another folder; anything else is the name of a tokenizer."""
    is_path = tokenizer is not None and os.path.lexists(tokenizer)
    return str(Path(str(tokenizer)).absolute()) if is_path else tokenizer


def _facts(
    found: FoundTokens,
    scan: IdScan,
    vocabulary: _Vocabulary,
    dtype: str | None,
    seq_len: int | None,
) -> dict[str, Any]:
    config = _config(found, vocabulary, dtype)
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
        "vocab_size_declared": vocabulary.declared,
        "largest_id": scan.largest_id if scan.num_seen else None,
        "largest_id_at": found.place(scan.largest_at) if scan.num_seen else None,
        "tokens_seen": scan.num_seen,
        "ids_outside_vocabulary": scan.num_outside if vocabulary.size is not None else None,
        "toml": config_toml(config),
        "flags": config_flags(config),
    }
    if seq_len is not None:
        facts["windows"] = _windows(found, seq_len)
        facts["samples_of_files"] = sum(f.num_tokens // (seq_len + 1) for f in found.files)
    return facts


def _tell(folder: Path, facts: dict[str, Any], problems: list[str], as_json: bool) -> None:
    if as_json:
        head = {"folder": str(folder), "ok": not problems, "problems": problems}
        print(json.dumps({**head, **facts}, indent=2))
        return
    count = f"{len(problems)} {'problem' if len(problems) == 1 else 'problems'}"
    print(f"{visible(str(folder))}: {f'REFUSED, {count}' if problems else 'ok'}")
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
    yield "tokenizer", facts["tokenizer"] or "nobody says"
    if facts["vocab_size"] is None:
        yield "vocabulary", "nobody says, so no id could be refused; name it with --tokenizer"
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
        yield "windows", f"{facts['windows']:,} over all files behind one another"
        yield "samples", f"{facts['samples_of_files']:,} when each file is cut for itself"


def _as_flags(message: str) -> str:
    """The library's words for an argument, as the command's."""
    return message.replace(
        "pass dtype='uint16' or dtype='uint32'", "pass --dtype uint16 or --dtype uint32"
    )


@contextmanager
def _progress() -> Iterator[OnProgress]:
    """A bar of tokens on stderr, gone when the work is done."""
    columns = (TextColumn("check"), BarColumn(bar_width=30), TaskProgressColumn())
    with safe_bars(*columns, TimeRemainingColumn()) as bars:
        task = bars.add_task("check", total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
