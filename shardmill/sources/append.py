"""Files that were added to those a store was built from.

The old files come first, in their old order, then the new ones. Every old file must still be there,
be read with the same settings, and have the recorded content (of large files the two ends, see
`fingerprint_files`); otherwise an error names it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from shardmill.errors import OptionError, SourceError
from shardmill.protocols import Source
from shardmill.records import JSON
from shardmill.sources.source import ConcatSource, FileSource, leaves
from shardmill.storage.files import InputFile, describe_difference, fingerprint, has_content

_Found = tuple[FileSource, InputFile]  # a list of files, and a file of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Appended:
    """A source of old files, followed by new ones."""

    source: Source  # all of them
    old: frozenset[object]  # the places of the old files
    num_new: int  # files


def append_files(source: Source, before: Mapping[str, Any]) -> Appended:
    """`source`, ordered so that it begins with the files that `before` describes."""
    found: list[_Found] = [(leaf, file) for leaf in _leaves(source) for file in leaf.files]
    if len({file.place for _, file in found}) < len(found):
        raise SourceError(f"source {source.name!r} reads a file twice; name each file once")
    waiting: dict[str, list[_Found]] = {}
    for one in found:
        waiting.setdefault(one[1].name, []).append(one)
    old = [
        _take(waiting.get(entry["file"], []), entry, settings)
        for settings, entries in _recorded(before)
        for entry in entries
    ]
    places = frozenset(file.place for _, file in old)
    new = [(leaf, file) for leaf, file in found if file.place not in places]
    return Appended(
        source=source if [*old, *new] == found else _joined(source, [*old, *new]),
        old=places,
        num_new=len(new),
    )


def only_files(source: Source, places: Collection[object]) -> Source | None:
    """A source of only the files at these places; None when no file is left."""
    if isinstance(source, ConcatSource):
        parts = [only_files(part, places) for part in source.parts]
        left = [part for part in parts if part is not None]
        return ConcatSource(left, name=source.name) if left else None
    (leaf,) = _leaves(source)
    files = tuple(file for file in leaf.files if file.place in places)
    if len(files) == len(leaf.files):
        return leaf
    return leaf.of_files(files) if files else None


def _leaves(source: Source) -> Iterator[FileSource]:
    for leaf in leaves(source):
        if not isinstance(leaf, FileSource):
            raise OptionError(
                f"source {leaf.name!r} is not a list of files, and only files can be added to a "
                "store; build it again with {overwrite}",
                overwrite=True,
            )
        yield leaf


def _recorded(before: Mapping[str, Any]) -> Iterator[tuple[dict[str, JSON], list[dict[str, Any]]]]:
    """The settings and the files of each list of files in a description."""
    if before.get("kind") == "concat":
        for part in before["parts"]:
            yield from _recorded(part)
    elif isinstance(before.get("files"), list):
        yield {k: v for k, v in before.items() if k not in ("name", "files")}, before["files"]
    else:
        raise OptionError(
            f"the store was built from {before.get('name')!r} ({before.get('kind')}), which is not "
            "a list of files, and only files can be added to files; build it again with "
            "{overwrite}",
            overwrite=True,
        )


def _take(
    candidates: list[_Found], entry: Mapping[str, Any], settings: Mapping[str, JSON]
) -> _Found:
    """The file that was recorded as `entry`; it is removed from the candidates."""
    name = entry["file"]
    if not candidates:
        raise SourceError(
            f"{name}: the store was built from this file, but it is not among the inputs now; name "
            "all old files beside the new ones, or build the store again with {overwrite}",
            overwrite=True,
        )
    alike = [one for one in candidates if one[0].settings == settings]
    if not alike:
        leaf, file = candidates[0]
        raise SourceError(
            f"{file.place}: was read as {dict(settings)}, now it would be {leaf.settings}; "
            "repeat the options of the first build, or build the store again with {overwrite}",
            overwrite=True,
        )
    for one in alike:
        if has_content(one[1], entry):
            candidates.remove(one)
            return one
    file = alike[0][1]
    changes = describe_difference([dict(entry)], [fingerprint(file, whole="sha256" in entry)])
    raise SourceError(
        f"{file.place}: changed since the store was built from it ({', '.join(changes)}); put the "
        "old file back, or build the store again with {overwrite}",
        overwrite=True,
    )


def _joined(source: Source, order: Sequence[_Found]) -> Source:
    """The files in this order; neighbours from one list of files are one part."""
    parts: list[Source] = [
        leaf.of_files(file for _, file in group)
        for leaf, group in groupby(order, key=lambda one: one[0])
    ]
    if len(parts) == 1 and isinstance(source, FileSource):
        return parts[0]
    return ConcatSource(parts, name=source.name)
