"""What the files beside foreign tokens say about them.

In: a folder.  Out: dtype, vocabulary size and tokenizer, as far as `meta.json` or
`metadata.yaml` say them.
Promise: `meta.json` comes first; a statement that cannot be understood, or two that disagree,
are refused; every fact knows where it was found.
Not here: tokens; stores of our own (they have a manifest).
"""

from __future__ import annotations

import json
import re
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
