"""Hosts of a cluster on one machine, as namespaces: each has its own network, name, processes and
disk, and a link to one switch that can be cut.

Nothing is made outside of these namespaces, no file in /run/netns and no address of this machine.
So two runs cannot meet, and nothing can be left: a host and all that runs on it ends with its first
process, which reads a pipe from this one until that is closed, also when this process is killed.

    with make_hosts(3) as hosts:
        s3 = LoopbackS3(hosts.address)
        with hosts.network():
            s3.start()  # in the switch, which all hosts reach
        cluster = RayOnHosts(hosts, environ)
        cluster.start()
        hosts[2].cut()
        wait_for(lambda: hosts[2].address not in cluster.alive())

It takes root and the command `ip`; elsewhere the test is skipped.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.building.clusters import short_folder
from tests.helpers import wait_for

NETWORK = "10.213.0"
SWITCH = f"{NETWORK}.254"
CLONE_NEWNET = 0x40000000

# All end with the first process in them, and that ends with this one.
_NAMESPACES = ("unshare", "--net", "--uts", "--mount", "--pid")
_NAMESPACES += ("--fork", "--kill-child", "--mount-proc")
# The first process of a host. Where that ignores SIGCHLD the kernel buries the orphans.
_FIRST = """
set -eu
echo "$1" >/proc/sys/kernel/hostname
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount --bind "$2" "$3"
ip link set lo up
echo ready
exec env --ignore-signal=CHLD cat
"""


@dataclass(frozen=True, eq=False)
class Host:
    """A machine of the cluster."""

    name: str
    address: str
    disk: Path  # its own disk, as its processes see it: the same path on every host
    files: Path  # what is on that disk, as this process sees it
    pid: int  # of its first process
    _switch: int  # the first process of the switch
    _started: list[subprocess.Popen[str]]  # on all hosts

    def environ(self) -> dict[str, str]:
        """Of processes here: home and temporary files are on the disk of this host, and no proxy
        is asked, which would not be in this network."""
        kept = {key: value for key, value in os.environ.items() if not _is_proxy(key)}
        places = {"HOME": "home", "TMPDIR": "tmp", "RAY_TMPDIR": "ray", "XDG_CACHE_HOME": "cache"}
        kept |= {key: str(self.disk / name) for key, name in places.items()}
        # whatever S3 server is asked from here, its log says by whom
        return {**kept, "PYTHONPATH": str(Path.cwd()), "AWS_ACCESS_KEY_ID": self.name}

    def run(
        self, argv: Sequence[str | Path], environ: Mapping[str, str] | None = None, **pipes: object
    ) -> subprocess.Popen[str]:
        """Start a command here; `environ` is added to that of the host.

        The process that is returned waits outside for the one inside, and ends as that does. A
        signal to it does not get inside: see `stop`."""
        command = [*_enter(self.pid, "--net", "--uts", "--mount", "--pid"), "env"]
        command += [f"--chdir={Path.cwd()}", *map(str, argv)]
        options = {"env": {**self.environ(), **(environ or {})}, "text": True, **pipes}
        # not in the foreground: Ctrl-C is for this process, which ends the hosts
        self._started.append(subprocess.Popen(command, start_new_session=True, **options))
        return self._started[-1]

    def processes(self, name: str = "") -> list[psutil.Process]:
        """Those that live here, or those of them whose program has this name; not the first."""
        found = []
        mine = Path(f"/proc/{self.pid}/ns/pid").readlink()
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                is_here = Path(f"/proc/{process.pid}/ns/pid").readlink() == mine
                if is_here and process.pid != self.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found += [process] if name in ("", Path(process.exe()).name) else []
        return found

    def kill(self, name: str = "") -> None:
        """Kill these processes, by default all, and wait until they are gone."""
        while found := self.processes(name):
            for process in found:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.01)

    def cut(self) -> None:
        """Pull the cable: nothing arrives, and nobody is told."""
        self._set_link("down")

    def restore(self) -> None:
        self._set_link("up")

    def _set_link(self, state: str) -> None:
        _ip(self._switch, f"link set {self.name} {state}")


@dataclass(frozen=True)
class Hosts:
    """Hosts that reach one another through a switch."""

    address: str  # of the switch, where servers of this process can listen
    _switch: int  # its first process
    _all: tuple[Host, ...]

    def __getitem__(self, number: int) -> Host:
        return self._all[number]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._all)

    @contextmanager
    def network(self) -> Iterator[None]:
        """In this block the calling thread is in the network of the switch, and so are sockets,
        threads and processes that it makes; they stay there."""
        with Path("/proc/thread-self/ns/net").open() as home:
            with Path(f"/proc/{self._switch}/ns/net").open() as switch:
                _set_network(switch.fileno())
            try:
                yield
            finally:
                _set_network(home.fileno())


@contextmanager
def make_hosts(count: int) -> Iterator[Hosts]:
    """Hosts `host-0`, `host-1` and so on. They end with the block, and all that runs on them."""
    _skip_where_not_permitted()
    started: list[subprocess.Popen[str]] = []
    made: list[Host] = []
    with short_folder() as folder, ExitStack() as stack:
        disk = folder / "d"
        disk.mkdir()
        stack.callback(lambda: [process.wait() for process in started])  # after the hosts' end
        switch = stack.enter_context(_namespaces("switch", folder / "s", disk))
        _ip(switch, "link add switch type bridge")
        _ip(switch, f"addr add {SWITCH}/24 dev switch")
        _ip(switch, "link set switch up")
        for number in range(count):
            name, files, address = f"host-{number}", folder / str(number), f"{NETWORK}.{number + 1}"
            pid = stack.enter_context(_namespaces(name, files, disk))
            _ip(switch, f"link add {name} type veth peer name eth0 netns {pid}")
            _ip(switch, f"link set {name} master switch up")
            _ip(pid, f"addr add {address}/24 dev eth0")
            _ip(pid, "link set eth0 up")
            for place in ("home", "tmp"):
                (files / place).mkdir()
            made.append(Host(name, address, disk, files, pid, switch, started))
        yield Hosts(SWITCH, switch, tuple(made))


@contextmanager
def _namespaces(name: str, files: Path, disk: Path) -> Iterator[int]:
    """The first process in new namespaces, where `files` are on `disk`; all end with the block."""
    files.mkdir()
    command = [*_NAMESPACES, "sh", "-c", _FIRST, "sh", name, str(files), str(disk)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **pipes) as outer:
        try:
            assert outer.stdout.readline() == "ready\n", f"{name} could not be made"
            (first,) = psutil.Process(outer.pid).children()
            yield first.pid
        finally:
            outer.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                outer.wait(10)  # when it has ended, so have all processes of its namespace
            outer.kill()


def stop(process: subprocess.Popen[str]) -> None:
    """End what `Host.run` has started, if it lives."""
    if process.poll() is None:
        for inside in psutil.Process(process.pid).children():
            inside.kill()
    process.wait()


def _skip_where_not_permitted() -> None:
    if shutil.which("ip") is None:
        pytest.skip("hosts are not tested: they need the command ip (apt-get install iproute2)")
    links = "ip link add switch type bridge && ip link add host type veth"
    tried = subprocess.run(
        [*_NAMESPACES, "sh", "-c", links], capture_output=True, text=True, check=False
    )
    if tried.returncode != 0:
        pytest.skip(f"hosts are not tested: no namespaces or links here: {tried.stderr.strip()}")


def _ip(pid: int, command: str) -> None:
    subprocess.run([*_enter(pid, "--net"), "ip", *command.split()], check=True)


def _enter(pid: int, *namespaces: str) -> list[str]:
    return ["nsenter", f"--target={pid}", *namespaces, "--"]


def _set_network(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12
    if libc.setns(descriptor, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns failed")


def _is_proxy(variable: str) -> bool:
    return variable.lower().endswith("_proxy")


# --- Ray


# Ray gives up a host after about 5 s of silence (its own settings: 65 s), and a host that was given
# up learns of it soon. Shorter times would give up hosts of a machine that is only busy.
_SETTINGS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "300",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "4",
    "RAY_raylet_liveness_self_check_interval_ms": "500",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3",
    "RAY_prestart_worker_first_driver": "0",  # they take as long to start as all else
    "RAY_enable_worker_prestart": "0",
}
_WATCH = """
import json, os, sys, time
import ray
address, path = sys.argv[1:]
ray.init(address=address, log_to_driver=False, logging_level="ERROR")
while True:
    alive = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
    with open(path + ".new", "w") as file:
        json.dump(alive, file)
    os.replace(path + ".new", path)
    time.sleep(0.1)
"""


class RayOnHosts:
    """A Ray with one CPU on each host, whose head is host 0. It ends with the hosts."""

    def __init__(self, hosts: Hosts, environ: Mapping[str, str]) -> None:
        """`environ` is added to the environment of its processes, and so of workers."""
        self._hosts = hosts
        self.address = f"{hosts[0].address}:6379"
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.environ = {**environ, **token, **_SETTINGS}  # a driver needs it, too
        self._nodes = hosts[0].files / "nodes.json"
        self._running: dict[Host, subprocess.Popen[str]] = {}

    def start(self) -> None:
        """Start Ray where it does not run, and wait until all hosts are in it."""
        wait_for(self._is_complete)

    def _is_complete(self) -> bool:
        """Whether all hosts are in it; starts Ray where it has ended."""
        head, *others = self._hosts
        if self._has_ended(head):
            for host in self._hosts:
                host.kill()
            self._nodes.unlink(missing_ok=True)
            self._start(head, "--head", "--port=6379", "--include-dashboard=false", "--no-monitor")
            wait_for(self._answers)
            watch = [sys.executable, "-c", _WATCH, self.address, head.disk / self._nodes.name]
            head.run(watch, self.environ)
        for host in others:
            if self._has_ended(host):
                host.kill()
                self._start(host, f"--address={self.address}")
        has_all = self.alive() == {host.address for host in self._hosts}
        return has_all and all(self._is_ready(host) for host in self._hosts)

    def alive(self) -> set[str]:
        """The addresses of hosts that are alive, as Ray says. Ask only while the head lives."""
        return set(json.loads(self._nodes.read_text())) if self._nodes.exists() else set()

    def _start(self, host: Host, *options: str) -> None:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options]
        command += [f"--node-ip-address={host.address}", f"--temp-dir={host.disk / 'ray'}"]
        command += ["--num-cpus=1", f"--object-store-memory={80 * 2**20}", "--disable-usage-stats"]
        command += ["--include-log-monitor=false"]
        with (host.files / "ray.log").open("w") as log:
            self._running[host] = host.run(command, self.environ, stdout=log, stderr=log)

    def _has_ended(self, host: Host) -> bool:
        """The command ends when one of its processes has died."""
        return host not in self._running or self._running[host].poll() is not None

    def _is_ready(self, host: Host) -> bool:
        """It is a second later than alive, and may be dead before Ray says so."""
        has_started = "Ray runtime started" in (host.files / "ray.log").read_text()
        return has_started and host.processes("raylet") != []

    def _answers(self) -> bool:
        """Whether the head takes connections."""
        host, _, port = self.address.partition(":")
        with self._hosts.network(), suppress(OSError):
            socket.create_connection((host, int(port)), timeout=1).close()
            return True
        return False
