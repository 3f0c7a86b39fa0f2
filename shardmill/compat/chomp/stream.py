"""What a config of chomp names: its tokenizer, its documents, and iterators of [A, B, T] over them.

Nothing of the data is read before the first batch. The tokenizer's own BOS, EOS and pad ids replace
those of the config unless `auto_set_special_tokens` is false. An id that is put into documents, or
that masks labels, is never an id that text can become. The vocabulary is rounded up, and holds
every id. What differs from the config is logged with both numbers.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shardmill.arguments import whole_number
from shardmill.compat.chomp.config import ModelSection, StreamConfig, TokenizerSection, read_config
from shardmill.errors import OptionError, TokenizerError
from shardmill.loading.streaming.documents import StreamOrder
from shardmill.loading.streaming.rows import BinRules
from shardmill.loading.streaming.stream import BatchShape, LossRules, Pipeline, TextStream
from shardmill.loading.streaming.tokenizer import (
    DocumentIds,
    StreamTokenizer,
    kind_of,
    load_tokenizer,
    special_strings,
)
from shardmill.protocols import Source, Tokenizer
from shardmill.sources import BatchLimits, MemorySource, open_hub, open_source
from shardmill.tokenizers import ByteTokenizer, open_tokenizer
from shardmill.tokenizers.base import TokenizerWithSpecials, usual_id

if TYPE_CHECKING:
    from shardmill.trainers.grain import StreamIterator

_log = logging.getLogger(__name__)

Purpose = Literal["train", "eval"]
ConfigLike = StreamConfig | Mapping[str, Any] | str | Path


def build_train_iterator(
    config: ConfigLike,
    *,
    process_index: int | None = None,
    process_count: int | None = None,
    overrides: Sequence[str] = (),
) -> StreamIterator:
    """Training batches as a `grain.DatasetIterator`.

    Under several processes each passes its index and their count, and gets its own documents.
    """
    return _build(read_config(config, overrides), "train", process_index, process_count)


def build_eval_iterator(
    config: ConfigLike,
    *,
    process_index: int | None = None,
    process_count: int | None = None,
    overrides: Sequence[str] = (),
) -> StreamIterator:
    """Batches of the evaluation data: in order, once, at most `data.max_eval_samples` documents."""
    return _build(read_config(config, overrides), "eval", process_index, process_count)


def _build(
    config: StreamConfig, purpose: Purpose, index: int | None, count: int | None
) -> StreamIterator:
    from shardmill.trainers.grain import StreamIterator

    rank, world = _rank_and_world(index, count)
    tokenizer = open_stream_tokenizer(config)
    pipeline = open_pipeline(config, purpose, tokenizer)
    make = partial(TextStream, pipeline, rank=rank, world=world)
    iterator = StreamIterator(make, config.data.grain_prefetch)
    iterator.tokenizer, iterator.config = tokenizer, effective_config(config, tokenizer)
    return iterator


def open_stream(
    config: ConfigLike,
    *,
    purpose: Purpose = "train",
    process_index: int | None = None,
    process_count: int | None = None,
    overrides: Sequence[str] = (),
) -> TextStream:
    """The same batches without Grain and without prefetching of batches."""
    rank, world = _rank_and_world(process_index, process_count)
    return TextStream(
        open_pipeline(read_config(config, overrides), purpose), rank=rank, world=world
    )


def open_pipeline(
    config: StreamConfig, purpose: Purpose = "train", tokenizer: StreamTokenizer | None = None
) -> Pipeline:
    """The parts that a config names. `tokenizer` is the config's own, if it is open already."""
    if purpose not in ("train", "eval"):
        raise OptionError("{purpose}: wanted 'train' or 'eval'", purpose=purpose)
    data, train, is_train = config.data, config.train, purpose == "train"
    tokenizer = tokenizer or open_stream_tokenizer(config)
    order = StreamOrder(
        seed=data.seed,
        shuffle=data.shuffle and is_train,
        buffer_documents=data.shuffle_buffer_size,
        buffer_bytes=data.shuffle_buffer_bytes,
        repeat=data.repeat and is_train,
        max_documents=None if is_train else data.max_eval_samples,
    )
    bins = BinRules(
        buffer_documents=data.packing_buffer_docs,
        buffer_tokens=data.packing_buffer_tokens,
        max_per_row=data.packing_max_docs_per_bin,
        algorithm=data.packing_algorithm,
        seed=order.seed if order.shuffle else None,
    )
    return Pipeline(
        source=open_documents(config, purpose),
        tokenizer=tokenizer,
        order=order,
        bins=bins if data.packing_mode == "bin" else None,
        loss=LossRules(
            mask_boundary_loss=data.mask_boundary_loss,
            train_on_eos=data.train_on_eos,
            eos_id=tokenizer.ids.eos_id,
        ),
        shape=BatchShape(
            grad_accum=train.grad_accum, batch_size=train.batch_size, seq_len=train.seq_len
        ),
        purpose=purpose,
        batch_documents=data.state_update_interval,
        num_streams=data.num_streams,
        remake=partial(open_pipeline, config, purpose),
    )


def _rank_and_world(index: int | None, count: int | None) -> tuple[int, int]:
    """As given, else one process. Several processes are never guessed from the environment."""
    if index is not None and count is not None:
        world = whole_number(count, "process_count")
        if whole_number(index, "process_index", least=0) >= world:
            raise OptionError(
                f"{{process_index}}: wanted 0 to {world - 1}, since {{process_count}}",
                process_index=index,
                process_count=count,
            )
        return index, count
    if index is not None or count is not None:
        raise OptionError(
            "{process_index}, {process_count}: wanted both, or neither for one process",
            process_index=index,
            process_count=count,
        )
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size.strip() != "1":
        raise OptionError(
            f"WORLD_SIZE={world_size} says that several processes train together, and each of them "
            "would get the same data: pass {process_index} (RANK) and {process_count} "
            "(WORLD_SIZE), or 0 and 1 if every process is meant to read everything",
            process_index=...,
            process_count=...,
        )
    return 0, 1


_EVAL_KEYS = {"hf": "hf_eval_split", "local_text": "local_eval_text", "files": "eval_files"}


def open_documents(config: StreamConfig, purpose: Purpose = "train") -> Source:
    """The documents of the config's backend. Without data for evaluation: the training data, with a
    warning."""
    data = config.data
    split, texts, files = data.hf_split, data.local_text, data.files
    key = _EVAL_KEYS[data.backend]
    if purpose == "eval" and getattr(data, key) is not None:
        split, texts, files = data.hf_eval_split or "", data.local_eval_text, data.eval_files
    elif purpose == "eval":
        _log.warning(
            "evaluation reads the training data, since data.%s is not set: its loss says nothing "
            "about text that was never seen",
            key,
        )
    limits = BatchLimits(num_documents=data.state_update_interval)
    if data.backend == "hf":
        assert data.hf_dataset is not None, "the config was checked"
        return open_hub(
            data.hf_dataset,
            limits=limits,
            config=data.hf_name,
            split=split,
            field=data.text_key,
            revision=data.hf_revision,
            max_retries=data.max_retries,
            retry_delay=data.retry_delay_sec,
        )
    if data.backend == "local_text":
        digest = hashlib.sha256()
        for text in texts or ():
            encoded = text.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
        return MemorySource(
            texts or (), name=f"local_text {digest.hexdigest()[:32]}", limits=limits
        )
    options: dict[str, Any] = {"limits": limits}
    if data.text_key is not None:
        options["field"] = data.text_key
    if data.on_bad != "error":
        options["on_bad"] = data.on_bad
    return open_source(list(files or ()), kind=data.files_kind, **options)


# the tokenizer

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
