"""Whether a path means a split of a store.

In: a path, perhaps the name of a split.  Out: the store and the split, or None: no store there.
Promise: `store` and `store/train` both work; a choice that is open is refused with the names.
Not here: folders without a manifest (foreign).
"""

from __future__ import annotations

import re
from pathlib import Path

from shardmill.arguments import nearest
from shardmill.errors import OptionError
from shardmill.mapped.declared import META_JSON
from shardmill.shards import Store, open_store
from shardmill.shards.manifest import refuse_remote

_FORMAT = re.compile(rb'"format"\s*:\s*"shardmill-store"')
_MAX_META = 2**30


def find_split(path: str | Path, split: str | None = None) -> tuple[Store, str] | None:
    """The split meant by `path`: a store's folder, or that folder and a split's name behind it.

    A store with one split needs no name. A damaged or unfinished store is an error, not None.
    """
    refuse_remote(path)
    folder = Path(path).absolute()
    if _is_ours(folder):
        store, named = open_store(folder), split
    elif _is_ours(folder.parent):
        store, named = open_store(folder.parent), folder.name
        if split not in (None, named):
            raise OptionError(f"{folder} is the split {named!r}, but split={split!r}")
    else:
        return None
    if named is None and len(store.splits) == 1:
        named = store.splits[0]
    if named not in store.splits:
        near = None if named is None else nearest(named, store.splits)
        meant = near or store.splits[0]
        raise OptionError(
            f"{store.folder}: a store with the splits {list(store.splits)}; "
            + ("say which" if named is None else f"none is {named!r}")
            + (f"; did you mean {near!r}?" if near else "")
            + f": split={meant!r}, or open {store.folder / meant}"
        )
    return store, named


def is_store(path: str | Path) -> bool:
    """Whether `path` is a store, sound or not, or a split of one: where `find_split` gives one."""
    folder = Path(path).absolute()
    return _is_ours(folder) or _is_ours(folder.parent)


def _is_ours(folder: Path) -> bool:
    """Whether meta.json says that it is a manifest of ours, sound or not."""
    path = folder / META_JSON
    try:
        if not path.is_file() or path.stat().st_size > _MAX_META:
            return False
        return _FORMAT.search(path.read_bytes()) is not None
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        raise OptionError(f"{path}: cannot be read ({error}); is this a store?") from error
