"""The whole offline job on text that is on every machine: `make demo`.

1. text:       Python's own sources, documentation and docstrings, plus the notes and chats beside
               this file, in the form of the recipe's datasets
2. tokenizer:  SentencePiece, trained on that text (kept for the next run)
3. build:      `python -m niels_gpt.cache.cli build-all`, the real command, on local paths
4. verify:     every byte of every store against its checksums
5. look:       a table of what was built, and one decoded batch with the trained tokens coloured

Everything lands in ./demo; nothing is downloaded.
"""

from __future__ import annotations

import ast
import json
import pydoc_data.topics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from niels_gpt.cache.pretrain_dataset import PretrainTokenStreamDataset
from niels_gpt.cache.sft_dataset import SFTExampleDataset
from niels_gpt.special_tokens import SPECIAL_TOKENS
from niels_gpt.tokenizer import load_tokenizer
from shardmill.records import IGNORE_INDEX
from shardmill.store import open_store, verify
from shardmill.tokenizers import TrainSpec, train_tokenizer

HERE = Path(__file__).parent
DEMO = HERE.parent / "demo"
TEXT, MODEL, CACHE = DEMO / "text", DEMO / "tokenizer", DEMO / "cache"
SKIPPED = {"test", "tests", "idlelib", "site-packages", "lib2to3", "__pycache__", "turtledemo"}
STORES = ["pretrain/fineweb_edu", "pretrain/wikitext", "pretrain/roam", "pretrain/gutenberg"]
STORES += ["sft/dolly15k", "sft/oasst1"]
console = Console()


def modules() -> Iterator[tuple[str, str]]:
    """(name, source) of the standard library's modules, in order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if not SKIPPED & set(inside.parts):
            yield inside.as_posix(), path.read_text("utf-8", "replace")


def article(name: str, source: str) -> str:
    """The docstrings of a module as one article: a title line, then its paragraphs."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    paragraphs = [" ".join(text.split()) for text in found if text]
    return "\n".join([f" = {name} = ", *paragraphs, ""]) if paragraphs else ""


def write_text() -> None:
    """The recipe's datasets as local files."""
    (TEXT / "wikitext").mkdir(parents=True)
    (TEXT / "books").mkdir()
    pages = list(modules())
    with (TEXT / "pages.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": source, "id": name}) + "\n" for name, source in pages)
    articles = [text for name, source in pages if (text := article(name, source))]
    (TEXT / "wikitext/wiki.valid.raw").write_text("".join(articles[::10]))
    rest = [text for number, text in enumerate(articles) if number % 10]
    (TEXT / "wikitext/wiki.train.raw").write_text("".join(rest))
    for topic, text in pydoc_data.topics.topics.items():
        (TEXT / f"books/{topic}.txt").write_text(text)


def train() -> None:
    texts = [TEXT / "wikitext", TEXT / "books", HERE / "notes"]
    files = sorted(path for folder in texts for path in folder.iterdir())
    train_tokenizer(MODEL, files=files, spec=TrainSpec(vocab_size=8_000, specials=SPECIAL_TOKENS))


def build() -> None:
    command = [sys.executable, "-m", "niels_gpt.cache.cli", "build-all", "--overwrite"]
    command += ["--cache-dir", str(CACHE), "--tokenizer", str(MODEL / "spm.model"), "--seed", "42"]
    command += ["--fineweb-path", str(TEXT / "pages.jsonl"), "--fineweb-val-tokens", "100000"]
    command += ["--wikitext-path", str(TEXT / "wikitext"), "--gutenberg-path", str(TEXT / "books")]
    command += ["--roam-dir", str(HERE / "notes")]
    command += ["--dolly-path", str(HERE / "chats/questions.jsonl")]
    command += ["--oasst1-path", str(HERE / "chats/trees.jsonl"), "--sft-split", "tree"]
    subprocess.run(command, check=True)


def summary() -> Table:
    table = Table("store", "split", "documents", "tokens", "shards", "sha256", title="Built")
    for name in STORES:
        folder = CACHE / name
        report = verify(folder)
        if report.problems:
            sys.exit(f"{folder}: {report.problems}")
        for split, entry in open_store(folder).manifest.splits.items():
            counts = (entry.documents, entry.tokens, len(entry.shards))
            table.add_row(name, split, *(f"{count:,}" for count in counts), "verified")
    return table


def show_batch() -> None:
    """One fine-tuning batch, as the model would be trained on it."""
    tokenizer = load_tokenizer(str(MODEL / "spm.model"))
    eot = tokenizer.special_token_ids()["eot"]
    chats = CACHE / "sft/dolly15k"
    data = SFTExampleDataset(
        str(chats / "train_tokens.bin"),
        str(chats / "train_idx.npy"),
        T=96,
        device="cpu",
        eot_id=eot,
    )
    x, y, trained = data.get_batch(B=2, generator=torch.Generator().manual_seed(0))
    short = {text: f"<{name}>" for name, text in SPECIAL_TOKENS.items()}
    console.print("\nOne batch: [green]trained[/], [dim]not trained[/], padding left out")
    for inputs, labels, mask in zip(x.tolist(), y.tolist(), trained.tolist(), strict=True):
        last = max(place for place, label in enumerate(mask) if label != IGNORE_INDEX)
        line = Text(short.get(tokenizer.decode(inputs[:1]), ""), style="dim")
        for label, masked in zip(labels[: last + 1], mask, strict=False):
            text = tokenizer.decode([label])
            style = "dim" if masked == IGNORE_INDEX else "green"
            line.append(short.get(text, text), style=style)
        console.print(line)
    pages = str(CACHE / "pretrain/fineweb_edu/train")
    windows = PretrainTokenStreamDataset(pages, T=256, device="cpu")
    x, y = windows.get_batch(B=8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(x[:, 1:], y[:, :-1])
    console.print(f"\n{windows}: x, y of {tuple(x.shape)}")


def main() -> None:
    start = time.monotonic()
    if not (TEXT / "books").exists():
        console.print("text: Python's own sources, documentation and docstrings")
        write_text()
    if not (MODEL / "meta.json").exists():
        console.print("tokenizer: training SentencePiece on it")
        train()
    build()
    console.print(summary())
    show_batch()
    console.print(f"\nDone in {time.monotonic() - start:.0f} s. Look around: {DEMO.name}/")


if __name__ == "__main__":
    main()
