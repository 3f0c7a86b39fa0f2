"""From a config to batches.

In: a config (a file, a mapping, overrides), and which of how many processes this is.
Out: `build_train_iterator`, `build_eval_iterator`: Grain iterators; `open_stream`: the same batches
without Grain.
Promise: nothing of the data is read before the first batch is wanted; what a state must match is
told apart from what may change (batch size, accumulation, prefetching, retries, engine).
Not here: the parts (pipeline), the position (iterator).

The source of documents that a config names.

In: a `StreamConfig`.  Out: a `Source` for training, or one for evaluation.
Promise: two configs that name other documents give sources with other descriptions, so that a state
of one is refused by the other; evaluation on the training data is announced.
Not here: order, shuffling and dealing out (documents).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shardmill.errors import OptionError
from shardmill.loading.streaming.batch import LossRules
from shardmill.loading.streaming.bin_rows import BinRules
from shardmill.loading.streaming.config import DataSection, StreamConfig, read_config
from shardmill.loading.streaming.encode import DocumentRules
from shardmill.loading.streaming.iterator import (
    BatchIterator,
    BatchShape,
    Packing,
    Pipeline,
    SharedEncoder,
)
from shardmill.loading.streaming.records import StreamOrder
from shardmill.loading.streaming.tokenizer import effective_config, open_stream_tokenizer
from shardmill.loading.streaming.tokenizer_snapshot import StreamTokenizer
from shardmill.protocols import Encoder, Source, Texts
from shardmill.records import JSON
from shardmill.sources import BatchLimits, MemorySource, open_hub, open_source

if TYPE_CHECKING:
    from shardmill.trainers.grain import StreamIterator


_log = logging.getLogger(__name__)


def open_train_source(config: StreamConfig) -> Source:
    """What `data.hf_split`, `data.local_text` or `data.files` name."""
    data = config.data
    if data.backend == "hf":
        return _open_hub(data, data.hf_split)
    if data.backend == "local_text":
        return _open_texts(data, data.local_text or ())
    return _open_files(data, data.files or ())


def open_eval_source(config: StreamConfig) -> Source:
    """What `data.hf_eval_split`, `data.local_eval_text` or `data.eval_files` name.

    Without one: the training data, with a warning.
    """
    data = config.data
    if data.backend == "hf" and data.hf_eval_split is not None:
        return _open_hub(data, data.hf_eval_split)
    if data.backend == "local_text" and data.local_eval_text is not None:
        return _open_texts(data, data.local_eval_text)
    if data.backend == "files" and data.eval_files is not None:
        return _open_files(data, data.eval_files)
    key = {"hf": "hf_eval_split", "local_text": "local_eval_text", "files": "eval_files"}
    _log.warning(
        "evaluation reads the training data, since data.%s is not set: its loss says nothing about "
        "text that was never seen",
        key[data.backend],
    )
    return open_train_source(config)


def _limits(data: DataSection) -> BatchLimits:
    return BatchLimits(num_documents=data.state_update_interval)


def _open_hub(data: DataSection, split: str) -> Source:
    assert data.hf_dataset is not None, "the checks of the config ask for it"
    return open_hub(
        data.hf_dataset,
        limits=_limits(data),
        config=data.hf_name,
        split=split,
        field=data.text_field,
        revision=data.hf_revision,
        max_retries=data.max_retries,
        retry_delay=data.retry_delay_sec,
    )


def _open_texts(data: DataSection, texts: Sequence[str]) -> Source:
    digest = hashlib.sha256()
    for text in texts:
        encoded = text.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    name = f"local_text {digest.hexdigest()[:32]}"
    return MemorySource(texts, name=name, limits=_limits(data))


def _open_files(data: DataSection, files: Sequence[str]) -> Source:
    options: dict[str, Any] = {"limits": _limits(data)}
    if data.text_field is not None:
        options["field"] = data.text_field
    if data.on_bad != "error":
        options["on_bad"] = data.on_bad
    return open_source(list(files), kind=data.files_kind, **options)


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
    return _build(read_config(config, overrides), "train", (process_index, process_count))


def build_eval_iterator(
    config: ConfigLike,
    *,
    process_index: int | None = None,
    process_count: int | None = None,
    overrides: Sequence[str] = (),
) -> StreamIterator:
    """Batches of the evaluation data: in order, once, at most `data.max_eval_samples` documents."""
    return _build(read_config(config, overrides), "eval", (process_index, process_count))


def open_stream(
    config: ConfigLike,
    *,
    purpose: Purpose = "train",
    process_index: int | None = None,
    process_count: int | None = None,
    overrides: Sequence[str] = (),
) -> BatchIterator:
    """The same batches without Grain and without prefetching of batches."""
    index, count = which_process(process_index, process_count)
    pipeline = open_pipeline(read_config(config, overrides), purpose)
    return BatchIterator(pipeline, process_index=index, process_count=count)


def open_pipeline(
    config: StreamConfig, purpose: Purpose = "train", tokenizer: StreamTokenizer | None = None
) -> Pipeline:
    """The parts that a config names. `tokenizer`: the config's own, if it is open already."""
    if purpose not in ("train", "eval"):
        raise OptionError(f"purpose={purpose!r}: wanted 'train' or 'eval'")
    data, train, is_train = config.data, config.train, purpose == "train"
    tokenizer = tokenizer or open_stream_tokenizer(config)
    source = open_train_source(config) if is_train else open_eval_source(config)
    order = StreamOrder(
        seed=data.seed,
        shuffle=data.shuffle and is_train,
        buffer_documents=data.shuffle_buffer_size,
        buffer_bytes=data.shuffle_buffer_bytes,
        repeat=data.repeat and is_train,
        max_documents=None if is_train else data.max_eval_samples,
    )
    return Pipeline(
        source=source,
        encoder=SharedEncoder(partial(_proved_encoder, tokenizer, source)),
        order=order,
        documents=_document_rules(config, tokenizer),
        packing=_packing(config, order, tokenizer.pad_id),
        loss=LossRules(
            mask_boundary_loss=data.mask_boundary_loss,
            train_on_eos=data.train_on_eos,
            eos_id=tokenizer.eos_id,
        ),
        shape=BatchShape(
            grad_accum=train.grad_accum, batch_size=train.batch_size, seq_len=train.seq_len
        ),
        data=_identity(config, purpose, source, order, tokenizer.fingerprint),
        num_streams=data.num_streams,
        remake=partial(open_pipeline, config, purpose),
    )


def _build(
    config: StreamConfig, purpose: Purpose, process: tuple[int | None, int | None]
) -> StreamIterator:
    from shardmill.trainers.grain import StreamIterator

    index, count = which_process(*process)
    tokenizer = open_stream_tokenizer(config)
    pipeline = open_pipeline(config, purpose, tokenizer)
    make = partial(BatchIterator, pipeline, process_index=index, process_count=count)
    return StreamIterator(make, effective_config(config, tokenizer), tokenizer)


def which_process(index: int | None, count: int | None) -> tuple[int, int]:
    """As the caller says; one process if nobody says otherwise, WORLD_SIZE included."""
    if index is not None and count is not None:
        return index, count
    if index is not None or count is not None:
        raise OptionError(
            f"process_index={index}, process_count={count}: wanted both, or neither for one process"
        )
    world = os.environ.get("WORLD_SIZE", "1")
    if world.strip() != "1":
        raise OptionError(
            f"WORLD_SIZE={world} says that several processes train together, and each of them "
            f"would get the same data: pass process_index (RANK) and process_count (WORLD_SIZE), "
            f"or process_index=0, process_count=1 if every process shall read everything"
        )
    return 0, 1


def _proved_encoder(tokenizer: StreamTokenizer, source: Source, first: Texts) -> Encoder:
    corpus = first if isinstance(first, Sequence) else first.to_pylist()
    return tokenizer.encoder(corpus=corpus, size_hint=source.size_hint())


def _document_rules(config: StreamConfig, tokenizer: StreamTokenizer) -> DocumentRules:
    rules = config.data.tokenizer
    return DocumentRules(
        bos_id=tokenizer.bos_id if rules.add_bos else None,
        eos_id=tokenizer.eos_id if rules.add_eos else None,
        max_doc_tokens=rules.max_doc_tokens,
        vocab_size=tokenizer.vocab_size,
    )


def _packing(config: StreamConfig, order: StreamOrder, pad_id: int) -> Packing:
    data, bins = config.data, None
    if data.packing_mode == "bin":
        bins = BinRules(
            buffer_documents=data.packing_buffer_docs,
            buffer_tokens=data.packing_buffer_tokens,
            max_per_row=data.packing_max_docs_per_bin,
            algorithm=data.packing_algorithm,
            seed=order.seed if order.shuffle else None,
        )
    return Packing(seq_len=config.train.seq_len, pad_id=pad_id, bins=bins)


def _identity(
    config: StreamConfig, purpose: Purpose, source: Source, order: StreamOrder, tokenizer: str
) -> dict[str, JSON]:
    """What decides the rows: a state of another value is refused by its name."""
    data, described = config.data, source.describe()
    text = json.dumps(described, sort_keys=True)
    told: dict[str, object] = {
        "purpose": purpose,
        "dataset": source.name,
        "revision": described.get("revision"),
        "dataset_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "tokenizer": tokenizer,
        "seed": order.seed,
        "shuffle": order.shuffle,
        "shuffle_buffer_size": order.buffer_documents if order.shuffle else None,
        "shuffle_buffer_bytes": order.buffer_bytes if order.shuffle else None,
        "repeat": order.repeat,
        "max_eval_samples": order.max_documents,
        "state_update_interval": data.state_update_interval,
        "packing_mode": data.packing_mode,
        "seq_len": config.train.seq_len,
        "mask_boundary_loss": data.mask_boundary_loss,
        "train_on_eos": data.train_on_eos,
    }
    for name in ("algorithm", "buffer_docs", "buffer_tokens", "max_docs_per_bin"):
        is_used = data.packing_mode == "bin"
        told[f"packing_{name}"] = getattr(data, f"packing_{name}") if is_used else None
    # ints and texts alone: some savers of checkpoints know nothing else
    return {key: value if isinstance(value, int) else str(value) for key, value in told.items()}
