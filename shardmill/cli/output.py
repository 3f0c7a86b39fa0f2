"""Where the store of a build goes: a folder of this machine, or a URL.

In: --out and --scratch.  Out: the folder to build in; behind the build, what a receipt tells.
Promise: a URL is looked at before the build, and has the store when the block ends well.
Not here: scratch and sending (remote).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardmill.cli.places import check_local
from shardmill.cli.push import transfer_progress
from shardmill.errors import OptionError
from shardmill.remote.outgoing import build_to, scratch_store
from shardmill.urls import Url


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Made by `open_output`."""

    folder: Path  # where the store is built
    url: str | None  # where it is sent then
    scratch: Path | None
    shown: str  # for people
    facts: dict[str, Any] = field(default_factory=dict)  # what a receipt for machines adds

    def replaces(self, *, resume: bool, overwrite: bool) -> bool:
        """Whether the build may replace what stands in its folder. In a scratch folder a store
        that a resume finds is one that was not sent: the place there is what it overwrites."""
        return overwrite and not (resume and self.url is not None)

    @contextmanager
    def opened(self, *, resume: bool, overwrite: bool) -> Iterator[Path]:
        """The folder to build in. At the end of the block the store goes where it was wanted."""
        if self.url is None:
            yield self.folder
            return
        is_built = False
        try:
            with (
                _bar_when_needed() as progress,
                build_to(
                    self.url,
                    scratch=self.scratch,
                    resume=resume,
                    overwrite=overwrite,
                    progress=progress,
                ) as out,
            ):
                yield out.folder
                is_built = True
        except KeyboardInterrupt:
            if is_built:
                print(
                    f"{self.shown}: stopped; what is built and sent is kept: go on with --resume",
                    file=sys.stderr,
                )
            raise
        sent = out.receipt
        self.facts.update(
            store=self.shown,
            sent_files=sent.moved_files if sent else 0,
            sent_bytes=sent.moved_bytes if sent else 0,
        )


def open_output(out: str, scratch: Path | None) -> Output:
    """What --out names. Asks nobody anything yet."""
    if "://" not in out:
        if scratch is not None:
            raise OptionError(
                f"--scratch {scratch}: is for a store that goes to a URL, but --out is the folder "
                f"{out}, in which it is built"
            )
        check_local(out, "--out", instead=", or a URL such as s3://bucket/path")
        return Output(folder=Path(out), url=None, scratch=None, shown=str(Path(out)))
    if scratch is not None:
        check_local(scratch, "--scratch")
    folder = scratch_store(out, scratch)
    return Output(folder=folder, url=out, scratch=scratch, shown=str(Url(out)).rstrip("/"))


@contextmanager
def _bar_when_needed() -> Iterator[Callable[[int, int], None]]:
    """A bar that appears with the first bytes: until then the build has one of its own."""
    with ExitStack() as bars:
        show: Callable[[int, int], None] | None = None

        def progress(done: int, total: int) -> None:
            nonlocal show
            if show is None:
                show = bars.enter_context(transfer_progress("push"))
            show(done, total)

        yield progress
