"""What a shell offers behind an option, beside what typer knows by itself.

Promise: a store that is named before the option is looked at by its manifest alone; whatever is
wrong with it, nothing is offered and nothing is said: a person is in the middle of a word.
"""

from __future__ import annotations

from pathlib import Path

import typer

from shardmill.errors import ShardmillError
from shardmill.shards.manifest import read_manifest


def complete_split(ctx: typer.Context, incomplete: str) -> list[str]:
    """The splits of the first store that stands before. An option that waits for its value leaves
    the words before it unparsed."""
    places = [ctx.params.get("folder"), ctx.params.get("source"), *ctx.args]
    for place in filter(None, places):
        try:
            splits = read_manifest(Path(place)).splits
        except (ShardmillError, OSError, ValueError):
            continue
        return [name for name in splits if name.startswith(incomplete)]
    return []
