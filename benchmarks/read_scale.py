"""A terabyte of tokens in 100,000 shards: sparse files, so only the numbers are large.

In: how many shards.  Out: what opening, the first batch and a resume cost, and what they read.
Promise: the store is a real one, and the process that reads it does nothing else. The windows of
the batches that are looked at hold tokens that name them, so a wrong window shows.
Not here: real disks; holes are read from nothing.

    python benchmarks/read_scale.py FOLDER plan    which windows the batches will be
    python benchmarks/read_scale.py FOLDER run 9   the reading process; prints JSON
"""

from __future__ import annotations

import hashlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from read_corpus import SPLIT, VOCAB_SIZE

from shardmill.loading import Batch, Loader, SampleStream, TokenSource
from shardmill.store.layout import index_header
from shardmill.store.manifest import (
    ListedFile,
    ShardEntry,
    SplitEntry,
    given_facts,
    make_manifest,
    write_manifest,
)

SHARD_BYTES = 10 * 2**20
SHARD_TOKENS = SHARD_BYTES // 2
DOCUMENT_TOKENS = SHARD_TOKENS // 10
SEQ_LEN, BATCH = 512, 32  # 100,000 shards are 1,023,999,999 windows
SEED = 1234
LIMITS = {"open_s": 2.0, "first_batch_s": 1.0, "private_mib": 300.0, "resume_ratio": 1.25}


def write_sparse_store(folder: Path, num_shards: int) -> None:
    """A finished store of zeros; ten documents in a shard."""
    (folder / SPLIT).mkdir(parents=True)
    digest = hashlib.sha256(bytes(SHARD_BYTES)).hexdigest()
    shards = []
    for number in range(num_shards):
        name = f"{SPLIT}/shard_{number:05d}.bin"
        with (folder / name).open("wb") as file:
            file.truncate(SHARD_BYTES)
        shards.append(
            ShardEntry(
                file=name,
                tokens=SHARD_TOKENS,
                documents=10,
                first_document=10 * number,
                last_document=10 * number + 9,
                sha256=digest,
            )
        )
    starts = np.arange(10 * num_shards, dtype="<i8") * DOCUMENT_TOKENS
    data = index_header(len(starts)) + starts.tobytes()
    (folder / f"{SPLIT}_idx.npy").write_bytes(data)
    index = ListedFile(
        file=f"{SPLIT}_idx.npy", entries=len(starts), sha256=hashlib.sha256(data).hexdigest()
    )
    tokens = num_shards * SHARD_TOKENS
    split = SplitEntry(tokens=tokens, documents=len(starts), index=index, shards=shards, chat=None)
    manifest = make_manifest(
        given_facts(len(starts), tokens, vocab_size=VOCAB_SIZE),
        built=True,
        token_dtype="uint16-le",
        shard_bytes=SHARD_BYTES,
        splits={SPLIT: split},
        dropped=None,
    )
    write_manifest(folder, manifest)


def mark_windows(folder: Path, windows: list[int]) -> None:
    """Input `j` of window `w` becomes `(w + j) % 65,521 + 1`; its last label stays as it is."""
    for window in windows:
        shard, start = divmod(window * SEQ_LEN, SHARD_TOKENS)
        with (folder / f"{SPLIT}/shard_{shard:05d}.bin").open("r+b") as file:
            file.seek(2 * start)
            file.write(((window + np.arange(SEQ_LEN)) % 65_521 + 1).astype("<u2").tobytes())


def open_stream(folder: Path) -> SampleStream:
    return SampleStream([TokenSource(folder, seq_len=SEQ_LEN, split=SPLIT)], seed=SEED)


def at_90_percent(stream: SampleStream) -> int:
    """A sample there, at the edge of a batch."""
    assert stream.epoch_samples is not None
    return stream.epoch_samples * 9 // 10 // BATCH * BATCH


def plan(folder: Path) -> list[int]:
    """The windows of the batch at sample 0 and of the one at 90 % of the epoch."""
    stream = open_stream(folder)
    late = at_90_percent(stream)
    samples = [*range(BATCH), *range(late, late + BATCH)]
    windows: list[int] = stream.take(samples).item.tolist()
    return windows


def anonymous_mib() -> float:
    """Memory of this process that is not page cache."""
    rollup = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    found = re.search(r"Anonymous: +(\d+) kB", rollup)
    assert found is not None, rollup
    return int(found[1]) / 1024


def run(folder: Path, rounds: int) -> dict[str, Any]:
    """What the reading process measures of itself."""
    before = anonymous_mib()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    stream = open_stream(folder)
    opened, opened_cpu = time.perf_counter(), time.process_time()
    loader = Loader(stream, batch_size=BATCH)
    first = next(iter(loader))
    got_first = time.perf_counter()
    seen = describe(first)
    state = loader.state_dict()
    loader.close()
    late = resume(stream, state, at_90_percent(stream))
    return {
        "num_tokens": stream.sources[0].num_tokens,
        "num_windows": stream.epoch_samples,
        "open_s": round(opened - begin, 3),
        "open_cpu_s": round(opened_cpu - begin_cpu, 3),
        "first_batch_s": round(got_first - opened, 3),
        "state_bytes": len(json.dumps(state)),
        "first": seen,
        "late": describe(late),
        **time_resumes(stream, state, rounds),
        **walk_epoch(stream),
        "private_mib": round(anonymous_mib(), 1),
        "private_before_mib": round(before, 1),
    }


def resume(stream: SampleStream, state: dict[str, Any], sample: int) -> Batch:
    """The next batch of a new loader over a new order, when `sample` samples are consumed."""
    again = SampleStream(stream.sources, seed=SEED)
    with Loader(again, batch_size=BATCH, ahead=0) as loader:
        loader.load_state_dict({**state, "samples": sample})
        return next(iter(loader))


def time_resumes(stream: SampleStream, state: dict[str, Any], rounds: int) -> dict[str, float]:
    """Seconds to the next batch at 0 % and at 90 %, alternating, each time of other windows."""
    late = at_90_percent(stream)
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(1, rounds + 1):
        turns = [(0, number * BATCH), (1, late + number * BATCH)]
        for which, sample in turns if number % 2 else turns[::-1]:
            begin = time.perf_counter()
            resume(stream, state, sample)
            seconds[which].append(time.perf_counter() - begin)
    ratio = statistics.median(b / a for a, b in zip(*seconds, strict=True))
    return {
        "resume_0_s": round(statistics.median(seconds[0]), 5),
        "resume_90_s": round(statistics.median(seconds[1]), 5),
        "resume_ratio": round(ratio, 3),
    }


def walk_epoch(stream: SampleStream) -> dict[str, int]:
    """Look at the order in 1,000 places of the epoch, 1,000 samples each, and its two edges."""
    last = stream.epoch_samples
    assert last is not None
    places = np.linspace(0, last - 1000, 1000).astype(np.int64)
    items = [stream.take(np.arange(place, place + 1000)).item for place in places]
    edge = stream.take([last - 1, last])
    return {
        "samples_seen": 1000 * 1000,
        "windows_seen": len(np.unique(np.concatenate(items))),
        "last_epoch": int(edge.epoch[0]),
        "next_epoch": int(edge.epoch[1]),
    }


def describe(batch: Batch) -> dict[str, list[int]]:
    """What names the rows of a batch: their windows, and tokens at both ends."""
    columns: dict[str, npt.NDArray[np.int64]] = {
        "window": batch.item,
        "first_input": batch.input_ids[:, 0],
        "last_input": batch.input_ids[:, -1],
        "first_label": batch.labels[:, 0],
        "input_sum": batch.input_ids.sum(axis=1),
    }
    return {name: column.tolist() for name, column in columns.items()}


def measure_scale(num_shards: int, rounds: int) -> dict[str, Any]:
    """The whole: write, mark, read in a fresh process, judge."""
    with tempfile.TemporaryDirectory(prefix="shardmill-scale-") as place:
        folder = Path(place) / "store"
        write_sparse_store(folder, num_shards)
        mark_windows(folder, in_fresh_process(folder, "plan"))
        found: dict[str, Any] = in_fresh_process(folder, "run", rounds)
    judged = [
        {
            "case": "scale",
            "name": name,
            "against": "at most",
            "wanted": most,
            "reached": found[name],
            "passed": found[name] <= most,
        }
        for name, most in LIMITS.items()
    ]
    passed = all(verdict["passed"] for verdict in judged)
    return {"shards": num_shards, **found, "wanted": judged, "passed": passed}


def in_fresh_process(folder: Path, action: str, *arguments: int) -> Any:
    command = [sys.executable, __file__, str(folder), action, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


if __name__ == "__main__":
    if sys.argv[2] == "plan":
        print(json.dumps(plan(Path(sys.argv[1]))))
    else:
        print(json.dumps(run(Path(sys.argv[1]), int(sys.argv[3]))))
