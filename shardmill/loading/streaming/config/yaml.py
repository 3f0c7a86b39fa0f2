"""YAML as plain values. The one importer of yaml.

In: text.  Out: what it says, as dicts, lists and scalars.
Promise: no object is made (safe loader); a key that is said twice is refused; aliases that would
grow into more than a million values, or lead back to themselves, are refused before they grow.
"""

from __future__ import annotations

from typing import Any

from shardmill.errors import OptionError, missing_extra

try:
    import yaml
except ImportError as missing:
    raise missing_extra("yaml", "yaml") from missing

MOST_VALUES = 1_000_000


def parse_yaml(text: str, file: str) -> object:
    """The one document of this text; `file` names it in messages."""
    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _count_values(node, file, {})
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(f"{file}: not YAML: {error}") from error


def _count_values(node: Any, file: str, known: dict[int, int | None]) -> int:
    """How many values there are when every alias is written out."""
    if id(node) in known:
        found = known[id(node)]
        if found is None:
            raise OptionError(f"{_at(node, file)}: an alias that leads back to itself")
        return found
    known[id(node)] = None
    children: list[Any] = []
    if isinstance(node, yaml.MappingNode):
        _refuse_twice(node, file)
        children = [child for pair in node.value for child in pair]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    total = 1 + sum(_count_values(child, file, known) for child in children)
    if total > MOST_VALUES:
        raise OptionError(
            f"{_at(node, file)}: more than {MOST_VALUES:,} values, aliases written out; a config "
            "is smaller: put documents into files (data.files)"
        )
    known[id(node)] = total
    return total


def _refuse_twice(node: Any, file: str) -> None:
    seen: set[tuple[str, str]] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise OptionError(f"{_at(key, file)}: a key that is no string")
        if (key.tag, key.value) in seen:
            raise OptionError(f"{_at(key, file)}: the key {key.value!r} is said twice; say it once")
        seen.add((key.tag, key.value))


def _at(node: Any, file: str) -> str:
    return f"{file}, line {node.start_mark.line + 1}"
