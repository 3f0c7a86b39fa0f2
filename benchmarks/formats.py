"""How fast a store is built of each format of file, against JSON lines with the same texts.

    python benchmarks/formats.py [--data FOLDER] [--megabytes 60] [--rounds 5]

One process builds a store with the fast engine from one file; each build is a fresh process, and
the formats alternate. CPU seconds are compared, without the proof of the engine, which costs the
same for a megabyte and for a terabyte. A ratio compares two builds of one round: 1 is as fast as
JSON lines. Wanted: CSV at least 0.8, a JSON list at least 0.5.

Text: --data (or SHARDMILL_REAL_DATA) when there is one, then the Python sources on this machine.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from build import train_models
from texts import some_documents, text_bytes

from shardmill.building import BuildSpec, Feed, build_store
from shardmill.building import worker as engine_module
from shardmill.sources import open_source
from shardmill.tokenizers import ChosenEncoder, choose_encoder, open_tokenizer

LINES = "lines.jsonl"
FILES = (LINES, "table.csv", "table.tsv", "list.json", "file.arrow", "stream.arrow")
FILES += ("rows.parquet", "texts.tar", "texts.zip")


def write_files(folder: Path, texts: Sequence[str]) -> None:
    """The same texts in every format."""
    rows = [{"text": text} for text in texts]
    (folder / LINES).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "list.json").write_text(json.dumps(rows))
    for name, dialect in (("table.csv", "excel"), ("table.tsv", "excel-tab")):
        with (folder / name).open("w", newline="") as stream:
            writer = csv.DictWriter(stream, ["text"], dialect=dialect)
            writer.writeheader()
            writer.writerows(rows)
    table = pa.Table.from_pylist(rows)
    for name, new in (("file.arrow", pa.ipc.new_file), ("stream.arrow", pa.ipc.new_stream)):
        with pa.OSFile(str(folder / name), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=1000)
    pq.write_table(table, folder / "rows.parquet", row_group_size=1000)
    with (
        tarfile.open(folder / "texts.tar", "w") as tar,
        zipfile.ZipFile(folder / "texts.zip", "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for number, text in enumerate(texts):
            info = tarfile.TarInfo(f"texts/{number:08}.txt")
            data = text.encode()
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
            archive.writestr(info.name, data)


def run_build(path: Path, model: Path) -> float:
    """CPU seconds of a build, without the proof of its engine."""
    proof = 0.0

    def timed_choice(*arguments: object, **options: object) -> ChosenEncoder:
        nonlocal proof
        begin = time.process_time()
        chosen = choose_encoder(*arguments, **options)
        proof += time.process_time() - begin
        return chosen

    engine_module.choose_encoder = timed_choice
    tokenizer = open_tokenizer(str(model))
    tokenizer.encode_batch(["warm up"])
    with tempfile.TemporaryDirectory(dir=path.parent) as out:
        start = time.process_time()
        build_store(
            [Feed(source=open_source(str(path)), fill=(("train", None),))],
            Path(out) / "store",
            tokenizer=tokenizer,
            spec=BuildSpec(append_eot=True),
            engine="fast",
            workers=1,
        )
        return time.process_time() - start - proof


def measured(path: Path, model: Path) -> float:
    command = [sys.executable, __file__, "--one", str(path), "--model", str(model)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    real = os.environ.get("SHARDMILL_REAL_DATA")
    parser.add_argument("--data", type=Path, default=Path(real) if real else None)
    parser.add_argument("--megabytes", type=float, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(run_build(options.one, options.model))
        return
    with tempfile.TemporaryDirectory(prefix="shardmill-formats-") as name:
        folder = Path(name)
        texts = some_documents(options.data, options.megabytes)
        write_files(folder, texts)
        train_models(folder, folder / LINES, {"bpe"})
        seconds: dict[str, list[float]] = {file: [] for file in FILES}
        for number in range(options.rounds):
            shift = number % len(FILES)
            for file in FILES[shift:] + FILES[:shift]:
                seconds[file].append(measured(folder / file, folder / "bpe/tokenizer.json"))
    size = text_bytes(texts) / 1e6
    print(f"{len(texts):,} documents, {size:.0f} MB of text, {options.rounds} rounds")
    print(f"{'file':14}{'CPU s':>8}{'MB/s':>8}{'ratio':>8}")
    for file in FILES:
        pairs = zip(seconds[LINES], seconds[file], strict=True)
        ratio = statistics.median(lines / one for lines, one in pairs)
        median = statistics.median(seconds[file])
        print(f"{file:14}{median:8.2f}{size / median:8.1f}{ratio:8.2f}")


if __name__ == "__main__":
    main()
