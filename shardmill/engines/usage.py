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


def _peak_bytes() -> int:
    """The kernel's own mark where there is one: getrusage counts the parent's memory too, as it was
    when this process was started."""
    if _STATUS.exists():
        found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
        if found is not None:
            return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
