"""Where one token of a store came from, for a view.

In: a store that is open, a position, the input as it was named to the server.  Out: facts for JSON.
Promise: what `blame` proved, or its error; of a long text only what stands around the token.
Not here: finding and proving it (blame).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardmill.blame import Blame, blame_token
from shardmill.blame.inputs import AnySource
from shardmill.errors import OptionError
from shardmill.inspector.opened import OpenStore
from shardmill.records import JSON
from shardmill.shards import Manifest
from shardmill.sources import open_chats, open_source

_AROUND = 200  # characters before and behind the token
_MOST = 300  # characters of the token itself
_OPTIONS = ("field", "on_bad", "split", "shape", "lang", "skip_deleted")
"""Of a source's description, those with which it is opened."""
_NOTES = {
    "text": "",
    "end": "put behind the document by the build, so it has no text",
    "template": "put there by the chat template, so it has no text of its own",
    "turn": "of a turn that a Jinja template wrote, which tells no words from marks",
}


def origin_facts(
    opened: OpenStore, split: str, token: int, inputs: Sequence[str]
) -> dict[str, JSON]:
    """The row that a token came from, and the characters it is."""
    words = opened.reading.words
    if words is None:
        raise OptionError(f"where a token comes from is proved with its tokenizer: {opened.why}")
    found = blame_token(
        opened.store,
        split,
        token,
        inputs=open_inputs(opened.store.manifest, inputs),
        tokenizer=words.tokenizer,
    )
    return _facts(found)


def open_inputs(manifest: Manifest, inputs: Sequence[str]) -> AnySource | None:
    """As the build opened it; None: nothing was named."""
    if not inputs:
        return None
    recorded: dict[str, Any] = manifest.sources[0] if manifest.sources else {}
    options = {key: recorded[key] for key in _OPTIONS if recorded.get(key) is not None}
    if recorded.get("kind") != "chats":
        return open_source(list(inputs), **options)
    if not recorded.get("shape_is_named"):
        options.pop("shape", None)
    return open_chats(list(inputs), **options)


def _facts(found: Blame) -> dict[str, JSON]:
    start = len(found.text) if found.start is None else found.start
    stop = start if found.stop is None else found.stop
    note = _NOTES[found.kind]
    if found.kind == "text" and found.start is None:
        note = "its tokenizer does not tell which characters it is"
    return {
        "source": found.source,
        "file": found.file,
        "row": found.row_id,
        "own_id": found.own_id,
        "turn": found.turn,
        "role": found.role,
        "from": found.start,
        "to": found.stop,
        "text_before": found.text[max(0, start - _AROUND) : start],
        "text": found.text[start:stop][:_MOST],
        "text_after": found.text[stop : stop + _AROUND],
        "note": note,
    }
