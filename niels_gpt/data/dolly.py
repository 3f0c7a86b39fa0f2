"""Dolly 15k as conversations: one question, one answer.

Every row gives one `Chat`, in order, with exactly the texts of the row. A broken row does too, so
that a build can drop it by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from niels_gpt.data.rows import open_rows
from niels_gpt.messages import Chat, Message

DATASET = "databricks/databricks-dolly-15k"


def iter_dolly_sft(
    path: str | Path | None = None,
    *,
    dataset: str = DATASET,
    split: str = "train",
    revision: str | None = None,
) -> Iterator[Chat]:
    """The conversations of the hub's dataset, or of a local .jsonl file or folder of them."""
    rows = open_rows(path, dataset=dataset, split=split, revision=revision)
    return chats_of_rows(rows)


def chats_of_rows(rows: Iterable[Mapping[str, Any]]) -> Iterator[Chat]:
    for number, row in enumerate(rows):
        yield Chat(_messages(row), id=f"dolly:{number}")


def _messages(row: Mapping[str, Any]) -> list[Message]:
    question, context = row.get("instruction"), row.get("context")
    if isinstance(question, str) and isinstance(context, str) and context.strip():
        question = f"{question}\n\ncontext:\n{context}"
    # A missing text stays None here: the builder drops the chat and says why.
    return [
        {"role": "user", "content": cast(str, question)},
        {"role": "assistant", "content": cast(str, row.get("response"))},
    ]


__all__ = ["DATASET", "chats_of_rows", "iter_dolly_sft"]
