"""Every run of the tests starts as on a new machine and must leave nothing behind.

The run gets a new HOME and a new TMPDIR, no setting that points to caches of earlier runs, and no
hub but those on loopback. It fails, and names what it found, when at its end

- a process that a test started is still alive, or
- something was written that is in no temporary folder of pytest: in HOME, at the top of TMPDIR, or
  in the repository. Where `tools/as_new.sh` says that the whole machine is ours, /tmp, /var/tmp,
  /dev/shm and the user's real home are compared as well.

A worker of pytest-xdist looks for its own processes; the process that started it looks at files.
"""

from __future__ import annotations

import ctypes
import getpass
import os
import pwd
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

# Settings that would bring in what earlier runs left, or send files to where nobody looks.
FORGOTTEN = (
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_TOKEN", "TRANSFORMERS_CACHE"),
    *("TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "MPLCONFIGDIR"),
    *("RAY_TMPDIR", "RAY_ADDRESS", "SE_CACHE_PATH"),
    "PYTHONDONTWRITEBYTECODE",  # each of the many processes would compile everything again
)
# Folders in the repository that belong to tools, by name.
TOOLS = {".git", ".venv", ".venv-peers", "__pycache__"}
TOOLS |= {".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"}
# Folders that multiprocessing leaves in TMPDIR when one of its processes is killed by a test.
KILLED = "pymp-"
# Python's own helper of multiprocessing: it ends with the process that started it.
ALLOWED = ("from multiprocessing.resource_tracker import main",)
PATIENCE_SECONDS = 30.0
PR_SET_CHILD_SUBREAPER = 36

KEY = pytest.StashKey["Watch"]()

# Hypothesis must not fail on a busy machine either, and draws the same examples in every run: what
# passed here passes elsewhere. SHARDMILL_EXPLORE=1 draws new ones.
settings.register_profile(
    "patient",
    settings(),
    deadline=None,
    derandomize="SHARDMILL_EXPLORE" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("patient")


class Watch:
    """What was there before the tests, and what was found to be left after them."""

    def __init__(self, config: pytest.Config) -> None:
        self.left: list[str] = []
        self.folder: Path | None = None
        # Orphans become children of this process, so that all descendants can be found.
        with suppress(AttributeError, OSError):
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # Started in the background by a shell, we and our children would ignore Ctrl-C.
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if not hasattr(config, "workerinput"):
            self.root = config.rootpath
            self.folder = self._move_in()
            self.before = set(self._files())

    def _move_in(self) -> Path:
        """New empty folders for this process and all that it starts."""
        self.temporary = Path(os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir()))
        folder = Path(tempfile.mkdtemp(prefix="sm-"))
        self.places = [folder / "home", folder / "t"]
        for place in self.places:
            place.mkdir()
        for name in FORGOTTEN:
            os.environ.pop(name, None)
        os.environ["HOME"], os.environ["TMPDIR"] = map(str, self.places)
        tempfile.tempdir = None  # so that Python looks at TMPDIR again
        os.environ["HF_HUB_OFFLINE"] = "1"  # from the start: the client reads it when imported
        if os.environ.get("SHARDMILL_OWN_MACHINE"):
            real_home = Path(pwd.getpwuid(os.getuid()).pw_dir)
            self.places += [Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"), real_home]
        return folder

    def _files(self) -> Iterator[str]:
        """All files of the repository, and what is at the top of the other places."""
        for place, folders, files in os.walk(self.root):
            folders[:] = [name for name in folders if name not in TOOLS]
            if Path(place) == self.temporary:  # below the repository
                folders.clear()
            yield from (str(Path(place, name)) for name in (*files, *folders))
        for top in self.places:
            with suppress(FileNotFoundError, PermissionError):
                yield from map(str, top.iterdir())

    def look_for_files(self) -> None:
        assert self.folder is not None
        own = {str(self.folder), str(self.temporary / f"pytest-of-{_user()}")}
        new = sorted(set(self._files()) - self.before - own)
        for path in new:
            if str(Path(path).parent) not in new and not Path(path).name.startswith(KILLED):
                self.left.append(f"written outside of the temporary folders: {_listing(path)}")

    def look_for_processes(self) -> None:
        """Those that are about to end get time for it."""
        limit = time.monotonic() + PATIENCE_SECONDS
        while (found := _descendants()) and time.monotonic() < limit:
            psutil.wait_procs(found, timeout=0.5)
        for process in found:
            with suppress(psutil.NoSuchProcess):
                self.left.append(f"process {process.pid} is alive: {_describe(process)}")
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def move_out(self, *, keep: bool) -> None:
        if self.folder is not None and not keep:
            shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_the_disk() -> Iterator[None]:
    """`os.fsync` returns at once: no test can see what a power cut would leave, and thousands of
    small stores are written here. Processes that tests start and kill still sync, and a test that
    needs clean pages calls `os.fdatasync`."""

    def fsync(descriptor: int) -> None:
        os.fstat(descriptor)  # a closed file is still an error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Caches of this user, such as the proofs of tokenizer engines, are in a temporary folder."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "torch"))
        yield


def pytest_configure(config: pytest.Config) -> None:
    config.stash[KEY] = Watch(config)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    """A worker of xdist has ended: what it found is ours to report."""
    output = getattr(node, "workeroutput", {})
    node.config.stash[KEY].left += output.get("left", [])


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config, watch = session.config, session.config.stash[KEY]
    watch.look_for_processes()
    if hasattr(config, "workerinput"):
        config.workeroutput["left"] = watch.left
        return
    watch.look_for_files()
    if watch.left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    watch = config.stash[KEY]
    if watch.left:
        terminalreporter.section("left behind by tests", red=True, bold=True)
        for line in watch.left:
            terminalreporter.write_line(line)


def pytest_unconfigure(config: pytest.Config) -> None:
    watch = config.stash.get(KEY, None)
    if watch is not None:
        watch.move_out(keep=any("written" in line for line in watch.left))


def _descendants() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            words = " ".join(process.cmdline())
            if process.status() != psutil.STATUS_ZOMBIE and not any(ok in words for ok in ALLOWED):
                found.append(process)
    return found


def _describe(process: psutil.Process) -> str:
    """Its command line, and the test that ran when it was started."""
    words = " ".join(process.cmdline())[:300] or process.name()
    test = ""
    with suppress(psutil.Error):
        test = process.environ().get("PYTEST_CURRENT_TEST", "")
    return f"{words} (started in {test})" if test else words


def _listing(path: str) -> str:
    """A path, and for a folder some of what is in it."""
    inside = sorted(str(one.relative_to(path)) for one in Path(path).rglob("*"))[:5]
    return f"{path} with {', '.join(inside)}" if inside else path


def _user() -> str:
    """As pytest names its folder."""
    try:
        return getpass.getuser()
    except (ImportError, OSError, KeyError):
        return "unknown"
