"""How much of the bare tokenizer's speed a whole build keeps, and how much memory it takes.

    python benchmarks/build.py [--data FOLDER] [--megabytes 400] [--repeats 3] [--only fast]

One process builds a store from jsonl and from parquet; the bare engine encodes the same texts, in
batches of the same size, from memory, with as many threads as it likes, which is all cores. Both
run in fresh processes, alternating, so that neither finds the other's word cache warm; a row is the
median of the rounds. The clock starts when the tokenizer is open. The proof that a fast engine
equals the reference is told apart: it costs the same few seconds for a megabyte and for a terabyte.

"ratio" compares the whole time, the start of workers included, which is a large part of so little
text; "per core" is the same for one more byte: between half of the corpus and all of it. Builds
with a fast engine have a worker for each core, as they have when there is more input. Peak memory
is that of builds of 1x, 2x, 4x and 8x the whole corpus.

Text: --data (or SHARDMILL_REAL_DATA) when there is one, then the Python sources on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from texts import some_documents, text_bytes

from shardmill.building import BuildSpec, Feed, build_store
from shardmill.building import worker as engine_module
from shardmill.sources import open_source
from shardmill.tokenizers import (
    ChosenEncoder,
    TrainSpec,
    choose_encoder,
    open_tokenizer,
    train_tokenizer,
)
from shardmill.tokenizers.engines import fast_candidates

Case = tuple[str, str, str, float, float]
CASES: list[
    Case
] = [  # (label, model file, engine, part of the corpus, wanted share of the bare speed)
    ("SentencePiece unigram, reference", "unigram/spm.model", "reference", 0.25, 0.90),
    ("byte-level BPE, reference", "bpe/tokenizer.json", "reference", 0.1, 0.90),
    ("byte-level BPE, fast", "bpe/tokenizer.json", "fast", 1.0, 0.75),
]


def write_corpora(
    folder: Path, data: Path | None, megabytes: int, parts: set[float]
) -> dict[float, int]:
    """<part>.jsonl and <part>.parquet for each part; gives the bytes of text in each."""
    texts = some_documents(data, megabytes)
    sizes: dict[float, int] = {}
    for part in sorted(parts):
        mine = texts[:: round(1 / part)]
        sizes[part] = text_bytes(mine)
        with (folder / f"{part}.jsonl").open("w") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in mine)
        pq.write_table(pa.table({"text": mine}), folder / f"{part}.parquet", row_group_size=1000)
    return sizes


def train_models(folder: Path, corpus: Path, models: set[str]) -> None:
    """Models of 16,000 ids, from 8 MB of the corpus."""
    lines = corpus.read_text().splitlines()
    step = max(corpus.stat().st_size // (8 * 10**6), 1)
    texts = [json.loads(line)["text"] for line in lines[::step]]
    kinds = {"unigram": TrainSpec(model_type="unigram"), "bpe": TrainSpec(model_type="byte-bpe")}
    for name in models:
        train_tokenizer(folder / name, texts=texts, spec=kinds[name])


def run_bare(corpus: Path, model: Path, engine: str) -> float:
    """Seconds to encode the corpus from memory, on all cores if the engine can."""
    os.environ["FASTOKENS_BPE_THREADS"] = str(os.cpu_count())
    batches = [batch.texts for batch in open_source(str(corpus)).batches()]
    tokenizer = open_tokenizer(str(model))
    encoder = fast_candidates(tokenizer).engines[0] if engine == "fast" else tokenizer
    encoder.encode_batch(["warm up"])
    start = time.perf_counter()
    for texts in batches:
        encoder.encode_batch(texts)
    return time.perf_counter() - start


def run_build(corpus: Path, model: Path, engine: str) -> tuple[float, float, int]:
    """(seconds of the whole build, of them for the proof of the engine, peak bytes)."""
    proof = 0.0

    def timed_choice(*arguments: object, **options: object) -> ChosenEncoder:
        nonlocal proof
        begin = time.perf_counter()
        chosen = choose_encoder(*arguments, **options)
        proof = time.perf_counter() - begin
        return chosen

    engine_module.choose_encoder = timed_choice
    tokenizer = open_tokenizer(str(model))
    tokenizer.encode_batch(["warm up"])
    with tempfile.TemporaryDirectory(dir=corpus.parent) as out:
        start = time.perf_counter()
        build_store(
            [Feed(source=open_source(str(corpus)), fill=(("train", None),))],
            Path(out) / "store",
            tokenizer=tokenizer,
            spec=BuildSpec(append_eot=True),
            engine=engine,
            workers=os.cpu_count() if engine == "fast" else None,
        )
        seconds = time.perf_counter() - start
    return seconds, proof, peak_bytes()


def peak_bytes() -> int:
    """Peak resident memory since this program began; getrusage would count its parent's too."""
    (line,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) * 1024


def in_fresh_process(action: str, *arguments: object) -> list[float]:
    command = [sys.executable, __file__, "--worker", action, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def worker(action: str, corpus: str, model: str, engine: str) -> None:
    if action == "bare":
        result: tuple[float, ...] = (run_bare(Path(corpus), Path(model), engine),)
    else:
        result = run_build(Path(corpus), Path(model), engine)
    print(json.dumps(result))


def speed_rows(
    folder: Path, sizes: dict[float, int], repeats: int, cases: list[Case]
) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for label, model, engine, part, wanted in cases:
        size = sizes[part]
        for kind in ("jsonl", "parquet"):
            rounds = [
                [
                    seconds(folder / f"{one}.{kind}", folder / model, engine)
                    for one in (part / 2, part)
                ]
                for _ in range(repeats)
            ]
            ratios = [bare / build for _, (bare, build, _) in rounds]
            # What one more byte takes: the start of workers is in both sizes, and falls out.
            slopes = [(two[0] - one[0]) / (two[1] - one[1]) for one, two in rounds]
            bare, build, proof = (statistics.median(one[n] for _, one in rounds) for n in range(3))
            rows.append(
                {
                    "case": label,
                    "input": kind,
                    "text_mb": round(size / 1e6, 1),
                    "bare_mb_s": round(size / bare / 1e6, 1),
                    "build_mb_s": round(size / build / 1e6, 1),
                    "ratio": round(statistics.median(ratios), 3),
                    "per_core": round(statistics.median(slopes), 3),
                    "wanted_per_core": wanted,
                    "proof_s": round(proof, 2),
                }
            )
    return rows


def seconds(corpus: Path, model: Path, engine: str) -> tuple[float, float, float]:
    """Of the bare engine, of a build without the proof of the engine, and of the proof."""
    (bare,) = in_fresh_process("bare", corpus, model, engine)
    whole, proof, _ = in_fresh_process("build", corpus, model, engine)
    return bare, whole - proof, proof


def memory_rows(folder: Path) -> list[dict[str, object]]:
    """Peak memory of builds of growing input, each the same text several times over."""
    rows: list[dict[str, object]] = []
    base = (folder / "1.0.jsonl").read_bytes()
    for times in (1, 2, 4, 8):
        corpus = folder / f"times{times}.jsonl"
        with corpus.open("wb") as file:
            for _ in range(times):
                file.write(base)
        model = folder / "bpe/tokenizer.json"
        _, _, peak = in_fresh_process("build", corpus, model, "fast")
        rows.append({"input": f"{times}x", "peak_mib": round(peak / 2**20, 1)})
        corpus.unlink()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("SHARDMILL_REAL_DATA"))
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(*args.worker)
        return
    with tempfile.TemporaryDirectory(prefix="shardmill-bench-") as name:
        folder = Path(name)
        cases = [case for case in CASES if args.only in case[0]]
        parts = {1.0, *(case[3] for case in cases), *(case[3] / 2 for case in cases)}
        sizes = write_corpora(folder, args.data and Path(args.data), args.megabytes, parts)
        models = {"bpe", *(case[1].partition("/")[0] for case in cases)}
        train_models(folder, folder / "1.0.jsonl", models)
        speed = speed_rows(folder, sizes, args.repeats, cases)
        memory = memory_rows(folder)
    if args.json:
        print(json.dumps({"speed": speed, "memory": memory}))
        return
    for row in speed:
        print(
            f"{row['case']:34} {row['input']:8} {row['text_mb']:6} MB  "
            f"bare {row['bare_mb_s']:7} MB/s  build "
            f"{row['build_mb_s']:7} MB/s  ratio {row['ratio']:.3f}  per core {row['per_core']:.3f} "
            f"(wanted {row['wanted_per_core']:.2f})  proof {row['proof_s']} s"
        )
    for row in memory:
        print(f"peak memory at {row['input']:3} {row['peak_mib']:7} MiB")


if __name__ == "__main__":
    main()
