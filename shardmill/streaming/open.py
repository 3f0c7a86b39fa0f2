"""The source of documents that a config names.

In: a `StreamConfig`.  Out: a `Source` for training, or one for evaluation.
Promise: two configs that name other documents give sources with other descriptions, so that a state
of one is refused by the other; evaluation on the training data is announced.
Not here: order, shuffling and dealing out (documents).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import Any

from shardmill.protocols import Source
from shardmill.sources import BatchLimits, MemorySource, open_hub, open_source
from shardmill.streaming.config import DataSection, StreamConfig

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
