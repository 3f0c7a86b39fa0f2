"""A stream from the hub, killed without warning: a new process gives the very next batch."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.services import Fault, LoopbackHub

pytest.importorskip("datasets")
pytest.importorskip("grain")
pytestmark = pytest.mark.slow

NUM_FILES, NUM_GROUPS, GROUP_ROWS = 6, 4, 12
NOISE = 8000  # bytes per row of a column that is not read, after the texts of each row group
GROUP_BYTES = GROUP_ROWS * NOISE
WORKER = str(Path(__file__).with_name("hub_worker.py"))


def texts_of(file: int) -> list[str]:
    rng = random.Random(file)
    rows = NUM_GROUPS * GROUP_ROWS
    lengths = [rng.randrange(1, 40) for _ in range(rows)]
    words = [[f"{rng.randrange(10**6)}" for _ in range(length)] for length in lengths]
    return [f"file {file} row {row}: {' '.join(words[row])}" for row in range(rows)]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackHub]:
    root = tmp_path_factory.mktemp("hub")
    (root / "docs/data").mkdir(parents=True)
    (root / "lines").mkdir()
    for file in range(NUM_FILES):
        table = pa.table({"text": texts_of(file), "noise": [b"\0" * NOISE] * len(texts_of(file))})
        name = f"docs/data/train-{file:05d}-of-{NUM_FILES:05d}.parquet"
        pq.write_table(
            table, root / name, row_group_size=GROUP_ROWS, compression="none", use_dictionary=False
        )
        lines = [json.dumps({"text": text}) + "\n" for text in texts_of(file)]
        (root / f"lines/train-{file}.jsonl").write_text("".join(lines))
    with LoopbackHub() as running:
        running.publish("own/docs", root / "docs")
        running.publish("own/lines", root / "lines")
        yield running


class Trainer:
    """Runs the worker, whole or until it is killed."""

    def __init__(self, hub: LoopbackHub, home: Path, **data: Any) -> None:
        self.hub, self.home = hub, home
        chosen: dict[str, Any] = {"backend": "hf", "hf_dataset": "own/docs", "seed": 3}
        chosen |= {"shuffle_buffer_size": 70, "state_update_interval": 16, "retry_delay_sec": 0.05}
        chosen |= {"tokenizer": {"kind": "byte", "byte_offset": 1, "add_eos": True}, **data}
        train = {"seq_len": 64, "batch_size": 2, "grad_accum": 3}
        config = {"data": chosen, "train": train, "model": {"eos_token_id": 0}}
        (home / "config.json").write_text(json.dumps(config))

    def run(
        self, num_batches: int, state: Any = None, kill_after: int | None = None
    ) -> list[dict[str, Any]]:
        """What it printed; with `kill_after`, SIGKILL once that many batches were seen."""
        command = [sys.executable, "-W", "ignore", WORKER, "config.json", str(num_batches)]
        if state is not None:
            (self.home / "state.json").write_text(json.dumps(state))
            command.append("state.json")
        environment = {**self.hub.environment(self.home), "HF_HUB_DOWNLOAD_TIMEOUT": "5"}
        printed: list[dict[str, Any]] = []
        with (
            (self.home / "stderr").open("a") as errors,
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                cwd=self.home,
            ) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                printed.append(json.loads(line))
                if len(printed) == kill_after:
                    process.kill()
                    break
        wanted = -9 if kill_after is not None else 0
        assert process.returncode == wanted, (self.home / "stderr").read_text()
        return printed


@pytest.fixture(scope="module")
def whole(
    hub: LoopbackHub, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Any]], range]:
    """What one epoch prints, and which requests the hub got meanwhile."""
    start = len(hub.requests)
    printed = Trainer(hub, tmp_path_factory.mktemp("whole"), repeat=False).run(10_000)
    return printed, range(start, len(hub.requests))


def batches_of(printed: list[dict[str, Any]]) -> list[str]:
    return [line["batch"] for line in printed]


@pytest.mark.parametrize(
    ("dataset", "packing", "parts"),
    [("own/docs", "bin", (45, 85)), ("own/lines", "sequential", (130,))],
)
def test_a_killed_stream_resumes_with_the_very_next_batch(
    hub: LoopbackHub, tmp_path: Path, dataset: str, packing: str, parts: tuple[int, ...]
) -> None:
    trainer = Trainer(
        hub, tmp_path, hf_dataset=dataset, packing_mode=packing, packing_buffer_docs=50
    )
    # 288 documents of about 150 bytes: an epoch is over after about 115 batches
    lines = trainer.run(160)
    whole = batches_of(lines)
    assert len(set(whole)) == len(whole) == 160
    assert '"epoch":1' in lines[-1]["state"]["streams"]["0"]
    seen: list[dict[str, Any]] = []
    for part in (*parts, None):  # the last kill is in the second epoch
        state = seen[-1]["state"] if seen else None
        seen += trainer.run(160 - len(seen), state, kill_after=part)
    assert batches_of(seen) == whole


def test_a_resumed_stream_does_not_read_finished_shards_again(
    hub: LoopbackHub, tmp_path: Path, whole: tuple[list[dict[str, Any]], range]
) -> None:
    printed, requests = whole
    before = len(hub.requests)
    late = len(printed) * 4 // 5
    rest = Trainer(hub, tmp_path, repeat=False).run(10_000, printed[late]["state"])
    assert batches_of(rest) == batches_of(printed)[late + 1 :]
    groups = groups_read(hub, requests.start, requests.stop)
    again = groups_read(hub, before, len(hub.requests))
    # the order of row groups is drawn; four fifths are done but for the block in the middle
    assert len(groups) == NUM_FILES * NUM_GROUPS
    assert again < groups
    assert len(again) <= len(groups) // 2


def ranges_read(hub: LoopbackHub, start: int, stop: int) -> list[tuple[int, range]]:
    """File and bytes of all data that were fetched by the requests start..stop."""
    found = []
    for request in hub.requests[start:stop]:
        name = re.search(r"train-(\d+)-of", request.path)
        edges = re.match(r"bytes=(\d+)-(\d+)", request.range or "")
        if name and edges and request.method == "GET":
            asked = range(int(edges[1]), int(edges[2]) + 1)
            if asked.stop < NUM_GROUPS * GROUP_BYTES:  # else it is the footer
                found.append((int(name[1]), asked))
    return found


def groups_read(hub: LoopbackHub, start: int, stop: int) -> set[tuple[int, int]]:
    """(file, row group) of all texts that were fetched, each by itself."""
    found = ranges_read(hub, start, stop)
    assert max(len(asked) for _, asked in found) < GROUP_BYTES
    return {(file, round(asked.start / GROUP_BYTES)) for file, asked in found}


def test_a_stream_in_file_order_opens_the_file_and_row_group_of_its_state(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    trainer = Trainer(hub, tmp_path, repeat=False, shuffle=False)
    whole = trainer.run(10_000)
    late = len(whole) * 9 // 10  # in the sixth of six files
    before = len(hub.requests)
    rest = trainer.run(10_000, whole[late]["state"])
    assert batches_of(rest) == batches_of(whole)[late + 1 :]
    assert {file for file, _ in ranges_read(hub, before, len(hub.requests))} == {5}


def test_faults_in_mid_stream_change_no_batch(
    hub: LoopbackHub, tmp_path: Path, whole: tuple[list[dict[str, Any]], range]
) -> None:
    trainer = Trainer(hub, tmp_path, repeat=False)
    hub.faults += [
        Fault(path="train-00002", status=503, times=2, skip=2, method="GET"),
        Fault(path="train-00004", drop_after=900, times=3, skip=1, method="GET"),
    ]
    try:
        assert batches_of(trainer.run(10_000)) == batches_of(whole[0])
        assert all(fault.times == 0 for fault in hub.faults)
    finally:
        hub.faults.clear()
