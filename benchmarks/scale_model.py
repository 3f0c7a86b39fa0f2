"""Does one coordinator keep up with a thousand workers, and what do 15 T tokens take?

    python benchmarks/scale_model.py [--data FOLDER] [--units 100000] [--workers 1000] [--json]

Three measurements, each in a fresh process, then arithmetic:

1. Speed of a core: real builds of two sizes with the fast engine (serial_share.py).
2. The coordinator: real input files (sparse, 27 TB), the real plan, scheduler, engine and
   connections, and workers that wait as long as a core would work (scale_farm.py). They differ in
   speed, one task in 100 takes ten times as long, and a worker dies of one in 500. Time runs faster
   than on a cluster, so that it takes about a minute.
3. The end of a build: real receipts with as many documents as real text has, turned into index and
   manifest; a cost is the slope between two numbers of units.

Asked for: planning and running take the coordinator less than 20 % of one core, over the time that
the workers need at the measured speed. Exit code 1 when that is missed. The end of a build comes
after its workers, so it is told apart. The last table is computed: docs/scale.md shows it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import serial_share
from scale_farm import FarmCounts, FarmEngine

from shardmill.building.engines.engine import Engine
from shardmill.building.finish import Finisher, OriginLog
from shardmill.building.plan import FeedChunks, Unit, cut_source, cut_units, unit_ranges
from shardmill.building.resources import TASK_BYTES, Resources
from shardmill.building.scheduler import FeedProgress, FeedWork, Scheduler, WorkerPool
from shardmill.building.segments import EncodedBatch, SegmentWriter, read_segment, receipt_name
from shardmill.building.splits import Fill
from shardmill.building.worker import ChunkEncoder, TokenRules, UnitTask, WorkerTools
from shardmill.building.workplace import FolderOutput
from shardmill.machine import usage_of_this_process
from shardmill.records import JSON, Ragged
from shardmill.sources import open_source
from shardmill.store import StoreWriter
from shardmill.store.layout import META, ORIGINS
from shardmill.store.manifest import given_facts
from shardmill.store.plans import write_origins

WANTED = 0.20  # of one core
DEATHS = 0.002  # of tasks
SECONDS = 60.0  # that the replay should take
FILE_BYTES = 10 * 10**9
SHARD_BYTES = 128 * 2**20
UNIT_BYTES = 2 * SHARD_BYTES  # four bytes of input for each token of two bytes
FILL: Fill = (("val", 100_000_000), ("train", None))
FINISHED = (200, 500)
"""Units that are finished; those of full size begin at 80."""

TOKENS = 15e12
CORES = (16, 128, 1024)
PARTS_OF_A_SHARD = 8  # of 16 MiB, as they are uploaded; beginning and end are two requests more
DOLLARS_PER_PUT, DOLLARS_PER_GET = 0.005 / 1000, 0.0004 / 1000  # assumed: a public list price


def measure_speed(folder: Path, data: str, megabytes: Sequence[int]) -> dict[str, float]:
    """CPU seconds of workers per gigabyte, and what the text is like."""
    serial_share.write_corpus(folder, Path(data), *megabytes)
    meter, costs = serial_share.Meter(), []
    meter.build(folder / "small", "local")  # imports, caches
    for _ in range(3):
        small, large = (meter.build(folder / name, "local") for name in ("small", "large"))
        gigabytes = large["gigabytes"] - small["gigabytes"]
        costs.append((large["workers"] - small["workers"]) / gigabytes)
    return {
        "worker_s_per_gb": statistics.median(costs),
        "bytes_per_token": large["gigabytes"] * 1e9 / large["tokens"],
        "tokens_per_document": large["tokens"] / large["documents"],
    }


def write_sparse(folder: Path, num_bytes: int) -> None:
    folder.mkdir()
    for number in range(-(-num_bytes // FILE_BYTES)):
        with (folder / f"{number:05d}.jsonl").open("wb") as file:
            file.truncate(FILE_BYTES)


def make_plan(folder: Path, fill: Fill) -> tuple[FeedChunks, Iterator[Unit]]:
    feed = cut_source(open_source(str(folder), field="text"), fill)
    units = cut_units(feed, 0, plan="0" * 64, shard_bytes=SHARD_BYTES, dtype="uint16")
    return feed, units


class FarmPool(WorkerPool):
    """Workers of the farm, for which no engine has to be proved."""

    def __init__(self, workers: int, address: str) -> None:
        resources = Resources(
            workers=workers,
            is_asked=True,
            unit_bytes=TASK_BYTES,
            limit_bytes=2**30,
            is_limited=False,
        )
        super().__init__(None, resources, keep_open=0)  # type: ignore[arg-type]
        self._address = address

    def start(
        self, _first: UnitTask, _works: Sequence[FeedWork]
    ) -> tuple[Engine, WorkerTools, dict[str, JSON]]:
        tools = WorkerTools(tokenizer=None, check="sample")  # type: ignore[arg-type]
        return self._open_engine(), tools, {}

    def _open_engine(self) -> Engine:
        if self._engine is None:
            self._engine = FarmEngine(self.resources.workers, self._address)
        return self._engine


def replay(folder: Path, units: int, workers: int, bytes_per_s: float) -> dict[str, Any]:
    """Plan and run a build of so many units; `bytes_per_s` is the speed of a core."""
    logging.getLogger().addHandler(logging.NullHandler())  # every death is a warning
    before, begin = usage_of_this_process().peak_bytes, time.process_time()
    feed, planned = make_plan(folder / "sparse", FILL)
    plan_s = time.process_time() - begin
    plan_bytes = usage_of_this_process().peak_bytes - before
    *_, (_, stop) = islice(unit_ranges(feed.sizes, SHARD_BYTES, "uint16"), units)
    gigabytes = sum(feed.sizes[:stop]) / 1e9
    needed = gigabytes * 1e9 / bytes_per_s / workers
    faster = max(1.0, needed / SECONDS)
    work = FeedWork(feed)
    work.begin(islice(planned, units))
    address, out = str(folder / "farm"), folder / "farm.json"
    command = [sys.executable, str(Path(__file__).with_name("scale_farm.py")), address]
    command += [str(bytes_per_s * faster), str(DEATHS), str(out)]
    with subprocess.Popen(command) as farm, FarmPool(workers, address) as pool:
        while not Path(address).exists() and farm.poll() is None:
            time.sleep(0.01)
        begin, begin_wall = time.process_time(), time.monotonic()
        scheduler_of(work, pool, folder).run()
        run_s, wall = time.process_time() - begin, time.monotonic() - begin_wall
    counts = msgspec.json.decode(out.read_bytes(), type=FarmCounts)
    assert work.num_settled == units, f"{work.num_settled} of {units} units are settled"
    return {
        "units": units,
        "workers": workers,
        "terabytes": gigabytes / 1e3,
        "needed_s": needed,
        "plan_s": plan_s,
        "run_s": run_s,
        "plan_share": plan_s / needed,
        "run_share": run_s / needed,
        "share": (plan_s + run_s) / needed,
        "receipts_per_s": units / run_s,
        "replay_s": wall,
        "times_as_fast": faster,
        "peak_mib": usage_of_this_process().peak_bytes / 2**20,
        "plan_bytes_per_gb": plan_bytes / gigabytes,
        "plan_s_per_gb": plan_s / gigabytes,
        "run_s_per_unit": run_s / units,
        "deaths": counts.deaths,
        "stragglers": counts.stragglers,
        "made_again": counts.receipts - units,
    }


def scheduler_of(work: FeedWork, pool: FarmPool, folder: Path) -> Scheduler:
    rules = TokenRules(dtype="uint16", vocab_size=16_000, end_id=0)
    return Scheduler(
        works=[work],
        pool=pool,
        encoder=ChunkEncoder(rules=rules, max_document=2**28, by_hash=(None,)),
        output=FolderOutput(store=folder / "store", receipts=folder / "receipts"),
        shard_tokens=SHARD_BYTES // 2,
        progress=[FeedProgress(0, work.feed, lambda _: None)],
    )


class NoFile:
    """Takes the tokens of a shard and forgets them."""

    path = Path("/dev/null")

    def write(self, data: memoryview) -> None:
        """Nothing of the end of a build depends on tokens."""

    def abort(self) -> None:
        """There is nothing to close."""


class ReceiptOutput(FolderOutput):
    """Keeps receipts only."""

    def create(self, _name: str) -> Any:
        return NoFile()

    def keep(self, _file: Any, name: str) -> str:
        return name.encode().hex()[:64].ljust(64, "0")

    def has(self, _name: str, _num_bytes: int) -> bool:
        return True


def write_receipts(output: ReceiptOutput, units: Sequence[Unit], text: dict[str, float]) -> None:
    """Receipts as workers write them, of documents as long as those of real text."""
    numbers, mean = np.random.default_rng(18), text["tokens_per_document"]
    tokens = np.zeros(SHARD_BYTES, np.uint16)
    for unit in units:
        writer = SegmentWriter(
            unit, output, fill=(("train", None),), before=(0, 0), shard_tokens=SHARD_BYTES // 2
        )
        size = unit.num_bytes / len(unit.chunks) / text["bytes_per_token"]
        for chunk in range(unit.first_chunk, unit.first_chunk + len(unit.chunks)):
            lengths = numbers.lognormal(np.log(mean) - 0.5, 1.0, int(size / mean)).astype(int) + 1
            documents = Ragged.from_lengths(tokens[: lengths.sum()], lengths)
            count = len(lengths)
            read: Any = SimpleNamespace(num_read=count, num_rows=count, counts={"empty": 0})
            writer.add(
                EncodedBatch(
                    unit=unit.number,
                    chunk=chunk,
                    read=read,
                    num_given=count,
                    num_bytes=int(size * 4),
                    documents=documents,
                )
            )
        writer.seal()


def finish(folder: Path, output: ReceiptOutput, feed: FeedChunks, units: int) -> dict[str, float]:
    """The end of a build, as `building.run` does it; its CPU seconds and what it wrote."""
    begin, splits = time.process_time(), ("train",)
    with StoreWriter(folder, splits=splits, dtype="uint16", shard_bytes=SHARD_BYTES) as out:
        origins = OriginLog([feed], splits)
        finisher = Finisher([feed], out, origins)
        for unit in range(units):
            data = output.read_receipt(receipt_name(0, unit))
            segment = None if data is None else read_segment(data, output, itemsize=2)
            assert segment is not None, f"unit {unit} has no receipt"
            finisher.add(segment, (0, 0))
        facts = given_facts(out.num_documents("train"), out.num_tokens("train"))
        manifest = out.finish(facts)
    write_origins(folder, origins.finish(finisher.units, None), manifest)
    return {
        "cpu_s": time.process_time() - begin,
        "documents": manifest.splits["train"].documents,
        "shards": len(manifest.splits["train"].shards),
        "manifest_bytes": (folder / META).stat().st_size,
        "origin_bytes": (folder / ORIGINS).stat().st_size,
    }


def measure_finish(folder: Path, text: dict[str, float]) -> dict[str, float]:
    """What the end of a build takes."""
    write_sparse(folder / "few", FINISHED[1] * 2**28)
    feed, planned = make_plan(folder / "few", (("train", None),))
    units = list(islice(planned, FINISHED[1]))
    output = ReceiptOutput(store=folder / "no store", receipts=folder / "receipts")
    output.receipts.mkdir()
    write_receipts(output, units, text)
    rounds = []
    for number in range(3):
        few, many = (finish(folder / f"{number}-{n}", output, feed, n) for n in FINISHED)
        rounds.append({key: many[key] - few[key] for key in few})
    gigabytes = sum(unit.num_bytes for unit in units[FINISHED[0] :]) / 1e9
    more = rounds[0]
    return {
        "finish_s_per_gb": statistics.median(one["cpu_s"] for one in rounds) / gigabytes,
        "documents_per_gb": more["documents"] / gigabytes,
        "shards_per_gb": more["shards"] / gigabytes,
        "manifest_bytes_per_shard": more["manifest_bytes"] / more["shards"],
        "origin_bytes_per_gb": more["origin_bytes"] / gigabytes,
    }


def compute(found: dict[str, float]) -> dict[str, Any]:
    """15 T tokens of text like that which was measured."""
    gigabytes = TOKENS * found["bytes_per_token"] / 1e9
    units = gigabytes * 1e9 / UNIT_BYTES
    shards = gigabytes * found["shards_per_gb"]
    documents = TOKENS / found["tokens_per_document"]
    puts = shards * (PARTS_OF_A_SHARD + 2) + units
    gets = shards + 4 * units
    coordinator = gigabytes * found["plan_s_per_gb"] + units * found["run_s_per_unit"]
    end = gigabytes * found["finish_s_per_gb"]
    rows = []
    for cores in CORES:
        work = gigabytes * found["worker_s_per_gb"] / cores
        roles = {"workers": work, "the end of the build": end, "coordinator": coordinator}
        rows.append(
            {
                "cores": cores,
                "hours_workers": work / 3600,
                "coordinator_share": coordinator / work,
                "hours_end": end / 3600,
                "hours": (max(work, coordinator) + end) / 3600,
                "limit": max(roles, key=roles.__getitem__),
                "units_per_s": units / work,
            }
        )
    return {
        "terabytes": gigabytes / 1e3,
        "units": units,
        "shards": shards,
        "documents": documents,
        "index_gb": 8 * documents / 1e9,
        "manifest_mb": shards * found["manifest_bytes_per_shard"] / 1e6,
        "origins_mb": gigabytes * found["origin_bytes_per_gb"] / 1e6,
        "plan_s": gigabytes * found["plan_s_per_gb"],
        "coordinator_gb": gigabytes * found["plan_bytes_per_gb"] / 1e9,
        "puts": puts,
        "gets": gets,
        "dollars": puts * DOLLARS_PER_PUT + gets * DOLLARS_PER_GET,
        "rows": rows,
        "origins_full_at_tokens": TOKENS * 2**30 / (gigabytes * found["origin_bytes_per_gb"]),
        "manifest_full_at_tokens": TOKENS * 2**30 / (shards * found["manifest_bytes_per_shard"]),
        "cores_when_end_is_half": gigabytes * found["worker_s_per_gb"] / end,
        "cores_of_one_coordinator": gigabytes * found["worker_s_per_gb"] / coordinator,
    }


def print_result(text: dict[str, float], run: dict[str, Any], far: dict[str, Any]) -> None:
    found = {**text, **run}
    print(
        f"measured: a core makes {1e3 / found['worker_s_per_gb']:.0f} MB/s "
        f"({found['worker_s_per_gb']:.2f} CPU s per GB); {found['bytes_per_token']:.2f} bytes of "
        f"input a token, {found['tokens_per_document']:.0f} tokens a document"
    )
    print(
        f"replayed: {run['units']:,} units, {run['terabytes']:.1f} TB, {run['workers']:,} workers, "
        f"which would take {run['needed_s']:.0f} s; here {run['replay_s']:.0f} s. Coordinator: "
        f"plan {run['plan_s']:.1f} s, run {run['run_s']:.1f} s of CPU; "
        f"{run['receipts_per_s']:,.0f} receipts per CPU second; peak {run['peak_mib']:,.0f} MiB; "
        f"{run['deaths']} deaths survived, {run['stragglers']} stragglers, {run['made_again']} "
        "units made again"
    )
    print(
        f"the end: {found['finish_s_per_gb'] * 1e3:.2f} CPU ms per GB; a shard is "
        f"{found['manifest_bytes_per_shard']:.0f} bytes of manifest; a GB is "
        f"{found['origin_bytes_per_gb']:,.0f} bytes of origins\n"
    )
    print(f"| {TOKENS / 1e12:.0f} T tokens, {far['terabytes']:.0f} TB |" + " |" * len(CORES))
    print("|---|" + "---|" * len(CORES))
    lines = {
        "cores": [f"{row['cores']:,}" for row in far["rows"]],
        "workers, hours": [f"{row['hours_workers']:.2f}" for row in far["rows"]],
        "units a second": [f"{row['units_per_s']:.0f}" for row in far["rows"]],
        "coordinator meanwhile, of one core": [
            f"{100 * row['coordinator_share']:.1f} %" for row in far["rows"]
        ],
        "the end on one machine, hours": [f"{row['hours_end']:.2f}" for row in far["rows"]],
        "in all, hours": [f"{row['hours']:.2f}" for row in far["rows"]],
        "what takes longest": [row["limit"] for row in far["rows"]],
    }
    for name, values in lines.items():
        print(f"| {name} | " + " | ".join(values) + " |")
    print(
        f"\nunits {far['units']:,.0f}, shards {far['shards']:,.0f}, documents "
        f"{far['documents'] / 1e9:.1f} G, index {far['index_gb']:.0f} GB, manifest "
        f"{far['manifest_mb']:.0f} MB, origins {far['origins_mb']:.0f} MB, coordinator's memory "
        f"{far['coordinator_gb']:.1f} GB, {far['plan_s']:.0f} s to plan\n"
        f"requests: {far['puts'] / 1e6:.2f} M PUT, "
        f"{far['gets'] / 1e6:.2f} M GET: ${far['dollars']:.0f}\n"
        f"limits: origins reach 1 GiB at {far['origins_full_at_tokens'] / 1e12:.0f} T tokens, the "
        f"manifest at {far['manifest_full_at_tokens'] / 1e12:.0f} T; the end takes as long as the "
        f"workers with {far['cores_when_end_is_half']:,.0f} cores; one coordinator is busy with "
        f"{far['cores_of_one_coordinator']:,.0f}\n"
    )
    print(
        f"{'reached' if run['ok'] else 'MISSED'}: coordinator at {100 * run['share']:.1f} % of one "
        f"core for {run['workers']:,} workers ({100 * run['plan_share']:.1f} % to plan first, "
        f"{100 * run['run_share']:.1f} % while they run), wanted less than "
        f"{100 * WANTED:.0f} %"
    )


def alone(what: str, folder: Path, **options: Any) -> Any:
    """The answer of one measurement, in a fresh process."""
    command = [sys.executable, __file__, "--alone", what, str(folder), json.dumps(options)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("SHARDMILL_REAL_DATA"))
    parser.add_argument("--megabytes", type=int, nargs=2, default=(100, 500))
    parser.add_argument("--units", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=1_000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--alone", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        what, folder, options = args.alone
        call = {"speed": measure_speed, "replay": replay, "finish": measure_finish}[what]
        print(json.dumps(call(Path(folder), **json.loads(options))))
        return 0
    if args.data is None:
        parser.error("--data: wanted a folder of real text (or SHARDMILL_REAL_DATA)")
    with tempfile.TemporaryDirectory(prefix="shardmill-scale-") as name:
        folder = Path(name)
        text = alone("speed", folder, data=str(args.data), megabytes=args.megabytes)
        write_sparse(folder / "sparse", args.units * 2**28)
        speed = 1e9 / text["worker_s_per_gb"]
        run = alone("replay", folder, units=args.units, workers=args.workers, bytes_per_s=speed)
        text |= alone("finish", folder, text=text)
    run["ok"] = run["share"] < WANTED
    far = compute({**text, **run})
    if args.json:
        print(json.dumps({"measured": text, "replay": run, "computed": far}))
    else:
        print_result(text, run, far)
    return 0 if run["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
