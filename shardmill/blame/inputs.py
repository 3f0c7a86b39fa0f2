"""The input of a store, as its caller has it now.

In: a manifest, and the sources that the caller opened.  Out: the very sources of the build.
Promise: what is not the input that the manifest describes (its files by name, size and hash, read
in the same manner) is refused by name; files that were added since are left out. Names of sources
and folders do not count: the input may lie elsewhere.
Not here: opening files by name (sources, cli).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

from shardmill.build.spec import describe_difference
from shardmill.errors import OptionError, SourceError
from shardmill.protocols import ConversationSource, Source
from shardmill.records import JSON
from shardmill.shards import Manifest
from shardmill.sources import ConcatSource, HubParquetSource, HubSource, append_files, only_files
from shardmill.sources.filesource import FileSource

AnySource: TypeAlias = Source | ConversationSource
Inputs: TypeAlias = AnySource | Sequence[AnySource] | None

_NEXT = "name the input that the store was built from, with the options of its build"


def matched_inputs(manifest: Manifest, inputs: Inputs) -> list[AnySource]:
    """One source for each that the store was built from, in their order."""
    recorded = manifest.sources
    if not recorded:
        raise OptionError(
            "this store does not tell what it was built from (it was converted, or made of "
            "examples in a program), so nobody can say where its tokens came from"
        )
    if inputs is None:
        return [_reopened(one) for one in recorded]
    given = list(inputs) if isinstance(inputs, Sequence) else [inputs]
    if len(given) != len(recorded):
        names = ", ".join(repr(one.get("name")) for one in recorded)
        raise OptionError(
            f"{len(given)} inputs, but the store was built from {len(recorded)} sources: {names}; "
            "give one for each, in this order"
        )
    return [_matched(source, one) for source, one in zip(given, recorded, strict=True)]


def _reopened(recorded: dict[str, Any]) -> AnySource:
    """A hub's dataset can be found again; where files lie no store tells."""
    if recorded.get("kind") != "hub":
        raise OptionError(
            f"the store was built from {_words(recorded)}, and does not tell where that lies; "
            "say so with --input (inputs=), as the build was told"
        )
    options = {key: recorded[key] for key in ("name", "config", "split", "field", "revision")}
    shuffle = recorded.get("shuffle")
    if shuffle:
        options["shuffle"] = (shuffle["seed"], shuffle["buffer_size"])
    by_files = "num_files" in recorded  # else it was streamed
    opened = HubParquetSource if by_files else HubSource
    return _matched(opened(recorded["dataset"], **options), recorded)


def _matched(source: AnySource, recorded: dict[str, Any]) -> AnySource:
    if isinstance(source, FileSource | ConcatSource):
        source = _same_files(source, recorded)
    changes = describe_difference(_nameless(recorded), _nameless(source.describe()))
    if changes:
        raise SourceError(
            f"source {source.name!r} is not what the store was built from (then -> now): "
            f"{changes[0]:.300}; {_NEXT}"
        )
    return source


def _same_files(source: Source, recorded: dict[str, Any]) -> Source:
    """The files of the build in its order, without others."""
    try:
        found = append_files(source, recorded)
    except (SourceError, OptionError) as error:
        what = str(error).partition(";")[0]
        raise SourceError(f"{what}; {_NEXT}") from error
    left = only_files(found.source, found.old) if found.num_new else found.source
    assert left is not None, "a description of files has some"
    return left


def _nameless(value: object) -> JSON:
    """Without what depends on where the input lies."""
    if isinstance(value, dict):
        return {key: _nameless(one) for key, one in value.items() if key != "name"}
    if isinstance(value, list | tuple):
        return [_nameless(one) for one in value]
    return cast(JSON, value)


def _words(recorded: dict[str, Any]) -> str:
    """A source for an error."""
    listed = recorded.get("files") or recorded.get("inputs") or ()
    files = [one["file"] for one in listed if isinstance(one, dict) and "file" in one]
    shown = f": {', '.join(map(repr, files[:3]))}{' ...' if len(files) > 3 else ''}"
    return f"{recorded.get('name')!r} ({recorded.get('kind')}{shown if files else ''})"
