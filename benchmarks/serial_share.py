"""What a gigabyte of input costs the process that coordinates a build, beside its workers.

    python benchmarks/serial_share.py [--data FOLDER] [--megabytes 400 4000] [--rounds 5] [--json]

The coordinator plans, hands out work, collects receipts and writes the index and the manifest: what
it does cannot be divided, so it bounds how many workers are of use. Asked for: at most 1/200 of the
CPU time of the workers, with the fast engine, on processes of this machine and on Ray. Exit code 1
when that is missed.

A cost is the slope between builds of two sizes: what a build takes once (the start of workers)
falls out, so the ratio holds for any input. Left out altogether are the proof of the engine, and
the look at the first megabytes that a build takes where its disk might be too small: the larger one
may need it, and the smaller not. All builds of one row run in one process, small and large in turn,
two workers each; a row is the median of the rounds. Input is JSON lines in files of 100 MB: real
pages, repeated with small changes, so the engine finds every word in its cache and workers are as
cheap as they can be. Units of the first gigabytes are 8 to 128 MiB; a terabyte has units of 256 and
more, which cost less. The coordinator of either size takes about 0.1 s, give or take 20 ms: with a
smaller difference that is what one sees.

CPU time is user and system time of all threads: of the coordinator by getrusage, of workers as they
report it. Ray's own processes (raylet, GCS) are shown, and are part of neither.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from shardmill.building import BuildSpec, Feed, build_store
from shardmill.building import run as run_module
from shardmill.building import worker as worker_module
from shardmill.building.engines.engine import Engine
from shardmill.building.resources import check_space
from shardmill.machine import Usage
from shardmill.sources import open_source
from shardmill.tokenizers import (
    TrainSpec,
    choose_encoder,
    open_tokenizer,
    train_tokenizer,
)

if TYPE_CHECKING:
    from shardmill.building.engines.ray import RayCluster

ENGINES = ("local", "ray")
ROLES = ("coordinator", "workers", "daemons", "wall")
WANTED = 1 / 200
WORKERS = 2
FILE_BYTES = 100 * 10**6


def real_lines(data: Path) -> list[str]:
    """Pages of FineWeb and C4 as JSON, each without the start of its line."""
    table = pq.read_table(data / "fineweb/fineweb_sample_2800.parquet", columns=["text"])
    texts = table["text"].to_pylist()
    rows = (data / "c4/c4_demo.jsonl").read_text("utf-8").splitlines()
    texts += [json.loads(row)["text"] for row in rows]
    return [json.dumps(text)[1:] + "}\n" for text in texts]


def write_corpus(folder: Path, data: Path, small: int, large: int) -> None:
    """The folders small/ and large/, of so many megabytes, and a model of 16,000 ids."""
    lines, number, left = real_lines(data), 0, large * 10**6
    texts = [json.loads('"' + line[:-2]) for line in lines[::4]]
    train_tokenizer(folder / "bpe", texts=texts, spec=TrainSpec(model_type="byte-bpe"))
    (folder / "small").mkdir()
    (folder / "large").mkdir()
    changed = _changed(lines)
    while left > 0:
        size, path = 0, folder / f"large/{number:03d}.jsonl"
        with path.open("wb") as file:
            while size < min(left, FILE_BYTES):
                size += file.write(next(changed).encode())
        if number * FILE_BYTES < small * 10**6:
            (folder / "small" / path.name).hardlink_to(path)
        number, left = number + 1, left - size


def _changed(lines: list[str]) -> Iterator[str]:
    """The same pages again and again; no two are equal."""
    copy = 0
    while True:
        copy += 1
        for line in lines:
            yield f'{{"text": "{copy}. {line}'


class Meter:
    """CPU seconds of a build, by role."""

    def __init__(self) -> None:
        self._once, self._workers = 0.0, Usage()
        self._daemons: list[Any] = []
        usage = Engine.usage

        def noted(engine: Engine) -> Usage:
            self._workers = usage(engine)
            return self._workers

        def left_out(once: Callable[..., Any]) -> Callable[..., Any]:
            def timed(*arguments: Any, **options: Any) -> Any:
                begin = _own()
                found = once(*arguments, **options)
                self._once += _own() - begin
                return found

            return timed

        Engine.usage = noted  # type: ignore[method-assign]
        worker_module.choose_encoder = left_out(choose_encoder)
        run_module.check_space = left_out(check_space)  # type: ignore[attr-defined]

    def open_ray(self) -> RayCluster:
        """One Ray for all builds."""
        import psutil

        from shardmill.building.engines.ray import RayCluster

        cluster = RayCluster(workers=WORKERS)
        names = ("raylet", "gcs_server")
        found = psutil.Process().children(recursive=True)
        self._daemons = [one for one in found if one.name() in names]
        assert len(self._daemons) == len(names), found
        return cluster

    def build(self, corpus: Path, run_on: str) -> dict[str, float]:
        self._once, self._workers = 0.0, Usage()
        tokenizer = open_tokenizer(str(corpus.parent / "bpe/tokenizer.json"))
        begin, daemons = _own(), self._of_daemons()
        with tempfile.TemporaryDirectory(dir=corpus.parent) as out:
            report = build_store(
                [Feed(source=open_source(str(corpus)), fill=(("train", None),))],
                Path(out) / "store",
                tokenizer=tokenizer,
                spec=BuildSpec(append_eot=True),
                engine="fast",
                workers=WORKERS,
                run_on=run_on,  # type: ignore[arg-type]
            )
            coordinator = _own() - begin - self._once
        split = report.manifest.splits["train"]
        return {
            "coordinator": coordinator,
            "workers": self._workers.cpu_seconds,
            "daemons": self._of_daemons() - daemons,
            "wall": report.seconds,
            "documents": split.documents,
            "tokens": split.tokens,
            "gigabytes": sum(path.stat().st_size for path in corpus.iterdir()) / 1e9,
        }

    def _of_daemons(self) -> float:
        times = [one.cpu_times() for one in self._daemons]
        return float(sum(one.user + one.system for one in times))


def _own() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(folder: Path, run_on: str, rounds: int) -> list[dict[str, float]]:
    """In this process: CPU seconds per gigabyte by role, for each round."""
    small, large = folder / "small", folder / "large"
    meter, found = Meter(), []
    with meter.open_ray() if run_on == "ray" else nullcontext():
        meter.build(small, run_on)  # imports, caches
        for _ in range(rounds):
            before, after = meter.build(small, run_on), meter.build(large, run_on)
            size = after["gigabytes"] - before["gigabytes"]
            found.append({role: (after[role] - before[role]) / size for role in ROLES})
    return found


def row_of(run_on: str, rounds: list[dict[str, float]]) -> dict[str, Any]:
    shares = [one["coordinator"] / one["workers"] for one in rounds]
    share = statistics.median(shares)
    return {
        "engine": run_on,
        **{
            f"{role}_s_per_gb": round(statistics.median(one[role] for one in rounds), 4)
            for role in ROLES
        },
        "share": round(share, 5),
        "shares": [round(one, 5) for one in shares],
        "wanted": WANTED,
        "ok": share <= WANTED,
    }


def in_fresh_process(folder: Path, run_on: str, rounds: int) -> dict[str, Any]:
    arguments = map(str, (folder, run_on, rounds))
    command = [sys.executable, __file__, "--worker", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return row_of(run_on, json.loads(done.stdout.splitlines()[-1]))


def print_rows(rows: list[dict[str, Any]]) -> None:
    print("CPU seconds per GB of input     coordinator   workers  Ray's own   share")
    for row in rows:
        print(
            f"{row['engine']:30} {row['coordinator_s_per_gb']:12.4f} "
            f"{row['workers_s_per_gb']:9.2f} {row['daemons_s_per_gb']:10.3f}   "
            f"1/{1 / max(row['share'], 1e-9):.0f}  rounds: "
            + ", ".join(f"1/{1 / max(share, 1e-9):.0f}" for share in row["shares"])
        )
    for row in rows:
        print(
            f"{'reached' if row['ok'] else 'MISSED'}: {row['engine']}: coordinator at "
            f"1/{1 / max(row['share'], 1e-9):.0f} of the workers, wanted at most "
            f"1/{1 / WANTED:.0f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("SHARDMILL_REAL_DATA"))
    parser.add_argument("--megabytes", type=int, nargs=2, default=(400, 4000))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=ENGINES)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        folder, run_on, rounds = args.worker
        print(json.dumps(measure(Path(folder), run_on, int(rounds))))
        return 0
    if args.data is None:
        parser.error("--data: wanted a folder of real text (or SHARDMILL_REAL_DATA)")
    small, large = args.megabytes
    if not 0 < small < large:
        parser.error("--megabytes: wanted a smaller and a larger size")
    with tempfile.TemporaryDirectory(prefix="shardmill-serial-") as name:
        write_corpus(Path(name), Path(args.data), small, large)
        engines = [args.only] if args.only else ENGINES
        rows = [in_fresh_process(Path(name), one, args.rounds) for one in engines]
    print(json.dumps(rows)) if args.json else print_rows(rows)
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
