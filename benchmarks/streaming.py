"""How much of the bare tokenizer's speed a stream from text to batches keeps.

    python benchmarks/streaming.py [--data FOLDER] [--megabytes 120] [--repeats 5] [--only fast]

Shuffled training batches from local parquet and from a hub on loopback, against the bare engine
(the same texts from memory, on all cores if the engine likes) and against the common shape:
`datasets` streaming with its own shuffle, one `encode` for each document, a Python list as packer,
with the same engine. Each runs in a fresh process, alternating; a row is the median of the ratios
of one round. The clock starts when the tokenizer is open; the proof that a fast engine equals the
reference is told apart: it costs the same few seconds for a megabyte and for a terabyte.
`get_state` is timed after each batch of a stream with a shuffle buffer of 10,000 documents.

Text: --data (or SHARDMILL_REAL_DATA) when there is one, then the Python sources on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from texts import some_documents, text_bytes

from shardmill.tokenizers import TrainSpec, open_tokenizer, train_tokenizer
from shardmill.tokenizers.engines import fast_candidates

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a script's path is its folder
from tests.services import LoopbackHub

DATASET = "own/texts"
NUM_FILES, GROUP_ROWS = 8, 500
SEQ_LEN, BATCH_SIZE, BUFFER = 1024, 32, 10_000
WANTED = {"reference": 0.80, "fast": 0.40}  # share of the bare speed
WANTED_TIMES = 3.0  # of the common shape
WANTED_STATE = 1e-3  # seconds
PART = {"reference": 0.25, "fast": 1.0}  # of the corpus: the reference is slow


def write_corpus(folder: Path, texts: list[str]) -> int:
    """Parquet files as a hub holds them; gives the bytes of text."""
    (folder / "data").mkdir(parents=True)
    size = -(-len(texts) // NUM_FILES)
    for number in range(NUM_FILES):
        part = texts[number * size : (number + 1) * size]
        name = f"train-{number:05d}-of-{NUM_FILES:05d}.parquet"
        pq.write_table(pa.table({"text": part}), folder / "data" / name, row_group_size=GROUP_ROWS)
    return text_bytes(texts)


def stream_config(where: str, corpus: Path, model: Path, engine: str) -> dict[str, Any]:
    data: dict[str, Any] = {"backend": "files", "files": str(corpus / "data")}
    if where == "hub":
        data = {"backend": "hf", "hf_dataset": f"{DATASET}-{engine}"}
    tokenizer = {"kind": "hf", "path": str(model), "engine": engine}
    data |= {"repeat": False, "shuffle_buffer_size": BUFFER, "tokenizer": tokenizer}
    return {"data": data, "train": {"seq_len": SEQ_LEN, "batch_size": BATCH_SIZE}}


def run_ours(where: str, corpus: Path, model: Path, engine: str) -> dict[str, float]:
    """Every batch of an epoch, its state taken behind each."""
    from shardmill.compat.chomp import build_train_iterator
    from shardmill.loading.streaming import tokenizer as module

    proof = 0.0
    choose = module.choose_encoder

    def timed_choice(*arguments: Any, **options: Any) -> Any:
        nonlocal proof
        begin = time.perf_counter()
        chosen = choose(*arguments, **options)
        proof = time.perf_counter() - begin
        return chosen

    module.choose_encoder = timed_choice
    states = []
    with build_train_iterator(stream_config(where, corpus, model, engine)) as batches:
        start = time.perf_counter()
        for batch in batches:
            assert batch.input_ids.shape == (1, BATCH_SIZE, SEQ_LEN)
            begin = time.perf_counter()
            state = batches.get_state()
            states.append(time.perf_counter() - begin)
        seconds = time.perf_counter() - start
        totals = batches.stats().total
        return {
            "seconds": seconds - proof,
            "proof": proof,
            "tokens": totals.tokens,
            "padding_share": totals.padding_share,
            "state_seconds": statistics.median(states),
            "state_slowest": max(states),
            "state_bytes": len(json.dumps(state)),
        }


def run_common(where: str, corpus: Path, model: Path, engine: str) -> dict[str, float]:
    """What many training scripts do."""
    import datasets

    if where == "hub":
        rows = datasets.load_dataset(f"{DATASET}-{engine}", split="train", streaming=True)
    else:
        files = [str(path) for path in sorted((corpus / "data").glob("*.parquet"))]
        rows = datasets.load_dataset(
            "parquet", data_files=files, split="train", streaming=True, cache_dir=str(corpus)
        )
    encode = encode_one(model, engine)
    rows = rows.shuffle(seed=0, buffer_size=BUFFER)
    encode("warm up")
    start = time.perf_counter()
    tokens = sum(inputs.size for inputs, _ in list_packed(rows, encode))
    return {"seconds": time.perf_counter() - start, "tokens": float(tokens)}


def encode_one(model: Path, engine: str) -> Callable[[str], list[int]]:
    if engine == "fast":
        import fastokens

        fast = fastokens.Tokenizer.from_json_str(model.read_text())
        return lambda text: fast.encode(text).ids
    import tokenizers

    reference = tokenizers.Tokenizer.from_file(str(model))
    return lambda text: reference.encode(text, add_special_tokens=False).ids


def list_packed(
    rows: Any, encode: Callable[[str], list[int]]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    buffer: list[int] = []
    batch: list[list[int]] = []
    for row in rows:
        buffer.extend(encode(row["text"]))
        buffer.append(0)
        while len(buffer) >= SEQ_LEN + 1:
            batch.append(buffer[: SEQ_LEN + 1])
            buffer = buffer[SEQ_LEN + 1 :]
            if len(batch) == BATCH_SIZE:
                ids = np.array(batch, dtype=np.int32)
                yield ids[:, :-1].copy(), ids[:, 1:].copy()
                batch = []


def run_bare(where: str, corpus: Path, model: Path, engine: str) -> dict[str, float]:  # noqa: ARG001
    """The engine alone, from memory, on all cores if it can."""
    from shardmill.sources import open_source

    os.environ["FASTOKENS_BPE_THREADS"] = str(os.cpu_count())
    batches = [batch.texts for batch in open_source(str(corpus / "data")).batches()]
    tokenizer = open_tokenizer(str(model))
    encoder = fast_candidates(tokenizer).engines[0] if engine == "fast" else tokenizer
    encoder.encode_batch(["warm up"])
    start = time.perf_counter()
    tokens = sum(len(encoder.encode_batch(texts).values) for texts in batches)
    return {"seconds": time.perf_counter() - start, "tokens": float(tokens)}


RUNS = {"bare": run_bare, "ours": run_ours, "common": run_common}


def in_fresh_process(hub: LoopbackHub, home: Path, *arguments: object) -> dict[str, float]:
    command = [sys.executable, "-W", "ignore", __file__, "--worker", *map(str, arguments)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env=hub.environment(home), cwd=home
    )
    return json.loads(done.stdout.splitlines()[-1])


def measure(hub: LoopbackHub, folder: Path, engine: str, size: int, repeats: int) -> list[dict]:
    corpus, model = folder / engine, folder / "bpe/tokenizer.json"
    rows = []
    for where in ("parquet", "hub"):
        rounds = []
        for number in range(repeats):
            names = [*RUNS][number % 3 :] + [*RUNS][: number % 3]
            taken = {
                name: in_fresh_process(hub, folder, name, where, corpus, model, engine)
                for name in names
            }
            rounds.append(taken)
        rows.append(summary(f"{engine} engine from {where}", engine, size, rounds))
    return rows


def summary(case: str, engine: str, size: int, rounds: list[dict[str, dict[str, float]]]) -> dict:
    def median(value: Callable[[dict[str, dict[str, float]]], float]) -> float:
        return statistics.median(value(taken) for taken in rounds)

    def rate(name: str) -> float:
        return median(lambda taken: size / taken[name]["seconds"] / 1e6)

    def ratio(name: str) -> float:
        return median(lambda taken: taken[name]["seconds"] / taken["ours"]["seconds"])

    state = median(lambda taken: taken["ours"]["state_seconds"])
    return {
        "case": case,
        "text_mb": round(size / 1e6, 1),
        "bare_mb_s": round(rate("bare"), 1),
        "ours_mb_s": round(rate("ours"), 1),
        "common_mb_s": round(rate("common"), 1),
        "tokens_s": round(median(lambda t: t["ours"]["tokens"] / t["ours"]["seconds"])),
        "of_bare": round(ratio("bare"), 3),
        "wanted_of_bare": WANTED[engine],
        "times_common": round(ratio("common"), 2),
        "wanted_times_common": WANTED_TIMES,
        "proof_s": round(median(lambda taken: taken["ours"]["proof"]), 2),
        "padding_share": round(rounds[0]["ours"]["padding_share"], 4),
        "state_us": round(state * 1e6, 1),
        "state_slowest_us": round(max(t["ours"]["state_slowest"] for t in rounds) * 1e6, 1),
        "state_bytes": int(rounds[0]["ours"]["state_bytes"]),
        "passed": ratio("bare") >= WANTED[engine]
        and ratio("common") >= WANTED_TIMES
        and state < WANTED_STATE,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("SHARDMILL_REAL_DATA"))
    parser.add_argument("--megabytes", type=float, default=120)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help="engines with this in their name")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        action, where, corpus, model, engine = args.worker
        print(json.dumps(RUNS[action](where, Path(corpus), Path(model), engine)))
        return 0
    rows: list[dict] = []
    with tempfile.TemporaryDirectory(prefix="shardmill-bench-") as name, LoopbackHub() as hub:
        folder = Path(name)
        texts = some_documents(args.data and Path(args.data), args.megabytes)
        spec = TrainSpec(model_type="byte-bpe")
        train_tokenizer(folder / "bpe", texts=texts[::20], spec=spec)
        for engine in WANTED:
            if args.only in engine:
                size = write_corpus(folder / engine, texts[:: round(1 / PART[engine])])
                hub.publish(f"{DATASET}-{engine}", folder / engine)
                rows += measure(hub, folder, engine, size, args.repeats)
    passed = all(row["passed"] for row in rows)
    if args.json:
        print(json.dumps({"rows": rows, "passed": passed}))
        return 0 if passed else 1
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    for row in rows:
        print(
            f"{row['case']:30} {row['text_mb']:6} MB  bare {row['bare_mb_s']:6} MB/s  ours "
            f"{row['ours_mb_s']:6} MB/s ({row['tokens_s'] / 1e6:.2f}M tokens/s)  common "
            f"{row['common_mb_s']:5} MB/s\n"
            f"{'':30} of bare {row['of_bare']:.3f} (wanted {row['wanted_of_bare']:.2f})  "
            f"{row['times_common']:.2f}x the common shape (wanted {WANTED_TIMES:.0f})  proof "
            f"{row['proof_s']} s  get_state {row['state_us']} us (slowest "
            f"{row['state_slowest_us']}), {row['state_bytes']} bytes"
        )
    print("passed" if passed else "missed")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
