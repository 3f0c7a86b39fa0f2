"""A process that reads a hub for the tests: jobs in on stdin, answers out on stdout, JSON lines.

It runs on its own because the client reads HF_ENDPOINT and HF_HOME when it is imported. Its pauses
between tries are shortened; the tries and the faults are real.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub.utils._http as client_http

from shardmill.errors import ShardmillError
from shardmill.sources import (
    BatchLimits,
    HubParquetSource,
    HubSource,
    iter_rows,
    open_hub,
    open_source,
)
from shardmill.sources.formats import parquet
from shardmill.storage import ranges
from shardmill.testing.sources import (
    account,
    assert_cut_is_the_source,
    assert_divides_exactly,
    assert_ledger_balances,
    assert_resumes_exactly,
)

LIMITS = BatchLimits(num_bytes=1200, num_documents=17)
KINDS = {
    "rows": HubSource,
    "parquet": HubParquetSource,
    "best": open_hub,
    "named": lambda dataset, **options: open_source(f"hub:{dataset}", **options),
}


def source_of(job: dict[str, Any]) -> Any:
    """`kind` says which source; `piece` = [at_least, number] is one of its pieces; `block` is the
    most that is asked for at a request."""
    parquet.blocks_of = partial(ranges.blocks_of, block=job.get("block", ranges.BLOCK_BYTES))
    options = dict(job.get("options", {}))
    if options.get("shuffle"):
        options["shuffle"] = tuple(options["shuffle"])
    source = KINDS[job.get("kind", "rows")](job["dataset"], limits=LIMITS, **options)
    if "piece" in job:
        at_least, number = job["piece"]
        return source.divide(at_least)[number]
    return source


def read(job: dict[str, Any]) -> dict[str, Any]:
    """Read from a cursor to the end, or some batches; an error ends it with what was read."""
    batches = []
    error: list[str] = []
    try:
        source = source_of(job)
        for batch in islice(source.batches(job.get("cursor")), job.get("max_batches")):
            batches.append(batch)
    except ShardmillError as found:
        error = [type(found).__name__, str(found)]
    total = account(batches)
    return {
        "texts": total.texts,
        "num_read": total.num_read,
        "counts": total.counts,
        "drops": [[drop.id, drop.reason] for drop in total.drops],
        "cursor": batches[-1].cursor if batches else None,
        "num_batches": len(batches),
        "error": error,
    }


def describe(job: dict[str, Any]) -> dict[str, Any]:
    return source_of(job).describe()


def guarantees(job: dict[str, Any]) -> dict[str, Any]:
    assert_ledger_balances(source_of(job))
    return {"texts": assert_resumes_exactly(lambda: source_of(job)).texts}


def kind(job: dict[str, Any]) -> str:
    return type(source_of(job)).__name__


def divided(job: dict[str, Any]) -> list[int]:
    return assert_divides_exactly(lambda: source_of(job), at_least=job["at_least"])


def pieces(job: dict[str, Any]) -> list[dict[str, Any]]:
    return [piece.describe() for piece in source_of(job).divide(job["at_least"])]


def cut(job: dict[str, Any]) -> list[dict[str, Any]]:
    pieces = assert_cut_is_the_source(source_of(job), job["size"])
    assert all(piece.files for piece in pieces), "only a stream has no files"
    return [piece.describe() for piece in pieces]


def is_whole(job: dict[str, Any]) -> bool:
    """Whether the source is its only piece."""
    source = source_of(job)
    (piece,) = source.cut(1)
    return piece is source


def sent(job: dict[str, Any]) -> list[str]:
    """The pieces as they go to other processes."""
    return [pickle.dumps(piece).hex() for piece in source_of(job).cut(job["size"])]


def received(job: dict[str, Any]) -> list[str]:
    return account(pickle.loads(bytes.fromhex(job["piece"])).batches()).texts


def far(job: dict[str, Any]) -> dict[str, Any]:
    """Files of a dataset, by fsspec's client of the hub; `dataset` is the address."""
    source = open_source(job["dataset"], limits=LIMITS)
    pieces = assert_cut_is_the_source(source, job["size"])
    found = assert_resumes_exactly(lambda: open_source(job["dataset"], limits=LIMITS))
    drops = [[drop.id, drop.reason] for drop in found.drops]
    facts = {"describe": source.describe(), "num_pieces": len(pieces), "drops": drops}
    return {"texts": found.texts, **facts}


def rows(job: dict[str, Any]) -> list[dict[str, Any]]:
    return list(iter_rows(job["dataset"], **job.get("options", {})))


def direct(job: dict[str, Any]) -> list[str]:
    """What the client itself gives, without shardmill."""
    stream = datasets.load_dataset(job["dataset"], split="train", streaming=True)
    if job.get("shuffle"):
        seed, buffer_size = job["shuffle"]
        stream = stream.shuffle(seed=seed, buffer_size=buffer_size)
    return [row["text"] for row in stream]


JOBS = {
    job.__name__: job
    for job in (
        *(read, describe, guarantees, kind, divided, pieces, cut, is_whole, sent, received),
        *(far, rows, direct),
    )
}


def main() -> None:
    client_http.time = SimpleNamespace(sleep=lambda seconds: time.sleep(seconds / 100))
    datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0.01  # after every shuffled stream; is 5 s
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer = {"result": JOBS[job["do"]](job)}
        except (ShardmillError, AssertionError) as error:
            answer = {"raised": [type(error).__name__, str(error)]}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


main()
