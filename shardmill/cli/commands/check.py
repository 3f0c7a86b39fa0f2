"""`shardmill check`: can these tokens be trained on, and how are they named in a config?

What stands in a folder of tokens, and whether its ids can be.

In: a folder of token files, or a store.  Out: `FoundTokens`, then an `IdScan`.
Promise: every token is looked at, or as many as was asked for, spread evenly from the first to the
last; memory stays that of one chunk; the files are read as a loader reads them.
Not here: printing, exit codes (check).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

from shardmill.arguments import whole_number
from shardmill.cli.printing import named_tokenizer
from shardmill.cli.terminal import complete_split, safe_bars, visible
from shardmill.errors import OptionError, StoreError, StoreNotFoundError
from shardmill.loading.config import DataConfig, Dtype, config_flags, config_toml, meant_split
from shardmill.loading.rows import EVERY_FILE
from shardmill.records import TokenFile
from shardmill.store import Store
from shardmill.store.readers import TokenSpace, open_token_folder, open_tokens
from shardmill.store.readers.foreign import (
    FORMATS,
    META_JSON,
    METADATA_YAML,
    DtypeRule,
    declared_facts,
)

CHUNK = 2**21
"""Tokens read at a time."""
_LEAST_CHUNK = 2**10

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTokens:
    """A folder that could be opened, and what is said about it."""

    folder: Path
    files: tuple[TokenFile, ...]
    decided: DtypeRule
    file_pattern: str | None  # None: a store lists its files
    store: Store | None = None
    split: str | None = None
    vocab_size: int | None = None
    tokenizer: str | None = None
    said_by: str = ""  # who says the two

    @property
    def num_tokens(self) -> int:
        return sum(file.num_tokens for file in self.files)

    def open(self) -> TokenSpace:
        if self.store is not None and self.split is not None:
            return open_tokens(self.store, self.split)
        return TokenSpace(self.files)

    def place(self, token: int) -> str:
        """Where a token of the whole stands: the file, and which token of it."""
        for file in self.files:
            if token < file.num_tokens:
                return f"{file.path}, token {token:,}"
            token -= file.num_tokens
        raise IndexError(token)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdScan:
    """What was seen. Places are counted over all files."""

    num_seen: int
    largest_id: int  # -1 when no token was seen
    largest_at: int
    num_outside: int  # ids that the vocabulary does not have
    first_outside: tuple[int, int] | None  # (place, id)


def find_tokens(
    folder: Path, *, file_pattern: str | None, dtype: str | None, split: str | None
) -> FoundTokens:
    """The tokens that `folder` means: a store, its split, or a folder of token files."""
    found = meant_split(folder, split)
    if found is not None:
        return _of_store(*found, file_pattern, dtype)
    if split is not None:
        raise OptionError(f"--split {split}: {folder} is no store, so it has no splits")
    pattern = file_pattern or choose_pattern(folder)
    opened = open_token_folder(folder, pattern, dtype=dtype)
    facts = declared_facts(opened.folder)
    there = [name for name in (META_JSON, METADATA_YAML) if (opened.folder / name).is_file()]
    return FoundTokens(
        folder=opened.folder,
        files=opened.files,
        decided=opened.decided,
        file_pattern=pattern,
        vocab_size=facts.vocab_size,
        tokenizer=facts.tokenizer,
        said_by=" or ".join(there),
    )


def choose_pattern(folder: Path) -> str:
    """The pattern of the only kind of token files that is there; "*.npy" when there are none."""
    there = {path.suffix for path in folder.iterdir()} if folder.is_dir() else set()
    kinds = [suffix for suffix in FORMATS if suffix in there]
    if len(kinds) > 1:
        raise OptionError(
            f"{folder}: there are {' and '.join(kinds)} files, perhaps the same tokens twice; "
            f"say which with --file-pattern '*{kinds[0]}' or '*{kinds[1]}'"
        )
    return f"*{kinds[0]}" if kinds else "*.npy"


def scan_ids(
    space: TokenSpace, *, vocab_size: int | None, sample: int | None, on_progress: OnProgress
) -> IdScan:
    """The largest id, and those that are `vocab_size` or more."""
    chunks = list(_chunks(space.num_tokens, sample))
    total = sum(stop - start for start, stop in chunks)
    largest = (-1, 0)
    seen, num_outside, first = 0, 0, None
    for start, stop in chunks:
        ids = space.read(start, stop)
        at = int(ids.argmax())
        if ids[at] > largest[0]:
            largest = (int(ids[at]), start + at)
        if vocab_size is not None and ids[at] >= vocab_size:
            outside = np.flatnonzero(ids >= vocab_size)
            num_outside += len(outside)
            first = first or (start + int(outside[0]), int(ids[outside[0]]))
        seen += stop - start
        on_progress(seen, total)
    return IdScan(
        num_seen=seen,
        largest_id=largest[0],
        largest_at=largest[1],
        num_outside=num_outside,
        first_outside=first,
    )


def _chunks(num_tokens: int, sample: int | None) -> Iterator[tuple[int, int]]:
    """Half-open runs of tokens: all of them, or about `sample` tokens of evenly spread ones."""
    size = CHUNK if sample is None else min(sample, max(_LEAST_CHUNK, min(CHUNK, sample // 64)))
    count = num_tokens if sample is None else -(-sample // size)
    if count * size >= num_tokens:
        for start in range(0, num_tokens, CHUNK):
            yield start, min(start + CHUNK, num_tokens)
        return
    # the first at 0, the last up to the end, none upon another: they fit in num_tokens
    for number in range(count):
        start = (num_tokens - size) * number // max(1, count - 1)
        yield start, start + size


def _of_store(store: Store, split: str, file_pattern: str | None, dtype: str | None) -> FoundTokens:
    if store.is_chat:
        raise OptionError(
            f"{store.folder}: a store of conversations, which `shardmill verify` checks; train on "
            f"it with shardmill.ChatRows, which keeps to its loss mask"
        )
    if file_pattern is not None:
        raise OptionError(
            f"--file-pattern {file_pattern}: {store.folder} is a store, which lists its files"
        )
    if dtype is not None and dtype != store.dtype:
        raise OptionError(f"--dtype {dtype}: {store.folder} is a store of {store.dtype}")
    reason = "the store's manifest says so"
    return FoundTokens(
        folder=store.folder,
        files=tuple(store.token_files(split)),
        decided=DtypeRule(dtype=store.dtype, rule="store", reason=reason),
        file_pattern=None,
        store=store,
        split=split,
        vocab_size=store.manifest.vocab_size,
        said_by="the manifest",
    )


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


def _config(found: FoundTokens, vocabulary: _Vocabulary, dtype: Dtype | None) -> DataConfig:
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
    dtype: Dtype | None,
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
