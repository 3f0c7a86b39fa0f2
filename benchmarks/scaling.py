"""Does a build take time in proportion to its input, and half of it with two workers?

    python benchmarks/scaling.py [--data FOLDER] [--megabytes 64] [--only fast] [--json]

Builds 1x, 2x, 4x and 8x of one corpus with one worker and with two, each in a fresh process, in
rounds: a ratio compares two builds of the same round, and a row is the median of the rounds. Asked
for: 8x the input in 8x the time (within 15 %); two workers at least 1.7 times as quick as one with
a reference engine, 1.3 times with the fastest, and 1.8 times for conversations; peak memory of the
largest process that does not grow from 4x to 8x. The clock leaves out the proof of the engine,
which takes the same seconds for a megabyte and for a terabyte; the start of workers counts. Exit
code 1 when anything is missed.

The reference engine is SentencePiece, which has one thread in a process. Hugging Face `tokenizers`
takes every core from one process already, so a second worker can give it nothing.

Two workers need two cores that nobody else uses: on a busy machine these numbers say nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from texts import some_documents

from shardmill.building import BuildSpec, Feed, build_chats, build_store
from shardmill.building import worker as engine_module
from shardmill.chat import bind_template, known_template
from shardmill.sources import open_chats, open_source
from shardmill.tokenizers import (
    ChosenEncoder,
    TrainSpec,
    choose_encoder,
    open_tokenizer,
    train_tokenizer,
)

TIMES = (1, 2, 4, 8)
CASES = {  # engine -> (share of the corpus in a file, files of 1x, model, wanted of two workers)
    "reference": (0.1, 2, "spm/spm.model", 1.7),
    "fast": (1.0, 3, "bpe/tokenizer.json", 1.3),
    "chats": (0.6, 2, "spm/spm.model", 1.8),
}
LINEAR = 0.15
FLAT = 1.25
UNIT_BYTES = {"reference": 8 * 2**20, "fast": 64 * 2**20, "chats": 8 * 2**20}
"""A grain, so that little input is work for two; and what is usual."""


def write_corpora(folder: Path, data: Path | None, megabytes: int) -> None:
    """<engine>-<times>/, folders of equal files by hard links, and two models of 16,000 ids."""
    texts = some_documents(data, megabytes)
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    chats = [json.dumps({"messages": list(turns_of(text))}) + "\n" for text in texts]
    for engine, (share, files, _, _) in CASES.items():
        kept = (chats if engine == "chats" else lines)[: round(len(lines) * share)]
        first = folder / f"{engine}.jsonl"
        with first.open("w") as file:
            file.writelines(kept)
        for times in TIMES:
            place = folder / f"{engine}-{times}"
            place.mkdir()
            for number in range(files * times):
                (place / f"{number:03d}.jsonl").hardlink_to(first)
    for name, kind in (("bpe", "byte-bpe"), ("spm", "bpe")):
        train_tokenizer(folder / name, texts=texts[::20], spec=TrainSpec(model_type=kind))


def turns_of(text: str) -> Iterator[dict[str, str]]:
    """A conversation: questions of 200 characters, answers of 800."""
    for start in range(0, max(len(text) - 200, 1), 1000):
        yield {"role": "user", "content": text[start : start + 200]}
        yield {"role": "assistant", "content": text[start + 200 : start + 1000] or "yes"}


def worker(corpus: str, model: str, engine: str, workers: str) -> None:
    """One build; prints its seconds without the proof of the engine, and the peak of a process."""
    proof = 0.0

    def timed_choice(*arguments: object, **options: object) -> ChosenEncoder:
        nonlocal proof
        begin = time.perf_counter()
        chosen = choose_encoder(*arguments, **options)  # type: ignore[arg-type]
        proof = time.perf_counter() - begin
        return chosen

    engine_module.choose_encoder = timed_choice
    tokenizer = open_tokenizer(model)
    how: dict[str, Any] = {"workers": int(workers), "unit_bytes": UNIT_BYTES[engine]}
    with tempfile.TemporaryDirectory(dir=Path(corpus).parent) as out:
        if engine == "chats":
            done = build_chats(
                open_chats(corpus),
                Path(out) / "store",
                template=bind_template(known_template("four-marker"), tokenizer),
                tokenizer=tokenizer,
                spec=BuildSpec(),
                **how,
            )
        else:
            done = build_store(
                [Feed(source=open_source(corpus), fill=(("train", None),))],
                Path(out) / "store",
                tokenizer=tokenizer,
                spec=BuildSpec(append_eot=True),
                engine=engine,  # type: ignore[arg-type]
                **how,
            )
    assert done.cost is not None
    if done.cost.num_workers != int(workers):  # one unit is built without workers
        sys.exit(f"{corpus}: too little input for {workers} workers: raise --megabytes")
    print(json.dumps([done.seconds - proof, done.cost.peak_bytes]))


def measure(folder: Path, engine: str, times: int, workers: int) -> tuple[float, int]:
    arguments = (folder / f"{engine}-{times}", folder / CASES[engine][2], engine, workers)
    command = [sys.executable, __file__, "--worker", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr.splitlines()[-1])
    seconds, peak = json.loads(done.stdout.splitlines()[-1])
    return float(seconds), int(peak)


def rows_of(folder: Path, engine: str, repeats: int) -> list[dict[str, object]]:
    """One row for each number of workers."""
    rounds = [
        {
            (times, workers): measure(folder, engine, times, workers)
            for times in TIMES
            for workers in (1, 2)
        }
        for _ in range(repeats)
    ]
    wanted = CASES[engine][3]
    rows: list[dict[str, object]] = []
    for workers in (1, 2):
        growth = statistics.median(one[8, workers][0] / one[1, workers][0] / 8 for one in rounds)
        memory = statistics.median(one[8, workers][1] / one[4, workers][1] for one in rounds)
        gain = statistics.median(one[8, 1][0] / one[8, workers][0] for one in rounds)
        rows.append(
            {
                "engine": engine,
                "workers": workers,
                "seconds_1x": round(statistics.median(one[1, workers][0] for one in rounds), 2),
                "seconds_8x": round(statistics.median(one[8, workers][0] for one in rounds), 2),
                "time_per_byte_8x_to_1x": round(growth, 3),
                "gain": round(gain, 2),
                "wanted_gain": wanted if workers == 2 else 1.0,
                "peak_mib": round(max(one[8, workers][1] for one in rounds) / 2**20, 1),
                "peak_8x_to_4x": round(memory, 3),
                "ok": growth <= 1 + LINEAR and memory <= FLAT and (workers == 1 or gain >= wanted),
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("SHARDMILL_REAL_DATA"))
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=list(CASES))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(*args.worker)
        return 0
    with tempfile.TemporaryDirectory(prefix="shardmill-scaling-") as name:
        write_corpora(Path(name), args.data and Path(args.data), args.megabytes)
        engines = [args.only] if args.only else list(CASES)
        rows = [row for engine in engines for row in rows_of(Path(name), engine, args.repeats)]
    if args.json:
        print(json.dumps(rows))
    else:
        for row in rows:
            print(
                f"{row['engine']:10} {row['workers']} workers  1x {row['seconds_1x']:7} s  8x "
                f"{row['seconds_8x']:7} s  time per byte x{row['time_per_byte_8x_to_1x']}  gain "
                f"{row['gain']} (wanted {row['wanted_gain']})  peak {row['peak_mib']} MiB, "
                f"x{row['peak_8x_to_4x']}  {'ok' if row['ok'] else 'MISSED'}"
            )
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
