"""What `protocols.Engine` promises, of processes on this machine."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardmill.engines import LocalEngine, pack
from shardmill.errors import BuildError, SourceError
from shardmill.protocols import TaskReport
from tests.engines.tasks import Doing


@pytest.fixture
def engine() -> Iterator[LocalEngine]:
    with LocalEngine(2) as opened:
        yield opened


def run(engine: LocalEngine, *tasks: Doing, tools: int = 0) -> list[TaskReport]:
    return list(engine.run(tools, iter(tasks)))


def told(reports: list[TaskReport], task: int) -> list[object]:
    """Notes, then "end", or the error, of one task."""
    mine = [report for report in reports if report.task == task]
    return [
        "end" if report.ended else report.error if report.error is not None else report.note
        for report in mine
    ]


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited a minute"
        time.sleep(0.02)


def test_every_task_tells_its_notes_in_order_and_its_end(engine):
    reports = run(engine, *(Doing(f"t{n}", count=n) for n in range(5)), tools=10)
    for number in range(5):
        assert told(reports, number) == [*range(10, 10 + number), "end"]
    assert engine.usage().cpu_seconds > 0
    assert engine.usage().peak_bytes > 2**20


def test_a_task_is_taken_only_when_a_slot_is_free(engine):
    taken = []

    def tasks() -> Iterator[Doing]:
        for number in range(6):
            taken.append(number)
            yield Doing(f"t{number}")

    ended = 0
    for report in engine.run(0, tasks()):
        ended += report.ended
        assert len(taken) - ended <= engine.slots
    assert taken == list(range(6))


def test_an_error_of_a_task_comes_out_with_its_class_and_words(engine):
    reports = run(engine, Doing("bad", at=1, act="raise"), Doing("good"), Doing("odd", 1, 0, "odd"))
    assert told(reports, 1) == [0, 1, 2, "end"]
    note, error = told(reports, 0)
    assert note == 0
    assert isinstance(error, SourceError)
    assert str(error) == "bad: no good"
    assert "tasks.py" in error.__notes__[0], "where it was raised"
    (odd,) = told(reports, 2)
    assert isinstance(odd, BuildError)
    assert str(odd) == "OddError: one and two"


def test_what_a_worker_logs_is_logged_here(engine, caplog):
    with caplog.at_level(logging.INFO):
        run(engine, Doing("far", at=0, act="log"))
    assert ("tests.far", logging.WARNING, "far says 7") in caplog.record_tuples


def test_a_worker_that_dies_is_replaced_and_its_task_run_again(engine, tmp_path):
    tasks = [Doing("dies", at=2, act="kill once", folder=tmp_path), Doing("good")]
    reports = run(engine, *tasks)
    assert told(reports, 0) == [0, 1, 0, 1, 2, "end"]
    assert told(reports, 1) == [0, 1, 2, "end"]


@pytest.mark.parametrize(("act", "words"), [("kill", "killed by signal 9"), ("exit", "code 7")])
def test_a_task_that_kills_three_workers_is_lost_and_the_others_are_done(
    engine, tmp_path, act, words
):
    reports = run(engine, Doing("killer", at=0, act=act, folder=tmp_path), *map(Doing, "abcd"))
    (error,) = told(reports, 0)
    assert isinstance(error, BuildError)
    assert "killer: 3 workers died of it" in str(error)
    assert words in str(error)
    assert [report.lost for report in reports if report.task == 0] == [True]
    assert len((tmp_path / "killer.begun").read_text()) == 3
    assert all(told(reports, number) == [0, 1, 2, "end"] for number in range(1, 5))


def test_closing_a_run_stops_its_tasks_at_once_and_the_engine_goes_on(engine, tmp_path):
    reports = engine.run(0, iter([Doing("sleeper", at=1, act="sleep", folder=tmp_path)]))
    assert next(reports).note == 0
    pid = int((tmp_path / "sleeper.pid").read_text())
    assert lives(pid)
    reports.close()
    assert not lives(pid)
    assert told(run(engine, Doing("next")), 0) == [0, 1, 2, "end"]


def test_a_worker_that_died_idle_is_replaced(engine, tmp_path):
    run(engine, Doing("one", folder=tmp_path))
    pid = int((tmp_path / "one.pid").read_text())
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not lives(pid))
    assert told(run(engine, Doing("two")), 0) == [0, 1, 2, "end"]


ORPHANS = """
import sys
from pathlib import Path
from shardmill.engines import LocalEngine
from tests.engines.tasks import Doing
tasks = [Doing(name, at=1, act="sleep", folder=Path(sys.argv[1])) for name in "ab"]
for report in LocalEngine(2).run(0, iter(tasks)):
    print(report, flush=True)
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_workers_die_with_their_parent(tmp_path, end):
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHANS, str(tmp_path)], stdout=subprocess.PIPE, cwd=Path.cwd()
    )
    assert parent.stdout is not None
    for _ in range(2):
        assert parent.stdout.readline()
    pids = [int((tmp_path / f"{name}.pid").read_text()) for name in "ab"]
    assert all(map(lives, pids))
    parent.send_signal(end)
    parent.wait()
    parent.stdout.close()
    wait_for(lambda: not any(map(lives, pids)))


def test_what_cannot_travel_is_refused_with_the_reason():
    with pytest.raises(pickle.PicklingError, match="cannot travel"):
        pack(lambda: None)
    code = "from shardmill.engines import pack\nclass Mine: pass\npack([Mine()])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Mine is defined in the script that was started" in done.stderr
