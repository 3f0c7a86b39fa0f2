"""`shardmill pull`: a finished folder from object storage."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardmill.cli.places import check_local
from shardmill.cli.push import receipt_text, transfer_progress
from shardmill.remote import pull as pull_folder


def pull(
    url: Annotated[str, typer.Argument(help="A pushed folder, for instance s3://bucket/path.")],
    folder: Annotated[Path, typer.Argument(help="Where to: a new or empty folder.")],
    workers: Annotated[int, typer.Option(help="Files fetched at a time.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print the receipt as JSON.")] = False,
) -> None:
    """Copy a finished folder from object storage; it appears when every byte is checked.

    Prints one line: files and bytes that were fetched, and those that were there before.
    Interrupted, run it again: what arrived is not fetched again.

    Example: shardmill pull s3://bucket/pushed pulled

    Exit 0: all of it is here, checked. Exit 2: a mistake in the call, or nothing whole is there.
    Exit 130: stopped with Ctrl-C.
    """
    check_local(folder, "FOLDER")
    with transfer_progress("pull") as progress:
        receipt = pull_folder(url, folder, workers=workers, progress=progress)
    print(receipt_text(receipt, str(receipt.folder), "fetched", as_json=as_json))
