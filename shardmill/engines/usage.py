"""What this process has used of its machine, and may use."""

from __future__ import annotations

import re
import resource
import time
from pathlib import Path

from shardmill.protocols import Usage

_STATUS = Path("/proc/self/status")


def usage_of_this_process() -> Usage:
    """CPU seconds of all its threads, and its peak resident memory."""
    return Usage(cpu_seconds=time.process_time(), peak_bytes=_peak_bytes())


def limit_memory(num_bytes: int) -> None:
    """From here on an allocation that goes beyond fails in this process, and kills no other."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def allow_memory(num_bytes: int) -> None:
    """As `limit_memory`, beyond what this process holds already."""
    limit_memory((_status("VmData") or 0) + num_bytes)


def _peak_bytes() -> int:
    """The kernel's own mark where there is one: getrusage counts the parent's memory too, as it was
    when this process was started."""
    return _status("VmHWM") or _peak_of_getrusage()


def _status(name: str) -> int | None:
    """Bytes that the kernel counts under this name; None where it does not."""
    if not _STATUS.exists():
        return None
    found = re.search(rf"{name}:\s+(\d+) kB", _STATUS.read_text())
    return int(found[1]) * 1024 if found is not None else None


def _peak_of_getrusage() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
