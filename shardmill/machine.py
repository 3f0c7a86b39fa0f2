"""How much memory this process can use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from shardmill.errors import OptionError


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
