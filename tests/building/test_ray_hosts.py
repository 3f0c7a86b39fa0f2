"""The command on Ray with three hosts that have no disk in common: one is cut off, one loses its
Ray, the head dies. Input and, in half of the cases, output are on an S3 server that all reach.

Each file of the input is a unit. The server answers workers about the later ones only when the test
says so, so a fault comes in the middle of a build however fast the machine is.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tests.building.hosts import Host, Hosts, RayOnHosts, make_hosts, stop
from tests.helpers import wait_for
from tests.services import LoopbackS3

pytestmark = pytest.mark.slow

NUM_FILES = 12
HELD_FROM = 5
CHUNK_BYTES = 24_000
NAMES = {"host-0", "host-1", "host-2"}
# The command itself, but for chunks of a size that suits the corpus.
COMMAND = f"""
from shardmill.building import plan
from shardmill.cli import main
plan.CHUNK_BYTES = {CHUNK_BYTES}
main()
"""


class HeldS3(LoopbackS3):
    """Workers wait for answers about the later files until they are released.

    Who asks shows in the access key: a worker has that of its host, the coordinator its own.
    """

    def __init__(self, hosts: Hosts) -> None:
        super().__init__(hosts.address)
        self._hosts = hosts
        self._changed = threading.Condition()
        self._waiting: list[tuple[str, object]] = []
        self._holds = False

    def hold(self) -> None:
        self._holds = True

    def release(self) -> None:
        """Answer everybody, from now on."""
        with self._changed:
            self._holds = False
            self._waiting.clear()
            self._changed.notify_all()

    def answer(self, host: str) -> None:
        """Answer what waits from this host, and hold what it asks next."""
        with self._changed:
            self._waiting = [entry for entry in self._waiting if entry[0] != host]
            self._changed.notify_all()

    def waiting(self) -> set[str]:
        """Hosts with a request that waits."""
        return {host for host, _ in self._waiting}

    def forward(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, bytes, list[tuple[str, str]]]:
        key = re.search(r"Credential=([^/]+)/", headers.get("Authorization", ""))
        file = re.search(r"/corpus/(\d+)\.jsonl", path)
        with self._changed:
            if key and key[1] in NAMES and file and int(file[1]) >= HELD_FROM and self._holds:
                entry = key[1], object()
                self._waiting.append(entry)
                self._changed.wait_for(lambda: entry not in self._waiting)
        return super().forward(method, path, body, headers)

    def ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The answer to a request from this process, which is never held."""
        key = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request"
        headers = {"Host": "localhost", "Authorization": key}
        with self._hosts.network():
            status, answer, _ = super().forward(method, path, body, headers)
        assert status == 200, answer
        return answer

    def files_below(self, prefix: str) -> dict[str, bytes]:
        """Every object of the bucket `data` whose name begins so, without that."""
        listing = self.ask("GET", f"/data?list-type=2&max-keys=1000&prefix={prefix}").decode()
        keys = re.findall(r"<Key>([^<]*)</Key>", listing)
        return {key.removeprefix(prefix): self.ask("GET", f"/data/{key}") for key in keys}


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with make_hosts(3) as made:
        yield made


@pytest.fixture(scope="module")
def server(hosts) -> Iterator[HeldS3]:
    """With a corpus of many small files."""
    draw = np.random.default_rng(5)
    server = HeldS3(hosts)
    with hosts.network():
        server.start()
    server.ask("PUT", "/data")
    for number in range(NUM_FILES):
        server.ask("PUT", f"/data/corpus/{number:02}.jsonl", some_lines(draw, number))
    yield server
    server.stop()


def some_lines(draw: np.random.Generator, number: int) -> bytes:
    """Documents of more than half a chunk, at most one chunk, in all."""
    data = b""
    while len(data) < CHUNK_BYTES * 3 // 4:
        text = f"{number} " + "caf\u00e9 word " * int(draw.integers(0, 80))
        data += json.dumps({"text": text}).encode() + b"\n"
    return data


@pytest.fixture
def s3(server) -> Iterator[HeldS3]:
    server.hold()
    yield server
    server.release()


@pytest.fixture(scope="module")
def ray(hosts, server) -> RayOnHosts:
    return RayOnHosts(hosts, access_to(server))


@pytest.fixture
def cluster(hosts, ray) -> Iterator[RayOnHosts]:
    """With all hosts, whatever happened to them before."""
    ray.start()
    yield ray
    for host in hosts:
        host.restore()


def access_to(server: LoopbackS3) -> dict[str, str]:
    """The settings of its clients but for the key, which is that of the host."""
    names = ("AWS_ENDPOINT_URL", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")
    return {name: server.environment()[name] for name in names}


class Builds:
    """Builds on host 0 with one output: a folder on its disk, or a URL of the server."""

    def __init__(self, host: Host, server: HeldS3, environ: dict[str, str], out: str) -> None:
        self._host, self._server, self._out = host, server, out
        self._environ = {**access_to(server), **environ, "AWS_ACCESS_KEY_ID": "coordinator"}
        self._errors = host.files / "errors.txt"
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *options: str) -> subprocess.Popen[str]:
        where = self._out if "://" in self._out else str(self._host.disk / self._out)
        words = ["build", "s3://data/corpus/*.jsonl", "--out", where, "--tokenizer", "byte"]
        words += ["--no-append-eot", "--shard-bytes", "40000", "--val-tokens", "3000"]
        words += ["--unit-bytes", str(CHUNK_BYTES), *options]
        command = [sys.executable, "-c", COMMAND, *words]
        with self._errors.open("w") as errors:
            pipes = {"stdout": subprocess.DEVNULL, "stderr": errors}
            self._started.append(self._host.run(command, self._environ, **pipes))
        return self._started[-1]

    def end(self, build: subprocess.Popen[str], *, code: int = 0) -> str:
        """Wait for the end of a build, with this exit code; returns its messages."""
        wait_for(lambda: build.poll() is not None)
        messages = self._errors.read_text()
        assert build.wait() == code, messages
        return messages

    def stop(self) -> None:
        """End what a failed test left running."""
        for build in self._started:
            stop(build)

    def files(self) -> dict[str, str]:
        """The hash of every file of the store, by relative name."""
        if "://" in self._out:
            found = self._server.files_below(self._out.removeprefix("s3://data/") + "/")
        else:
            folder = self._host.files / self._out
            paths = [path for path in folder.rglob("*") if path.is_file()]
            found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        return {name: hashlib.sha256(data).hexdigest() for name, data in found.items()}


@pytest.fixture(scope="module")
def wanted(hosts, server) -> dict[str, str]:
    """What one process makes of the corpus."""
    builds = Builds(hosts[0], server, {}, "one")
    builds.end(builds.start("--workers", "1"))
    return builds.files()


@pytest.fixture(params=["folder", "s3"])
def builds(request, hosts, s3, cluster) -> Iterator[Builds]:
    name = request.node.name.partition("[")[0]
    out = {"folder": name, "s3": f"s3://data/{name}"}[request.param]
    found = Builds(hosts[0], s3, cluster.environ, out)
    yield found
    found.stop()


def start_on_all(builds: Builds, cluster: RayOnHosts, s3: HeldS3) -> subprocess.Popen[str]:
    """A build in its middle: a worker on each host has done something, or waits to begin."""
    build = builds.start("--run-on", "ray", "--ray-address", cluster.address, "--workers", "3")
    wait_for(lambda: s3.waiting() == NAMES or build.poll() is not None)
    assert build.poll() is None, builds.end(build)
    return build


def test_three_hosts_write_the_bytes_of_one_process(builds, cluster, s3, wanted):
    build = start_on_all(builds, cluster, s3)
    s3.release()
    builds.end(build)
    assert builds.files() == wanted


def test_a_host_that_is_cut_off_and_comes_back_costs_nothing_but_time(
    builds, cluster, s3, hosts, wanted
):
    build = start_on_all(builds, cluster, s3)
    hosts[2].cut()
    wait_for(lambda: hosts[2].address not in cluster.alive())
    hosts[2].restore()
    s3.answer("host-2")  # the worker that was given up goes on
    wait_for(lambda: not hosts[2].processes("raylet"))  # it was told that it is dead
    cluster.start()
    s3.answer("host-2")  # whatever that worker asked last
    wait_for(lambda: "host-2" in s3.waiting() or build.poll() is not None)  # a new one has work
    s3.release()
    assert "(with its machine, host-2); it runs again" in builds.end(build)
    assert builds.files() == wanted


def test_a_host_that_loses_its_ray_costs_nothing_but_time(builds, cluster, s3, hosts, wanted):
    build = start_on_all(builds, cluster, s3)
    hosts[2].kill("raylet")
    wait_for(lambda: hosts[2].address not in cluster.alive())
    s3.release()
    assert "(with its machine, host-2); it runs again" in builds.end(build)
    assert builds.files() == wanted


def test_when_the_head_dies_the_build_can_be_resumed_without_ray(
    builds, cluster, s3, hosts, wanted
):
    build = start_on_all(builds, cluster, s3)
    hosts[0].kill("gcs_server")
    # Ray itself ends the process: shardmill gets no chance to say a word
    assert "Failed to connect to GCS" in builds.end(build, code=1)
    assert "meta.json" not in builds.files()
    s3.release()
    builds.end(builds.start("--workers", "2", "--resume"))
    assert builds.files() == wanted
