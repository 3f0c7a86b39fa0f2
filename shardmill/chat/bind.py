"""A template meets a tokenizer: markers become ids, fixed text is encoded once.

In: a spec and a tokenizer.  Out: a TokenTemplate.
Promise: every marker is exactly one special id of the tokenizer, and different markers have
different ids; fixed text holds no marker; the opening of an assistant's turn is not the
beginning of another's, nor the other way round. Anything else is an error that says what
the tokenizer has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from shardmill.chat.assemble import END, STRUCTURE, WORDS, Fixed
from shardmill.chat.check import special_in_text
from shardmill.chat.spec import Marker, Pieces, TemplateSpec, Text
from shardmill.chat.template import TokenTemplate
from shardmill.errors import TokenizerError
from shardmill.protocols import Encoder, Tokenizer
from shardmill.records import IntArray


def bind_template(
    spec: TemplateSpec, tokenizer: Tokenizer, encoder: Encoder | None = None
) -> TokenTemplate:
    """A template that renders with this tokenizer.

    A marker is looked up as a name in `special_token_ids()`, then as a literal string by
    `marker_id(text)`, which the tokenizers of this library have. `encoder` is a faster way to the
    same ids, and encodes the words when there is one.
    """
    named = list(_named_pieces(spec))
    markers = _find_markers(spec, named, tokenizer)
    texts = _encode_texts(spec, named, tokenizer, markers)
    pieces = {name: _fixed(parts, kind, markers, texts) for name, kind, parts in named}
    opening = pieces["assistant.before"].ids
    for role in spec.roles:
        other = pieces[f"{role}.before"].ids
        common = min(len(opening), len(other))
        if role != "assistant" and np.array_equal(other[:common], opening[:common]):
            raise TokenizerError(
                f"template {spec.name!r}: a turn of the {role} opens with {other.tolist()}, one of "
                f"the assistant with {opening.tolist()} in {tokenizer!r}: one is the beginning of "
                "the other, so text could make them alike"
            )
    return TokenTemplate(
        spec=spec, markers=markers, pieces=pieces, encoder=tokenizer if encoder is None else encoder
    )


def _named_pieces(spec: TemplateSpec) -> Iterator[tuple[str, int, Pieces]]:
    """(name, kind, pieces) of everything fixed; adjoining texts are one."""
    yield "begin", STRUCTURE, _merged(spec.begin)
    for role, one in spec.roles.items():
        yield f"{role}.before", STRUCTURE, _merged(one.before)
        yield f"{role}.end", END, _merged(one.end)
        yield f"{role}.after", STRUCTURE, _merged(one.after)
    for name in ("reasoning", "tool_call", "tools"):
        insert = getattr(spec, name)
        if insert is not None:
            yield f"{name}.between", WORDS, _merged(insert.between)
            yield f"{name}.before", WORDS, _merged(insert.before)
            yield f"{name}.after", WORDS, _merged(insert.after)


def _merged(pieces: Pieces) -> Pieces:
    merged: list[Marker | Text] = []
    for piece in pieces:
        if merged and isinstance(piece, Text) and isinstance(merged[-1], Text):
            merged[-1] = Text(merged[-1].text + piece.text)
        else:
            merged.append(piece)
    return tuple(merged)


def _find_markers(
    spec: TemplateSpec, named: list[tuple[str, int, Pieces]], tokenizer: Tokenizer
) -> dict[str, int]:
    specials = tokenizer.special_token_ids()
    by_string = getattr(tokenizer, "marker_id", None)
    found: dict[str, int] = {}
    for name, _, parts in named:
        for marker in (part.marker for part in parts if isinstance(part, Marker)):
            number = specials.get(marker)
            if number is None and callable(by_string):
                number = by_string(marker)
            if number is None or number < 0:
                raise TokenizerError(
                    f"template {spec.name!r}, {name}: the marker {marker!r} is not one special "
                    f"token of {tokenizer!r}, which has {_shown(specials)}; use a tokenizer with "
                    "this token, or a template file that names tokens it has"
                )
            found[marker] = int(number)
    by_id: dict[int, str] = {}
    for marker, number in found.items():
        if number in by_id:
            raise TokenizerError(
                f"template {spec.name!r}: {by_id[number]!r} and {marker!r} are both id {number} of "
                f"{tokenizer!r}; wanted different ids"
            )
        by_id[number] = marker
    return found


def _shown(specials: Mapping[str, int]) -> str:
    if not specials:
        return "no special tokens"
    shown = [f"{name!r} ({number})" for name, number in list(specials.items())[:20]]
    more = f" and {len(specials) - 20} more" if len(specials) > 20 else ""
    return ", ".join(shown) + more


def _encode_texts(
    spec: TemplateSpec,
    named: list[tuple[str, int, Pieces]],
    tokenizer: Tokenizer,
    markers: Mapping[str, int],
) -> dict[str, IntArray]:
    """Each fixed text to its ids."""
    texts = sorted({p.text for _, _, parts in named for p in parts if isinstance(p, Text)})
    if not texts:
        return {}
    encoded = tokenizer.encode_batch(texts)
    for number in special_in_text(encoded, markers.values()).tolist():
        raise TokenizerError(
            f"template {spec.name!r}: {tokenizer!r} makes a marker out of the plain text "
            f"{texts[number]!r}; write it as a marker, or open the model with "
            "shardmill.tokenizer.open_tokenizer, which keeps them apart"
        )
    return dict(zip(texts, encoded, strict=True))


def _fixed(
    pieces: Pieces, kind: int, markers: Mapping[str, int], texts: Mapping[str, IntArray]
) -> Fixed:
    parts = [
        [markers[piece.marker]] if isinstance(piece, Marker) else texts[piece.text]
        for piece in pieces
    ]
    ids = np.concatenate([np.empty(0, np.int64), *(np.asarray(part, np.int64) for part in parts)])
    return Fixed(ids, np.full(len(ids), kind, np.uint8))
