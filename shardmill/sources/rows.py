"""Rows of local JSON lines, whole.

In: `.jsonl` files, plain or compressed.  Out: one dict per row, in order.
Promise: blank lines are not rows; a line that is no JSON object is an error naming file and line;
strings are valid text (what is not becomes U+FFFD), otherwise as they stand in the file. A row of
more than 256 MiB of text is refused before it is read whole.
Not here: which parts of a row are text. For chats and other sets that are more than one text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from shardmill.sources.batching import DEFAULT_LIMITS
from shardmill.sources.files import InputFile, Where, check_unchanged, list_files
from shardmill.sources.jsonl import JSONL_SUFFIXES, bad_row_error
from shardmill.sources.jsonline import BadJsonError, bad_row, filled_lines, read_object
from shardmill.sources.lines import line_blocks
from shardmill.sources.record import repaired

_DECODER = msgspec.json.Decoder(dict[str, Any])
_LIMITS = DEFAULT_LIMITS.refusing(256 * 2**20)  # of one row, so that a damaged file takes no more


def iter_jsonl_rows(where: Where) -> Iterator[dict[str, Any]]:
    """Every row of a file, folder, glob or list of files. Files are looked up at the call."""
    files = list_files(where, suffixes=JSONL_SUFFIXES)
    return (row for file in files for row in _rows(file))


def _rows(file: InputFile) -> Iterator[dict[str, Any]]:
    check_unchanged(file)
    for block in line_blocks(file, start=0, first_line=0, limits=_LIMITS, is_json=True):
        for number, line in filled_lines(block):
            try:
                yield _row(line)
            except BadJsonError as bad:
                raise bad_row_error(file, bad_row(number, line, bad)) from bad


def _row(line: bytes) -> dict[str, Any]:
    try:
        return _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        row = read_object(line)
    try:
        mended: dict[str, Any] = repaired(row)
        return mended
    except RecursionError as error:
        raise BadJsonError("bad_json", f"nested too deep: {error}") from error
