"""Train a tokenizer: text becomes a model file with a meta.json beside it.

The training text is cut into chunks of lines. The same input and seed give the same chunks in the
same order, at most `max_bytes` of them, drawn evenly from the whole input.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from glob import glob, has_magic
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shardmill.arguments import whole_number
from shardmill.errors import OptionError, TokenizerError
from shardmill.records import JSON
from shardmill.storage.atomic import atomic_write
from shardmill.tokenizers.base import DEFAULT_SPECIALS

_log = logging.getLogger(__name__)

META_FORMAT = "shardmill-tokenizer"
MAX_VOCAB = 2**24
ModelType = Literal["unigram", "bpe", "byte-bpe"]
CHUNK_CHARACTERS = 16_384
_FILE_NAMES = {"unigram": "spm.model", "bpe": "spm.model", "byte-bpe": "tokenizer.json"}
TEXT_SUFFIXES = (".txt", ".md")
NOT_TEXT = (
    *(".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".feather", ".bin"),
    *(".tar", ".tgz", ".zip", ".gz", ".zst"),
)


def find_files(patterns: Sequence[str | Path]) -> list[Path]:
    """The files of paths, globs and folders (their .txt and .md), sorted, once each."""
    found: set[Path] = set()
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            matched = [file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES]
        elif has_magic(str(pattern)) and not path.exists():
            matched = [Path(name) for name in glob(str(pattern), recursive=True)]  # noqa: PTH207
        else:
            matched = [path]
        files = {file for file in matched if file.is_file()}
        if not files:
            raise TokenizerError(
                f"no input matched {str(pattern)!r}; wanted a text file, a glob that matches some "
                f"(looked from {Path.cwd().name!r}), or a folder with .txt or .md files"
            )
        found |= files
    for file in sorted(found):
        if file.suffix in NOT_TEXT:
            raise TokenizerError(
                f"{file} is not plain text; train from the texts of a source instead ({{texts}})",
                texts=...,
            )
    return sorted(found)


class TrainingText:
    """The chunks to train on, and the record of where they came from.

    Of all chunks those with the smallest random keys stay, as many as fit `max_bytes`.
    """

    def __init__(self, seed: int, max_bytes: int | None) -> None:
        digest = hashlib.sha256(repr((seed, "tokenizer", "chunks")).encode()).digest()
        key = int.from_bytes(digest[:16], "little")
        self._random = np.random.Generator(np.random.Philox(key=key))
        self._max_bytes = float("inf") if max_bytes is None else max_bytes
        self._heap: list[tuple[int, int, int, str]] = []  # (-key, number, bytes, chunk)
        self._count = 0
        self.inputs: list[dict[str, JSON]] = []  # {"name", "sha256", "bytes"}
        self.bytes_read = self.bytes_used = 0

    def add(self, lines: Iterable[str]) -> None:
        for chunk in _chunks(lines):
            size = len(chunk.encode("utf-8", "replace"))
            key = int(self._random.integers(0, 2**63))
            heapq.heappush(self._heap, (-key, self._count, size, chunk))
            self._count += 1
            self.bytes_read += size
            self.bytes_used += size
            while self.bytes_used > self._max_bytes and len(self._heap) > 1:
                self.bytes_used -= heapq.heappop(self._heap)[2]

    def read_files(self, files: Sequence[Path]) -> None:
        """Text is cleaned as in sources: `\\r\\n` is `\\n`, no BOM, invalid UTF-8 replaced."""
        root = Path(os.path.commonpath([file.resolve().parent for file in files]))
        for file in files:
            with file.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            name = file.resolve().relative_to(root).as_posix()
            self.inputs.append({"name": name, "sha256": digest, "bytes": file.stat().st_size})
            with file.open(encoding="utf-8-sig", errors="replace", newline="") as lines:
                self.add(line[:-2] + "\n" if line.endswith("\r\n") else line for line in lines)
        self.inputs.sort(key=lambda item: str(item["name"]))

    def read_texts(self, texts: Iterable[str], name: str) -> None:
        digest = hashlib.sha256()
        size = 0
        for text in texts:
            data = text.encode("utf-8", "replace")
            digest.update(len(data).to_bytes(8, "little") + data)
            size += len(data)
            self.add(data.decode().splitlines(keepends=True))
        self.inputs.append({"name": name, "sha256": digest.hexdigest(), "bytes": size})

    def chunks(self) -> list[str]:
        """Whole lines, "\\n" between them, in the order of the input; TokenizerError if blank."""
        kept = [chunk for _, _, _, chunk in sorted(self._heap, key=lambda item: item[1])]
        if any(map(str.strip, kept)):
            return kept
        names = ", ".join(str(item["name"]) for item in self.inputs[:5])
        raise TokenizerError(
            f"no text to train on: {len(self.inputs)} inputs hold only whitespace ({names})"
        )


def _chunks(lines: Iterable[str]) -> Iterator[str]:
    """Whole lines of up to about 16 K characters together; a longer line is cut."""
    chunk: list[str] = []
    size = 0
    for line in lines:
        for start in range(0, len(line), CHUNK_CHARACTERS):
            part = line[start : start + CHUNK_CHARACTERS]
            if size + len(part) > CHUNK_CHARACTERS and chunk:
                yield "".join(chunk)
                chunk, size = [], 0
            chunk.append(part)
            size += len(part)
    if chunk:
        yield "".join(chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSpec:
    """Equal specs, input and library versions give equal bytes. Stored in meta.json."""

    vocab_size: int = 16_000  # all ids: specials and bytes included
    model_type: ModelType = "unigram"  # SentencePiece unigram or bpe, or byte-level BPE
    specials: Mapping[str, str] = field(default_factory=lambda: dict(DEFAULT_SPECIALS))
    seed: int = 42  # draws the chunks when there are more than max_bytes
    max_bytes: int | None = 256 * 2**20  # of text to train on; None: all of it

    def ordered_specials(self) -> dict[str, str]:
        """sys, usr, asst, eot first and in that order, then the rest as given."""
        usual = [name for name in DEFAULT_SPECIALS if name in self.specials]
        rest = [name for name in self.specials if name not in DEFAULT_SPECIALS]
        return {name: self.specials[name] for name in [*usual, *rest]}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    model: Path
    meta: dict[str, JSON]


def train_tokenizer(
    out: str | Path,
    *,
    files: Sequence[str | Path] = (),
    texts: Iterable[str] | None = None,
    texts_name: str = "texts",
    spec: TrainSpec | None = None,
    overwrite: bool = False,
) -> TrainReport:
    """Train into the folder `out`, from `files` (paths, globs, folders) or from `texts`.

    The same input, spec and library version give the same bytes. The specials are single,
    consecutive ids that no text becomes. Every text round-trips exactly (SentencePiece: except
    U+2581, its sign for a space). Both files are written atomically, meta.json last. A folder that
    holds a model already is refused unless `overwrite`.
    """
    spec = spec or TrainSpec()
    _check_spec(spec)
    folder = Path(out)
    model_path = folder / _FILE_NAMES[spec.model_type]
    _check_target(folder, overwrite)
    if (texts is None) == (not files):
        raise OptionError("give exactly one of {files} and {texts}", files=..., texts=...)
    text = TrainingText(spec.seed, spec.max_bytes)
    if texts is None:
        text.read_files(find_files(files))
    else:
        text.read_texts(texts, texts_name)
    if text.bytes_used < text.bytes_read:
        _log.info("training on %d of %d bytes", text.bytes_used, text.bytes_read)
    tokenizer = _train(text.chunks(), spec)
    source = tokenizer.engine_source
    meta: dict[str, JSON] = {
        "format": META_FORMAT,
        "version": 1,
        "model_file": model_path.name,
        "model_sha256": tokenizer.model_sha256,
        "model_type": spec.model_type,
        "vocab_size": spec.vocab_size,
        "special_tokens": dict(spec.ordered_specials()),
        "special_token_ids": tokenizer.special_token_ids(),
        "seed": spec.seed,
        "max_bytes": spec.max_bytes,
        "library": {"name": source.library, "version": source.library_version},
        "inputs": list(text.inputs),
        "bytes_read": text.bytes_read,
        "bytes_used": text.bytes_used,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted({*_FILE_NAMES.values(), "meta.json"}):
        (folder / name).unlink(missing_ok=True)
    with atomic_write(model_path) as file:
        file.write(tokenizer.model_bytes)
    with atomic_write(folder / "meta.json") as file:
        file.write(json.dumps(meta, indent=2, sort_keys=True).encode() + b"\n")
    return TrainReport(model=model_path, meta=meta)


def _train(chunks: list[str], spec: TrainSpec) -> Any:
    """The tokenizer with the trained model, after its guarantees were checked."""
    strings = spec.ordered_specials()
    tokenizer: Any
    if spec.model_type == "byte-bpe":
        from shardmill.tokenizers import huggingface

        model = huggingface.train_byte_bpe(chunks, spec.vocab_size, strings)
        tokenizer = huggingface.HuggingFaceTokenizer(model, names=strings)
    else:
        from shardmill.tokenizers import sentencepiece

        model = sentencepiece.train_sentencepiece(
            chunks, spec.vocab_size, strings, model_type=spec.model_type
        )
        tokenizer = sentencepiece.SentencePieceTokenizer(model, specials=strings)
    ids: dict[str, int] = tokenizer.special_token_ids()
    numbers = list(ids.values())
    if numbers != list(range(numbers[0], numbers[0] + len(strings))):
        raise TokenizerError(f"the special tokens did not become single, consecutive ids: {ids}")
    if tokenizer.vocab_size != spec.vocab_size:
        raise TokenizerError(
            f"wanted {spec.vocab_size:,} ids, the trained model has {tokenizer.vocab_size:,}"
        )
    for probe in [*chunks[:50], " ".join(strings.values()), "".join(strings.values())]:
        encoded = tokenizer.encode(probe)
        exact = not tokenizer.round_trips(probe) or tokenizer.decode(encoded) == probe
        if not exact or set(encoded) & set(numbers):
            raise TokenizerError(f"the trained model does not give back {probe[:60]!r}")
    return tokenizer


def _check_spec(spec: TrainSpec) -> None:
    if spec.model_type not in _FILE_NAMES:
        raise OptionError(
            f"{{model_type}}: wanted one of {sorted(_FILE_NAMES)}", model_type=spec.model_type
        )
    if not spec.specials:
        raise OptionError("no special tokens; give at least one, such as eot=<|eot|>")
    strings = list(spec.specials.values())
    for name, text in spec.specials.items():
        bad = len(text) < 2 or any(c.isspace() or c in ",\u2581" for c in text)
        if not name or bad or text.startswith("<0x") or text == "<unk>":
            raise OptionError(
                f"special {name!r}={text!r}: wanted two or more characters with no whitespace or "
                "comma, and not <unk> or a byte's name like <0x41>"
            )
    if len(set(strings)) != len(strings):
        raise OptionError(f"two special tokens have the same string: {dict(spec.specials)}")
    smallest = 256 + len(strings) + (spec.model_type != "byte-bpe")
    if not smallest <= spec.vocab_size <= MAX_VOCAB:
        raise OptionError(
            f"{{vocab_size}}: wanted at least {smallest:,} (256 bytes and the special tokens) and "
            f"at most {MAX_VOCAB:,}",
            vocab_size=spec.vocab_size,
        )
    if spec.max_bytes is not None:
        whole_number(spec.max_bytes, "max_bytes")


def _check_target(folder: Path, overwrite: bool) -> None:
    names = sorted({*_FILE_NAMES.values(), "meta.json"})
    there = [name for name in names if (folder / name).exists()]
    if there and not overwrite:
        raise TokenizerError(
            f"{folder} holds {', '.join(there)} already; choose another folder, or pass "
            "{overwrite}",
            overwrite=True,
        )
    if "meta.json" in there and f'"{META_FORMAT}"' not in (folder / "meta.json").read_text():
        raise TokenizerError(
            f"{folder}/meta.json is not a tokenizer's (a store's, perhaps) and is not overwritten; "
            "choose another folder"
        )
