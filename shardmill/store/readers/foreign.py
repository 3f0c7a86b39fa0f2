"""Folders of token files that no manifest describes: `.npy` and bare `.bin`.

Files are sorted by name, have one format and one dtype, and are checked in size; only `.npy` files
that can be mapped as they are are accepted, and no pickle is ever read. The dtype of `.bin` files
comes from the caller, else `meta.json`, else `metadata.yaml`, else from the contents. What decided
it is logged; what stays open is refused, never guessed.
"""

from __future__ import annotations

import ast
import hashlib
import json
import logging
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardmill.errors import DamagedStoreError, OptionError, StoreError, StoreNotFoundError
from shardmill.records import TokenFile
from shardmill.store.readers.token_space import TokenSpace

logger = logging.getLogger(__name__)

FORMATS = (".npy", ".bin")
META_JSON = "meta.json"
METADATA_YAML = "metadata.yaml"
_AGAIN = "copy the file again or write it again"


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypeRule:
    """A dtype and what decided it."""

    dtype: str  # "uint16" or "uint32"
    rule: str  # "argument", "meta.json", "metadata.yaml", "header", "store" or "contents"
    reason: str  # the same as a sentence, with what was found
    doubt: str = ""  # what the data itself says against it; "" when it says nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFolder:
    """Token files that belong together, each to be cut into windows for itself."""

    folder: Path
    files: tuple[TokenFile, ...]  # sorted by path, none empty, all of one dtype
    decided: DtypeRule

    @property
    def dtype(self) -> str:
        return self.decided.dtype

    @property
    def num_tokens(self) -> int:
        return sum(file.num_tokens for file in self.files)


def open_token_folder(
    folder: str | Path, file_pattern: str = "*.npy", *, dtype: npt.DTypeLike | None = None
) -> TokenFolder:
    """The token files in `folder` that match `file_pattern`: `.npy` or `.bin`, not both.

    The dtype of `.npy` files is in their headers; for `.bin` see `decide_dtype`. `dtype` overrides.
    """
    folder = Path(folder).absolute()
    paths = _matching(folder, file_pattern)
    sizes = [_size(path) for path in paths]
    if paths[0].suffix == ".npy":
        files, decided = _npy_files(paths, sizes, dtype)
    else:
        decided = decide_dtype(folder, paths, sizes, dtype)
        width = np.dtype(decided.dtype).itemsize
        files = [
            TokenFile(path=path, num_tokens=size // width, dtype=decided.dtype)
            for path, size in zip(paths, sizes, strict=True)
        ]
    logger.info("%s: %d files of %s (%s)", folder, len(files), decided.dtype, decided.reason)
    if decided.doubt:
        found = (decided.dtype, decided.reason, decided.doubt)
        logger.warning("%s: read as %s, because %s, but %s", folder, *found)
    return TokenFolder(folder=folder, files=tuple(files), decided=decided)


def folder_fingerprint(folder: TokenFolder, space: TokenSpace) -> str:
    """Over names, sizes and dtype of the files, and 256 tokens at each of sixteen positions.

    There is no manifest: with the sizes alone the same texts in another tokenisation, padded to
    the same length, would pass for the same data.
    """
    listed = [
        (file.path.relative_to(folder.folder).as_posix(), file.num_tokens, file.dtype)
        for file in folder.files
    ]
    digest = hashlib.sha256(json.dumps(listed).encode())
    length = min(256, space.num_tokens)
    last = space.num_tokens - length
    starts = [last * number // 15 for number in range(16)]
    digest.update(space.gather(starts, length).astype("<u4").tobytes())
    return digest.hexdigest()


def _matching(folder: Path, file_pattern: str) -> list[Path]:
    if not folder.is_dir():
        raise StoreNotFoundError(f"No files: {folder} is not a folder; check the path")
    try:
        paths = sorted(folder.glob(file_pattern))
    except (ValueError, NotImplementedError) as error:  # pathlib raises it for an absolute pattern
        raise OptionError(
            f"{{file_pattern}}: {error}; wanted a pattern inside the folder, such as '*.npy' or "
            "'train/*.bin'",
            file_pattern=file_pattern,
        ) from error
    if not paths:
        there = sorted({path.suffix for path in folder.iterdir() if path.suffix in FORMATS})
        hint = f"there are {' and '.join(there)} files" if there else "there are no token files"
        raise StoreNotFoundError(f"No files match {file_pattern!r} in {folder}; {hint}")
    formats = {path.suffix: path for path in reversed(paths)}
    other = next((path for suffix, path in formats.items() if suffix not in FORMATS), None)
    if other is not None:
        raise OptionError(
            f"{other}: {{file_pattern}} matches it, but only .npy and .bin files hold tokens; "
            "narrow the pattern",
            file_pattern=file_pattern,
        )
    if len(formats) > 1:
        raise OptionError(
            f"{{file_pattern}} matches both {formats['.npy']} and {formats['.bin']}, perhaps the "
            "same tokens twice; choose one of the two formats",
            file_pattern=file_pattern,
        )
    return paths


def _size(path: Path) -> int:
    try:
        found = path.stat()
    except OSError as error:
        raise StoreError(f"{path}: cannot be examined: {error.strerror}; a broken link?") from error
    if not stat.S_ISREG(found.st_mode):
        raise OptionError(f"{path}: not a file; narrow {{file_pattern}}", file_pattern=...)
    if found.st_size == 0:
        raise StoreError(f"{path}: empty (0 bytes), perhaps an interrupted copy; copy it again")
    return found.st_size


def _npy_files(
    paths: Sequence[Path], sizes: Sequence[int], dtype: npt.DTypeLike | None
) -> tuple[list[TokenFile], DtypeRule]:
    files = [read_npy_header(path, size) for path, size in zip(paths, sizes, strict=True)]
    first = files[0]
    for file in files:
        if file.dtype != first.dtype:
            raise StoreError(
                f"mixed dtypes: {first.path} is {first.dtype}, but {file.path} is {file.dtype}; "
                "put them into separate folders"
            )
    if dtype is not None and dtype_name(dtype, "dtype") != first.dtype:
        raise OptionError(
            f"{first.path}: its header says {first.dtype}, but {{dtype}}", dtype=dtype
        )
    reason = "the .npy headers say so"
    return files, DtypeRule(dtype=first.dtype, rule="header", reason=reason)


# .npy headers

_MAGIC = b"\x93NUMPY"
_LENGTH_BYTES = {(1, 0): 2, (2, 0): 4, (3, 0): 4}  # of the header's own length, by version
_MAX_HEADER = 10_000  # numpy reads no longer ones either
_NPY_DTYPES = {"<u2": "uint16", "<u4": "uint32"}


def read_npy_header(path: Path, num_bytes: int) -> TokenFile:
    """What the first bytes of `path`, a file of `num_bytes`, say about the rest."""
    try:
        with path.open("rb") as file:
            head = file.read(_MAX_HEADER)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
    fields, offset = parse_npy(path, head)
    dtype, num_tokens = _check_npy(path, fields)
    found = TokenFile(path=path, num_tokens=num_tokens, dtype=dtype, offset=offset)
    if num_bytes != offset + found.num_bytes:
        problem = "truncated" if num_bytes < offset + found.num_bytes else "too long"
        raise DamagedStoreError(
            f"{path}: {problem}: found {num_bytes:,} bytes, wanted {offset + found.num_bytes:,} "
            f"({num_tokens:,} {dtype} tokens after a header of {offset}); {_AGAIN}"
        )
    if offset % (found.num_bytes // num_tokens):
        raise StoreError(
            f"{path}: its header has {offset} bytes, so the {dtype} tokens are not aligned; "
            "np.save(path, np.load(path)) fixes that"
        )
    return found


def parse_npy(path: Path, head: bytes) -> tuple[dict[str, Any], int]:
    """The header's dictionary, and where the data begins."""
    size = _LENGTH_BYTES.get((head[6], head[7])) if len(head) > 7 else None
    if not head.startswith(_MAGIC) or size is None:
        raise DamagedStoreError(
            f"{path}: begins with {head[:8]!r}, so it is no .npy file of version 1, 2 or 3; "
            f"{_AGAIN}"
        )
    start = 8 + size
    stop = start + int.from_bytes(head[8:start], "little")
    if len(head) < stop:
        raise DamagedStoreError(
            f"{path}: truncated: its header ends at byte {stop:,}, but {len(head):,} were found "
            f"(at most {_MAX_HEADER:,} are read); {_AGAIN}"
        )
    try:
        fields = ast.literal_eval(head[start:stop].decode("utf-8"))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise DamagedStoreError(
            f"{path}: its .npy header is damaged ({error}); {_AGAIN}"
        ) from error
    if not isinstance(fields, dict) or set(fields) != {"descr", "fortran_order", "shape"}:
        raise DamagedStoreError(f"{path}: not the header of an array: {fields!r:.200}; {_AGAIN}")
    return fields, stop


def _check_npy(path: Path, fields: dict[str, Any]) -> tuple[str, int]:
    """The dtype, and how many tokens there are."""
    shape, descr = fields["shape"], fields["descr"]
    dtype = _NPY_DTYPES.get(descr) if isinstance(descr, str) else None
    if dtype is None:
        advice = {
            "O": "it holds Python objects, which would have to be unpickled: that is never done",
            "i": "check that no id is negative or too large, then save it with .astype('<u4')",
            "u": "check that no id is too large, then save it with .astype('<u4')",
        }.get(
            descr[1:2] if isinstance(descr, str) else "",
            "token ids are whole numbers: is this a file of tokens?",
        )
        raise StoreError(
            f"{path}: holds {descr!r:.100}, wanted '<u2' or '<u4' (uint16 or uint32, little "
            f"endian); {advice}"
        )
    if not isinstance(shape, tuple) or len(shape) != 1:
        raise StoreError(
            f"{path}: an array of shape {shape!r:.100}, wanted one dimension; flatten it where it "
            "is made"
        )
    num_tokens = shape[0]
    if type(num_tokens) is not int or num_tokens < 0:
        raise DamagedStoreError(f"{path}: an array of shape {shape!r:.100}; {_AGAIN}")
    if num_tokens == 0:
        raise StoreError(f"{path}: holds no token (shape (0,)); remove it or write it again")
    return dtype, num_tokens


# the dtype of bare files

_IMPOSSIBLE_ID = 2**21  # no tokenizer has that many ids; used when the vocabulary is unknown
_BLOCK = 16_384  # bytes read at the beginning, in the middle and at the end of a file
_MIN_PAIRS = 8
_MUCH, _MOST = 0.25, 0.9
_FILES_READ = 8  # of a declared dtype

Pairs = npt.NDArray[np.uint16]


def decide_dtype(
    folder: Path, paths: Sequence[Path], sizes: Sequence[int], dtype: npt.DTypeLike | None
) -> DtypeRule:
    """The dtype of all these `.bin` files, which are not empty."""
    if dtype is not None:
        rule = _declare(dtype_name(dtype, "dtype"), "argument", dtype)
        return _check_declared(rule, paths, sizes, _IMPOSSIBLE_ID)
    facts = declared_facts(folder)
    # twice, because added tokens are often left out of a vocabulary's size
    bound = _IMPOSSIBLE_ID if facts.vocab_size is None else 2 * facts.vocab_size
    if facts.dtype is not None:
        return _check_declared(facts.dtype, paths, sizes, bound)
    return _dtype_of_contents(paths, sizes, bound)


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
            "(little endian)"
        )
    return f"uint{8 * found.itemsize}"


def _declare(name: str, where: str, written: object) -> DtypeRule:
    shown = name if where == "argument" else written
    return DtypeRule(dtype=name, rule=where, reason=f"the {where} says {shown!r}")


def _check_declared(
    rule: DtypeRule, paths: Sequence[Path], sizes: Sequence[int], bound: int
) -> DtypeRule:
    """The same rule, with what the first files say against it."""
    width = np.dtype(rule.dtype).itemsize
    for path, size in zip(paths, sizes, strict=True):
        if size % width:
            raise StoreError(
                f"{path}: truncated, or not {rule.dtype}: {size:,} bytes are no whole number of "
                f"tokens of {width} bytes ({rule.reason}); copy it again"
            )
    for path, size in list(zip(paths, sizes, strict=True))[:_FILES_READ]:
        found = _judge(_read_pairs(path, size), bound)
        if found not in (None, rule.dtype):
            return replace(rule, doubt=f"{path} looks like {found}")
    return rule


def _dtype_of_contents(paths: Sequence[Path], sizes: Sequence[int], bound: int) -> DtypeRule:
    """uint32 if the size is a multiple of four, else uint16, checked against the contents of every
    file; one folder has one dtype."""
    examples: dict[str, Path] = {}
    for path, size in zip(paths, sizes, strict=True):
        if size % 2:
            raise StoreError(f"{path}: {size:,} bytes, an odd number: truncated, or no tokens")
        found = _judge(_read_pairs(path, size), bound)
        if size % 4 and found == "uint32":
            raise _unclear(
                f"{path}: {size:,} bytes are no whole number of uint32 tokens, but its contents "
                "look like uint32: truncated? Copy it again, or"
            )
        verdict = found or ("uint16" if size % 4 else None)
        if verdict is not None:
            examples.setdefault(verdict, path)
    if len(examples) == 2:
        raise _unclear(
            f"mixed dtypes: {examples['uint16']} is uint16, but {examples['uint32']} is uint32; "
            "put them into separate folders, or"
        )
    for verdict, path in examples.items():
        reason = f"no metadata; of the two, only {verdict} fits the bytes of {path.name}"
        return DtypeRule(dtype=verdict, rule="contents", reason=reason)
    raise _unclear(
        f"{paths[0]} and {len(paths) - 1:,} more: neither a meta.json nor a metadata.yaml says "
        "the dtype, and the contents could be uint16, uint32 or something else:"
    )


def _unclear(problem: str) -> StoreError:
    return StoreError(f"{problem} pass {{dtype}} or 'uint32'", dtype="uint16")


def _judge(pairs: Pairs, bound: int) -> str | None:
    """What the data alone says: "uint16", "uint32", or None when it could be either or neither.

    `pairs` is (n, 2): every aligned four bytes as two little-endian uint16. They are the halves
    (low, high) of a uint32, or two uint16 in a row. No vocabulary has two million ids, so in
    uint32 files the high halves are tiny and hardly ever as large as the low ones. In uint16 files
    both are alike, and most pairs make an impossible id.
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
    if len(telling) < _MIN_PAIRS or telling[:, 1].max() >= _IMPOSSIBLE_ID >> 16:
        return False
    return bool(np.mean(telling[:, 0] > telling[:, 1]) >= _MOST)


def _is_int64(pairs: Pairs) -> bool:
    """Every second uint32 is 0, and hardly any other."""
    words = pairs[: len(pairs) // 2 * 2].reshape(-1, 4)
    if len(words) < _MIN_PAIRS or words[:, 2:].any():
        return False
    return bool(np.mean(words[:, :2].any(axis=1)) >= _MOST)


def _read_pairs(path: Path, size: int) -> Pairs:
    """Up to three blocks of a file, in aligned pairs of uint16."""
    last = max(0, size - _BLOCK)
    blocks = []
    try:
        with path.open("rb", buffering=0) as file:
            for offset in sorted({0, last // 8 * 4, -(-last // 4) * 4}):
                file.seek(offset)
                block = file.read(_BLOCK)
                blocks.append(np.frombuffer(block[: len(block) // 4 * 4], "<u2").reshape(-1, 2))
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
    return np.concatenate(blocks)


# metadata beside the files

_MAX_METADATA_BYTES = 2**24
_LINE = re.compile(
    r"^[ \t]*([\"']?)(dtype|vocab_size|tokenizer)\1[ \t]*:[ \t]*(.*?)[ \t]*(?:[ \t]#.*)?$", re.M
)
_KEY = re.compile(r"\b(dtype|vocab_size)[\"']?[ \t]*:(?=[ \t\n]|$)")
_COMMENT = re.compile(r"(^|[ \t])#.*$", re.M)
_TEXT_BLOCK = re.compile(
    r"^([ \t]*)(\S.*:[ \t]*[|>][-+0-9]*[ \t]*\n)(?:\1[ \t]+.*\n?|[ \t]*\n)*", re.M
)
_NOTHING = ("", "null", "~", "None")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredFacts:
    """What the metadata says; None where it says nothing."""

    dtype: DtypeRule | None = None
    vocab_size: int | None = None
    tokenizer: str | None = None


def declared_facts(folder: Path) -> DeclaredFacts:
    """`meta.json` first, then `metadata.yaml`, fact by fact. What cannot be understood, or is said
    twice in different ways, is refused."""
    facts = DeclaredFacts()
    for path, read in ((folder / META_JSON, _read_json), (folder / METADATA_YAML, _read_yaml)):
        said = read(path)
        dtypes = {dtype_name(value, str(path)): value for value in said.get("dtype", [])}
        sizes, names = set(said.get("vocab_size", [])), set(said.get("tokenizer", []))
        if len(dtypes) > 1 or len(sizes) > 1:
            raise _bad(path, f"says dtype {list(dtypes)}, vocab_size {sorted(sizes)}")
        for size in sizes:
            if not (re.fullmatch(r"[0-9]{1,18}", size) and int(size)):
                raise _bad(path, f"vocab_size is {size!r:.80}, wanted a positive number")
        rules = [_declare(name, path.name, value) for name, value in dtypes.items()]
        facts = DeclaredFacts(
            dtype=facts.dtype or next(iter(rules), None),
            vocab_size=facts.vocab_size or next(map(int, sizes), None),
            tokenizer=facts.tokenizer or (next(iter(names)) if len(names) == 1 else None),
        )
    return facts


def _read_json(path: Path) -> dict[str, list[str]]:
    """`token_dtype` or `dtype`, `vocab_size` and `tokenizer` of a JSON object."""
    text = _read_text(path)
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"not JSON ({error})") from error
    if not isinstance(found, dict):
        raise _bad(path, f"a {type(found).__name__}, wanted a JSON object")
    said: dict[str, list[str]] = {}
    for key in ("token_dtype", "dtype", "vocab_size", "tokenizer"):
        if isinstance(found.get(key), (str, int)):
            said.setdefault(key.removeprefix("token_"), []).append(str(found[key]))
        elif found.get(key) is not None and key != "tokenizer":
            raise _bad(path, f"{key} is {found[key]!r:.80}")
    return said


def _read_yaml(path: Path) -> dict[str, list[str]]:
    """The same from a YAML file, by its lines: at any depth, plain or quoted scalars."""
    said: dict[str, list[str]] = {}
    text = _TEXT_BLOCK.sub(r"\1\2", _read_text(path) or "")
    lines = _LINE.findall(text)
    understood = sum(key != "tokenizer" for _, key, _ in lines)
    found = _KEY.findall(_COMMENT.sub("", text))
    if len(found) != understood:
        keys = " and ".join(sorted(set(found)))
        raise _bad(
            path,
            f"says {keys} in a form that is not read here; wanted each on its own line, as in "
            "`dtype: uint16`",
        )
    for _, key, value in lines:
        bare = value[1:-1] if value[:1] in ("'", '"') and value[-1:] == value[:1] else value
        if bare not in _NOTHING:
            said.setdefault(key, []).append(bare)
    return said


def _read_text(path: Path) -> str | None:
    try:
        size = path.stat().st_size
        if size > _MAX_METADATA_BYTES:
            raise _bad(path, f"{size:,} bytes; this is no metadata")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise _bad(path, f"cannot be read ({error})") from error


def _bad(path: Path, problem: str) -> StoreError:
    return _unclear(f"{path}: {problem}; correct it, or")
