"""The tokenizer that a config names, with the ids that a stream needs.

In: a `StreamConfig`.  Out: a `StreamTokenizer`.
Promise: an id of the config wins over the tokenizer's own; BOS and EOS are never ids that text can
become; what is taken in place of something missing is announced; a vocabulary that does not hold
every id is refused with both numbers.
Not here: encoding documents (encode), keeping the tokenizer (snapshot).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from shardmill.errors import OptionError, TokenizerError
from shardmill.protocols import Tokenizer
from shardmill.streaming.config import StreamConfig, TokenizerSection
from shardmill.streaming.snapshot import kind_of, load_tokenizer, special_strings
from shardmill.streaming.stream_tokenizer import (
    DocumentIds,
    StreamTokenizer,
    make_stream_tokenizer,
)
from shardmill.tokenizer import ByteTokenizer, open_tokenizer

__all__ = ["StreamTokenizer", "open_stream_tokenizer"]

_log = logging.getLogger(__name__)

_BOS_NAMES = ("bos", "<s>", "begin_of_text")
_EOS_NAMES = ("eos", "</s>", "eot", "endoftext", "end_of_text")
_PAD_NAMES = ("pad", "<pad>", "[PAD]")
_AT = "data.tokenizer"


@runtime_checkable
class HasMarkers(Protocol):
    """A tokenizer that can tell whether a string is one of its special tokens."""

    def marker_id(self, text: str) -> int | None: ...


def open_stream_tokenizer(config: StreamConfig) -> StreamTokenizer:
    """Open it, find its ids, check them. May ask a hub, if the config names one."""
    section = config.data.tokenizer
    kept = None if section.snapshot is None else load_tokenizer(section.snapshot)
    tokenizer = _open_base(section) if kept is None else _from_snapshot(section, kept.tokenizer)
    ids = _find_ids(config, tokenizer)
    opened = make_stream_tokenizer(
        tokenizer, ids, vocab_size=_vocab_size(config, tokenizer, ids), engine=section.engine
    )
    if kept is not None and kept.fingerprint != opened.fingerprint:
        _log.warning(
            "%s.snapshot: %s was kept with %s; the config says %s, and that holds",
            *(_AT, section.snapshot, kept.ids, ids),
        )
    return opened


def _open_base(section: TokenizerSection) -> Tokenizer:
    if section.kind == "byte":
        return ByteTokenizer(byte_offset=section.byte_offset, specials=section.specials)
    name = section.path or section.hf_name_or_path
    assert name is not None, "the checks of the config ask for one"
    opened = open_tokenizer(name, specials=section.specials, revision=section.hf_revision)
    if kind_of(opened) != section.kind:
        raise OptionError(
            f'{_AT}.kind is "{section.kind}", but {name} is a tokenizer of the kind '
            f'"{kind_of(opened)}"; say {_AT}.kind = "{kind_of(opened)}"'
        )
    return opened


def _from_snapshot(section: TokenizerSection, kept: Tokenizer) -> Tokenizer:
    """The kept tokenizer, if it is the one that the other keys speak of."""
    at = f"{_AT}.snapshot: {section.snapshot}"
    if kind_of(kept) != section.kind:
        raise OptionError(
            f'{at} holds a tokenizer of the kind "{kind_of(kept)}", but {_AT}.kind is '
            f'"{section.kind}"'
        )
    if section.kind == "byte" or section.path or section.hf_name_or_path:
        named = _open_base(section)
        if named.fingerprint != kept.fingerprint:
            raise OptionError(
                f"{at} holds {kept!r} with the fingerprint {kept.fingerprint[:16]}, but the other "
                f"keys of {_AT} name {named!r} with {named.fingerprint[:16]}; leave the snapshot "
                "away for a new run, or the other keys to go on with it"
            )
        return named
    strings = special_strings(kept)
    for name, text in (section.specials or {}).items():
        if strings.get(name) != text:
            raise OptionError(
                f"{at}: the special {name!r} is {strings.get(name)!r} there, but {_AT}.specials "
                f"says {text!r}"
            )
    return kept


def _find_ids(config: StreamConfig, tokenizer: Tokenizer) -> DocumentIds:
    section, model = config.data.tokenizer, config.model
    named = tokenizer.special_token_ids() if section.auto_set_special_tokens else {}
    bos = _one_id("bos", model.bos_token_id, named, _BOS_NAMES)
    eos = _one_id("eos", model.eos_token_id, named, _EOS_NAMES)
    pad = _one_id("pad", model.pad_token_id, named, _PAD_NAMES)
    for name, number in (("bos", bos), ("eos", eos), ("pad", pad)):
        if number is not None:
            _check_id(name, number, tokenizer, config)
    for name, number, wanted in (("bos", bos, section.add_bos), ("eos", eos, section.add_eos)):
        if wanted and number is None:
            raise OptionError(
                f"{_AT}.add_{name} is true, but there is no {name.upper()} id: {tokenizer!r} has "
                f"the specials {sorted(named) or 'none'}; set model.{name}_token_id, or name its "
                f'string ({_AT}.specials = {{ {name} = "..." }}), or say {_AT}.add_{name} = false'
            )
    return DocumentIds(
        bos_id=bos,
        eos_id=eos,
        pad_id=_pad_id(pad, eos, bos),
        add_bos=section.add_bos,
        add_eos=section.add_eos,
        max_doc_tokens=section.max_doc_tokens,
    )


def _one_id(
    name: str, said: int | None, named: Mapping[str, int], names: Sequence[str]
) -> int | None:
    if said is not None:
        return said
    found = next((candidate for candidate in names if candidate in named), None)
    if found is None:
        return None
    if found != name:
        _log.info("no special token is called %s; %s (%d) is taken", name, found, named[found])
    return named[found]


def _pad_id(pad: int | None, eos: int | None, bos: int | None) -> int:
    if pad is not None:
        return pad
    taken = next(((n, i) for n, i in (("eos", eos), ("bos", bos)) if i is not None), ("id", 0))
    _log.info(
        "no special token is called pad; padding is filled with %s (%d): attention is False and "
        "labels are ignored there",
        *taken,
    )
    return taken[1]


def _check_id(name: str, number: int, tokenizer: Tokenizer, config: StreamConfig) -> None:
    key = f"model.{name}_token_id"
    if isinstance(tokenizer, ByteTokenizer):
        first = tokenizer.byte_offset
        if first <= number < first + 256:
            raise OptionError(
                f"{key} is {number}, but the ids {first} to {first + 255} are bytes of text, which "
                f"would be taken for it; choose one from {first + 256} on, or raise "
                f"{_AT}.byte_offset to {number + 1} or more to keep it"
            )
        return
    limit = max(_rounded(tokenizer.vocab_size, config), config.model.vocab_size or 0)
    if number >= limit:
        raise OptionError(
            f"{key} is {number:,}, but {tokenizer!r} has {tokenizer.vocab_size:,} ids "
            f"({limit:,} with those the model has beyond them); wanted less"
        )
    if name != "pad" and _is_text(tokenizer, number):
        raise OptionError(
            f"{key} is {number:,}, which is {tokenizer.decode([number])!r} and no special token "
            f"of {tokenizer!r}: text would be taken for it; choose a special token "
            f"({tokenizer.special_token_ids()}), or make this one special with "
            f'{_AT}.specials = {{ {name} = "..." }}'
        )


def _is_text(tokenizer: Tokenizer, number: int) -> bool:
    """Whether some text may become this id."""
    try:
        literal = tokenizer.decode([number])
    except TokenizerError:  # no token has it: beyond the vocabulary, or a gap in it
        return False
    assert isinstance(tokenizer, HasMarkers), "every kind of a config tells its markers"
    return tokenizer.marker_id(literal) != number


def _vocab_size(config: StreamConfig, tokenizer: Tokenizer, ids: DocumentIds) -> int:
    largest = max(
        number for number in (ids.bos_id, ids.eos_id, ids.pad_id, 0) if number is not None
    )
    needed = max(tokenizer.vocab_size, largest + 1)
    said = config.model.vocab_size
    if said is None:
        return _rounded(needed, config)
    if said < needed:
        raise OptionError(
            f"model.vocab_size is {said:,}, but the tokenizer and its special ids need "
            f"{needed:,}; set it to {_rounded(needed, config):,} (a multiple of "
            f"{_AT}.vocab_size_multiple), or leave it away"
        )
    return said


def _rounded(size: int, config: StreamConfig) -> int:
    multiple = config.data.tokenizer.vocab_size_multiple
    return -(-size // multiple) * multiple
