"""MB of text a second from JSON lines to token files, ours and others', with one tokenizer.

    python benchmarks/build_peers.py [--megabytes 40] [--times 12] [--rounds 3] [--only fast]
    make bench-peers

Everybody gets the same real text, the same tokenizer.json (byte-level BPE, 16,000 ids) and both
cores, and works in a fresh process; in a round all run right after one another, in an order that
rotates. What was written is read back and must hold the ids of the `tokenizers` library, token for
token; who gives others is shown and does not count. Peers and our reference engine build `small`;
the fast engine is done with that before it has begun, so it builds `large`, --times as much of the
same mix (nothing repeated, since engines remember words), and is compared on the part that has
reference ids.

The clock starts when everything is imported and stops when the files are there; starting worker
processes counts. `from start` counts the whole process, with imports, and with the proof of the
fast engine, which takes the same seconds for a megabyte and for a terabyte: the clock leaves it
out. Judged is the median over the rounds of our MB/s over those of the best peer in that round.
`by cpu` is the same for processor seconds a megabyte, which other work on the machine changes less.
Rows called "tuned" are not judged (peers/builders.py). `--json` for a machine. Exits with 1 when a
wanted number is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import build_peers_ours as ours
from build_peers_corpus import Corpus, compare, open_corpus, write_corpus
from build_peers_shares import measure_shares
from build_peers_table import TUNED_MARK, Contender, judge, print_result, table_of
from peers import Peer
from peers.builders import BUILDERS, ENVIRON, TUNED, Task

LEAST = 20  # megabytes: two grains in each file, without which one process would build it alone


def find_peer(name: str) -> Peer:
    (peer,) = (peer for peer in BUILDERS if peer.name == name.removesuffix(TUNED_MARK))
    return peer


def build_theirs(corpus: Corpus, name: str, out: Path) -> dict[str, Any]:
    module = find_peer(name).load()
    task = Task(
        files=corpus.files("small"),
        model=corpus.model,
        end=corpus.end,
        end_id=corpus.end_id,
        out=str(out),
        tuned=name.endswith(TUNED_MARK),
    )
    begin, begin_cpu = time.perf_counter(), cpu_seconds()
    module.build(task)
    told = {"seconds": time.perf_counter() - begin, "proof": 0.0, "ended": time.time()}
    told["cpu"] = cpu_seconds() - begin_cpu
    return {**told, "ids": compare(module.documents(task), corpus.wanted())}


def build_ours(corpus: Corpus, engine: str, out: Path) -> dict[str, Any]:
    begin, begin_cpu = time.perf_counter(), cpu_seconds()
    _, proof = ours.build(corpus, engine, out / "store")
    whole = time.perf_counter() - begin
    told = {"seconds": whole - proof.seconds, "proof": proof.seconds, "ended": time.time()}
    told["cpu"] = cpu_seconds() - begin_cpu - proof.cpu
    found = ours.documents(corpus, engine, out / "store")
    return {**told, "ids": compare(found, corpus.wanted())}


def cpu_seconds() -> float:
    """Of this process and of those it started that have ended."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(sum(resource.getrusage(kind)[:2]) for kind in kinds)


def run_alone(action: str, name: str, folder: str) -> dict[str, Any]:
    corpus = open_corpus(folder)
    if action == "shares":
        return dict(measure_shares(corpus, name))
    with tempfile.TemporaryDirectory(dir=folder) as out:
        build = build_theirs if action == "peer" else build_ours
        return build(corpus, name, Path(out))


def in_fresh_process(action: str, name: str, folder: str) -> dict[str, Any]:
    """What `run_alone` tells of a process of its own; its last words, when it fails."""
    command = [sys.executable, __file__, "--alone", action, name, folder]
    with tempfile.TemporaryDirectory(dir=folder) as home:  # nobody finds what another one kept
        environ = {**os.environ, "HF_HOME": home, "XDG_CACHE_HOME": home, "HF_HUB_OFFLINE": "1"}
        if action == "peer":
            environ |= ENVIRON
        started = time.time()
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise RuntimeError(f"{said[-1]:.200}")
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "ended" in told:
        told["from_start"] = told.pop("ended") - started
    return told


def contenders(args: argparse.Namespace) -> tuple[list[Contender], dict[str, str]]:
    """Who takes part, and why others do not."""
    chosen = [
        Contender(name=engine, peer=False, size=size)
        for engine, size in ours.OURS.items()
        if args.only in engine
    ]
    absent = {}
    for peer in BUILDERS:
        if args.peers not in peer.name:
            absent[peer.name] = "not asked for"
        elif not peer.is_installed():
            absent[peer.name] = f"not installed (pip install {peer.package})"
        else:
            names = (peer.name, peer.name + TUNED_MARK) if peer.name in TUNED else (peer.name,)
            chosen += [Contender(name=name, peer=True, size="small") for name in names]
    return chosen, absent


def race(
    chosen: list[Contender], corpus: Corpus, rounds: int, absent: dict[str, str]
) -> dict[Contender, list[dict[str, Any]]]:
    """What each told, round by round; who fails is absent from then on."""
    found: dict[Contender, list[dict[str, Any]]] = {one: [] for one in chosen}
    for number in range(rounds):
        turn = number % len(chosen)
        for one in [*chosen[turn:], *chosen[:turn]]:
            if one not in found:
                continue
            try:
                action = "peer" if one.peer else "ours"
                found[one].append(in_fresh_process(action, one.name, corpus.folder))
            except RuntimeError as failed:
                if not one.peer:
                    raise
                absent[one.name] = f"does not run here: {failed}"
                del found[one]
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    chosen, absent = contenders(args)
    with tempfile.TemporaryDirectory(prefix="shardmill-build-peers-") as place:
        folder = Path(place).resolve()
        corpus = write_corpus(folder, args.data and Path(args.data), args.megabytes, args.times)
        found = race(chosen, corpus, args.rounds, absent)
        shares = {
            one.name: in_fresh_process("shares", one.name, corpus.folder)
            for one in found
            if not one.peer
        }
    rows = table_of(found, corpus)
    judged = judge(rows)
    packages = {find_peer(one.name).package for one in found if one.peer}
    return {
        "rounds": args.rounds,
        "cores": os.cpu_count(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in sorted({"tokenizers", "fastokens", *packages})},
        },
        "absent": absent,
        "table": rows,
        "shares": shares,
        "wanted": judged,
        "passed": all(verdict["passed"] for verdict in judged),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("SHARDMILL_REAL_DATA"))
    parser.add_argument("--megabytes", type=float, default=40, help="of text for the slow ones")
    parser.add_argument("--times", type=int, default=12, help="as much for the fast engine")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="ours with this in their name")
    parser.add_argument("--peers", default="", help="peers with this in their name")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--alone", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        print(json.dumps(run_alone(*args.alone)))
        return 0
    if args.rounds < 1 or args.times < 1 or args.megabytes < LEAST:
        parser.error(f"--rounds and --times from 1 on, --megabytes from {LEAST} on")
    if not any(args.only in engine for engine in ours.OURS):
        parser.error(f"--only {args.only}: no such engine among {', '.join(ours.OURS)}")
    result = measure(args)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        print_result(result)
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
