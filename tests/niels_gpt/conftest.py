"""A small real model for the recipe's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from niels_gpt.special_tokens import SPECIAL_TOKENS
from shardmill.tokenizers import TrainSpec, train_tokenizer

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model of 800 pieces with the recipe's special tokens."""
    folder = tmp_path_factory.mktemp("model")
    files = [path for path in EXAMPLES.rglob("*") if path.suffix in {".md", ".jsonl", ".py"}]
    texts = [path.read_text() for path in sorted(files)]
    spec = TrainSpec(vocab_size=800, specials=SPECIAL_TOKENS)
    return train_tokenizer(folder, texts=texts, texts_name="examples", spec=spec).model


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other")
    texts = [path.read_text() for path in sorted((EXAMPLES / "notes").glob("*.md"))]
    spec = TrainSpec(vocab_size=500, specials=SPECIAL_TOKENS)
    return train_tokenizer(folder, texts=texts, texts_name="notes", spec=spec).model


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents for the web-page recipe: the example notes, each five times, as JSON lines."""
    import json

    path = tmp_path_factory.mktemp("pages") / "pages.jsonl"
    notes = [note.read_text() for note in sorted((EXAMPLES / "notes").glob("*.md"))]
    rows = [{"text": f"page {n}\n{note}"} for n in range(5) for note in notes]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def wiki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wiki")
    for name, titles in (("train", ("Bread", "Tea", "Moon")), ("valid", ("Units",))):
        notes = [
            f" = {title} = \n{(EXAMPLES / 'notes' / f'{title}.md').read_text()}" for title in titles
        ]
        (folder / f"wiki.{name}.raw").write_text("\n".join(notes))
    return folder
