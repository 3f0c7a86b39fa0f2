"""`shardmill push` and `shardmill pull`: a finished folder to object storage, and from there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shardmill.cli.terminal import byte_bar, check_local
from shardmill.remote import TransferReceipt
from shardmill.remote import pull as pull_folder
from shardmill.remote import push as push_folder


def push(
    folder: Annotated[Path, typer.Argument(help="A finished store or packed folder.")],
    url: Annotated[str, typer.Argument(help="Where to, for instance s3://bucket/path.")],
    workers: Annotated[int, typer.Option(help="Files sent at a time.")] = 8,
    replace: Annotated[
        bool, typer.Option("--replace", help="Another folder there may be replaced.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the receipt as JSON.")] = False,
) -> None:
    """Copy a finished folder to object storage, the manifest last.

    Prints one line: files and bytes that were sent, and those that were there before. Interrupted,
    run it again: what arrived is not sent again. Credentials and endpoint come from the
    environment (AWS_PROFILE, AWS_ENDPOINT_URL, ...).

    Example: shardmill push store s3://bucket/store

    Exit 0: all of it is there, checked. Exit 2: a mistake in the call, or a place that cannot be
    written. Exit 130: stopped with Ctrl-C.
    """
    with byte_bar("push") as progress:
        receipt = push_folder(folder, url, workers=workers, progress=progress, replace=replace)
    print(receipt_text(receipt, receipt.url, "sent", as_json=as_json))


def receipt_text(receipt: TransferReceipt, place: str, verb: str, *, as_json: bool) -> str:
    """One line, or JSON; `place` is where the folder is now."""
    if as_json:
        return json.dumps(receipt.to_json(), indent=2)
    return (
        f"{place}: {receipt.kind} of {receipt.files:,} files, {receipt.bytes:,} bytes; "
        f"{receipt.moved_files:,} {verb} ({receipt.moved_bytes:,} bytes), "
        f"{receipt.kept_files:,} there before; all checked"
    )


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
    with byte_bar("pull") as progress:
        receipt = pull_folder(url, folder, workers=workers, progress=progress)
    print(receipt_text(receipt, str(receipt.folder), "fetched", as_json=as_json))
