"""What processes of this machine do beyond the contract of all engines."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardmill.building.engines.engine import pack
from shardmill.building.engines.local import LocalEngine
from shardmill.errors import BuildError
from tests.building.processes import lives, wait_for
from tests.building.tasks import Doing


@pytest.mark.slow
@pytest.mark.parametrize(("act", "words"), [("kill", "killed by signal 9"), ("exit", "code 7")])
def test_a_lost_task_tells_how_its_workers_died(tmp_path, act, words):
    with LocalEngine(1) as engine:
        (report,) = engine.run(0, iter([Doing("killer", at=0, act=act, folder=tmp_path)]))
    assert "killer: 3 workers died of it, the last one" in str(report.error)
    assert words in str(report.error)


@pytest.mark.slow
def test_workers_that_cannot_start_are_one_error_and_not_started_for_ever():
    refused = pytest.raises(BuildError, match=r"cannot start: exit code 1; .*resume=True")
    with LocalEngine(1, environ={"PYTHONHOME": "/nowhere"}) as engine, refused:
        list(engine.run(0, iter([Doing("never")])))


@pytest.mark.slow
def test_every_note_of_a_worker_that_dies_is_heard(tmp_path):
    with LocalEngine(1) as engine:
        reports = engine.run(0, iter([Doing("dies", at=2, act="kill once", folder=tmp_path)]))
        assert [report.note for report in reports] == [0, 1, 2, None]
    assert (tmp_path / "dies.begun").read_text() == "xx"


def test_closing_a_run_has_stopped_its_tasks_when_it_returns(tmp_path):
    with LocalEngine(1) as engine:
        reports = engine.run(0, iter([Doing("sleeper", at=1, act="sleep", folder=tmp_path)]))
        next(reports)
        pid = int((tmp_path / "sleeper.pid").read_text())
        assert lives(pid)
        reports.close()
        assert not lives(pid)


ORPHANS = """
import sys
from pathlib import Path
from shardmill.building.engines.local import LocalEngine
from tests.building.tasks import Doing
tasks = [Doing(name, at=1, act="sleep", folder=Path(sys.argv[1])) for name in "ab"]
for report in LocalEngine(2).run(0, iter(tasks)):
    print(report, flush=True)
"""


@pytest.mark.slow
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
    code = "from shardmill.building.engines.engine import pack\nclass Mine: pass\npack([Mine()])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Mine is defined in the script that was started" in done.stderr
