"""How much of the bare tokenizer's speed a whole build keeps, and how much memory it takes.

    python benchmarks/build.py [--data FOLDER] [--megabytes 48] [--repeats 3] [--json]

One process builds a store from jsonl and from parquet; the bare engine encodes the same texts, in
batches of the same size, from memory. Both run in fresh processes, alternating, so that neither
finds the other's word cache warm; a row is the median of the ratios. The proof that a fast engine
equals the reference is made before the clock starts and told apart: it costs the same few seconds
for a megabyte and for a terabyte. Peak memory is that of builds of 1x, 2x, 4x and 8x the input.

Text: --data (or SHARDMILL_REAL_DATA), else the Python standard library's sources.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from shardmill.build import BuildSpec, Feed, build_store
from shardmill.sources import open_source
from shardmill.tokenizer import TrainSpec, open_tokenizer, train_tokenizer
from shardmill.tokenizer.fast import fast_candidates

CASES = [  # (label, model file, engine, the share of the bare engine's speed that is wanted)
    ("SentencePiece unigram, reference", "unigram/spm.model", "reference", 0.90),
    ("byte-level BPE, reference", "bpe/tokenizer.json", "reference", 0.90),
    ("byte-level BPE, fast", "bpe/tokenizer.json", "fast", 0.50),
]
DOCUMENT_CHARS = 6000


def documents(data: Path | None) -> Iterator[str]:
    """Real text in documents of a few thousand characters."""
    if data is None:
        paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("**/*.py"))
        texts = (path.read_text("utf-8", "replace") for path in paths)
    else:
        table = pq.read_table(data / "fineweb/fineweb_sample_2800.parquet", columns=["text"])
        books = sorted((data / "gutenberg").glob("*.txt"))
        texts = iter(
            [*table["text"].to_pylist(), *(book.read_text("utf-8", "replace") for book in books)]
        )
    for text in texts:
        for start in range(0, len(text), DOCUMENT_CHARS):
            yield text[start : start + DOCUMENT_CHARS]


def write_corpus(folder: Path, data: Path | None, megabytes: int) -> int:
    """corpus.jsonl and corpus.parquet; returns the bytes of text, never repeated."""
    texts, size = [], 0
    for text in documents(data):
        texts.append(text)
        size += len(text.encode())
        if size >= megabytes * 10**6:
            break
    with (folder / "corpus.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    pq.write_table(pa.table({"text": texts}), folder / "corpus.parquet", row_group_size=1000)
    return size


def train_models(folder: Path) -> None:
    """Two models of 16,000 ids, from a tenth of the corpus."""
    lines = (folder / "corpus.jsonl").read_text().splitlines()[::10]
    texts = [json.loads(line)["text"] for line in lines]
    train_tokenizer(folder / "unigram", texts=texts, spec=TrainSpec(model_type="unigram"))
    train_tokenizer(folder / "bpe", texts=texts, spec=TrainSpec(model_type="byte-bpe"))


def run_bare(corpus: Path, model: Path, engine: str) -> float:
    """Seconds to encode the corpus from memory."""
    batches = [batch.texts for batch in open_source(str(corpus)).batches()]
    tokenizer = open_tokenizer(str(model))
    encoder = fast_candidates(tokenizer).engines[0] if engine == "fast" else tokenizer
    encoder.encode_batch(["warm up"])
    start = time.perf_counter()
    for texts in batches:
        encoder.encode_batch(texts)
    return time.perf_counter() - start


def run_build(corpus: Path, model: Path, engine: str) -> tuple[float, float, int]:
    """(seconds of the whole build, of them before the first batch was encoded, peak bytes)."""
    marks: list[float] = []
    with tempfile.TemporaryDirectory(dir=corpus.parent) as out:
        start = time.perf_counter()
        build_store(
            [Feed(source=open_source(str(corpus)), fill=(("train", None),))],
            Path(out) / "store",
            tokenizer=open_tokenizer(str(model)),
            spec=BuildSpec(append_eot=True),
            engine=engine,
            on_progress=lambda _: marks.append(time.perf_counter()),
        )
        seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return seconds, marks[0] - start, peak


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


def speed_rows(folder: Path, size: int, repeats: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for label, model, engine, wanted in CASES:
        for kind in ("jsonl", "parquet"):
            ratios, bare_rates, build_rates, starts = [], [], [], []
            for _ in range(repeats):
                corpus = folder / f"corpus.{kind}"
                (bare,) = in_fresh_process("bare", corpus, folder / model, engine)
                whole, first, _ = in_fresh_process("build", corpus, folder / model, engine)
                proof = first if engine == "fast" else 0.0
                ratios.append(bare / (whole - proof))
                bare_rates.append(size / bare / 1e6)
                build_rates.append(size / (whole - proof) / 1e6)
                starts.append(proof)
            rows.append(
                {
                    "case": label,
                    "input": kind,
                    "bare_mb_s": round(statistics.median(bare_rates), 1),
                    "build_mb_s": round(statistics.median(build_rates), 1),
                    "ratio": round(statistics.median(ratios), 3),
                    "wanted": wanted,
                    "proof_s": round(statistics.median(starts), 2),
                }
            )
    return rows


def memory_rows(folder: Path) -> list[dict[str, object]]:
    """Peak memory of builds of growing input, each the same text several times over."""
    rows: list[dict[str, object]] = []
    base = (folder / "corpus.jsonl").read_bytes()
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
    parser.add_argument("--megabytes", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(*args.worker)
        return
    with tempfile.TemporaryDirectory(prefix="shardmill-bench-") as name:
        folder = Path(name)
        size = write_corpus(folder, args.data and Path(args.data), args.megabytes)
        train_models(folder)
        speed, memory = speed_rows(folder, size, args.repeats), memory_rows(folder)
    if args.json:
        print(json.dumps({"text_mb": round(size / 1e6, 1), "speed": speed, "memory": memory}))
        return
    print(f"{size / 1e6:.1f} MB of text")
    for row in speed:
        print(
            f"{row['case']:34} {row['input']:8} bare {row['bare_mb_s']:7} MB/s  build "
            f"{row['build_mb_s']:7} MB/s  ratio {row['ratio']:.2f} (wanted {row['wanted']:.2f})"
            f"  proof {row['proof_s']} s"
        )
    for row in memory:
        print(f"peak memory at {row['input']:3} {row['peak_mib']:7} MiB")


if __name__ == "__main__":
    main()
