"""What every `Engine` promises: processes of this machine, and Ray."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator

import pytest

from shardmill.building.engines.engine import Engine, Task, TaskReport
from shardmill.building.engines.local import LocalEngine
from shardmill.errors import BuildError, SourceError
from tests.building.clusters import ray_nodes
from tests.building.processes import lives, wait_for
from tests.building.tasks import Doing, Stepping


@pytest.fixture(scope="module")
def ray_engine() -> Iterator[Engine]:
    from shardmill.building.engines.ray import RayCluster, RayEngine

    with (
        ray_nodes(2) as nodes,
        RayCluster(nodes.address) as cluster,
        RayEngine(cluster, 2) as opened,
    ):
        yield opened


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.slow)])
def engine(request) -> Iterator[Engine]:
    if request.param == "ray":
        yield request.getfixturevalue("ray_engine")
        return
    with LocalEngine(2) as opened:
        yield opened


def run(engine: Engine, *tasks: Task, tools: int = 0) -> list[TaskReport]:
    return list(engine.run(tools, iter(tasks)))


def reported(reports: list[TaskReport], task: int) -> list[object]:
    """Notes, then "end", or the error, of one task."""
    mine = [report for report in reports if report.task == task]
    return [
        "end" if report.ended else report.error if report.error is not None else report.note
        for report in mine
    ]


def test_every_task_reports_its_notes_in_order_and_its_end(engine):
    reports = run(engine, *(Doing(f"t{n}", count=n) for n in range(5)), tools=10)
    for number in range(5):
        assert reported(reports, number) == [*range(10, 10 + number), "end"]
    assert engine.usage().cpu_seconds > 0
    assert engine.usage().peak_bytes > 2**20


@pytest.mark.slow
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


@pytest.mark.slow
def test_an_error_of_a_task_comes_out_with_its_class_and_words(engine):
    reports = run(engine, Doing("bad", at=1, act="raise"), Doing("good"), Doing("odd", 1, 0, "odd"))
    assert reported(reports, 1) == [0, 1, 2, "end"]
    note, error = reported(reports, 0)
    assert note == 0
    assert isinstance(error, SourceError)
    assert str(error) == "bad: no good"
    assert "tasks.py" in error.__notes__[0], "where it was raised"
    (odd,) = reported(reports, 2)
    assert isinstance(odd, BuildError)
    assert str(odd) == "OddError: one and two"


@pytest.mark.slow
def test_what_a_worker_logs_is_logged_here(engine, caplog):
    with caplog.at_level(logging.INFO):
        run(engine, Doing("remote", at=0, act="log"))
    assert ("tests.worker", logging.WARNING, "remote says 7") in caplog.record_tuples


@pytest.mark.slow
def test_a_worker_that_dies_is_replaced_and_its_task_run_again(engine, tmp_path):
    tasks = [Doing("dies", at=2, act="kill once", folder=tmp_path), Doing("good")]
    reports = run(engine, *tasks)
    assert reported(reports, 0) == [0, 1, 2, "end"]
    assert reported(reports, 1) == [0, 1, 2, "end"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "act"), [("local", "kill"), ("local", "exit"), ("ray", "kill")], indirect=["engine"]
)
def test_a_task_that_kills_three_workers_is_lost_and_the_others_are_done(engine, tmp_path, act):
    reports = run(engine, Doing("killer", at=0, act=act, folder=tmp_path), *map(Doing, "abcd"))
    (error,) = reported(reports, 0)
    assert isinstance(error, BuildError)
    assert "killer: 3 workers died of it" in str(error)
    assert [report.lost for report in reports if report.task == 0] == [True]
    assert len((tmp_path / "killer.begun").read_text()) == 3
    assert all(reported(reports, number) == [0, 1, 2, "end"] for number in range(1, 5))


@pytest.mark.slow
def test_closing_a_run_stops_its_tasks_at_once_and_the_engine_goes_on(engine, tmp_path):
    reports = engine.run(0, iter([Doing("sleeper", at=1, act="sleep", folder=tmp_path)]))
    assert next(reports).note == 0
    pid = int((tmp_path / "sleeper.pid").read_text())
    assert lives(pid)
    reports.close()
    wait_for(lambda: not lives(pid))
    assert reported(run(engine, Doing("next")), 0) == [0, 1, 2, "end"]


@pytest.mark.slow
def test_a_worker_that_died_idle_is_replaced(engine, tmp_path):
    run(engine, Doing("one", folder=tmp_path))
    pid = int((tmp_path / "one.pid").read_text())
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not lives(pid))
    assert reported(run(engine, Doing("two")), 0) == [0, 1, 2, "end"]


@pytest.mark.slow
def test_a_step_that_was_noted_is_never_done_again(engine, tmp_path):
    """What was heard of the first attempt is not repeated by the second."""
    reports = run(engine, Stepping("stepper", 5, tmp_path))
    notes = reported(reports, 0)
    assert notes == [0, 1, 2, 3, 4, "end"]
    done = [int(word) for word in (tmp_path / "done").read_text().split()]
    assert done[:3] == [0, 1, 2], "then its worker died"
    again = done[3]  # the first that was not heard
    assert done[3:] == list(range(again, 5))
    assert again == 2 or not isinstance(engine, LocalEngine), "here every note is heard"
