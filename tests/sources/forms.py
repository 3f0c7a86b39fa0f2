"""Small files of every format with the same documents, and what a store that is built of one holds.

Run as a program, it builds stores of the files of a hub: `python -m tests.sources.forms OUT ADDRESS
FILE...` prints what each holds as a line of JSON. The client of the hub reads its environment when
it is imported.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

import shardmill
from shardmill.testing.stores import read_documents

TEXTS = ["one", 'two, "quoted"\nover lines', "d\u00e9j\u00e0 vu \U0001f600", "x" * 500, "five"]
ROWS: list[dict[str, Any]] = [{"id": n, "text": text} for n, text in enumerate(TEXTS)]
NULLS: list[dict[str, Any]] = [*ROWS[:3], {"id": 9, "text": None}, *ROWS[3:]]  # one is dropped
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
}


def csv_bytes(rows: Sequence[dict[str, Any]], **options: Any) -> bytes:
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, list(rows[0]), **options)
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue().encode()


def arrow_bytes(
    rows: Sequence[dict[str, Any]] | pa.Table, *, is_stream: bool = False, size: int = 2
) -> bytes:
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(list(rows))
    stream = io.BytesIO()
    new = pa.ipc.new_stream if is_stream else pa.ipc.new_file
    with new(stream, table.schema) as writer:
        writer.write_table(table, max_chunksize=size)
    return stream.getvalue()


def parquet_bytes() -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(NULLS), stream)
    return stream.getvalue()


def tar_bytes(members: Sequence[tuple[str, bytes]], **options: Any) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", **options) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def zip_bytes(members: Sequence[tuple[str, bytes]]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return stream.getvalue()


MEMBERS = [(f"texts/{n}.txt", text.encode()) for n, text in enumerate(TEXTS)]
MEMBERS += [("texts/x.bin", b"left out"), ("texts/x.py", b"\0 dropped")]
SAMPLES = [(f"s/{n}.json", json.dumps(row).encode()) for n, row in enumerate(NULLS)]
_PARTS = "".join(f"# {n}\n{text}\n" for n, text in enumerate(TEXTS)).encode()

# format -> the ending of a file, its bytes, the options it is read with, how it can be packed
FORMS: dict[str, tuple[str, bytes, dict[str, Any], str]] = {
    "text": (".txt", TEXTS[1].encode(), {}, "gz zst"),
    "code": (".py", TEXTS[1].encode(), {}, "gz zst"),
    "parts": (".md", _PARTS, {"split_on": "# [0-9]+"}, "gz zst"),
    "jsonl": (".jsonl", "".join(json.dumps(row) + "\n" for row in NULLS).encode(), {}, "gz zst"),
    "json": (".json", json.dumps({"n": 5, "rows": NULLS}, indent=1).encode(), {}, "gz zst"),
    "csv": (".csv", csv_bytes(ROWS), {}, "gz zst"),
    "tsv": (".tsv", csv_bytes(ROWS, delimiter="\t"), {}, "gz zst"),
    "parquet": (".parquet", parquet_bytes(), {}, ""),
    "arrow file": (".feather", arrow_bytes(NULLS), {}, "gz zst"),
    "arrow stream": (".arrow", arrow_bytes(NULLS, is_stream=True), {}, "gz zst"),
    "tar": (".tar", tar_bytes(MEMBERS), {}, "gz zst"),
    "webdataset": (".tar", tar_bytes(SAMPLES), {"field": "text"}, "gz zst"),
    "zip": (".zip", zip_bytes(MEMBERS), {}, ""),
}
CELLS = [
    (form, packing)
    for form, (*_, packings) in FORMS.items()
    for packing in ("", *(f".{one}" for one in packings.split()))
]


def file_of(form: str, packing: str) -> tuple[str, bytes]:
    """The name and the bytes of a file."""
    ending, data, *_ = FORMS[form]
    return f"{form.replace(' ', '-')}{ending}{packing}", PACKERS[packing](data)


def built(where: str, out: Path, options: dict[str, Any]) -> list[str]:
    """The documents of a store that is built of one input, then the ids of its drops."""
    shardmill.build(where, out, tokenizer="byte:1", eot="<|end|>", workers=1, **options)
    stored = read_documents(out, "train")
    dropped = out / "dropped.jsonl"
    lines = dropped.read_text().splitlines() if dropped.exists() else []
    ids = [json.loads(line)["id"].replace(".gz", "").replace(".zst", "") for line in lines]
    return [*(bytes(int(id) - 1 for id in ids if id).decode() for ids in stored), *ids]


if __name__ == "__main__":
    folder, address = Path(sys.argv[1]), sys.argv[2]
    for number, (form, packing) in enumerate(CELLS):
        url = f"{address}/{file_of(form, packing)[0]}"
        print(json.dumps(built(url, folder / str(number), FORMS[form][2])))
