"""Damage to files, decided by a number and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

Rng = np.random.Generator


def bits(data: bytearray, rng: Rng) -> None:
    for place in rng.integers(0, len(data), rng.integers(1, 9)).tolist():
        data[place] ^= 1 << int(rng.integers(0, 8))


def one_bit(data: bytearray, rng: Rng) -> None:
    data[int(rng.integers(0, len(data)))] ^= 1 << int(rng.integers(0, 8))


def overwrite(data: bytearray, rng: Rng) -> None:
    start, size = int(rng.integers(0, len(data))), int(rng.integers(1, 64))
    run = rng.bytes(size) if rng.integers(0, 2) else bytes([int(rng.integers(0, 256))]) * size
    data[start : start + size] = run[: len(data) - start]


def cut(data: bytearray, rng: Rng) -> None:
    del data[int(rng.integers(0, len(data))) :]


def hole(data: bytearray, rng: Rng) -> None:
    start = int(rng.integers(0, len(data)))
    del data[start : start + int(rng.integers(1, 64))]


def insert(data: bytearray, rng: Rng) -> None:
    start = int(rng.integers(0, len(data) + 1))
    data[start:start] = rng.bytes(int(rng.integers(1, 64)))


def zero_page(data: bytearray, rng: Rng) -> None:
    size = int(rng.choice([64, 512, 4096]))
    start = int(rng.integers(0, len(data))) // size * size
    stop = min(start + size, len(data))
    data[start:stop] = bytes(stop - start)


def empty(data: bytearray, rng: Rng) -> None:
    data.clear()


def double(data: bytearray, rng: Rng) -> None:
    data += bytes(data)


KINDS: dict[str, tuple[int, Callable[[bytearray, Rng], None]]] = {  # how often, and what
    "one bit": (6, one_bit),
    "bits": (4, bits),
    "overwrite": (5, overwrite),
    "cut": (3, cut),
    "hole": (3, hole),
    "insert": (3, insert),
    "zero page": (3, zero_page),
    "empty": (1, empty),
    "double": (1, double),
}
_SWAP, _GONE = 2, 1


def damage(folder: Path, other: Path, targets: str, rng: Rng) -> str:
    """Change one file of `folder`, or swap two, or take one of the data set at `other`.

    What was done, for messages. Some byte is always another one than before.
    """
    paths = sorted(path for path in folder.rglob(targets) if path.is_file())
    path = paths[int(rng.integers(0, len(paths)))]
    names = [*KINDS, "swap", "gone"]
    weights = np.array([*(often for often, _ in KINDS.values()), _SWAP, _GONE], float)
    kind = str(rng.choice(names, p=weights / weights.sum()))
    if kind == "gone":
        path.unlink()
    elif kind != "swap" or not _swap(folder, path, paths, other, rng):
        kind = kind if kind in KINDS else "one bit"
        before = path.read_bytes()
        data = bytearray(before)
        if data:
            KINDS[kind][1](data, rng)
        while data == before:  # zeros over zeros
            data = data or bytearray(1)
            one_bit(data, rng)
        path.write_bytes(data)
    return f"{kind}: {path.relative_to(folder)}"


def _swap(folder: Path, path: Path, paths: list[Path], other: Path, rng: Rng) -> bool:
    """Swap with another file of the folder, or with its namesake; False if that changes nothing.

    A folder of one file would only become the other data set, which is no damage.
    """
    second = paths[int(rng.integers(0, len(paths)))]
    if rng.integers(0, 2):
        second = other / path.relative_to(folder)
    alone = sum(file.is_file() for file in folder.rglob("*")) == 1
    first_bytes = path.read_bytes()
    if alone or not second.exists() or second.read_bytes() == first_bytes:
        return False
    path.write_bytes(second.read_bytes())
    if second.is_relative_to(folder):
        second.write_bytes(first_bytes)
    return True
