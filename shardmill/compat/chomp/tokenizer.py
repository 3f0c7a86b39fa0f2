"""The tokenizer that a config of chomp names, with the ids that a stream needs.

The tokenizer's own BOS, EOS and pad ids replace those of the config unless
`auto_set_special_tokens` is false. An id that is put into documents, or that masks labels, is never
an id that text can become. The vocabulary is rounded up, and holds every id. What differs from the
config is logged with both numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from shardmill.compat.chomp.config import ModelSection, StreamConfig, TokenizerSection
from shardmill.errors import OptionError, TokenizerError
from shardmill.loading.streaming.tokenizer import (
    DocumentIds,
    StreamTokenizer,
    kind_of,
    load_tokenizer,
    special_strings,
)
from shardmill.protocols import Tokenizer
from shardmill.tokenizers import ByteTokenizer, open_tokenizer
from shardmill.tokenizers.base import TokenizerWithSpecials, usual_id

_log = logging.getLogger(__name__)

_BYTE_IDS = {"pad": 0, "bos": 1, "eos": 2}  # of a byte tokenizer whose byte_offset leaves room
_AT = "data.tokenizer"


def open_stream_tokenizer(config: StreamConfig) -> StreamTokenizer:
    """Open the tokenizer, find its ids and check them. May ask a hub, if the config names one."""
    section = config.data.tokenizer
    saved = None if section.snapshot is None else load_tokenizer(section.snapshot)
    tokenizer = _open_base(section) if saved is None else _from_snapshot(section, saved.tokenizer)
    ids = _find_ids(config, tokenizer)
    opened = StreamTokenizer(
        tokenizer=tokenizer,
        ids=ids,
        vocab_size=_vocab_size(config, tokenizer, ids),
        engine=section.engine,
    )
    if saved is not None and saved.fingerprint != opened.fingerprint:
        _log.warning(
            "%s.snapshot: %s was saved with %s; the config says %s, and that is used",
            *(_AT, section.snapshot, saved.ids, ids),
        )
    return opened


def effective_config(config: StreamConfig, tokenizer: StreamTokenizer) -> StreamConfig:
    """The config with the vocabulary and the ids that are used: what a model is made from."""
    model = ModelSection(
        vocab_size=tokenizer.vocab_size,
        bos_token_id=tokenizer.ids.bos_id,
        eos_token_id=tokenizer.ids.eos_id,
        pad_token_id=tokenizer.ids.pad_id,
    )
    return replace(config, model=model)


def _open_base(section: TokenizerSection) -> Tokenizer:
    specials = None if section.specials is None else dict(section.specials)
    if section.kind == "byte":
        return ByteTokenizer(byte_offset=section.byte_offset, specials=specials)
    name = section.path or section.hf_name_or_path
    assert name is not None, "the config was checked"
    opened = open_tokenizer(name, specials=specials, revision=section.hf_revision)
    if kind_of(opened) != section.kind:
        raise OptionError(
            f'{_AT}.kind is "{section.kind}", but {name} is a tokenizer of the kind '
            f'"{kind_of(opened)}"; set {_AT}.kind = "{kind_of(opened)}"'
        )
    return opened


def _from_snapshot(section: TokenizerSection, saved: Tokenizer) -> Tokenizer:
    """The saved tokenizer, if the other keys name the same one."""
    at = f"{_AT}.snapshot: {section.snapshot}"
    if kind_of(saved) != section.kind:
        raise OptionError(
            f'{at} holds a tokenizer of the kind "{kind_of(saved)}", but {_AT}.kind is '
            f'"{section.kind}"'
        )
    if section.kind == "byte" or section.path or section.hf_name_or_path:
        named = _open_base(section)
        if named.fingerprint != saved.fingerprint:
            raise OptionError(
                f"{at} holds {saved!r} with the fingerprint {saved.fingerprint[:16]}, but the "
                f"other keys of {_AT} name {named!r} with {named.fingerprint[:16]}; drop the "
                "snapshot for a new run, or the other keys to continue with it"
            )
        # a byte tokenizer has no files: without specials in the config, the saved ones are used
        return named if section.kind != "byte" or section.specials is not None else saved
    strings = special_strings(saved)
    for name, text in (section.specials or {}).items():
        if strings.get(name) != text:
            raise OptionError(
                f"{at}: the special {name!r} is {strings.get(name)!r} there, but {_AT}.specials "
                f"says {text!r}"
            )
    return saved


def _find_ids(config: StreamConfig, tokenizer: Tokenizer) -> DocumentIds:
    section = config.data.tokenizer
    named = tokenizer.special_token_ids() if section.auto_set_special_tokens else {}
    ids = _updated_ids(config.model, named)
    if isinstance(tokenizer, ByteTokenizer) and section.auto_set_special_tokens and not named:
        needed = {"pad": True, "bos": section.add_bos, "eos": section.add_eos}
        _add_byte_ids(ids, tokenizer, needed)
    # ids that documents or labels use; padding is marked by the attention mask
    used = {"bos": section.add_bos, "eos": section.add_eos or not config.data.train_on_eos}
    for name, number in ids.items():
        if number is not None:
            _check_id(name, number, tokenizer, config, used=used.get(name, False))
    for name, wanted in (("bos", section.add_bos), ("eos", section.add_eos)):
        if wanted and ids[name] is None:
            raise OptionError(
                f"{_AT}.add_{name} is true, but there is no {name.upper()} id: {tokenizer!r} has "
                f"the specials {sorted(named) or 'none'}; set model.{name}_token_id, or name its "
                f'string ({_AT}.specials = {{ {name} = "..." }}), or set {_AT}.add_{name} = false'
            )
    return DocumentIds(
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        pad_id=_pad_id(ids),
        add_bos=section.add_bos,
        add_eos=section.add_eos,
        max_doc_tokens=section.max_doc_tokens,
    )


def _updated_ids(model: ModelSection, named: Mapping[str, int]) -> dict[str, int | None]:
    """The config's ids, replaced by those that the tokenizer calls bos, eos or pad.

    A stand-in such as "eot" is taken only where the config says nothing.
    """
    ids: dict[str, int | None] = {
        "bos": model.bos_token_id,
        "eos": model.eos_token_id,
        "pad": model.pad_token_id,
    }
    replaced = []
    for name, given in ids.items():
        if given is None:
            ids[name] = usual_id(name, named)
        elif named.get(name, given) != given:
            ids[name] = named[name]
            replaced.append(f"model.{name}_token_id {named[name]} (the config says {given})")
    if replaced:
        _log.warning(
            "the tokenizer's own ids are used: %s; %s.auto_set_special_tokens = false keeps those "
            "of the config",
            *(", ".join(replaced), _AT),
        )
    return ids


def _add_byte_ids(
    ids: dict[str, int | None], tokenizer: ByteTokenizer, needed: Mapping[str, bool]
) -> None:
    """Pad 0, BOS 1 and EOS 2 where `byte_offset` leaves room and the id is free; otherwise an id
    that documents need is the first free one after the bytes.

    An id that nothing needs stays None: it is part of the fingerprint, and so of every state.
    """
    taken = set(ids.values())
    after = tokenizer.vocab_size
    for name in ("pad", "eos", "bos"):
        if ids[name] is not None or not needed[name]:
            continue
        if tokenizer.byte_offset >= len(_BYTE_IDS) and _BYTE_IDS[name] not in taken:
            ids[name] = _BYTE_IDS[name]
        elif name != "pad":
            while after in taken:
                after += 1
            ids[name] = after
        taken.add(ids[name])


def _pad_id(ids: Mapping[str, int | None]) -> int:
    for name in ("pad", "eos", "bos"):
        number = ids[name]
        if number is not None:
            break
    else:
        name, number = "id", 0
    if name != "pad":
        _log.info(
            "no special token is called pad; padding is filled with %s (%d): attention is False "
            "and labels are ignored there",
            *(name, number),
        )
    return number


def _check_id(
    name: str, number: int, tokenizer: Tokenizer, config: StreamConfig, *, used: bool
) -> None:
    """Refuse an id that the model does not have, and one that text can become if it is `used`."""
    key = f"model.{name}_token_id"
    if isinstance(tokenizer, ByteTokenizer):
        first = tokenizer.byte_offset
        if used and first <= number < first + 256:
            raise OptionError(
                f"{key} is {number}, but the ids {first} to {first + 255} are bytes of text, which "
                f"would be taken for it; choose one from {first + 256} on, or raise "
                f"{_AT}.byte_offset to {number + 1} or more to keep it"
            )
        return
    limit = _rounded(max(tokenizer.vocab_size, config.model.vocab_size or 0), config)
    if number >= limit:
        raise OptionError(
            f"{key} is {number:,}, but {tokenizer!r} has {tokenizer.vocab_size:,} ids "
            f"({limit:,} with those the model has beyond them); wanted less"
        )
    if used and _is_text(tokenizer, number):
        raise OptionError(
            f"{key} is {number:,}, which is {tokenizer.decode([number])!r} and not a special token "
            f"of {tokenizer!r}: text would be taken for it; choose a special token "
            f"({tokenizer.special_token_ids()}), or make this one special with "
            f'{_AT}.specials = {{ {name} = "..." }}'
        )


def _is_text(tokenizer: Tokenizer, number: int) -> bool:
    """Whether some text may become this id."""
    try:
        literal = tokenizer.decode([number])
    except TokenizerError:  # not a token: beyond the vocabulary, or a gap in it
        return False
    assert isinstance(tokenizer, TokenizerWithSpecials), "every kind of tokenizer in a config is"
    return tokenizer.marker_id(literal) != number


def _vocab_size(config: StreamConfig, tokenizer: Tokenizer, ids: DocumentIds) -> int:
    used = (ids.bos_id, ids.eos_id, ids.pad_id, tokenizer.vocab_size - 1)
    needed = max(number for number in used if number is not None) + 1
    given = config.model.vocab_size
    size = _rounded(max(needed, given or 0), config)
    if given is not None and given < needed:
        _log.warning(
            "model.vocab_size is raised from %s to %s: the tokenizer and its special ids need %s, "
            "rounded up to a multiple of %s.vocab_size_multiple",
            *(f"{given:,}", f"{size:,}", f"{needed:,}", _AT),
        )
    elif given not in (None, size):
        _log.info(
            "model.vocab_size is rounded up from %s to %s, a multiple of %s.vocab_size_multiple",
            *(f"{given:,}", f"{size:,}", _AT),
        )
    return size


def _rounded(size: int, config: StreamConfig) -> int:
    multiple = config.data.tokenizer.vocab_size_multiple
    return -(-size // multiple) * multiple
