"""The command on Ray with three hosts: one is cut off and comes back, the head dies.

Input, and most outputs, are on an S3 server that all reach; the hosts have no disk in common.

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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.building.hosts import Host, Hosts, RayOnHosts, make_hosts, stop
from tests.helpers import wait_for
from tests.services import LoopbackS3

pytestmark = pytest.mark.slow

NUM_FILES = 12
HELD_FROM = 5
LATER_FILES = r" /data/corpus/(0[5-9]|1\d)\.jsonl"
SHARDS = r"PUT /data/.*/shard_"
CHUNK_BYTES = 24_000
NAMES = {"host-0", "host-1", "host-2"}
# The command itself, but for chunks of a size that suits the corpus.
COMMAND = f"""
from shardmill.building import plan
from shardmill.cli import main
plan.CHUNK_BYTES = {CHUNK_BYTES}
main()
"""


@dataclass(eq=False)
class Held:
    """A request that waits for its answer, and whose client may be gone meanwhile."""

    host: str
    request: str
    is_late: bool = False  # waits until the test says that it arrives
    status: int | None = None  # of the answer


class HeldS3(LoopbackS3):
    """Workers wait for answers to what is held of their host.

    Who asks shows in the access key: a worker has that of its host, the coordinator its own.
    """

    def __init__(self, hosts: Hosts) -> None:
        super().__init__(hosts.address)
        self._hosts = hosts
        self._changed = threading.Condition()
        self._patterns: dict[str, str] = {}  # by host
        self._held: list[Held] = []

    def hold(self, pattern: str, *hosts: str) -> None:
        """Hold what looks so, and nothing else, of these hosts."""
        self._change({**self._patterns, **dict.fromkeys(hosts, pattern)})

    def release(self) -> None:
        """Answer everybody, from now on."""
        self._change({})

    def _change(self, patterns: dict[str, str]) -> None:
        with self._changed:
            self._patterns = patterns
            self._held = [one for one in self._held if self._is_held(one)]
            self._changed.notify_all()

    def waiting(self, pattern: str = "") -> set[str]:
        """Hosts with a request that waits and looks so."""
        with self._changed:
            return {one.host for one in self._held if re.search(pattern, one.request)}

    def delay(self, host: str) -> list[Held]:
        """Whatever waits from this host is on its way until it `arrives`."""
        with self._changed:
            late = [one for one in self._held if one.host == host]
            self._held = [one for one in self._held if one.host != host]
            for one in late:
                one.is_late = True
            return late

    def arrive(self, late: list[Held]) -> list[int | None]:
        """The statuses of the answers to late requests."""
        with self._changed:
            for one in late:
                one.is_late = False
            self._changed.notify_all()
        wait_for(lambda: all(one.status for one in late))
        return [one.status for one in late]

    def _is_held(self, one: Held) -> bool:
        pattern = self._patterns.get(one.host)
        return one.is_late or (pattern is not None and bool(re.search(pattern, one.request)))

    def forward(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, bytes, list[tuple[str, str]]]:
        key = re.search(r"Credential=([^/]+)/", headers.get("Authorization", ""))
        one = Held(key[1] if key else "", f"{method} {path}")
        with self._changed:
            if self._is_held(one):
                self._held.append(one)
                self._changed.wait_for(lambda: not self._is_held(one))
                self._held = [other for other in self._held if other is not one]
        answer = super().forward(method, path, body, headers)
        one.status = answer[0]
        return answer

    def ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The answer to a request from this process, which is never held."""
        key = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request"
        headers = {"Host": "localhost", "Authorization": key}
        with self._hosts.network():
            status, answer, _ = super().forward(method, path, body, headers)
        assert status == 200, answer
        return answer

    def names_below(self, prefix: str) -> list[str]:
        """Every object of the bucket `data` whose name begins so, without that."""
        listing = self.ask("GET", f"/data?list-type=2&max-keys=1000&prefix={prefix}").decode()
        return [key.removeprefix(prefix) for key in re.findall(r"<Key>([^<]*)</Key>", listing)]


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
    server.hold(LATER_FILES, *NAMES)
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
    """Builds with one output: a folder, or a URL of the server."""

    def __init__(self, server: HeldS3, environ: dict[str, str], out: str | Path) -> None:
        self._server, self._out = server, str(out)
        # Ray's own limit leaves time to say a word: see `_HEAD_SECONDS`
        environ = {**environ, "RAY_gcs_rpc_server_reconnect_timeout_s": "15"}
        self._environ = {**access_to(server), **environ, "AWS_ACCESS_KEY_ID": "coordinator"}
        self._errors: dict[subprocess.Popen[str], Path] = {}

    def start(self, host: Host, *options: str) -> subprocess.Popen[str]:
        words = ["build", "s3://data/corpus/*.jsonl", "--out", self._out, "--tokenizer", "byte"]
        words += ["--no-append-eot", "--shard-bytes", "40000", "--val-tokens", "3000"]
        words += ["--unit-bytes", str(CHUNK_BYTES), *options]
        command = [sys.executable, "-c", COMMAND, *words]
        path = host.files / "errors.txt"
        with path.open("w") as errors:
            pipes = {"stdout": subprocess.DEVNULL, "stderr": errors}
            build = host.run(command, self._environ, **pipes)
        self._errors[build] = path
        return build

    def end(self, build: subprocess.Popen[str], *, code: int = 0) -> str:
        """Wait for the end of a build, with this exit code; returns its messages."""
        wait_for(lambda: build.poll() is not None)
        messages = self._errors[build].read_text()
        assert build.wait() == code, messages
        return messages

    def stop(self) -> None:
        """End what a failed test left running."""
        for build in self._errors:
            stop(build)

    def names(self) -> list[str]:
        """Of everything below the URL."""
        return self._server.names_below(self._out.removeprefix("s3://data/") + "/")

    def files(self) -> dict[str, str]:
        """The hash of every file of the store, by relative name."""
        if "://" in self._out:
            prefix = self._out.removeprefix("s3:/")
            found = {name: self._server.ask("GET", f"{prefix}/{name}") for name in self.names()}
        else:
            paths = [path for path in Path(self._out).rglob("*") if path.is_file()]
            found = {path.relative_to(self._out).as_posix(): path.read_bytes() for path in paths}
        return {name: hashlib.sha256(data).hexdigest() for name, data in found.items()}


@pytest.fixture(scope="module")
def wanted(hosts, server, tmp_path_factory) -> dict[str, str]:
    """What one process makes of the corpus."""
    builds = Builds(server, {}, tmp_path_factory.mktemp("wanted") / "one")
    builds.end(builds.start(hosts[0], "--workers", "1"))
    return builds.files()


@pytest.fixture
def make_builds(s3, cluster) -> Iterator[Callable[[str | Path], Builds]]:
    made: list[Builds] = []

    def make(out: str | Path) -> Builds:
        made.append(Builds(s3, cluster.environ, out))
        return made[-1]

    yield make
    for builds in made:
        builds.stop()


@pytest.fixture
def builds(request, make_builds) -> Builds:
    return make_builds(f"s3://data/{request.node.name}")


def start_on_all(
    builds: Builds, cluster: RayOnHosts, s3: HeldS3, host: Host
) -> subprocess.Popen[str]:
    """A build in its middle: a worker on each host waits for one of the later files."""
    build = builds.start(host, *on_ray(cluster))
    wait_for(lambda: s3.waiting() == NAMES or build.poll() is not None)
    assert build.poll() is None, builds.end(build)
    return build


def on_ray(cluster: RayOnHosts) -> tuple[str, ...]:
    return ("--run-on", "ray", "--ray-address", cluster.address, "--workers", "3")


def units_in(names: Iterable[str], pattern: str) -> list[int]:
    """The numbers of units in the names of their files."""
    return sorted(int(found[1]) for name in names if (found := re.search(pattern, name)))


def test_a_folder_that_hosts_do_not_share_is_refused(make_builds, cluster, s3, hosts):
    s3.release()
    builds = make_builds(hosts[0].disk / "store")
    messages = builds.end(builds.start(hosts[0], *on_ray(cluster)), code=2)
    assert re.search(
        r"shardmill: .*/store: is not there on host-[12]: workers write the store themselves, so "
        "its folder must be one that all machines share, or a URL\n$",
        messages,
    )


def test_three_hosts_write_the_bytes_of_one_process(
    make_builds, cluster, s3, hosts, wanted, tmp_path
):
    """To a folder that they share; the other tests write to the server."""
    builds = make_builds(tmp_path / "store")  # on no disk of a host
    build = start_on_all(builds, cluster, s3, hosts[0])
    s3.release()
    builds.end(build)
    assert builds.files() == wanted


def test_a_host_that_is_cut_off_and_comes_back_costs_nothing_but_time(
    builds, cluster, s3, hosts, wanted
):
    build = start_on_all(builds, cluster, s3, hosts[0])
    s3.hold(SHARDS, "host-2")  # it goes on, and sends a shard,
    wait_for(lambda: "host-2" in s3.waiting(SHARDS))
    late = s3.delay("host-2")  # which is on its way until the build has ended
    s3.hold(LATER_FILES, "host-2")
    hosts[2].cut()
    wait_for(lambda: hosts[2].address not in cluster.alive())
    hosts[2].restore()
    wait_for(lambda: not hosts[2].processes("raylet"))  # it was told that it is dead
    cluster.start()
    wait_for(lambda: "host-2" in s3.waiting() or build.poll() is not None)  # a new one has work
    s3.release()
    assert "(with its machine, host-2); it runs again" in builds.end(build)
    assert builds.files() == wanted
    assert s3.arrive(late) == [412], "the shard is there"
    assert builds.files() == wanted


def test_when_the_head_dies_the_build_is_resumed_on_another_host_without_ray(
    builds, cluster, s3, hosts, wanted
):
    build = start_on_all(builds, cluster, s3, hosts[1])
    hosts[0].kill()
    messages = builds.end(build, code=2)
    said = f"Ray's head at {cluster.address} does not answer any more; finished work is kept: "
    assert said in messages
    assert messages.endswith("continue with --resume (also without Ray)\n")
    wait_for(lambda: not any(host.processes("raylet") for host in hosts))
    made = units_in(builds.names(), r"(\d+)\.receipt$")
    assert made == list(range(HELD_FROM))
    assert "meta.json" not in builds.names()
    s3.release()
    s3.requests.clear()
    builds.end(builds.start(hosts[2], "--workers", "2", "--resume"))
    assert builds.files() == wanted
    sent = [one.path for one in s3.requests if one.method == "PUT"]
    assert units_in(sent, r"/shard_0*(\d+)\.bin$") == list(range(HELD_FROM, NUM_FILES))
