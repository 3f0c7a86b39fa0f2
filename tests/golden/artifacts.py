"""Everything shardmill writes or yields for a set of small inputs, as hashes.

Each function makes one kind of artifact in the current folder and returns {name: sha256}. Inputs
are literal and paths are relative, so the hashes depend on the code alone. When code moves, the
imports and calls here follow it; the hashes in hashes.json do not change.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from niels_gpt.cache.build_cache import build_pretrain_cache, build_sft_cache
from shardmill.chat.proof import prove
from shardmill.cli import main
from shardmill.compat.chomp import build_train_iterator
from shardmill.loading import Loader, PackSource, SampleStream, TokenSource

Hashes = dict[str, str]
WORDS = [
    *("the", "tall", "ships", "sail", "past", "a", "quiet", "harbour"),
    *("while", "gulls", "argue", "over", "bread", "\u00e9\u00e8", "\u4e2d\u6587"),
]
CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
HASHES = Path(__file__).parent.resolve() / "hashes.json"
FIXED_MTIME = 1_700_000_000


def text(number: int) -> str:
    """A document of 5 to 124 words, different for each number."""
    return " ".join(
        WORDS[(number * 7 + k * k + k // 5) % len(WORDS)] for k in range(number % 120 + 5)
    )


def write_inputs() -> None:
    """Text in two formats, conversations, a stream config; all with one modification time."""
    Path("pages").mkdir()
    for part in range(3):
        rows = [{"id": f"{part}-{n}", "text": text(part * 50 + n)} for n in range(50)]
        lines = "".join(
            json.dumps(row, ensure_ascii=n % 2 == 0) + "\n" for n, row in enumerate(rows)
        )
        Path(f"pages/part-{part}.jsonl").write_text(lines)
    Path("books").mkdir()
    for n in range(5):
        Path(f"books/{n}.txt").write_text(text(90 + n) + "\n\n" + text(7 * n) + "\n")
    chats = []
    for n in range(60):
        turns = [{"role": "system", "content": "Be brief."}] if n % 3 == 0 else []
        for k in range(n % 4 + 1):
            turns.append({"role": "user", "content": text(n + k)[:80]})
            turns.append({"role": "assistant", "content": text(3 * n + k)[:120]})
        chats.append({"messages": turns})
    Path("chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    Path("chatml.jinja").write_text(CHATML)
    Path("bpe").mkdir()
    Path("bpe/tokenizer.json").write_text(json.dumps(byte_level_bpe()))
    for path in Path().rglob("*"):
        os.utime(path, (FIXED_MTIME, FIXED_MTIME))


def byte_level_bpe() -> dict[str, Any]:
    """A Hugging Face tokenizer of all bytes, a few merges and the markers of ChatML."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = [chr(b) for b in printable] + [chr(256 + n) for n in range(len(others))]
    merges = [("t", "h"), ("th", "e"), ("a", "r"), ("\u0120", "s"), ("o", "u"), ("\u0120", "the")]
    vocab = {token: n for n, token in enumerate([*letters, *("".join(pair) for pair in merges)])}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": len(vocab) + n, "content": content, "special": True, **flags}
            for n, content in enumerate(("<|im_start|>", "<|im_end|>", "<|endoftext|>"))
        ],
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "decoder": {**byte_level, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": [list(pair) for pair in merges]},
    }


def shardmill(*words: str) -> None:
    """Run a command in this process; it must succeed."""
    before, sys.argv = sys.argv, ["shardmill", *words]
    try:
        with pytest.raises(SystemExit) as end:
            main()
    finally:
        sys.argv = before
    assert not end.value.code, (words, end.value.code)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def of_folder(folder: str) -> Hashes:
    """Every file below a folder."""
    paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    assert paths, folder
    return {path.as_posix(): sha256(path.read_bytes()) for path in paths}


def of_arrays(batch: Any) -> bytes:
    """The names, dtypes, shapes and bytes of every array of a batch, sorted by name."""
    names = [name for name in sorted(dir(batch)) if not name.startswith("_")]
    found = b""
    for name in names:
        value = getattr(batch, name)
        if isinstance(value, np.ndarray):
            array = np.ascontiguousarray(value)
            found += f"{name} {array.dtype.str} {array.shape}\n".encode() + array.tobytes()
    assert found
    return found


def of_run(iterator: Iterator[Any], state: Callable[[], Any], steps: int) -> Hashes:
    """One hash over the batches of the first steps, and one over the states after each."""
    batches, states = hashlib.sha256(), hashlib.sha256()
    for _ in range(steps):
        batches.update(of_arrays(next(iterator)))
        states.update(json.dumps(state(), sort_keys=True).encode())
    return {"batches": batches.hexdigest(), "states": states.hexdigest()}


def named(prefix: str, hashes: Hashes) -> Hashes:
    return {f"{prefix}/{name}": value for name, value in hashes.items()}


def document_stores() -> Hashes:
    common = ("--tokenizer", "byte:4", "--eot", "none", "--workers", "1")
    shardmill(
        "build", "pages", "--out", "web", *common, "--val-tokens", "900", "--shard-bytes", "8KiB"
    )
    shardmill(
        "build", "books", "--out", "books-32", *common, "--dtype", "uint32", "--no-append-eot"
    )
    shardmill("build", "pages", "--out", "seeded", *common, "--seed", "5", "--max-tokens", "9000")
    return of_folder("web") | of_folder("books-32") | of_folder("seeded")


def divided_store() -> Hashes:
    """Two processes and small units: the bytes of `web`."""
    words = ("--tokenizer", "byte:4", "--eot", "none", "--workers", "2", "--unit-bytes", "4KiB")
    shardmill(
        "build", "pages", "--out", "two/web", *words, "--val-tokens", "900", "--shard-bytes", "8KiB"
    )
    return of_folder("two/web")


def chat_stores() -> Hashes:
    specials = [f"--special={name}=<|{name}|>" for name in ("sys", "usr", "asst", "eot")]
    shardmill(
        *("build", "chats", "chats.jsonl", "--out", "chat-four-marker", "--tokenizer", "byte:4"),
        *("--template", "four-marker", "--val-fraction", "0.2", "--seed", "3", *specials),
    )
    for name, template in (("chatml", "chatml"), ("jinja", "chatml.jinja")):
        shardmill(
            *("build", "chats", "chats.jsonl", "--out", f"chat-{name}", "--template", template),
            *("--tokenizer", "bpe/tokenizer.json", "--train-on", "last-assistant"),
        )
    return of_folder("chat-four-marker") | of_folder("chat-chatml") | of_folder("chat-jinja")


def pack_plans() -> Hashes:
    for algorithm in ("best-fit", "first-fit", "first-fit-shuffle", "concatenate"):
        for long in ("truncate", "split", "drop"):
            seed = ("--seed", "4") if algorithm == "first-fit-shuffle" else ()
            shardmill(
                *("pack", "chat-four-marker", "--seq-len", "256", "--algorithm", algorithm),
                *("--long", long, "--name", f"{algorithm}-{long}", *seed),
            )
    shardmill(
        *("pack", "chat-four-marker", "--seq-len", "512", "--long", "split", "--align-to", "16"),
        *("--max-per-row", "3", "--name", "aligned"),
    )
    found = of_folder("chat-four-marker")
    return {name: value for name, value in found.items() if "plan" in name or "pack" in name}


def exclusions() -> Hashes:
    shardmill("exclude", "web", "--document", "3", "--document", "41", "--reason", "withdrawn")
    return {"web/exclude.json": sha256(Path("web/exclude.json").read_bytes())}


def conversions() -> Hashes:
    shardmill("convert", "books-32", "megatron/train", "--from", "store", "--to", "megatron")
    plan = "chat-four-marker/packs/train-best-fit-split.plan"
    for form in ("memmap", "legacy", "parquet"):
        target = {
            "memmap": "packed/shard",
            "legacy": "packed/old.npy",
            "parquet": "packed/x.parquet",
        }
        shardmill("convert", plan, target[form], "--from", "plan", "--to", form)
    return of_folder("megatron") | of_folder("packed")


def loaded_batches() -> Hashes:
    found: Hashes = {}
    for shuffle in ("global", "block", "none"):
        sources = [TokenSource(name, seq_len=64) for name in ("web", "seeded")]
        phases = [(40, [0.2, 0.8])]
        stream = SampleStream(sources, weights=[3, 1], phases=phases, seed=7, shuffle=shuffle)
        loader = Loader(stream, batch_size=4, rank=1, world=2, documents=True)
        found |= named(f"mixture-{shuffle}", of_run(iter(loader), loader.state_dict, 12))
        loader.close()
    packed = PackSource("chat-four-marker", "train-best-fit-split")
    loader = Loader(SampleStream([packed], seed=2), batch_size=3)
    found |= named("packed", of_run(iter(loader), loader.state_dict, 12))
    loader.close()
    return found


def streamed_batches() -> Hashes:
    found: Hashes = {}
    packers: dict[str, dict[str, Any]] = {
        "sequential": {"packing_mode": "sequential"},
        "best-fit": {"packing_mode": "bin", "packing_algorithm": "best-fit"},
        "first-fit": {"packing_mode": "bin", "packing_algorithm": "first-fit"},
    }
    for name, packing in packers.items():
        config = {
            "data": {
                "backend": "files",
                "files": "pages/*.jsonl",
                "shuffle": True,
                "seed": 9,
                "shuffle_buffer_size": 20,
                "grain_prefetch": 0,
                **packing,
                "tokenizer": {"kind": "byte", "byte_offset": 4, "add_eos": True},
            },
            "model": {"eos_token_id": 2, "pad_token_id": 0},
            "train": {"seq_len": 128, "batch_size": 2, "grad_accum": 2},
        }
        iterator = build_train_iterator(config)
        found |= named(name, of_run(iterator, iterator.get_state, 8))
        iterator.close()
    return found


class Bytes:
    """The smallest tokenizer of the recipe."""

    vocab_size = 266

    def encode(self, text: str) -> list[int]:
        return [byte + 10 for byte in text.encode()]

    def special_token_ids(self) -> dict[str, int]:
        return {"sys": 0, "usr": 1, "asst": 2, "eot": 3}


def recipe_caches() -> Hashes:
    build_pretrain_cache(
        (text(n) for n in range(80)),
        "cache/pretrain",
        tokenizer=Bytes(),
        max_train_tokens=9_000,
        max_val_tokens=1_000,
        shard_bytes=4_096,
        seed=42,
        shuffle_buffer=16,
    )
    examples = [
        json.loads(line)["messages"] for line in Path("chats.jsonl").read_text().splitlines()
    ]
    build_sft_cache(examples, "cache/sft", tokenizer=Bytes(), val_frac=0.1, seed=42)
    return of_folder("cache")


def pushed_objects() -> Hashes:
    shardmill("push", "books-32", "memory://golden/books-32")
    memory = fsspec.filesystem("memory")
    names = sorted(memory.find("/golden"))
    found = {name.lstrip("/"): sha256(memory.cat_file(name)) for name in names}
    memory.rm("/golden", recursive=True)
    return found


ARTIFACTS: tuple[Callable[[], Hashes], ...] = (
    document_stores,
    divided_store,
    chat_stores,
    pack_plans,
    conversions,
    loaded_batches,
    streamed_batches,
    recipe_caches,
    pushed_objects,
    exclusions,  # last: a store with exclusions cannot be converted
)


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def make_all(folder: Path) -> dict[str, Hashes]:
    """{artifact: {name: sha256}} of everything, made in an empty folder."""
    with inside(folder), pytest.MonkeyPatch.context() as patch:
        # a certificate names its libraries; these are the ones of the recorded hashes
        versions = {"shardmill": "0.1.0", "numpy": "2.4.6", "python": "3.11.7"}
        patch.setattr(prove, "_versions", lambda: versions)
        write_inputs()
        return {make.__name__: make() for make in ARTIFACTS}


def record() -> None:
    """Write hashes.json from this code. For a change of format that was decided, and only then."""
    with tempfile.TemporaryDirectory() as folder:
        found = make_all(Path(folder))
    HASHES.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
