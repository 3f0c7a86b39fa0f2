"""chomp's iterators over the core stream: `build_train_iterator` and `build_eval_iterator`.

Batches have the shape [A, B, T]. Nothing of the data is read before the first batch.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shardmill.arguments import whole_number
from shardmill.compat.chomp.config import StreamConfig, read_config
from shardmill.compat.chomp.tokenizer import effective_config, open_stream_tokenizer
from shardmill.errors import OptionError
from shardmill.loading.streaming.documents import StreamOrder
from shardmill.loading.streaming.rows import BinRules
from shardmill.loading.streaming.stream import BatchShape, LossRules, Pipeline, TextStream
from shardmill.loading.streaming.tokenizer import StreamTokenizer
from shardmill.protocols import Source
from shardmill.sources import BatchLimits, MemorySource, open_hub, open_source

if TYPE_CHECKING:
    from shardmill.compat.chomp.grain_iterator import StreamIterator

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
    from shardmill.compat.chomp.grain_iterator import StreamIterator

    rank, world = _rank_and_world(index, count)
    tokenizer = open_stream_tokenizer(config)
    pipeline = open_pipeline(config, purpose, tokenizer)
    make = partial(TextStream, pipeline, rank=rank, world=world)
    return StreamIterator(make, effective_config(config, tokenizer), tokenizer)


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
