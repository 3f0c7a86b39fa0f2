"""Two pushes to one place: the parts that its tests share, and a worker process that pushes."""

from __future__ import annotations

import contextlib
import json
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardmill.errors import ShardmillError
from shardmill.remote.folder import RemoteFolder, open_folder
from shardmill.remote.push import send

Hook = Callable[[str], None]
OPERATIONS = ("listing", "info", "block", "pipe", "write", "create", "put", "remove")


class Killed(BaseException):
    """What SIGKILL is: nothing that this process does afterwards reaches the place."""


class Watched(RemoteFolder):
    """A place that calls `hook` with the name of each operation before it is done.

    With `turns`, the threads of a push do their operations one at a time, so that a hook that
    waits stops all of them.
    """

    hook: Hook
    turns: contextlib.AbstractContextManager[Any]

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in OPERATIONS or threading.current_thread().name.endswith("-beat"):
            return found

        def watched(*arguments: Any, **options: Any) -> Any:
            with self.turns:
                self.hook(name)
                return found(*arguments, **options)

        return watched


def watched(
    url: str, options: dict[str, Any], hook: Hook, *, one_at_a_time: bool = False
) -> Watched:
    opened = open_folder(url, options)
    place = Watched(opened.fs, opened.root, opened.url)
    object.__setattr__(place, "hook", hook)
    turns = threading.RLock() if one_at_a_time else contextlib.nullcontext()
    object.__setattr__(place, "turns", turns)
    return place


def push_to(folder: Path, place: RemoteFolder, *, replace: bool = False) -> str:
    """The sha256 of the manifest that was pushed, or the class and words of the refusal."""
    try:
        return send(folder, place, workers=2, replace=replace).manifest_sha256
    except ShardmillError as error:
        return f"{type(error).__name__}: {error}"


def delays(seed: int) -> Hook:
    """Random pauses: mostly none or short, now and then long enough for another whole push."""
    generator = random.Random(seed)

    def pause(_: str) -> None:
        kind = generator.random()
        if kind > 0.97:
            time.sleep(generator.uniform(0.02, 0.1))
        elif kind > 0.6:
            time.sleep(generator.uniform(0, 0.005))

    return pause


def main() -> None:
    """Do the push of each line of stdin; answer with a line."""
    for line in sys.stdin:
        task = json.loads(line)
        place = watched(task["url"], task["options"], delays(task["seed"]))
        print(json.dumps(push_to(Path(task["folder"]), place, replace=task["replace"])), flush=True)


if __name__ == "__main__":
    main()
