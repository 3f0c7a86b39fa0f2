"""Files in an order that is drawn from a seed.

In: sources, in the order they were named, and a seed.  Out: one source of the same files.
Promise: the order depends on the seed and the names of the files alone (relative ones, as they are
in cursors): not on the machine, the format, or how the files were named on the command line, but
for files of one name, which keep the order of the command line. Inside a file nothing moves.
Not here: an order of documents; loading draws that, at no cost, for every epoch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from shardmill.errors import OptionError
from shardmill.protocols import Source
from shardmill.sources.concat import ConcatSource
from shardmill.sources.filesource import FileSource


def in_seeded_order(parts: Sequence[Source], seed: int) -> Source:
    """All files of all parts, mixed."""
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise OptionError(f"seed={seed!r}: wanted a whole number")
    if len(parts) == 1 and isinstance(parts[0], FileSource):
        return parts[0].reordered(lambda file: place_of_file(seed, file.name))
    files: list[tuple[str, Source]] = []
    for part in parts:
        if not isinstance(part, FileSource):
            raise OptionError(
                f"seed={seed}: {part.name} is no files here, and a seed orders files; name it "
                "without a seed, or its files: hf://datasets/owner/name/**/*.parquet"
            )
        files += [(place_of_file(seed, one.files[0].name), one) for one in part.each_file()]
    files.sort(key=lambda pair: pair[0])
    return ConcatSource(
        [source for _, source in files], name=" + ".join(part.name for part in parts)
    )


def place_of_file(seed: int, name: str) -> str:
    """What files are sorted by."""
    return hashlib.sha256(json.dumps([seed, "file order", name]).encode()).hexdigest()
