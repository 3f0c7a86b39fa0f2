"""`shardmill push` and `shardmill pull`: a finished folder to object storage, and from there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from shardmill.arguments import check_local
from shardmill.cli.options import AsJson
from shardmill.cli.printing import Answer
from shardmill.cli.terminal import one_bar
from shardmill.remote import TransferReceipt
from shardmill.remote import pull as pull_folder
from shardmill.remote import push as push_folder


@dataclass(frozen=True, kw_only=True)
class PushCommand:
    """Prints one line: files and bytes that were sent, and those that were already there.
    Interrupted, run it again: what arrived is not sent again. Credentials and endpoint come from
    the environment (AWS_PROFILE, AWS_ENDPOINT_URL, ...).

    Example: shardmill push store s3://bucket/store

    Exit 0: all of it is there, checked. Exit 2: a mistake in the call, or a place that cannot be
    written. Exit 130: stopped with Ctrl-C.
    """

    folder: Annotated[Path, "FOLDER", "A finished store or packed folder."]
    url: Annotated[str, "URL", "Where to, for instance s3://bucket/path."]
    workers: Annotated[int, "Files sent at a time."] = 8
    replace: Annotated[bool, "Replace another folder that is there."] = False
    as_json: AsJson = False

    def run(self) -> Answer:
        with one_bar("push") as progress:
            done = push_folder(
                self.folder,
                self.url,
                workers=self.workers,
                progress=progress,
                replace=self.replace,
            )
        return _answer(done, done.url, "sent")


@dataclass(frozen=True, kw_only=True)
class PullCommand:
    """Prints one line: files and bytes that were fetched, and those that were already there.
    Interrupted, run it again: what arrived is not fetched again.

    Example: shardmill pull s3://bucket/pushed pulled

    Exit 0: all of it is here, checked. Exit 2: a mistake in the call, or nothing whole is there.
    Exit 130: stopped with Ctrl-C.
    """

    url: Annotated[str, "URL", "A pushed folder, for instance s3://bucket/path."]
    folder: Annotated[Path, "FOLDER", "Where to: a new or empty folder."]
    workers: Annotated[int, "Files fetched at a time."] = 8
    as_json: AsJson = False

    def run(self) -> Answer:
        check_local(self.folder, "folder")
        with one_bar("pull") as progress:
            done = pull_folder(self.url, self.folder, workers=self.workers, progress=progress)
        return _answer(done, str(done.folder), "fetched")


def _answer(done: TransferReceipt, where: str, verb: str) -> Answer:
    text = (
        f"{where}: {done.kind} of {done.files:,} files, {done.bytes:,} bytes; "
        f"{done.moved_files:,} {verb} ({done.moved_bytes:,} bytes), "
        f"{done.kept_files:,} there before; all checked"
    )
    return Answer(done.to_json(), [text], indent=2)
