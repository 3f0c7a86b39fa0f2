"""Functions for `map`, which tests and their workers import by name."""

from __future__ import annotations

from typing import Any


def number(row: dict[str, Any]) -> Any:
    return row["number"]


def text(row: dict[str, Any]) -> Any:
    return row.get("text")


def long_messages(row: dict[str, Any]) -> dict[str, Any] | None:
    """A chat in another form, when it is long enough."""
    if len(row["turns"]) < 2:
        return None
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": t} for n, t in enumerate(row["turns"])]}
