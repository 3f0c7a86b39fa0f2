"""Batches a second, ours and others', as shares of what a plain copy-and-cast reaches.

    python benchmarks/read.py [--tokens 200000000] [--rounds 15] [--calls 200] [--only epoch]
    python benchmarks/read.py --scale [--json]
    make bench-peers

A batch is 32 x 1,024 int64 inputs and as many labels. Cases: `random` windows from anywhere; a
shuffled `epoch`; the same with `documents` told apart; and a `trainer` that computes with every
batch, which shows what reading ahead is for. One store of uint16 tokens in a temporary folder is
read by all; peers that want another format write it before the clock runs (peers/). A peer that is
not installed, or does not run here, is named with the reason. Rows called "tuned" are loops written
by hand that are quicker than what people use; they are shown, and nothing is judged by them.
Everything alternates in this process in rounds, with all mapped pages present and torch on one
thread, like everybody; a number is the median of the ratios of each round.
`--scale`: a sparse store of a terabyte (read_scale.py). `--json` for a machine. Exits with 1 when a
wanted number is missed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import read_ours as ours
import torch
from common import Contender, alternate, microseconds, speed_of
from peers import PEERS, Peer
from peers.plain import TUNED
from read_checks import check_batch
from read_corpus import BATCH, SEQ_LEN, Corpus, write_corpus
from read_pages import populate
from read_scale import measure_scale

STORE = "store"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one of ours must reach."""

    case: str
    name: str
    of_limit: float | None
    of_best_peer: float


CASES = ("random", "epoch", "documents", "trainer")
WANTED = (
    Wanted("random", ours.GATHER, 0.30, 8.0),
    Wanted("epoch", ours.LOADER, 0.30, 8.0),
    Wanted("epoch", ours.TORCH, None, 4.0),
    Wanted("documents", ours.DOCUMENTS, None, 4.0),
)


class Endless:
    """One epoch after the other; a call is a batch."""

    def __init__(self, epochs: Iterable[Any]) -> None:
        self.epochs = epochs
        self.batches: Iterator[Any] = iter(())

    def __call__(self, _: object = None) -> Any:
        batch = next(self.batches, None)
        if batch is None:
            self.batches = iter(self.epochs)
            batch = next(self.batches)
        return batch


def contender(name: str, epochs: Iterable[Any], folder: Path) -> Contender:
    """Batches of `epochs`; what it has mapped so far is made present before each turn."""

    def prepare(calls: int) -> Iterable[int]:
        populate(folder)
        return range(calls)

    return Contender(name=name, prepare=prepare, run=Endless(epochs))


def try_peers(folder: Path, only: str) -> tuple[list[Peer], dict[str, str]]:
    """Write each peer's format and read a batch, in a process of its own: who can, and why not."""
    able, absent = [], {}
    for peer in PEERS:
        if only not in peer.name:
            absent[peer.name] = "not asked for"
        elif not peer.is_installed():
            absent[peer.name] = f"not installed (pip install {peer.package})"
        else:
            command = [sys.executable, __file__, "--prepare", peer.file, str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                able.append(peer)
            else:
                said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
                absent[peer.name] = f"does not run here: {said[-1]:.200}"
    return able, absent


def prepare_peer(file: str, folder: Path) -> None:
    """What `try_peers` has done elsewhere. Any error ends the process, and is the reason told."""
    (peer,) = (peer for peer in PEERS if peer.file == file)
    corpus, place, module = Corpus(folder / STORE), folder / file, peer.load()
    module.prepare(corpus, place)
    for case in CASES:
        if hasattr(module, case):
            for name, epochs in getattr(module, case)(corpus, place).items():
                check_batch(Endless(epochs)(), corpus, name)


def entrants(case: str, corpus: Corpus, peers: list[Peer]) -> tuple[list[Contender], list[str]]:
    """Everybody in a case, the limit first, and which of them are peers."""
    folder = corpus.folder.parent
    if case == "trainer":
        steps = ours.steps(corpus).items()
        return [ours.step_alone(), *(contender(*step, folder) for step in steps)], []
    mine: dict[str, Iterable[Any]] = getattr(ours, case)(corpus)
    for name, epochs in mine.items():
        check_batch(Endless(epochs)(), corpus, name)
    theirs: dict[str, Iterable[Any]] = {}
    for peer in peers:
        module = peer.load()
        if hasattr(module, case):
            theirs |= getattr(module, case)(corpus, folder / peer.file)
    both = [contender(name, epochs, folder) for name, epochs in (mine | theirs).items()]
    return [ours.InOrder(corpus).contender(), *both], list(theirs)


def measure_case(
    case: str, corpus: Corpus, peers: list[Peer], *, rounds: int, calls: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(rows of a table, verdicts on what is wanted)"""
    contenders, theirs = entrants(case, corpus, peers)
    alternate(contenders, rounds=1, calls=min(calls, 50))
    times = alternate(contenders, rounds=rounds, calls=calls)
    limit = contenders[0].name
    judged = [name for name in theirs if name not in TUNED]
    best = min(judged, key=lambda name: statistics.median(times[name]), default=None)
    rows = []
    for one in contenders:
        row = {
            "name": one.name,
            "peer": one.name in theirs,
            "tuned": one.name in TUNED,
            "microseconds": round(microseconds(times, one.name), 1),
            "batches_s": round(1e6 / microseconds(times, one.name)),
            "of_limit": round(speed_of(times, one.name, limit=limit), 4),
        }
        if best is not None:
            row["of_best_peer"] = round(speed_of(times, one.name, limit=best), 2)
        rows.append(row)
    return rows, list(verdicts(case, rows, best))


def verdicts(case: str, rows: list[dict[str, Any]], best: str | None) -> Iterator[dict[str, Any]]:
    by_name = {row["name"]: row for row in rows}
    for wanted in WANTED:
        if wanted.case != case:
            continue
        row = by_name[wanted.name]
        pairs = [("of_limit", wanted.of_limit, rows[0]["name"])]
        if best is not None:
            pairs.append(("of_best_peer", wanted.of_best_peer, best))
        for key, least, against in pairs:
            if least is not None:
                reached = row[key]
                yield {
                    "case": case,
                    "name": wanted.name,
                    "against": against,
                    "wanted": least,
                    "reached": reached,
                    "passed": reached >= least,
                }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    cases = [case for case in CASES if args.only in case]
    torch.set_num_threads(1)  # a second one costs more than it brings for 32 small tensors
    warnings.filterwarnings("ignore", message="The given buffer is not writable")  # LitData's
    with tempfile.TemporaryDirectory(prefix="shardmill-read-") as place:
        folder = Path(place).resolve()
        corpus = write_corpus(folder / STORE, args.tokens)
        peers, absent = try_peers(folder, args.peers)
        tables, judged = {}, []
        for case in cases:
            tables[case], said = measure_case(
                case, corpus, peers, rounds=args.rounds, calls=args.calls
            )
            judged += said
    return {
        "tokens": args.tokens,
        "batch": BATCH,
        "seq_len": SEQ_LEN,
        "rounds": args.rounds,
        "calls": args.calls,
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "torch": torch.__version__,
            **{peer.name: peer.version() for peer in peers if peer.package != "torch"},
        },
        "absent": absent,
        "cases": tables,
        "wanted": judged,
        "passed": all(verdict["passed"] for verdict in judged),
    }


def print_tables(result: dict[str, Any]) -> None:
    for name, reason in result["absent"].items():
        print(f"absent: {name}: {reason}")
    for case, rows in result["cases"].items():
        print(f"\n{case:46} {'us a batch':>10} {'batches/s':>10} {'of limit':>9} {'of peer':>8}")
        for row in rows:
            peer = f"{row['of_best_peer']:8.2f}" if "of_best_peer" in row else ""
            mark = "  tuned: " if row["tuned"] else "  peer: " if row["peer"] else "  "
            print(
                f"{mark + row['name']:46} {row['microseconds']:10.1f} {row['batches_s']:10,} "
                f"{row['of_limit']:9.4f} {peer}"
            )
    print()


def print_verdicts(result: dict[str, Any]) -> None:
    for said in result["wanted"]:
        word = "reached" if said["passed"] else "MISSED"
        print(
            f"{word}: {said['case']}, {said['name']}: {said['reached']} against "
            f"{said['against']}, wanted {said['wanted']}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=200_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=200, help="batches a round and contender")
    parser.add_argument("--only", default="", help=f"cases with this in their name: {CASES}")
    parser.add_argument("--peers", default="", help="peers with this in their name")
    parser.add_argument("--scale", action="store_true", help="the sparse terabyte, nothing else")
    parser.add_argument("--shards", type=int, default=100_000, help="of the sparse store")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--prepare", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.prepare:
        prepare_peer(args.prepare[0], Path(args.prepare[1]))
        return 0
    if args.tokens < 3 * BATCH * SEQ_LEN or args.rounds < 1 or args.calls < 1 or args.shards < 100:
        parser.error(
            f"--tokens from {3 * BATCH * SEQ_LEN:,} on, --rounds and --calls from 1 on, --shards "
            f"from 100 on"
        )
    if not args.scale and not any(args.only in case for case in CASES):
        parser.error(f"--only {args.only}: no such case among {', '.join(CASES)}")
    result = measure_scale(args.shards, args.rounds) if args.scale else measure(args)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        if not args.scale:
            print_tables(result)
        print_verdicts(result)
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
