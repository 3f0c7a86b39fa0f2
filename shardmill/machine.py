"""What this process may use of its machine, and what it has used: cores, CPU time, memory."""

from __future__ import annotations

import os
import re
import resource
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shardmill.errors import OptionError

_STATUS = Path("/proc/self/status")


def num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What some processes have used so far."""

    cpu_seconds: float = 0.0
    peak_bytes: int = 0  # resident, of the largest process

    @classmethod
    def total(cls, parts: Iterable[Usage]) -> Usage:
        parts = list(parts)
        return cls(
            cpu_seconds=sum(part.cpu_seconds for part in parts),
            peak_bytes=max((part.peak_bytes for part in parts), default=0),
        )


def usage_of_this_process() -> Usage:
    """CPU seconds of all its threads, and its peak resident memory.

    The kernel's own peak is used where there is one: getrusage also counts the memory that the
    parent had when it started this process.
    """
    peak = _kernel_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Usage(cpu_seconds=time.process_time(), peak_bytes=peak)


def limit_memory(num_bytes: int, *, beyond_current: bool = False) -> None:
    """From now on, larger allocations fail in this process instead of hurting others.

    `beyond_current`: on top of what the process holds already.
    """
    if beyond_current:
        num_bytes += _kernel_bytes("VmData") or 0
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def _kernel_bytes(name: str) -> int | None:
    """A number from /proc/self/status; None where there is no such file."""
    found = re.search(rf"{name}:\s+(\d+) kB", _text(_STATUS))
    return int(found[1]) * 1024 if found is not None else None


def check_memory(num_bytes: int, what: str, advice: str) -> None:
    """Refuse a request for more memory than is available, before it takes all of it."""
    available = available_memory()
    if available is not None and num_bytes > available:
        raise OptionError(
            f"{what}: {_gigabytes(num_bytes)}; found {_gigabytes(available)} of memory available "
            f"to this process; {advice}"
        )


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process can allocate without swapping, or None if the system does not say.

    The smallest of what the machine and each control group of the process have left. `root` holds
    /proc and /sys.
    """
    machine = re.search(r"MemAvailable:\s+(\d+) kB", _text(root / "proc/meminfo"))
    if machine is None:
        return None
    return max(0, min([int(machine[1]) * 1024, *_left_in_groups(root)]))


def _left_in_groups(root: Path) -> Iterator[int]:
    """Limit minus use of every control group up to the root, version 2 or 1.

    The page cache does not count as use: the kernel drops it when memory is needed.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, kinds, path = line.split(":", 2) if line.count(":") >= 2 else ("", "?", "")
        if kinds and "memory" not in kinds.split(","):
            continue
        if kinds:
            top, limit, used = "memory", "memory.limit_in_bytes", r"^total_rss (\d+)$"
        else:
            top, limit, used = "", "memory.max", r"^anon (\d+)$"
        highest = root / "sys/fs/cgroup" / top
        folder = highest / path.strip("/")
        for group in (folder, *folder.parents):
            most = _text(group / limit).strip()
            if most.isdigit():  # "max": no limit
                found = re.search(used, _text(group / "memory.stat"), re.M)
                yield int(most) - (int(found[1]) if found else 0)
            if group == highest:
                break


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _gigabytes(num_bytes: int) -> str:
    number = num_bytes / 1e9
    return f"{number:,.1f} GB" if number >= 0.1 else f"{number:.3f} GB"
