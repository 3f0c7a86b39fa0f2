"""From what contenders told, round by round, to a table and verdicts.

In: contenders and their runs.  Out: rows, ratios to the best peer, what is reached and missed.
Promise: a ratio compares two runs of the same round; who wrote other ids never counts.
Not here: running anybody.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from build_peers_corpus import Corpus

WANTED = {"fast": 36.0, "reference": 1.25}  # times the best peer
TUNED_MARK = ", tuned"
_IDS = ("in order", "reordered", "differ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to build."""

    name: str
    peer: bool
    size: str  # of the corpus: "small" or "large"

    @property
    def is_tuned(self) -> bool:
        return self.name.endswith(TUNED_MARK)


def table_of(
    found: Mapping[Contender, list[dict[str, Any]]], corpus: Corpus
) -> list[dict[str, Any]]:
    """A row for each, with the ratios to the best peer that counts."""
    rows = []
    for one, runs in found.items():
        megabytes = corpus.num_bytes(one.size) / 1e6
        ids = max((run["ids"] for run in runs), key=_IDS.index)
        rows.append(
            {
                "name": one.name,
                "peer": one.peer,
                "counts": not one.is_tuned and ids != "differ",
                "ids": ids,
                "text_mb": round(megabytes, 1),
                "seconds": _median(run["seconds"] for run in runs),
                "cpu_s": _median(run["cpu"] for run in runs),
                "proof_s": _median(run["proof"] for run in runs),
                "mb_s": _median(megabytes / run["seconds"] for run in runs),
                "from_start_mb_s": _median(megabytes / run["from_start"] for run in runs),
            }
        )
    best = _best(rows)
    for row, (one, runs) in zip(rows, found.items(), strict=True):
        for theirs in (other for other in found if other.name == best):
            size = corpus.num_bytes(one.size) / corpus.num_bytes(theirs.size)
            pairs = list(zip(runs, found[theirs], strict=True))
            row["times"] = _median(size * b["seconds"] / a["seconds"] for a, b in pairs)
            row["times_by_cpu"] = _median(size * b["cpu"] / a["cpu"] for a, b in pairs)
    return rows


def _median(numbers: Iterable[float]) -> float:
    return round(statistics.median(numbers), 3)


def _best(rows: list[dict[str, Any]]) -> str | None:
    peers = [row for row in rows if row["peer"] and row["counts"]]
    best = max(peers, key=lambda row: float(row["mb_s"]), default=None)
    return None if best is None else str(best["name"])


def judge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whether ours reach what is wanted; nothing without a peer, but that their ids are right."""
    best = _best(rows)
    said = []
    for row in rows:
        if row["peer"]:
            continue
        wanted, reached = (WANTED[row["name"]], row["times"]) if best is not None else (None, None)
        said.append(
            {
                "name": row["name"],
                "against": best,
                "wanted": wanted,
                "reached": reached,
                "ids": row["ids"],
                "passed": row["counts"] and (best is None or reached >= wanted),
            }
        )
    return said


def print_result(result: dict[str, Any]) -> None:
    for name, reason in result["absent"].items():
        print(f"absent: {name}: {reason}")
    heads = ("text MB", "s", "cpu s", "MB/s", "from start", "times", "by cpu")
    print(f"{'':34}", *(f"{head:>10}" for head in heads), " ids")
    keys = ("text_mb", "seconds", "cpu_s", "mb_s", "from_start_mb_s", "times", "times_by_cpu")
    for row in result["table"]:
        mark = "peer: " if row["peer"] else "shardmill, "
        numbers = (f"{row[key]:10.2f}" if key in row else " " * 10 for key in keys)
        print(f"{mark + row['name']:34}", *numbers, f" {row['ids']}")
        if row["proof_s"] >= 1:
            print(f"  and {row['proof_s']:.1f} s for the proof of the engine")
    for name, shares in result["shares"].items():
        told = ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items())
        print(f"the cores during shardmill, {name}: {told}")
    for said in result["wanted"]:
        word = "reached" if said["passed"] else "MISSED"
        if said["against"] is None:
            print(f"{word}: {said['name']}: no peer to compare with, ids {said['ids']}")
        else:
            print(
                f"{word}: {said['name']}: {said['reached']} times {said['against']}, wanted "
                f"{said['wanted']}"
            )
