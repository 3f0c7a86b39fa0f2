"""How soon `shardmill view` shows a terabyte, and in how much memory.

    python benchmarks/view.py [--shards 100000] [--rounds 3] [--json]

A sparse store of a terabyte in 100,000 shards (read_scale.py). In each round a fresh server is
started; the clock runs from the request for the list of stores until the list, the overview, the
first page of documents and of shards, and the lengths of documents are there: what a browser asks
first. Opening the store is in it, the start of Python is not; the page cache is as the round before
left it. Memory is that of the server which is not page cache, behind all of that, a document from
the middle and a search of a second. Exits with 1 when a limit is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
from read_scale import write_sparse_store

from shardmill.store import read_manifest
from shardmill.store.manifest import write_manifest
from shardmill.tokenizers import ByteTokenizer

LIMITS = {"first_page_s": 2.0, "private_mib": 300.0}
FIRST = (
    "stores",
    "stores/0",
    "stores/0/documents?split=train&limit=100",
    "stores/0/shards?split=train&limit=100",
    "stores/0/histogram?split=train",
)
LATER = ("stores/0/documents/{middle}?split=train", "stores/0/search?split=train&q=needle")


def ask(url: str, path: str) -> Any:
    with urllib.request.urlopen(f"{url}api/{path}") as answer:
        return json.load(answer)


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def private_mib(process: int) -> float:
    """Memory of the process that is not page cache."""
    text = Path(f"/proc/{process}/smaps_rollup").read_text()
    found = re.search(r"Anonymous: +(\d+) kB", text)
    assert found is not None, text
    return int(found[1]) / 1024


def measure(folder: Path) -> dict[str, float]:
    """One server, from its first answer to its end."""
    command = [sys.executable, "-m", "shardmill", "view", str(folder), "--tokenizer", "byte"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        try:
            begin, begin_cpu = time.perf_counter(), cpu_seconds(server.pid)
            answers = [ask(url, path) for path in FIRST]
            seconds = time.perf_counter() - begin
            used = cpu_seconds(server.pid) - begin_cpu
            middle = answers[2]["total"] // 2
            for path in LATER:
                ask(url, path.format(middle=middle))
            memory = private_mib(server.pid)
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(timeout=60)
    return {
        "first_page_s": seconds,
        "first_page_cpu_s": used,
        "private_mib": memory,
        "tokens": answers[1]["splits"][0]["tokens"],
        "documents": answers[2]["total"],
        "shards": answers[3]["total"],
        "looked_at": answers[4]["looked_at"],
    }


def run(shards: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "terabyte"
        write_sparse_store(folder, shards)
        known = msgspec.structs.replace(
            read_manifest(folder), tokenizer_fingerprint=ByteTokenizer().fingerprint
        )
        write_manifest(folder, known)  # so that its zeros are text, and can be searched
        found = [measure(folder) for _ in range(rounds)]
    last = found[-1]
    return {
        **last,
        "first_page_s": statistics.median(one["first_page_s"] for one in found),
        "private_mib": max(one["private_mib"] for one in found),
        "limits": LIMITS,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = run(options.shards, options.rounds)
    found["passed"] = all(found[name] < limit for name, limit in LIMITS.items())
    if options.json:
        print(json.dumps(found))
    else:
        print(
            f"{found['tokens']:,} tokens in {found['shards']:,} shards; the first page took "
            f"{found['first_page_cpu_s']:.2f} s of processor time"
        )
        for name, limit in LIMITS.items():
            verdict = "ok" if found[name] < limit else "MISSED"
            print(f"  {name}: found {found[name]:.2f}, wanted less than {limit:g}: {verdict}")
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
