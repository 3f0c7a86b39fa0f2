"""What the files beside foreign tokens say about them.

In: a folder.  Out: dtype, vocabulary size and tokenizer, as far as `meta.json` or
`metadata.yaml` say them.
Promise: `meta.json` comes first; a statement that cannot be understood, or two that disagree,
are refused; every fact knows where it was found.
Not here: tokens; stores of our own (they have a manifest).

Which dtype the tokens of bare `.bin` files have, and who says so.

In: a folder, its files and their sizes.  Out: a `DtypeRule`: the dtype and what decided it.
Promise: in this order: the caller, `meta.json`, `metadata.yaml`, and last the old rule (uint32 if
the size is a multiple of four, else uint16) checked against the data: a uint32 reading full of
impossible ids is uint16. What stays open is refused, never guessed.
Not here: files with a header (npy), mapping.

The check reads tokens in pairs: (low, high) halves of a uint32, or two uint16 in a row. No
vocabulary has two million ids, so in true uint32 files the high halves are tiny and hardly ever
as large as the low ones. In uint16 files both are alike, and most pairs make an impossible id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardmill.errors import OptionError, StoreError

META_JSON = "meta.json"
METADATA_YAML = "metadata.yaml"
_MAX_BYTES = 2**24
_LINE = re.compile(
    r"^[ \t]*([\"']?)(dtype|vocab_size|tokenizer)\1[ \t]*:[ \t]*(.*?)[ \t]*(?:[ \t]#.*)?$", re.M
)
_KEY = re.compile(r"\b(dtype|vocab_size)[\"']?[ \t]*:(?=[ \t\n]|$)")
_COMMENT = re.compile(r"(^|[ \t])#.*$", re.M)
_TEXT_BLOCK = re.compile(
    r"^([ \t]*)(\S.*:[ \t]*[|>][-+0-9]*[ \t]*\n)(?:\1[ \t]+.*\n?|[ \t]*\n)*", re.M
)
_NOTHING = ("", "null", "~", "None")
_NEXT = "correct it, or pass dtype='uint16' or dtype='uint32'"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedDtype:
    """A dtype that somebody named."""

    name: str  # "uint16" or "uint32"
    where: str  # "argument", "meta.json" or "metadata.yaml"
    written: str  # as it stands there


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that was said; None where nobody said anything."""

    dtype: NamedDtype | None = None
    vocab_size: int | None = None
    tokenizer: str | None = None


def declared_facts(folder: Path) -> Facts:
    """`meta.json` first, then `metadata.yaml`, fact by fact."""
    json_facts = _facts(folder / META_JSON, _read_json(folder / META_JSON))
    yaml_facts = _facts(folder / METADATA_YAML, _read_yaml(folder / METADATA_YAML))
    return Facts(
        dtype=json_facts.dtype or yaml_facts.dtype,
        vocab_size=json_facts.vocab_size or yaml_facts.vocab_size,
        tokenizer=json_facts.tokenizer or yaml_facts.tokenizer,
    )


def dtype_name(written: npt.DTypeLike, where: str) -> str:
    """ "uint16" or "uint32", from "uint16-le", "<u4", "np.uint16", `np.uint16` and the like."""
    plain: Any = written
    if isinstance(written, str):
        plain = re.sub(r"^(np|numpy|torch)\.", "", written.strip()).removesuffix("-le")
    try:
        found = np.dtype(plain)
    except (TypeError, ValueError, SyntaxError):
        found = np.dtype(np.void)
    if found not in (np.dtype("<u2"), np.dtype("<u4")) or plain is None:
        raise OptionError(
            f"{where}: {written!r:.80} is no dtype of token files; wanted 'uint16' or 'uint32' "
            f"(little endian)"
        )
    return f"uint{8 * found.itemsize}"


def _facts(path: Path, said: dict[str, list[str]]) -> Facts:
    dtypes = {dtype_name(value, str(path)): value for value in said.get("dtype", [])}
    sizes, names = set(said.get("vocab_size", [])), set(said.get("tokenizer", []))
    if len(dtypes) > 1 or len(sizes) > 1:
        raise StoreError(f"{path}: says dtype {list(dtypes)}, vocab_size {sorted(sizes)}; {_NEXT}")
    size = next(iter(sizes), None)
    if size is not None and not (re.fullmatch(r"[0-9]{1,18}", size) and int(size)):
        raise StoreError(f"{path}: vocab_size is {size!r:.80}, wanted a positive number; {_NEXT}")
    return Facts(
        dtype=next(
            (NamedDtype(name=k, where=path.name, written=v) for k, v in dtypes.items()), None
        ),
        vocab_size=None if size is None else int(size),
        tokenizer=next(iter(names)) if len(names) == 1 else None,
    )


def _read_json(path: Path) -> dict[str, list[str]]:
    """`token_dtype` or `dtype`, `vocab_size` and `tokenizer` of a JSON object."""
    text = _read_text(path)
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}: not JSON ({error}); {_NEXT}") from error
    if not isinstance(found, dict):
        raise StoreError(f"{path}: a {type(found).__name__}, wanted a JSON object; {_NEXT}")
    said: dict[str, list[str]] = {}
    for key in ("token_dtype", "dtype", "vocab_size", "tokenizer"):
        if isinstance(found.get(key), (str, int)):
            said.setdefault(key.removeprefix("token_"), []).append(str(found[key]))
        elif found.get(key) is not None and key != "tokenizer":
            raise StoreError(f"{path}: {key} is {found[key]!r:.80}; {_NEXT}")
    return said


def _read_yaml(path: Path) -> dict[str, list[str]]:
    """The same of a YAML file, by its lines: at any depth, plain or quoted scalars."""
    said: dict[str, list[str]] = {}
    text = _TEXT_BLOCK.sub(r"\1\2", _read_text(path) or "")
    lines = _LINE.findall(text)
    understood = sum(key != "tokenizer" for _, key, _ in lines)
    found = _KEY.findall(_COMMENT.sub("", text))
    if len(found) != understood:
        raise StoreError(
            f"{path}: says {' and '.join(sorted(set(found)))} in a form that is not read here; "
            f"wanted each on a line of its own, as in `dtype: uint16`; {_NEXT}"
        )
    for _, key, value in lines:
        bare = value[1:-1] if value[:1] in ("'", '"') and value[-1:] == value[:1] else value
        if bare not in _NOTHING:
            said.setdefault(key, []).append(bare)
    return said


def _read_text(path: Path) -> str | None:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise StoreError(f"{path}: {path.stat().st_size:,} bytes; this is no metadata; {_NEXT}")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{path}: cannot be read ({error}); {_NEXT}") from error


IMPOSSIBLE_ID = 2**21
"""No tokenizer has that many ids; used when nobody says how many there are."""

_BLOCK = 16_384  # bytes looked at, at the beginning, in the middle and at the end of a file
_LEAST_PAIRS = 8
_MUCH, _MOST = 0.25, 0.9
_LOOK_AT_DECLARED = 8  # files of a declared dtype that are looked at
_SAY = "pass dtype='uint16' or dtype='uint32'"

Pairs = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypeRule:
    """A dtype and what decided it."""

    dtype: str  # "uint16" or "uint32"
    rule: str  # "argument", "meta.json", "metadata.yaml", "header", "store" or "contents"
    reason: str  # the same as a sentence, with what was found
    doubt: str = ""  # what the data itself says against it; "" when it says nothing


def decide_dtype(
    folder: Path, paths: Sequence[Path], sizes: Sequence[int], dtype: npt.DTypeLike | None
) -> DtypeRule:
    """The dtype of all these `.bin` files, which are not empty."""
    if dtype is not None:
        name = dtype_name(dtype, "dtype")
        asked = NamedDtype(name=name, where="argument", written=name)
        return _declared(asked, paths, sizes, IMPOSSIBLE_ID)
    facts = declared_facts(folder)
    # twice, because a vocabulary's size is often told without its added tokens
    bound = IMPOSSIBLE_ID if facts.vocab_size is None else 2 * facts.vocab_size
    if facts.dtype is not None:
        return _declared(facts.dtype, paths, sizes, bound)
    return _judged(paths, sizes, bound)


def judge(pairs: Pairs, bound: int = IMPOSSIBLE_ID) -> str | None:
    """What the data alone says: "uint16", "uint32", or None when it could be either or neither.

    `pairs` is (n, 2): every aligned four bytes as two little-endian uint16.
    """
    low, high = pairs[:, 0].astype(np.int64), pairs[:, 1].astype(np.int64)
    impossible = float(np.mean(low + (high << 16) >= bound)) if len(pairs) else 0.0
    if impossible >= _MUCH:
        return None if _is_uint32(pairs.byteswap()[:, ::-1]) else "uint16"  # big endian: neither
    if impossible > 0 or _is_int64(pairs):
        return None
    return "uint32" if _is_uint32(pairs) else None


def _is_uint32(pairs: Pairs) -> bool:
    """High halves all tiny, and nearly always below the low ones. (0, 0) says nothing."""
    telling = pairs[(pairs != 0).any(axis=1)]
    if len(telling) < _LEAST_PAIRS or telling[:, 1].max() >= IMPOSSIBLE_ID >> 16:
        return False
    return bool(np.mean(telling[:, 0] > telling[:, 1]) >= _MOST)


def _is_int64(pairs: Pairs) -> bool:
    """Every second uint32 is 0, and hardly any other."""
    words = pairs[: len(pairs) // 2 * 2].reshape(-1, 4)
    if len(words) < _LEAST_PAIRS or words[:, 2:].any():
        return False
    return bool(np.mean(words[:, :2].any(axis=1)) >= _MOST)


def _declared(
    said: NamedDtype, paths: Sequence[Path], sizes: Sequence[int], bound: int
) -> DtypeRule:
    width = np.dtype(said.name).itemsize
    for path, size in zip(paths, sizes, strict=True):
        if size % width:
            raise StoreError(
                f"{path}: truncated, or not {said.name}: {size:,} bytes are no whole number of "
                f"tokens of {width} bytes ({said.where} says {said.written!r}); copy it again"
            )
    doubt = ""
    for path, size in list(zip(paths, sizes, strict=True))[:_LOOK_AT_DECLARED]:
        found = judge(read_pairs(path, size), bound)
        if found not in (None, said.name):
            doubt = f"{path} looks like {found}"
            break
    reason = f"the {said.where} says {said.written!r}"
    return DtypeRule(dtype=said.name, rule=said.where, reason=reason, doubt=doubt)


def _judged(paths: Sequence[Path], sizes: Sequence[int], bound: int) -> DtypeRule:
    """The rule of sizes, checked on every file; one folder has one dtype."""
    examples: dict[str, Path] = {}
    for path, size in zip(paths, sizes, strict=True):
        if size % 2:
            raise StoreError(f"{path}: {size:,} bytes, an odd number: truncated, or no tokens")
        found = judge(read_pairs(path, size), bound)
        if size % 4 and found == "uint32":
            raise StoreError(
                f"{path}: {size:,} bytes are no whole number of uint32 tokens, but its contents "
                f"look like uint32: truncated? Copy it again, or {_SAY}"
            )
        verdict = found or ("uint16" if size % 4 else None)
        if verdict is not None:
            examples.setdefault(verdict, path)
    if len(examples) == 2:
        raise StoreError(
            f"mixed dtypes: {examples['uint16']} is uint16, but {examples['uint32']} is uint32; "
            f"put them into folders of their own, or {_SAY}"
        )
    for verdict, path in examples.items():
        reason = f"no metadata; of the two, only {verdict} fits the bytes of {path.name}"
        return DtypeRule(dtype=verdict, rule="contents", reason=reason)
    raise StoreError(
        f"{paths[0]} and {len(paths) - 1:,} more: neither a meta.json nor a metadata.yaml says "
        f"the dtype, and the contents could be uint16, uint32 or something else: {_SAY}"
    )


def read_pairs(path: Path, size: int) -> Pairs:
    """Up to three blocks of a file, in aligned pairs of uint16."""
    last = max(0, size - _BLOCK)
    blocks = []
    try:
        with path.open("rb", buffering=0) as file:
            for place in sorted({0, last // 8 * 4, -(-last // 4) * 4}):
                file.seek(place)
                block = file.read(_BLOCK)
                blocks.append(np.frombuffer(block[: len(block) // 4 * 4], "<u2").reshape(-1, 2))
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
    return np.concatenate(blocks)
