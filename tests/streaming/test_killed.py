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

from shardmill.testing.hub import Fault, LoopbackHub

pytest.importorskip("datasets")
pytest.importorskip("grain")
pytestmark = pytest.mark.slow

NUM_FILES, NUM_GROUPS, GROUP_ROWS = 6, 5, 20
WORKER = str(Path(__file__).with_name("hub_worker.py"))


def texts_of(file: int) -> list[str]:
    rng = random.Random(file)
    rows = NUM_GROUPS * GROUP_ROWS
    return [f"file {file} row {row}: " + "word " * rng.randrange(1, 60) for row in range(rows)]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackHub]:
    root = tmp_path_factory.mktemp("hub")
    (root / "docs/data").mkdir(parents=True)
    (root / "lines").mkdir()
    for file in range(NUM_FILES):
        table = pa.table({"text": texts_of(file), "noise": [b"\0" * 400] * len(texts_of(file))})
        name = f"docs/data/train-{file:05d}-of-{NUM_FILES:05d}.parquet"
        pq.write_table(table, root / name, row_group_size=GROUP_ROWS, compression="none")
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
        """What it printed; with `kill_after`, SIGKILL once so many batches were seen."""
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


def batches_of(printed: list[dict[str, Any]]) -> list[str]:
    return [line["batch"] for line in printed]


@pytest.mark.parametrize("dataset", ["own/docs", "own/lines"])
@pytest.mark.parametrize("packing", ["sequential", "bin"])
def test_a_killed_stream_goes_on_with_the_very_next_batch(
    hub: LoopbackHub, tmp_path: Path, dataset: str, packing: str
) -> None:
    trainer = Trainer(
        hub, tmp_path, hf_dataset=dataset, packing_mode=packing, packing_buffer_docs=50
    )
    # 600 documents of about 160 bytes: an epoch is about 250 batches, so the end is in the second
    whole = batches_of(trainer.run(330))
    assert len(whole) == 330
    assert len(set(whole)) == 330
    seen: list[dict[str, Any]] = []
    for part in (90, 130, None):
        state = seen[-1]["state"] if seen else None
        seen += trainer.run(330 - len(seen), state, kill_after=part)
    assert batches_of(seen) == whole


def test_a_resumed_stream_does_not_read_finished_shards_again(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    trainer = Trainer(hub, tmp_path, repeat=False)
    whole = trainer.run(10_000)
    state = whole[len(whole) * 3 // 4]["state"]
    asked_whole = ranges_by_file(hub, since=0)
    assert len(asked_whole) == NUM_FILES
    before = len(hub.requests)
    rest = trainer.run(10_000, state)
    assert batches_of(rest) == batches_of(whole)[len(whole) * 3 // 4 + 1 :]
    asked = ranges_by_file(hub, since=before)
    # row groups come in a shuffled order, each from its own range of bytes; three quarters are done
    assert data_bytes(asked) < 0.45 * data_bytes(asked_whole)


def ranges_by_file(hub: LoopbackHub, *, since: int) -> dict[str, set[tuple[int, int]]]:
    """The byte ranges that were fetched of each data file."""
    found: dict[str, set[tuple[int, int]]] = {}
    for request in hub.requests[since:]:
        name = re.search(r"train-\d+[^/?]*", request.path)
        edges = re.match(r"bytes=(\d+)-(\d+)", request.range or "")
        if name and edges and request.method == "GET":
            found.setdefault(name[0], set()).add((int(edges[1]), int(edges[2])))
    return found


def data_bytes(ranges: dict[str, set[tuple[int, int]]]) -> int:
    return sum(stop - start for file in ranges.values() for start, stop in file)


def test_a_stream_in_file_order_opens_the_file_and_row_group_of_its_state(
    hub: LoopbackHub, tmp_path: Path
) -> None:
    trainer = Trainer(hub, tmp_path, repeat=False, shuffle=False)
    whole = trainer.run(10_000)
    middle = len(whole) * 2 // 3  # in the fifth of six files
    before = len(hub.requests)
    rest = trainer.run(10_000, whole[middle]["state"])
    assert batches_of(rest) == batches_of(whole)[middle + 1 :]
    touched = {int(name[6:11]) for name in ranges_by_file(hub, since=before)}
    assert touched <= {0, 4, 5}  # the first file's footer may say which column is the text
    assert {4, 5} <= touched


def test_faults_in_mid_stream_change_no_batch(hub: LoopbackHub, tmp_path: Path) -> None:
    trainer = Trainer(hub, tmp_path, repeat=False)
    whole = batches_of(trainer.run(10_000))
    hub.faults += [
        Fault(path="train-00002", status=503, times=2, skip=2, method="GET"),
        Fault(path="train-00004", drop_after=900, times=3, skip=1, method="GET"),
    ]
    try:
        assert batches_of(trainer.run(10_000)) == whole
        assert all(fault.times == 0 for fault in hub.faults)
    finally:
        hub.faults.clear()
