"""Files that a finished store may have beside its tokens: pack plans, each a small file in the
folder `packs`, and one table of which part of the input every document came from.

Each is written atomically, and equal contents are equal bytes. `read_plan` and `read_origins` check
the sha256 of the whole file at every open, so what they return is what was written. A file of
another store, or of this one before it was built again, is refused. FORMAT.md describes the bytes.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np

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
from shardmill.records import IntArray, OffsetArray
from shardmill.storage.atomic import atomic_write, cannot_write
from shardmill.store.layout import ALIGNMENT, ORIGINS, decode_sealed, encode_sealed
from shardmill.store.manifest import Count, Manifest, Sha256, fingerprint, read_plain_file
from shardmill.store.store import Store


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides which tokens share a row. Equal options, equal plan."""

    seq_len: Count  # inputs of a row, which has one token more
    algorithm: Algorithm = "best-fit"
    seed: Count | None = None  # for "first-fit-shuffle" only
    max_per_row: Count | None = None  # pieces
    align_to: Count = 1  # every piece starts at a multiple of it; it divides seq_len
    long: Long = "error"  # what happens to an example of more than `capacity` tokens

    @property
    def capacity(self) -> int:
        """Tokens that fit into a row: `seq_len + 1`. With `align_to` above 1 only `seq_len`, a
        multiple of it, so that the last piece can be rounded up too; the token after it is then
        padding in every row."""
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
    lower_bound: Count  # no plan of these pieces has fewer rows
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
    """Which store a plan is for, how it was made, and the result."""

    store: Sha256  # fingerprint: a plan is for these tokens and no others
    split: str
    options: PlanOptions
    metrics: PlanMetrics

    @property
    def row_len(self) -> int:
        """Tokens of a row, padding included."""
        return self.options.seq_len + 1

    @property
    def utilisation(self) -> float:
        """The share of all positions in rows that hold a token, 0 to 1; 1 without rows."""
        positions = self.metrics.num_rows * self.row_len
        return self.metrics.num_tokens / positions if positions else 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanArrays:
    """Rows as lists of pieces. A piece is a whole example, unless it is among the cuts.

    Pieces are numbered through all rows; cuts refer to those numbers.
    """

    counts: IntArray  # (rows,) pieces of each row, at least 1
    examples: IntArray  # (pieces,) the example of each piece
    cut_pieces: IntArray  # (cuts,) numbers of pieces, ascending
    cut_starts: IntArray  # (cuts,) such a piece is start..stop of its example
    cut_stops: IntArray
    too_long: IntArray  # numbers of the examples left out for this reason, ascending
    trains_nothing: IntArray  # the same, once for each piece that was left out


NAMES = tuple(PlanArrays.__dataclass_fields__)
REASONS = ("too_long", "trains_nothing")
"""Why a piece is in no row; each is also the name of an array."""


def option_problems(options: PlanOptions) -> Iterator[OptionError]:
    """What is wrong with the options of a plan."""
    seq_len, step = options.seq_len, options.align_to
    if not 1 <= seq_len < 2**31 - 1:
        yield OptionError(f"{{seq_len}}: wanted 1 to {2**31 - 2:,}", seq_len=seq_len)
    elif step < 1 or seq_len % step:
        near = max(seq_len // max(step, 1), 1) * max(step, 1)
        yield OptionError(
            f"{{seq_len}} is no multiple of {{align_to}}; take {near}",
            seq_len=seq_len,
            align_to=step,
        )
    if takes_seed(options.algorithm) != (options.seed is not None):
        needs = "needs a seed" if options.seed is None else "takes no seed: it shuffles nothing"
        yield OptionError(f"{{algorithm}} {needs}", algorithm=options.algorithm)
    if options.max_per_row == 0:
        yield OptionError("{max_per_row}: wanted at least 1", max_per_row=0)


def plan_problems(facts: PlanFacts, arrays: PlanArrays) -> Iterator[str]:
    """What cannot be true of any plan, most telling first."""
    metrics, counts = facts.metrics, arrays.counts
    yield from map(str, option_problems(facts.options))
    pieces = len(arrays.examples)
    found = len(counts), pieces, int(counts.sum(dtype=np.int64))
    if found != (metrics.num_rows, metrics.num_pieces, metrics.num_pieces):
        yield f"rows, pieces, pieces of all rows are {found}, but its metrics say otherwise"
    options = facts.options
    most = -(-options.capacity // max(options.align_to, 1))  # every piece takes a step or more
    most = most if options.max_per_row is None else min(most, options.max_per_row)
    if len(counts) and not 1 <= counts.min() <= counts.max() <= most:
        yield f"rows of {counts.min():,} to {counts.max():,} pieces"
    left_out = {name: entry.pieces for name, entry in metrics.left_out.items()}
    if left_out != {name: len(getattr(arrays, name)) for name in REASONS}:
        yield f"other pieces are listed as left out than its metrics say: {left_out}"
    for name in ("examples", *REASONS):
        numbers = getattr(arrays, name)
        if len(numbers) and numbers.max() >= metrics.num_examples:
            yield f"{name}: example {numbers.max():,} of {metrics.num_examples:,}"
    cuts = arrays.cut_pieces
    if not len(cuts) == len(arrays.cut_starts) == len(arrays.cut_stops):
        yield "its cuts have other numbers of starts and stops"
    elif len(cuts) and ((cuts[1:] <= cuts[:-1]).any() or cuts[-1] >= pieces):
        yield f"its cuts do not rise within the {pieces:,} pieces"
    elif (arrays.cut_starts >= arrays.cut_stops).any():
        yield "a cut without tokens"


PACKS = "packs"
SUFFIX = ".plan"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", re.ASCII)
_NEXT = "copy the plan again, or pack again"
_DTYPES = tuple(np.dtype(name) for name in ("<u1", "<u2", "<u4", "<u8"))


class _Array(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    dtype: Literal["uint8", "uint16", "uint32", "uint64"]
    entries: Count


class _PlanHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
    fingerprint: str  # the sha256 at the end of the file: equal fingerprints, equal rows


def plan_path(folder: Path, split: str, name: str) -> Path:
    """Where a store keeps the plan `name` of a split: `packs/train-8192.plan`."""
    if not _NAME.fullmatch(name):
        raise OptionError(
            f"plan name {name!r}: 1 to 100 letters, digits, '_', '.' or '-', and begins with a "
            "letter or digit"
        )
    return Path(folder) / PACKS / f"{split}-{name}{SUFFIX}"


def find_plan(folder: Path, plan: str | Path | int) -> Path:
    """The file of a plan: by its name ("train-8192", as in `list_plans`), by its path, or by its
    `seq_len` when it is the only plan of that length."""
    if isinstance(plan, bool) or not isinstance(plan, str | Path | int):
        raise OptionError("{plan}: wanted the name of a plan, its path or its seq_len", plan=plan)
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
            continue  # asked for by name, it is refused with the reason
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
    """Write a plan; returns its size in bytes. `overwrite`: it may replace a different plan."""
    problems = list(plan_problems(facts, arrays))
    if problems:
        raise BuildError(f"{path}: refusing to write this plan: " + "; ".join(problems))
    data = _encode(facts, [_narrow(getattr(arrays, name)) for name in NAMES])
    if path.exists() and not overwrite:
        if path.is_file() and path.read_bytes() == data:
            return len(data)
        raise StoreExistsError(
            f"{path}: another plan is here; choose another {{name}}, or replace it with "
            "{overwrite}",
            name=...,
            overwrite=True,
        )
    _write(path, data)
    return len(data)


def read_plan(path: Path) -> StoredPlan:
    """The plan at `path`, after all checks. Its arrays are mapped and read-only."""
    path = Path(path).absolute()
    header, body, sha256 = decode_sealed(
        _map(path), _PlanHeader, "shardmill-plan", where=str(path), what="a pack plan", advice=_NEXT
    )
    if tuple(entry.name for entry in header.arrays) != NAMES:
        raise _damaged(path, "its first line lists other arrays than a plan has")
    arrays, at = {}, 0
    for entry in header.arrays:
        kind = np.dtype(entry.dtype).newbyteorder("<")
        size = entry.entries * kind.itemsize
        if at + size > len(body):
            raise _damaged(path, f"{entry.name} goes beyond its end")
        arrays[entry.name] = np.frombuffer(body[at : at + size], kind)
        at += size + -size % ALIGNMENT
    if at != len(body):
        raise _damaged(path, "there is more after its arrays")
    plan = PlanArrays(**arrays)
    for problem in plan_problems(header.plan, plan):
        raise _damaged(path, problem)
    return StoredPlan(path=path, facts=header.plan, arrays=plan, fingerprint=sha256)


def check_plan(plan: StoredPlan, store: Store) -> None:
    """Refuse a plan that was not made for exactly these tokens."""
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


def _narrow(values: IntArray) -> IntArray:
    """Whole numbers from 0 on in the narrowest unsigned type that holds them all."""
    most = int(values.max(initial=0))
    assert values.min(initial=0) >= 0, "a negative number would wrap silently"
    kind = next(kind for kind in _DTYPES if most <= np.iinfo(kind).max)
    return values.astype(kind)


def _encode(facts: PlanFacts, parts: list[IntArray]) -> bytes:
    entries = [
        _Array(name=name, dtype=part.dtype.name, entries=len(part))  # type: ignore[arg-type]
        for name, part in zip(NAMES, parts, strict=True)
    ]
    header = _PlanHeader(format="shardmill-plan", version=1, plan=facts, arrays=entries)
    body = b"".join(part.tobytes() + b"\0" * (-part.nbytes % ALIGNMENT) for part in parts)
    return encode_sealed(header, body)


def _map(path: Path) -> memoryview:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # a pipe would wait for its other end
            raise ManifestError(f"{path}: not a plain file, so no plan")
        if not found.st_size:
            raise _damaged(path, "empty")
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError as error:
        raise StoreNotFoundError(f"{path}: no such plan; make it with `shardmill pack`") from error
    except OSError as error:
        raise ManifestError(f"{path}: cannot be read as a plan: {error.strerror}") from error


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(exist_ok=True)
        with atomic_write(path) as file:
            file.write(data)
    except OSError as error:
        raise cannot_write(path, error) from error


def _damaged(where: str | Path, what: str, advice: str = _NEXT) -> DamagedStoreError:
    return DamagedStoreError(f"{where}: {what}; {advice}")


FEED, GRAIN, MARK, ROWS = range(4)
COLUMNS = ("feed", "grain", "mark", "rows")
"""The first columns of a table; the first document of each split follows."""
MAX_ORIGINS_BYTES = 2**30
_NEXT_ORIGINS = "copy it again, or remove it: the store does without"


class _ByHash(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    seed: int
    fractions: list[tuple[str, float]]


class _OriginsHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: Literal["shardmill-origins"]
    version: Literal[1, 2]
    store: Sha256
    fill: list[list[str]]
    splits: Annotated[list[str], msgspec.Meta(min_length=1)]
    entries: Count
    unit_bytes: Count | msgspec.UnsetType = msgspec.UNSET  # of the record of units; version 2
    by_hash: _ByHash | msgspec.UnsetType = msgspec.UNSET  # version 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Origins:
    """Where documents came from, by parts of the input, in the order in which they were read."""

    fill: tuple[tuple[str, ...], ...]  # for each source the splits that it fills, in this order
    splits: tuple[str, ...]  # of the columns after COLUMNS
    table: OffsetArray  # (entries, len(COLUMNS) + len(splits)) see FORMAT.md
    # seed, and share of each split but "train", if a hash chose the split of every document
    by_hash: tuple[int, tuple[tuple[str, float], ...]] | None = None
    units: bytes | None = None  # how the build was divided, as JSON lines: `building` reads it

    def first(self, split: str) -> OffsetArray:
        """(entries,) how many documents of a split come before each part."""
        return self.table[:, len(COLUMNS) + self.splits.index(split)]


def write_origins(folder: Path, origins: Origins, manifest: Manifest) -> None:
    """Write the table into the folder of the finished store with this manifest."""
    path = folder / ORIGINS
    header = _OriginsHeader(
        format="shardmill-origins",
        version=1 if origins.units is None and origins.by_hash is None else 2,
        store=fingerprint(manifest),
        fill=[list(splits) for splits in origins.fill],
        splits=list(origins.splits),
        entries=len(origins.table),
        unit_bytes=msgspec.UNSET if origins.units is None else len(origins.units),
        by_hash=msgspec.UNSET if origins.by_hash is None else _by_hash(*origins.by_hash),
    )
    for problem in _origin_problems(header, origins, manifest):
        raise BuildError(f"{path}: refusing to write this table: {problem}")
    table = np.ascontiguousarray(origins.table, "<i8").tobytes()
    _write(path, encode_sealed(header, table + (origins.units or b"")))


def _by_hash(seed: int, fractions: tuple[tuple[str, float], ...]) -> _ByHash:
    return _ByHash(seed=seed, fractions=[(name, float(share)) for name, share in fractions])


def read_origins(folder: Path, manifest: Manifest) -> Origins | None:
    """The table of the store at `folder`, after all checks; None when it has none."""
    path = Path(folder) / ORIGINS
    data = read_plain_file(path, MAX_ORIGINS_BYTES)
    return None if data is None else decode_origins(data, manifest, where=str(path))


def decode_origins(data: bytes, manifest: Manifest, *, where: str) -> Origins:
    """The table that these bytes are. They are not trusted."""
    header, body, _ = decode_sealed(
        memoryview(data),
        _OriginsHeader,
        "shardmill-origins",
        where=where,
        what="a table of origins",
        advice=_NEXT_ORIGINS,
        newest=2,
    )
    width = len(COLUMNS) + len(header.splits)
    stop = 8 * width * header.entries
    unit_bytes = 0 if header.unit_bytes is msgspec.UNSET else header.unit_bytes
    if len(body) != stop + unit_bytes:
        raise _damaged(where, f"not of {header.entries:,} entries", _NEXT_ORIGINS)
    rule = header.by_hash
    origins = Origins(
        fill=tuple(tuple(splits) for splits in header.fill),
        splits=tuple(header.splits),
        table=np.frombuffer(body[:stop], "<i8").reshape(header.entries, width),
        by_hash=None if rule is msgspec.UNSET else (rule.seed, tuple(rule.fractions)),
        units=None if header.unit_bytes is msgspec.UNSET else bytes(body[stop:]),
    )
    for problem in _origin_problems(header, origins, manifest):
        raise _damaged(where, problem, _NEXT_ORIGINS)
    return origins


def _origin_problems(header: _OriginsHeader, origins: Origins, manifest: Manifest) -> Iterator[str]:
    """What cannot be true of a table of this store, the most telling first."""
    if header.store != fingerprint(manifest):
        yield f"of another store (fingerprint {header.store[:12]})"
        return
    if origins.splits != tuple(sorted(manifest.splits)):
        yield f"for the splits {list(origins.splits)}, the store has {sorted(manifest.splits)}"
        return
    if any(set(splits) - set(origins.splits) for splits in origins.fill):
        yield "a source fills a split that the store does not have"
    table = origins.table
    if not len(table):
        return
    order = table[:, FEED] * (int(table[:, GRAIN].max()) + 1) + table[:, GRAIN]
    if table.min() < 0 or table[:, FEED].max() >= len(origins.fill):
        yield "a number in it is impossible"
    elif (np.diff(order) <= 0).any() or (np.diff(table[:, len(COLUMNS) :], axis=0) < 0).any():
        yield "its entries do not rise"
    for split in origins.splits:
        if origins.first(split)[0] or origins.first(split)[-1] > manifest.splits[split].documents:
            yield f"its documents of split {split!r} are not those of the store"
