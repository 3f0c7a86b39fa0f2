"""Only one push or build at a time changes a remote folder. Below, a build is a push too.

A push first writes a claim, a small file with a random name that no other push writes to, and then
lists the folder. It continues only if no other push that may be alive has a claim there. This is
enough on any file system whose listing shows every file written before it: of two pushes, the one
that wrote its claim later sees the claim of the other. If each sees the other, the one with the
higher name withdraws and the one with the lower name waits until it has.

A push rewrites its claim every `BEAT` seconds. The claim of a killed push stays. It is ignored and
removed if its process is known to be dead (same machine), or if it did not change for `DEAD`
seconds. A push that could not write its own claim for `LOST` seconds stops before that.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from shardmill.errors import ShardmillError, StoreError, StoreNotFoundError
from shardmill.remote.folder import Listing, RemoteFolder
from shardmill.storage.retry import RetryPolicy

log = logging.getLogger(__name__)

CLAIM = ".shardmill-push-"
"""How the names of claims begin."""

BEAT, LOST, DEAD = 5.0, 20.0, 60.0
PATIENCE = 10.0
"""Seconds that a push waits for another one to withdraw."""

_CLAIM_BYTES = 600
_active: set[str] = set()  # names of the claims that pushes of this process hold


class ClaimedError(StoreError):
    """Another push or build is at work in the folder."""


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a claim: which push is at work, for the next push that finds it."""

    pushing: str  # sha256 of the manifest; "build"
    host: str
    machine: str | None  # differs between machines, boots and containers; None: unknown
    pid: int
    started: int  # when the process started, as the kernel counts
    at_work: bool  # False: it is still checking whether it is alone
    beat: int


@dataclass(frozen=True, slots=True)
class _Seen:
    """A claim of another push, as it was found."""

    data: bytes
    record: _Record | None  # None: it could not be decoded
    since: float  # when it was first seen like this
    changed: bool  # it was rewritten while we watched: its push is alive


class PushClaim:
    """The right to change a remote folder. Made by `claim_folder`."""

    def __init__(self, remote: RemoteFolder, pushing: str) -> None:
        self.remote, self.name = remote, f"{CLAIM}{secrets.token_hex(8)}.json"
        self.found = Listing(remote, {})  # the folder, when the claim was won
        self._record = _Record(
            pushing=pushing,
            host=socket.gethostname()[:100],
            machine=_machine(),
            pid=os.getpid(),
            started=_started(os.getpid()) or 0,
            at_work=False,
            beat=0,
        )
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._last = _now()
        self._thread = threading.Thread(target=self._keep_beating, daemon=True, name=f"{CLAIM}beat")

    def check(self) -> None:
        """Raise unless this push can still be sure that no other push took over."""
        if _now() - self._last > LOST:
            raise StoreError(
                f"{self.remote.url}: no contact for more than {LOST:.0f} s, so another push or "
                "build may be at work there now; check the connection, then do the same again (a "
                "build with {resume}): what arrived is kept",
                resume=True,
            )

    def _begin(self) -> None:
        self._write(self.remote, at_work=False)
        self._thread.start()
        self.found, dead = self._wait()
        self._write(self.remote, at_work=True)
        for name in dead:
            log.info("%s/%s: removed; it was left by a push that ended", self.remote.url, name)
            self.remote.remove(name)
            self.found.pop(name, None)

    def _end(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(LOST)
        try:
            self.remote.remove(self.name)
        except StoreError as error:  # the next push finds out that this one ended
            log.warning("%s; %s stays there until the next push", error, self.name)

    def _wait(self) -> tuple[Listing, list[str]]:
        """A listing in which no other push is alive, and the claims of dead ones in it."""
        seen: dict[str, _Seen] = {}
        began, pause, has_warned = _now(), 0.02, False
        while True:
            found = self.remote.listing()
            names = [name for name in found if name.startswith(CLAIM) and name != self.name]
            alive = {name: self._is_alive(name, found, seen) for name in names}
            dead = [name for name, is_alive in alive.items() if is_alive is False]
            if len(dead) == len(alive):
                return found, dead
            for name, is_alive in alive.items():
                record = seen[name].record if name in seen else None
                if is_alive and record and (record.at_work or name < self.name):
                    raise self._taken(record)
            waited = _now() - began
            if waited > PATIENCE and None not in alive.values():
                raise self._taken(None)  # it should have withdrawn
            if waited > 1 and None in alive.values() and not has_warned:
                log.warning(
                    "%s: another machine began a push or build to here; waiting up to %.0f s to "
                    "see whether it is still at work",
                    self.remote.url,
                    DEAD,
                )
                has_warned = True
            time.sleep(pause)
            pause = min(pause * 1.5, 1.0)

    def _is_alive(self, name: str, found: Listing, seen: dict[str, _Seen]) -> bool | None:
        """Whether the push with this claim is alive; None if that is not known yet."""
        try:
            data = self.remote.read(name, min(found[name]["size"], 2 * _CLAIM_BYTES))
        except StoreNotFoundError:
            return None  # it went after the listing: list again
        except StoreError:  # it was rewritten, with another length, while it was read
            data = b""
        now, before = _now(), seen.get(name)
        if before is None or before.data != data:
            seen[name] = _Seen(data, _decode(data), since=now, changed=before is not None)
        last = seen[name]
        record = last.record
        if record is not None and record.machine is not None and record.machine == _machine():
            if record.pid == os.getpid():
                return name in _active
            return _started(record.pid) == record.started
        if now - last.since > DEAD:
            return False
        return True if last.changed else None

    def _taken(self, record: _Record | None) -> ClaimedError:
        who = f" (process {record.pid} on {record.host})" if record else ""
        return ClaimedError(
            f"{self.remote.url}: another push or build is at work there{who}; nothing was sent: "
            "wait for it, then do the same again"
        )

    def _write(self, remote: RemoteFolder, *, at_work: bool | None = None) -> None:
        began = _now()
        with self._lock:
            old = self._record
            working = old.at_work if at_work is None else at_work
            record = msgspec.structs.replace(old, at_work=working, beat=old.beat + 1)
            # always the same length, so that a reader who knows the old size reads all of it
            remote.pipe(self.name, msgspec.json.encode(record).ljust(_CLAIM_BYTES) + b"\n")
            self._record, self._last = record, began

    def _keep_beating(self) -> None:
        # Long pauses between retries could take more than LOST: the next beat comes sooner.
        remote = replace(self.remote, retry=RetryPolicy(max_retries=2, delay=0.2))
        while not self._stop.wait(BEAT):
            if _now() - self._last > LOST:
                return  # too late: another push may have begun
            try:
                self._write(remote)
            except ShardmillError as error:
                log.debug("%s", error)


@contextmanager
def claim_folder(remote: RemoteFolder, pushing: str) -> Iterator[PushClaim]:
    """The right to change `remote` while the block runs. Raises if another push has it."""
    claim = PushClaim(remote, pushing)
    _active.add(claim.name)
    try:
        try:
            claim._begin()
            yield claim
        finally:
            claim._end()
    finally:
        _active.discard(claim.name)


def _now() -> float:
    """Seconds of a clock that also counts while the machine sleeps, where there is one."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def _decode(data: bytes) -> _Record | None:
    try:
        return msgspec.json.decode(data, type=_Record)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


@functools.cache
def _machine() -> str | None:
    """Identifies this boot of this machine, and the process numbering that this process sees."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")  # noqa: PTH115
    except OSError:
        return None
    return hashlib.sha256(f"{boot} {space}".encode()).hexdigest()[:16]


def _started(pid: int) -> int | None:
    """When a living process of this machine started; None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None
