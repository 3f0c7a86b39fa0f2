"""Grain's own tools on our iterator."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

grain = pytest.importorskip("grain")

from etils import epath  # noqa: E402 - comes with grain
from grain._src.python.testing.experimental import (  # noqa: E402
    assert_equal_output_after_checkpoint,
)

from shardmill.compat.chomp import (  # noqa: E402
    build_eval_iterator,
    build_train_iterator,
    open_stream,
)
from shardmill.errors import OptionError, SourceError, StateMismatchError  # noqa: E402
from shardmill.loading.streaming.documents import StreamOrder  # noqa: E402
from shardmill.loading.streaming.rows import BinRules  # noqa: E402
from shardmill.loading.streaming.stream import BatchShape, TextStream  # noqa: E402
from shardmill.trainers.grain import CheckpointedDataset, StreamIterator  # noqa: E402
from tests.loading.streaming.pipelines import Case, NumberEncoder, assert_equal, some  # noqa: E402

CASE = Case(
    units=((3, 4, 5, 6),) * 4,
    order=StreamOrder(shuffle=True, buffer_documents=5),
    shape=BatchShape(grad_accum=2, batch_size=1, seq_len=5),
)


def make_config(**data: Any) -> dict[str, Any]:
    texts = [f"text number {number} " * (number % 4 + 1) for number in range(30)]
    chosen: dict[str, Any] = {"backend": "local_text", "local_text": texts}
    chosen |= {"shuffle_buffer_size": 7, "tokenizer": {"kind": "byte", "byte_offset": 1}}
    return {
        "data": chosen | data,
        "train": {"seq_len": 32, "batch_size": 2},
        "model": {"eos_token_id": 0},
    }


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("bins", [None, BinRules(buffer_documents=5, seed=1)])
@pytest.mark.parametrize("repeat", [False, True])
def test_grains_checkpoint_test_passes(prefetch: int, bins: BinRules | None, repeat: bool) -> None:
    order = StreamOrder(shuffle=True, buffer_documents=5, repeat=repeat)
    case = Case(units=CASE.units, order=order, bins=bins, shape=CASE.shape)
    dataset = CheckpointedDataset(case.open)
    if repeat:
        dataset = grain.experimental.LimitIterDataset(dataset, count=14)
    if prefetch:
        dataset = grain.experimental.ThreadPrefetchIterDataset(
            dataset, prefetch_buffer_size=prefetch
        )
    assert_equal_output_after_checkpoint(dataset)


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 2])
def test_grains_checkpoint_test_passes_on_a_configured_stream(prefetch: int) -> None:
    config = make_config(repeat=False, grain_prefetch=prefetch)

    class Stream:
        def __iter__(self) -> Any:
            return build_train_iterator(config)

    assert_equal_output_after_checkpoint(Stream())


def test_the_iterator_is_grains() -> None:
    with build_train_iterator(make_config()) as iterator:
        assert isinstance(iterator, grain.DatasetIterator)
        assert iterator.config.train.seq_len == 32
        assert iterator.tokenizer.vocab_size == 384
        assert next(iterator).input_ids.shape == (1, 2, 32)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_grains_handler_saves_to_a_folder_and_restores_from_it(
    tmp_path: Path, prefetch: int
) -> None:
    build: Callable[[], Any] = partial(build_train_iterator, make_config(grain_prefetch=prefetch))
    handler = grain.checkpoint.CheckpointHandler()
    with build() as running, build() as resumed:
        some(running, 5)
        handler.save(epath.Path(tmp_path), item=running)
        (file,) = tmp_path.iterdir()
        assert file.name == "process_0-of-1.json"
        assert json.loads(file.read_text()) == running.get_state()
        handler.restore(epath.Path(tmp_path), item=resumed)
        assert_equal(some(resumed, 9), some(running, 9))


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
def test_statistics_speak_of_the_batches_given(prefetch: int) -> None:
    config = make_config(grain_prefetch=prefetch, repeat=False)
    with build_train_iterator(config) as iterator, open_stream(config) as plain:
        assert iterator.stats() == plain.stats()
        for _ in range(4):
            assert_equal([next(iterator)], [next(plain)])
            assert iterator.stats() == plain.stats()
        assert iterator.stats().batch.rows == 2
        assert iterator.stats().total.rows == 8


def test_a_refused_state_loses_nothing_that_was_read_ahead() -> None:
    config = make_config(grain_prefetch=3)
    with build_train_iterator(config) as iterator, open_stream(config) as undisturbed:
        some(iterator, 4), some(undisturbed, 4)
        state = iterator.get_state()
        with pytest.raises(StateMismatchError, match="seed: the state has 9, this stream 0"):
            iterator.set_state({**state, "data": {**state["data"], "seed": 9}})
        assert iterator.get_state() == state
        assert_equal(some(iterator, 6), some(undisturbed, 6))


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_an_error_comes_after_the_batches_before_it_and_again_when_asked_again(
    prefetch: int,
) -> None:
    class Breaking(NumberEncoder):
        def encode_batch(self, texts: Any) -> Any:
            if "9:3" in [str(text) for text in texts]:
                raise SourceError("no ids for 9:3")
            return super().encode_batch(texts)

    case = Case(units=((3,) * 12,), batch_rows=1, shape=BatchShape(batch_size=1, seq_len=3))
    pipeline = case.pipeline(encoder=Breaking)
    iterator: Any = StreamIterator(partial(TextStream, pipeline), prefetch)
    assert len(some(iterator, 8)) == 8
    state = iterator.get_state()
    for _ in range(3):
        with pytest.raises(SourceError, match="no ids for 9:3"):
            next(iterator)
    assert iterator.get_state() == state
    iterator.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_closed_iterator_says_so_and_still_has_its_state(prefetch: int) -> None:
    iterator = build_train_iterator(make_config(grain_prefetch=prefetch))
    some(iterator, 3)
    state, stats = iterator.get_state(), iterator.stats()
    iterator.close()
    iterator.close()
    assert iterator.get_state() == state
    assert iterator.stats() == stats
    with pytest.raises(ValueError, match="closed"):
        next(iterator)
    with pytest.raises(ValueError, match="closed"):
        iterator.set_state(state)


@pytest.mark.slow
def test_an_iterator_that_cannot_be_made_raises_its_own_error_alone() -> None:
    with pytest.raises(OptionError, match="process_index=2: wanted 0 to 1"):
        build_train_iterator(make_config(), process_index=2, process_count=2)
    gc.collect()  # what was half made goes without a word, or pytest takes it for an error


def test_evaluation_reads_in_order_once_and_no_more_than_asked_for() -> None:
    texts = [f"evaluation {number}" for number in range(9)]
    config = make_config(local_eval_text=texts, max_eval_samples=4, mask_boundary_loss=False)
    with build_eval_iterator(config) as iterator:
        batches = list(iterator)
        assert iterator.stats().total.documents == 4
    assert len(batches) == 1
    ids = batches[0].input_ids[0][batches[0].attention_mask[0]]
    assert bytes((ids[:12] - 1).tolist()) == b"evaluation 0"
    with build_eval_iterator(config) as again:
        assert_equal(list(again), batches)


@pytest.mark.slow
def test_a_script_that_closes_nothing_ends_quietly() -> None:
    code = f"""
import warnings; warnings.simplefilter("ignore")
from shardmill.compat.chomp import build_train_iterator
iterator = build_train_iterator({make_config(grain_prefetch=2)!r})
next(iterator)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0
    assert "Exception" not in done.stderr
    assert "Traceback" not in done.stderr
