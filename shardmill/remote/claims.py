"""One push at a time changes a place.

A push first writes a flag, a small file with a random name that no other push writes to, and then
lists the place. It goes on only if no other push that may be alive has a flag there. A file system
whose listing shows every file that was written before it needs no more than that: of two pushes,
the one that wrote its flag later sees the flag of the other. If each sees the other, the one with
the higher name withdraws and the one with the lower name waits until it has.

A push rewrites its flag every `BEAT` seconds. The flag of a killed push stays. It is ignored and
removed if its process is known to be dead (same machine), or if it did not change for `DEAD`
seconds. A push that could not write its own flag for `LOST` seconds stops itself before that.
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
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shardmill.errors import ShardmillError, StoreError, StoreNotFoundError
from shardmill.storage.object_store import Listing, RemoteFolder

log = logging.getLogger(__name__)

FLAG = ".shardmill-push-"
"""How the names of flags begin."""

BEAT, LOST, DEAD = 5.0, 20.0, 60.0
PATIENCE = 10.0
"""Seconds that a push waits for another one to withdraw."""

_FLAG_BYTES = 600
_active: set[str] = set()  # names of the flags that pushes of this process hold


class _Flag(msgspec.Struct, frozen=True, kw_only=True):
    """Who is at work; for the next push that finds it."""

    pushing: str  # sha256 of the manifest
    host: str
    machine: str | None  # tells apart machines, boots and containers; None: unknown
    pid: int
    started: int  # when the process started, as the kernel counts
    at_work: bool  # False: it still looks whether it is alone
    beat: int


@dataclass(frozen=True, slots=True)
class _Seen:
    """A flag of another push, as it was found."""

    data: bytes
    flag: _Flag | None  # None: it could not be read as one
    since: float  # since when it is so
    changed: bool  # it was rewritten while we watched: its push is alive


class Turn:
    """The right to change a place. Made by `take_turn`."""

    def __init__(self, place: RemoteFolder, pushing: str) -> None:
        self.place, self.name = place, f"{FLAG}{secrets.token_hex(8)}.json"
        self.found: Listing = {}  # the place, listed when the turn began
        self._flag = _Flag(
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
        self._thread = threading.Thread(target=self._keep_beating, daemon=True, name=f"{FLAG}beat")

    def check(self) -> None:
        """Raise unless this push can still be sure that no other one took its place."""
        if _now() - self._last > LOST:
            raise StoreError(
                f"{self.place.url}: no contact for more than {LOST:.0f} s, so another push may be "
                "at work there now; look at the connection, then push again: what arrived is kept"
            )

    def _begin(self) -> None:
        self._write(at_work=False)
        self._thread.start()
        self.found, dead = self._wait()
        self._write(at_work=True)
        for name in dead:
            log.info("%s/%s: was left by a push that ended; removed", self.place.url, name)
            self.place.remove(name)
            self.found.pop(name, None)

    def _end(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(LOST)
        try:
            self.place.remove(self.name)
        except StoreError as error:  # the next push finds out that nobody is there
            log.warning("%s; %s stays there until the next push", error, self.name)

    def _wait(self) -> tuple[Listing, list[str]]:
        """The listing in which no other push is alive, and the flags of dead ones in it."""
        seen: dict[str, _Seen] = {}
        began, pause, is_told = _now(), 0.02, False
        while True:
            found = self.place.listing()
            names = [name for name in found if name.startswith(FLAG) and name != self.name]
            others = {name: self._look(name, found, seen) for name in names}
            dead = [name for name, life in others.items() if life is False]
            if len(dead) == len(others):
                return found, dead
            for name, life in others.items():
                flag = seen[name].flag if name in seen else None
                if life and flag and (flag.at_work or name < self.name):
                    raise self._taken(flag)
            waited = _now() - began
            if waited > PATIENCE and None not in others.values():
                raise self._taken(None)  # it should have withdrawn
            if waited > 1 and None in others.values() and not is_told:
                log.warning(
                    "%s: another machine began a push to here; waiting up to %.0f s to see whether "
                    "it is still at work",
                    self.place.url,
                    DEAD,
                )
                is_told = True
            time.sleep(pause)
            pause = min(pause * 1.5, 1.0)

    def _look(self, name: str, found: Listing, seen: dict[str, _Seen]) -> bool | None:
        """Whether the push with this flag is alive; None if that is not known yet."""
        data = _read(self.place, name, found)
        if data is None:
            return None  # it went after the listing: list again
        now, before = _now(), seen.get(name)
        if before is None or before.data != data:
            seen[name] = _Seen(data, _decoded(data), since=now, changed=before is not None)
        last = seen[name]
        known = _is_alive(name, last.flag)
        if known is not None:
            return known
        if now - last.since > DEAD:
            return False
        return True if last.changed else None

    def _taken(self, flag: _Flag | None) -> StoreError:
        who = f" (process {flag.pid} on {flag.host})" if flag else ""
        return StoreError(
            f"{self.place.url}: another push is at work there{who}; nothing was sent: wait for it, "
            "then push again"
        )

    def _write(self, *, at_work: bool | None = None) -> None:
        began = _now()
        with self._lock:
            old = self._flag
            working = old.at_work if at_work is None else at_work
            flag = msgspec.structs.replace(old, at_work=working, beat=old.beat + 1)
            # always as long, so that a reader with the size of the one before reads all of it
            self.place.pipe(self.name, msgspec.json.encode(flag).ljust(_FLAG_BYTES) + b"\n")
            self._flag, self._last = flag, began

    def _keep_beating(self) -> None:
        while not self._stop.wait(BEAT):
            if _now() - self._last > LOST:
                return  # too late: another push may have begun
            try:
                self._write()
            except ShardmillError as error:
                log.debug("%s", error)


@contextmanager
def take_turn(place: RemoteFolder, pushing: str) -> Iterator[Turn]:
    """The right to change `place` while the block runs. Raises if another push has it."""
    turn = Turn(place, pushing)
    _active.add(turn.name)
    try:
        try:
            turn._begin()
            yield turn
        finally:
            turn._end()
    finally:
        _active.discard(turn.name)


def _now() -> float:
    """Seconds of a clock that also counts while the machine sleeps, where there is one."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def _read(place: RemoteFolder, name: str, found: Listing) -> bytes | None:
    """A flag; None if it is gone."""
    try:
        return place.read(name, min(found[name]["size"], 2 * _FLAG_BYTES))
    except StoreNotFoundError:
        return None
    except StoreError:  # it was rewritten, with another length, while it was read
        return b""


def _decoded(data: bytes) -> _Flag | None:
    try:
        return msgspec.json.decode(data, type=_Flag)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _is_alive(name: str, flag: _Flag | None) -> bool | None:
    """Whether the push with this flag is at work; None if that cannot be known from here."""
    if flag is None or flag.machine is None or flag.machine != _machine():
        return None
    if flag.pid == os.getpid():
        return name in _active
    return _started(flag.pid) == flag.started


@functools.cache
def _machine() -> str | None:
    """This boot of this machine, and the numbering of processes that this one sees."""
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
