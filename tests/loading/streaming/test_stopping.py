"""A stream can be stopped at any moment: by closing, by Ctrl-C, in a forked child."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardmill.compat.chomp import build_train_iterator, open_stream
from shardmill.errors import OptionError
from shardmill.threads import StoppedError, pause, read_ahead, wait_for
from tests.helpers import is_in
from tests.helpers import wait_for as wait_for_condition
from tests.services import Fault, LoopbackHub

ENDLESS: dict[str, Any] = {  # a batch takes hours
    "data": {"backend": "local_text", "local_text": ["abc", "def"], "tokenizer": {"kind": "byte"}},
    "train": {"seq_len": 2**24, "batch_size": 1},
    "model": {"eos_token_id": 256},
}
SMALL: dict[str, Any] = {**ENDLESS, "train": {"seq_len": 8, "batch_size": 1}}


def test_an_interrupt_from_another_thread_ends_a_reader_that_waits_for_ever() -> None:
    interrupt, ended = threading.Event(), threading.Event()

    def waits() -> Iterator[int]:
        try:
            pause(3600)
            yield 1
        finally:
            ended.set()

    threading.Timer(0.2, interrupt.set).start()
    with pytest.raises(StoppedError):
        next(read_ahead(waits(), interrupt=interrupt))
    assert ended.is_set()  # the thread too


def test_closing_ends_a_thread_that_waits_for_a_result() -> None:
    waiting, never = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:

        def waits() -> Iterator[int]:
            yield 1
            waiting.set()
            wait_for(pool.submit(never.wait))

        items = read_ahead(waits())
        assert next(items) == 1
        assert waiting.wait(600)
        items.close()
        never.set()


def test_items_made_before_a_shared_stop_are_still_given() -> None:
    stop = threading.Event()

    def outer() -> Iterator[int]:
        with closing(read_ahead(iter(range(3)), stop=stop)) as inner:
            yield from inner

    items = read_ahead(outer(), depth=3, stop=stop)
    first = next(items)
    wait_for_condition(stop.is_set)  # the inner one has ended, and closing it stops both threads
    assert [first, *items] == [0, 1, 2]


def test_a_result_that_timed_out_is_raised_as_such() -> None:
    def late() -> int:
        raise TimeoutError("the line is slow")

    with ThreadPoolExecutor(1) as pool:
        items = read_ahead(wait_for(pool.submit(late)) for _ in range(1))
        with pytest.raises(TimeoutError, match="the line is slow"):
            next(items)


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 2, None])
def test_closing_does_not_wait_for_the_batch_that_is_being_made(prefetch: int | None) -> None:
    if prefetch is None:
        stream: Any = open_stream(ENDLESS)
    else:
        pytest.importorskip("grain")
        stream = build_train_iterator(ENDLESS, overrides=[f"data.grain_prefetch={prefetch}"])
    before = stream.get_state()
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            next(stream)
        except OptionError as error:
            errors.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    package = "shardmill/loading/" if prefetch is None else "shardmill/trainers/"
    wait_for_condition(lambda: is_in(asking, package))
    asking.join(0.5)
    assert asking.is_alive()
    stream.close()
    assert stream.get_state() == before
    with pytest.raises(OptionError, match=r"was closed; (make|open) a new one"):
        next(stream)
    if prefetch != 2:  # there the consumer waits for Grain's own queue
        asking.join(600)
        assert "was closed while it made a batch" in str(errors[0])


def refused(stream: Iterator[Any]) -> None:
    with pytest.raises(OptionError, match="was closed while it made a batch"):
        next(stream)


@pytest.mark.slow
def test_a_second_thread_on_one_stream_is_refused() -> None:
    with open_stream(ENDLESS) as stream:
        asking = threading.Thread(target=refused, args=(stream,))
        asking.start()
        wait_for_condition(lambda: is_in(asking, "shardmill/loading/"))
        asking.join(0.5)
        with pytest.raises(OptionError, match="two threads use this iterator"):
            next(stream)
        stream.close()
        asking.join(600)
        assert not asking.is_alive()


def test_a_grain_iterator_says_that_it_does_not_follow_into_a_fork() -> None:
    pytest.importorskip("grain")
    with build_train_iterator(SMALL) as stream:
        next(stream)
        child = os.fork()
        if not child:
            signal.alarm(600)
            try:
                next(stream)
            except OptionError as error:
                stream.close()  # must not wait for the parent's thread
                os._exit(0 if "before the process forked" in str(error) else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        next(stream)
        with pytest.raises(OptionError, match="cannot be pickled"):
            stream.__reduce__()


def test_a_batch_larger_than_the_data_is_announced_once(caplog: pytest.LogCaptureFixture) -> None:
    with open_stream(SMALL, overrides=["train.seq_len=64"]) as stream:
        next(stream), next(stream)
    assert caplog.text.count("one batch passed over the data") == 1


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "prefetch"), [("refuses", 0), ("stalls", 2)])
def test_ctrl_c_ends_a_stream_whose_hub_does_not_answer(
    tmp_path: Path, prefetch: int, fault: str
) -> None:
    pytest.importorskip("datasets")
    pytest.importorskip("grain")
    (tmp_path / "docs").mkdir()
    for number in range(4):
        table = pa.table({"text": [f"text {number} {row} " * 50 for row in range(200)]})
        name = tmp_path / f"docs/train-{number:05d}-of-00004.parquet"
        pq.write_table(table, name, row_group_size=20, compression="none")
    config = {
        "data": {
            "backend": "hf",
            "hf_dataset": "own/docs",
            "max_retries": 1000,
            "grain_prefetch": prefetch,
            "tokenizer": {"kind": "byte"},
        },
        "train": {"seq_len": 64, "batch_size": 2},
        "model": {"eos_token_id": 256},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    trouble: dict[str, Any] = {"status": 503} if fault == "refuses" else {"delay": 4.0}
    with LoopbackHub() as hub:
        hub.publish("own/docs", tmp_path / "docs")
        hub.faults.append(Fault(path="train-", times=10**6, skip=6, method="GET", **trouble))
        environment = {**hub.environment(tmp_path), "HF_HUB_DOWNLOAD_TIMEOUT": "5"}
        command = [sys.executable, "-m", "shardmill", "stream", "config.json", "--steps", "100000"]
        with subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
        ) as process:
            asked = len(hub.requests)
            while process.poll() is None and not _is_stuck(hub, asked):
                threading.Event().wait(0.1)
            process.send_signal(signal.SIGINT)
            printed = process.communicate(timeout=600)[1]
    assert process.returncode == 130, printed
    assert "Traceback" not in printed
    assert "Fatal Python error" not in printed


def _is_stuck(hub: LoopbackHub, asked: int) -> bool:
    """The fault has struck: it serves six requests well."""
    data = [request for request in hub.requests[asked:] if "train-" in request.path]
    return len([one for one in data if one.method == "GET"]) > 6 or any(
        one.status == 503 for one in data
    )
