"""Pack plans on disk: one small file each, in the folder `packs` of their store.

In: facts and arrays of a plan, or a path.  Out: the file, or a `StoredPlan` mapped from it.
Promise: a file appears whole or not at all; equal plans are equal bytes; what `read_plan` returns
is what was written, to the byte (every open checks the sha256 of the whole file); a plan of
another store, or of one that was built again, is refused by name.
Not here: making plans (build), reading rows through them (mapped). FORMAT.md has the bytes.

What a pack plan on disk says of itself, as frozen records.

In: nothing.  Out: the classes that the header of a plan is made of, and its arrays.
Promise: the types alone refuse unknown keys, missing keys, negative and absurd numbers;
`plan_problems` finds everything else that cannot be true of a plan without looking at its store.
Not here: bytes (plans.py), choosing rows (packing), the tokens (mapped).
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from shardmill.arguments import choices
from shardmill.errors import (
    BuildError,
    DamagedStoreError,
    ManifestError,
    OptionError,
    StoreError,
    StoreExistsError,
    StoreNotFoundError,
)
from shardmill.packing import Algorithm, Long, takes_seed
from shardmill.records import IntArray
from shardmill.storage.atomic import atomic_write, cannot_write
from shardmill.store.entries import Count, Sha256
from shardmill.store.store import Store


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides which tokens share a row. Equal options, equal plan."""

    seq_len: Count  # inputs of a row; it has one token more
    algorithm: Algorithm = "best-fit"
    seed: Count | None = None  # of "first-fit-shuffle", and of no other
    max_per_row: Count | None = None  # pieces
    align_to: Count = 1  # every piece starts at a multiple of it; seq_len is one
    long: Long = "error"  # what becomes of an example over `capacity` tokens

    @property
    def capacity(self) -> int:
        """Tokens that a row has room for: `seq_len + 1`. With `align_to` above 1 `seq_len`, which
        is a multiple of it, so that the last piece too can be rounded up; the token behind is
        then padding in every row."""
        return self.seq_len + 1 if self.align_to == 1 else self.seq_len


class LeftOut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pieces that are in no row, for one reason."""

    pieces: Count
    tokens: Count
    labels: Count  # trained ones among them


class PlanMetrics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How well rows are filled, and where every token and every trained label went.

    `num_tokens - repeated_tokens + truncated_tokens` and the tokens left out are all tokens of the
    split; `trained_labels + truncated_labels` and the labels left out are all its labels: its
    trained tokens but those that are the first of their example, which nothing predicts.
    A token that a piece in a row and one left out share is in the row, so it is not left out.
    """

    num_rows: Count
    lower_bound: Count  # no plan of these pieces has less rows
    num_examples: Count
    num_empty: Count  # examples without tokens
    num_pieces: Count  # in rows
    num_tokens: Count  # in rows
    repeated_tokens: Count  # in two rows: the last of a piece is the first of the next, if split
    trained_labels: Count
    num_split: Count  # examples
    num_truncated: Count
    truncated_tokens: Count
    truncated_labels: Count
    left_out: dict[str, LeftOut]  # by reason, each of REASONS


class PlanFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of which store a plan is, how it was made, and what came of it."""

    store: Sha256  # fingerprint: a plan means these tokens and no others
    split: str
    options: PlanOptions
    metrics: PlanMetrics

    @property
    def row_len(self) -> int:
        """Tokens of a row, padding included."""
        return self.options.seq_len + 1

    @property
    def utilisation(self) -> float:
        """Tokens for each place of a row, 0 to 1; 1 when there are no rows."""
        places = self.metrics.num_rows * self.row_len
        return self.metrics.num_tokens / places if places else 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanArrays:
    """Rows as lists of pieces. A piece is a whole example, unless it is among the cuts.

    Pieces of all rows behind one another are numbered; cuts are told by that number.
    """

    counts: IntArray  # (rows,) pieces of each row, at least 1
    examples: IntArray  # (pieces,) which example each is of
    cut_pieces: IntArray  # (cuts,) numbers of pieces, rising
    cut_starts: IntArray  # (cuts,) such a piece is start..stop of its example
    cut_stops: IntArray
    too_long: IntArray  # numbers of the examples left out for this reason, rising
    trains_nothing: IntArray  # the same, once for each piece that was left out


NAMES = tuple(PlanArrays.__dataclass_fields__)
REASONS = ("too_long", "trains_nothing")
"""Why a piece is in no row; each is also the name of an array."""


def option_problems(options: PlanOptions) -> Iterator[str]:
    """What cannot be asked of a plan, found and wanted."""
    seq_len, step = options.seq_len, options.align_to
    if not 1 <= seq_len < 2**31 - 1:
        yield f"seq_len={seq_len:,}: wanted 1 to {2**31 - 2:,}"
    elif step < 1 or seq_len % step:
        near = max(seq_len // max(step, 1), 1) * max(step, 1)
        yield f"seq_len={seq_len:,} is no multiple of align_to={step:,}; take seq_len={near:,}"
    if takes_seed(options.algorithm) != (options.seed is not None):
        needs = "needs a seed" if options.seed is None else "takes no seed: it shuffles nothing"
        yield f"algorithm={options.algorithm!r} {needs}"
    if options.max_per_row == 0:
        yield "max_per_row=0: wanted at least 1"


def plan_problems(facts: PlanFacts, arrays: PlanArrays) -> Iterator[str]:
    """What cannot be true of any plan, most telling first."""
    metrics, counts = facts.metrics, arrays.counts
    yield from option_problems(facts.options)
    pieces = len(arrays.examples)
    found = len(counts), pieces, int(counts.sum(dtype=np.int64))
    if found != (metrics.num_rows, metrics.num_pieces, metrics.num_pieces):
        yield f"rows, pieces, pieces of all rows are {found}, but its metrics say otherwise"
    if len(counts) and not 1 <= counts.min() <= counts.max() <= _most_pieces(facts.options):
        yield f"rows of {counts.min():,} to {counts.max():,} pieces"
    left_out = {name: entry.pieces for name, entry in metrics.left_out.items()}
    if left_out != {name: len(getattr(arrays, name)) for name in REASONS}:
        yield f"other pieces are listed as left out than its metrics say: {left_out}"
    for name in ("examples", *REASONS):
        numbers = getattr(arrays, name)
        if len(numbers) and numbers.max() >= metrics.num_examples:
            yield f"{name}: example {numbers.max():,} of {metrics.num_examples:,}"
    yield from _cut_problems(arrays, pieces)


def _most_pieces(options: PlanOptions) -> int:
    """Every piece takes a place of its own."""
    most = -(-options.capacity // max(options.align_to, 1))
    return most if options.max_per_row is None else min(most, options.max_per_row)


def _cut_problems(arrays: PlanArrays, pieces: int) -> Iterator[str]:
    cuts = arrays.cut_pieces
    if not len(cuts) == len(arrays.cut_starts) == len(arrays.cut_stops):
        yield "its cuts have other numbers of starts and stops"
    elif len(cuts) and ((cuts[1:] <= cuts[:-1]).any() or cuts[-1] >= pieces):
        yield f"its cuts do not rise within the {pieces:,} pieces"
    elif (arrays.cut_starts >= arrays.cut_stops).any():
        yield "a cut without tokens"


PACKS = "packs"
SUFFIX = ".plan"
FORMAT: Literal["shardmill-plan"] = "shardmill-plan"
VERSION: Literal[1] = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", re.ASCII)
_HEAD = re.compile(rb'\{"format":"shardmill-plan","version":([0-9]+),')
_UNIT, _SEAL = 64, 32
_MAX_HEADER = 2**20
_DTYPES = tuple(np.dtype(name) for name in ("<u1", "<u2", "<u4", "<u8"))


class _Array(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    dtype: Literal["uint8", "uint16", "uint32", "uint64"]
    entries: Count


class _Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: Literal["shardmill-plan"]
    version: Literal[1]
    plan: PlanFacts
    arrays: list[_Array]  # in the order of NAMES


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredPlan:
    """A plan and the file it is mapped from."""

    path: Path
    facts: PlanFacts
    arrays: PlanArrays
    fingerprint: str  # its sha256, the one at the end of the file: equal ones, equal rows


def plan_path(folder: Path, split: str, name: str) -> Path:
    """Where a store keeps the plan `name` of a split: `packs/train-8192.plan`."""
    if not _NAME.fullmatch(name):
        raise OptionError(
            f"plan name {name!r}: 1 to 100 letters, digits, '_', '.' or '-', and begins with a "
            "letter or digit"
        )
    return Path(folder) / PACKS / f"{split}-{name}{SUFFIX}"


def find_plan(folder: Path, plan: str | Path | int) -> Path:
    """The file of a plan: by its name ("train-8192", as `list_plans` tells it), by its path, or by
    its `seq_len` when it is the only plan of that length."""
    if isinstance(plan, bool) or not isinstance(plan, str | Path | int):
        raise OptionError(f"plan {plan!r}: wanted the name of a plan, its path or its seq_len")
    if isinstance(plan, int):
        return _plan_of_length(Path(folder), plan)
    if isinstance(plan, Path) or plan.endswith(SUFFIX) or os.sep in plan:
        return Path(plan).absolute()
    path = Path(folder).absolute() / PACKS / f"{plan}{SUFFIX}"
    if not path.is_file():
        if plan.isascii() and plan.isdigit():
            return _plan_of_length(Path(folder), int(plan))
        known = choices(plan, list_plans(folder), verb="its plans are")
        raise StoreNotFoundError(
            f"{folder}: no plan {plan!r}; {known} (`shardmill pack` makes them)"
        )
    return path


def _plan_of_length(folder: Path, seq_len: int) -> Path:
    found = []
    for name in list_plans(folder):
        path = folder.absolute() / PACKS / f"{name}{SUFFIX}"
        try:
            if read_plan(path).facts.options.seq_len == seq_len:
                found.append(path)
        except StoreError:
            continue  # it has a name, by which it is refused with the reason
    if len(found) == 1:
        return found[0]
    if not found:
        raise OptionError(
            f"{folder}: no plan of seq_len {seq_len}; make one with "
            f"`shardmill pack {folder} --seq-len {seq_len}`"
        )
    names = ", ".join(repr(path.name.removesuffix(SUFFIX)) for path in found)
    raise OptionError(
        f"{folder}: {len(found)} plans have seq_len {seq_len}: {names}; name one of them"
    )


def list_plans(folder: str | Path) -> list[str]:
    """The names of all plans of a store, sorted; none of them is opened."""
    return sorted(path.name.removesuffix(SUFFIX) for path in Path(folder, PACKS).glob(f"*{SUFFIX}"))


def write_plan(path: Path, facts: PlanFacts, arrays: PlanArrays, *, overwrite: bool = False) -> int:
    """Put a plan on disk; returns its size in bytes.

    The same plan may stand there already; another one only goes with `overwrite`.
    """
    problems = list(plan_problems(facts, arrays))
    if problems:
        raise BuildError(f"{path}: refusing to write this plan: " + "; ".join(problems))
    parts = [narrow(getattr(arrays, name)) for name in NAMES]
    data = _encode(facts, parts)
    if path.exists() and not overwrite:
        if path.is_file() and path.read_bytes() == data:
            return len(data)
        raise StoreExistsError(
            f"{path}: another plan stands here; choose another name (name=), or replace it with "
            "overwrite=True"
        )
    try:
        path.parent.mkdir(exist_ok=True)
        with atomic_write(path) as file:
            file.write(data)
    except OSError as error:
        raise cannot_write(path, error) from error
    return len(data)


def read_plan(path: Path) -> StoredPlan:
    """The plan at `path`, after all checks. Its arrays are mapped and read-only."""
    path = Path(path).absolute()
    data = _map(path)
    version = _HEAD.match(data[: 2 * _UNIT].tobytes())
    if version is None or len(data) < _UNIT + _SEAL:
        raise ManifestError(f"{path}: not a pack plan of ours, or its beginning is damaged")
    if int(version[1]) != VERSION:
        raise ManifestError(
            f"{path}: a plan of version {version[1].decode()}, but this shardmill reads version "
            f"{VERSION}; upgrade shardmill, or pack again"
        )
    digest = hashlib.sha256(data[:-_SEAL].data)
    if digest.digest() != data[-_SEAL:].tobytes():
        raise _damaged(path, "its sha256 is not the one at its end: changed or cut off")
    header, at = _header(path, data)
    arrays = PlanArrays(**dict(_cut(path, data, header, at)))
    for problem in plan_problems(header.plan, arrays):
        raise _damaged(path, problem)
    return StoredPlan(path=path, facts=header.plan, arrays=arrays, fingerprint=digest.hexdigest())


def check_plan(plan: StoredPlan, store: Store) -> None:
    """Refuse a plan that was not made of exactly these tokens."""
    facts = plan.facts
    if facts.store != store.fingerprint or facts.split not in store.splits:
        raise DamagedStoreError(
            f"{plan.path}: a plan of another store, or of this one before it was built again "
            f"(fingerprint {facts.store[:12]}, that of {store.folder} is "
            f"{store.fingerprint[:12]}); pack again: it takes seconds"
        )
    if facts.metrics.num_examples != store.num_documents(facts.split):
        raise _damaged(plan.path, f"not of the {store.num_documents(facts.split):,} examples")


def plans_of(store: Store) -> Iterator[tuple[str, StoredPlan | StoreError]]:
    """Every plan of a store by name: opened and checked, or why it cannot be used."""
    for name in list_plans(store.folder):
        try:
            plan = read_plan(find_plan(store.folder, name))
            check_plan(plan, store)
        except StoreError as error:
            yield name, error
        else:
            yield name, plan


def narrow(values: IntArray) -> IntArray:
    """Whole numbers from 0 on in the narrowest unsigned type that holds them all."""
    most = int(values.max(initial=0))
    assert values.min(initial=0) >= 0, "a negative number would be wrapped without a word"
    kind = next(kind for kind in _DTYPES if most <= np.iinfo(kind).max)
    return values.astype(kind)


def _encode(facts: PlanFacts, parts: list[IntArray]) -> bytes:
    entries = [
        _Array(name=name, dtype=part.dtype.name, entries=len(part))  # type: ignore[arg-type]
        for name, part in zip(NAMES, parts, strict=True)
    ]
    header = _Header(format=FORMAT, version=VERSION, plan=facts, arrays=entries)
    line = msgspec.json.encode(header)
    line += b" " * (-(len(line) + 1) % _UNIT) + b"\n"
    body = b"".join(part.tobytes() + b"\0" * (-part.nbytes % _UNIT) for part in parts)
    return line + body + hashlib.sha256(line + body).digest()


def _map(path: Path) -> npt.NDArray[np.uint8]:
    try:
        # without waiting: a pipe may have no other end
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise ManifestError(f"{path}: not a plain file, so no plan")
            if not found.st_size:
                raise _damaged(path, "empty")
            return np.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), np.uint8)
        finally:
            os.close(descriptor)
    except FileNotFoundError as error:
        raise StoreNotFoundError(f"{path}: no such plan; make it with `shardmill pack`") from error
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read as a plan: {error.strerror}") from error


def _header(path: Path, data: npt.NDArray[np.uint8]) -> tuple[_Header, int]:
    """What the first line says, and where the next one would begin."""
    line = data[: min(_MAX_HEADER, len(data) - _SEAL)].tobytes().partition(b"\n")[0]
    try:
        header = msgspec.json.decode(line, type=_Header)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _damaged(path, f"its first line is no header ({error})") from error
    if tuple(entry.name for entry in header.arrays) != NAMES or (len(line) + 1) % _UNIT:
        raise _damaged(path, "its first line lists other arrays than a plan has")
    return header, len(line) + 1


def _cut(
    path: Path, data: npt.NDArray[np.uint8], header: _Header, at: int
) -> Iterator[tuple[str, IntArray]]:
    for entry in header.arrays:
        kind = np.dtype(entry.dtype).newbyteorder("<")
        size = entry.entries * kind.itemsize
        if at + size > len(data) - _SEAL:
            raise _damaged(path, f"{entry.name} goes beyond its end")
        yield entry.name, data[at : at + size].view(kind)
        at += size + -size % _UNIT
    if at != len(data) - _SEAL:
        raise _damaged(path, "there is more behind its arrays")


def _damaged(path: Path, what: str) -> DamagedStoreError:
    return DamagedStoreError(f"{path}: {what}; copy the plan again, or pack again")
