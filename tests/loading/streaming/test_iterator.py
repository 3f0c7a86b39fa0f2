"""The iterator: its shape, its end, its errors, its threads."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shardmill.compat.chomp import open_stream
from shardmill.errors import OptionError, SourceError, StateMismatchError
from shardmill.loading.state import Counts
from shardmill.loading.streaming.documents import StreamOrder
from shardmill.loading.streaming.rows import BinRules
from shardmill.loading.streaming.stream import BatchShape, TextStream
from shardmill.protocols import Texts
from shardmill.records import Cursor, Ragged, TextBatch
from shardmill.sources import MemorySource
from tests.helpers import wait_for
from tests.loading.streaming.pipelines import (
    EOS,
    PAD,
    Case,
    NumberEncoder,
    assert_equal,
    some,
    with_states,
)
from tests.loading.streaming.units import UnitsSource

CASE = Case(units=((3, 4, 5),) * 3, shape=BatchShape(grad_accum=2, batch_size=2, seq_len=5))


def test_batches_are_literally_these() -> None:
    case = Case(
        units=((2, 6),), shape=BatchShape(grad_accum=2, batch_size=2, seq_len=4), max_doc_tokens=4
    )
    with case.open() as iterator:
        (batch,) = list(iterator)
    # 1001 1002 EOS 2001 2002 | 2003 2004, cut: no EOS; then two rows of padding
    assert batch.input_ids.tolist() == [
        [[1001, 1002, EOS, 2001], [2003, 2004, PAD, PAD]],
        [[PAD] * 4, [PAD] * 4],
    ]
    assert batch.labels.tolist() == [
        [[1002, EOS, 2001, 2002], [2004, -100, -100, -100]],
        [[-100] * 4, [-100] * 4],
    ]
    assert batch.segment_ids.tolist() == [[[1, 1, 1, 2], [1, 1, 0, 0]], [[0] * 4, [0] * 4]]
    assert batch.attention_mask.tolist() == [
        [[True] * 4, [True, True, False, False]],
        [[False] * 4, [False] * 4],
    ]
    assert iterator.stats().total == Counts(
        rows=4,
        tokens=7,
        padding=13,
        documents=2,
        truncated_documents=1,
        truncated_tokens=2,
        input_documents=2,
    )
    assert iterator.stats().total.utilisation == 0.35
    assert iterator.stats().batch == iterator.stats().total


@pytest.mark.parametrize("bins", [None, BinRules(buffer_documents=4)])
def test_every_batch_has_the_one_shape(bins: BinRules | None) -> None:
    with replace(CASE, bins=bins).open() as iterator:
        batches = list(iterator)
    assert len(batches) > 1
    for batch in batches:
        for array in batch.arrays().values():
            assert array.shape == (2, 2, 5)
            assert array.flags.writeable
            assert array.flags.c_contiguous
        assert [str(array.dtype) for array in batch.arrays().values()] == [
            "int32",
            "int32",
            "bool",
            "int32",
        ]


def test_streams_give_a_row_each_in_turn() -> None:
    case = Case(units=((3, 7), (3,), (3, 3, 3)), shape=BatchShape(batch_size=1, seq_len=3))
    with TextStream(case.pipeline(num_streams=3)) as iterator:
        firsts = [int(batch.input_ids[0, 0]) for batch in iterator]
    # unit v goes to stream v: documents 1 2 | 3 | 4 5 6, each row a document or half of the long
    assert firsts == [1001, 3001, 4001, 2001, 5001, 2005, 6001]


def test_after_the_end_comes_stop_iteration_for_ever_and_the_state_stays_valid() -> None:
    iterator = CASE.open()
    batches, states = with_states(iterator, 100)
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(iterator)
    ended = iterator.get_state()
    iterator.set_state(ended)
    assert next(iterator, None) is None
    iterator.set_state(states[1])
    assert_equal(list(iterator), batches[1:])
    iterator.close()


def test_a_state_can_be_set_on_a_running_iterator_and_its_threads_end() -> None:
    case = replace(CASE, order=StreamOrder(shuffle=True, buffer_documents=3, repeat=True))
    with case.open() as iterator:
        batches, states = with_states(iterator, 6)
        running = threading.active_count()
        for _ in range(20):
            iterator.set_state(states[2])
            assert_equal([next(iterator)], batches[2:3])
        assert threading.active_count() <= running
    assert_no_more_threads()


@pytest.fixture(autouse=True)
def _threads_before() -> None:
    """Those of other tests, which share the process: a server, iterators that were not closed."""
    global before
    before = set(threading.enumerate())


before: set[threading.Thread] = set()


def assert_no_more_threads() -> None:
    wait_for(lambda: not set(threading.enumerate()) - before)


def test_nothing_is_opened_before_the_first_batch() -> None:
    pipeline = CASE.pipeline()
    source: Any = pipeline.source
    iterator = TextStream(pipeline)
    iterator.set_state(iterator.get_state())
    assert source.opened == []
    assert source.num_divided == 0
    next(iterator)
    assert source.opened != []
    iterator.close()
    assert_no_more_threads()


def test_a_refused_state_changes_nothing() -> None:
    with CASE.open() as iterator, CASE.open() as undisturbed:
        some(iterator, 1), some(undisturbed, 1)
        with pytest.raises(StateMismatchError, match="seed: the state has 5, this stream 0"):
            iterator.set_state({**iterator.get_state(), "data": {"seed": 5, "source": "units"}})
        assert iterator.get_state() == undisturbed.get_state()
        assert_equal(list(iterator), list(undisturbed))


def test_a_closed_iterator_says_so_and_still_has_its_state() -> None:
    iterator = CASE.open()
    next(iterator)
    state = iterator.get_state()
    iterator.close()
    iterator.close()
    with pytest.raises(OptionError, match="was closed"):
        next(iterator)
    assert iterator.get_state() == state


class Breaking(UnitsSource):
    """Fails after a number of batches of the source, as often as asked."""

    breaks_at = 5
    times = 2

    def divide(self, at_least: int) -> Any:
        return (self,)

    def batches(self, cursor: Cursor | None = None) -> Iterator[TextBatch]:
        for batch in super().batches(cursor):
            done = batch.cursor["unit"] * 3 + (batch.cursor["cursor"] or {"row": 0})["row"]  # type: ignore[operator,index,call-overload]
            if done >= self.breaks_at and self.times:
                self.times -= 1
                raise SourceError(f"broken after row {self.breaks_at}")
            yield batch


def breaking() -> Breaking:
    return Breaking(
        [[f"{unit * 3 + i + 1}:3" for i in range(3)] for unit in range(4)], batch_rows=1
    )


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_error_comes_where_the_data_end_and_is_never_taken_for_the_end(shuffle: bool) -> None:
    case = Case(
        units=((3, 3, 3),) * 4,
        batch_rows=1,
        order=StreamOrder(shuffle=shuffle, buffer_documents=2),
        shape=BatchShape(batch_size=1, seq_len=3),
    )
    sound = breaking()
    sound.times = 0
    with TextStream(case.pipeline(source=sound)) as undisturbed:
        wanted = list(undisturbed)
    assert len(wanted) == 12
    source = breaking()
    with TextStream(case.pipeline(source=source)) as iterator:
        assert_equal(some(iterator, 4), wanted[:4])
        with pytest.raises(SourceError, match="broken after row 5"):
            next(iterator)
        state = iterator.get_state()
        with pytest.raises(SourceError, match="broken after row 5"):  # the second time
            next(iterator)
        assert iterator.get_state() == state
        assert_equal(list(iterator), wanted[4:])  # the source is well again: nothing was lost
    assert_no_more_threads()


class BreakingEncoder(NumberEncoder):
    def encode_batch(self, texts: Texts) -> Ragged:
        if "7:3" in [str(text) for text in texts]:
            raise RuntimeError("no ids for 7:3")
        return super().encode_batch(texts)


def test_an_error_of_the_encoder_comes_at_its_batch_each_time() -> None:
    case = Case(units=((3,) * 12,), batch_rows=2, shape=BatchShape(batch_size=1, seq_len=3))
    with TextStream(case.pipeline(encoder=BreakingEncoder)) as iterator:
        assert len(some(iterator, 6)) == 6
        for _ in range(3):
            with pytest.raises(RuntimeError, match="no ids for 7:3"):
                next(iterator)
        assert iterator.stats().total.rows == 6


def test_an_interrupt_loses_nothing() -> None:
    """Ctrl-C in mid-batch: the next call gives that batch whole."""
    interrupts = [KeyboardInterrupt()]

    class Interrupted(NumberEncoder):
        def encode_batch(self, texts: Texts) -> Ragged:
            if interrupts and "5:4" in [str(text) for text in texts]:
                raise interrupts.pop()
            return super().encode_batch(texts)

    with CASE.open() as undisturbed:
        wanted = list(undisturbed)
    case = replace(CASE, batch_rows=1)
    with TextStream(case.pipeline(encoder=Interrupted)) as iterator:
        got = []
        for _ in range(20):
            try:
                got += [next(iterator)]
            except KeyboardInterrupt:
                continue
            except StopIteration:
                break
    assert not interrupts
    assert_equal(got, wanted)


@pytest.mark.parametrize("repeat", [False, True])
def test_a_stream_without_documents_is_an_error_not_an_endless_loop(repeat: bool) -> None:
    case = Case(units=((),), order=StreamOrder(repeat=repeat))
    with case.open() as iterator:
        for _ in range(2):
            with pytest.raises(SourceError, match="no document"):
                next(iterator)


def test_a_generator_that_was_read_is_refused_not_taken_for_the_end() -> None:
    source = MemorySource((f"{number}:3" for number in range(1, 9)), name="once")
    with TextStream(CASE.pipeline(source=source)) as iterator:
        batches, states = with_states(iterator, 100)
        assert len(batches) == 2
        iterator.set_state(states[1])
        with pytest.raises(SourceError, match="read only once"):
            next(iterator)


CONFIG: dict[str, Any] = {
    "data": {
        "backend": "local_text",
        "local_text": [f"text number {number}" for number in range(30)],
        "shuffle_buffer_size": 9,
        "tokenizer": {"kind": "byte", "byte_offset": 1},
    },
    "train": {"seq_len": 16, "batch_size": 2},
    "model": {"eos_token_id": 0},
}


@pytest.mark.parametrize("used", [0, 3])
def test_a_pickled_iterator_continues_by_itself(used: int) -> None:
    with open_stream(CONFIG, process_index=1, process_count=2) as iterator:
        some(iterator, used)
        copy = pickle.loads(pickle.dumps(iterator))
        assert copy.get_state() == iterator.get_state()
        with copy:
            assert_equal(some(copy, 4), some(iterator, 4))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_iterator_continues_by_itself() -> None:
    with open_stream(CONFIG) as iterator:
        next(iterator)
        read, write = os.pipe()
        child = os.fork()
        if not child:
            signal.alarm(20)  # a child that waits for a thread it does not have
            os.write(write, b"".join(one.input_ids.tobytes() for one in some(iterator, 40)))
            os._exit(0)
        os.close(write)
        wanted = b"".join(one.input_ids.tobytes() for one in some(iterator, 40))
        with os.fdopen(read, "rb") as pipe:
            assert pipe.read() == wanted
        assert os.waitpid(child, 0)[1] == 0


def test_documents_rebuilt_from_rows_are_the_tokenizers_own() -> None:
    config = {**CONFIG, "data": {**CONFIG["data"], "repeat": False, "mask_boundary_loss": False}}
    with open_stream(config) as iterator:
        flat = np.concatenate(
            [
                np.append(row[attended], last)
                for batch in iterator
                for row, attended, last in zip(
                    batch.input_ids[0], batch.attention_mask[0], batch.labels[0, :, -1], strict=True
                )
            ]
        )
    text = bytes(token - 1 if token else 0 for token in flat[flat >= 0].tolist())  # EOS is 0
    assert sorted(text.split(b"\0")) == sorted(
        [b"", *(one.encode() for one in CONFIG["data"]["local_text"])]
    )


def test_statistics_are_of_the_last_batch_and_of_all() -> None:
    with CASE.open() as iterator:
        assert iterator.stats().total == Counts()
        totals = Counts()
        for _ in iterator:
            totals += iterator.stats().batch
            assert iterator.stats().batch.rows == 4
            assert iterator.stats().total == totals
        state = iterator.get_state()
        assert totals.to_dict()["input_read"] == 9
    with CASE.open() as resumed:
        resumed.set_state(state)
        assert resumed.stats().total == totals
        assert resumed.stats().batch == Counts()


@pytest.mark.parametrize("packing", ["sequential", "bin"])
@pytest.mark.parametrize("documents", [1, 2, 4096])
def test_rows_without_text_at_the_end_are_counted_too(packing: str, documents: int) -> None:
    data = {"backend": "local_text", "local_text": ["abc", "", "def", "", "", ""]}
    data |= {"repeat": False, "shuffle": False, "state_update_interval": 1}
    data |= {"packing_mode": packing, "packing_buffer_docs": documents}
    data |= {"tokenizer": {"kind": "byte", "add_eos": False}}
    config = {"data": data, "train": {"seq_len": 2, "batch_size": 1}}
    with open_stream(config) as iterator:
        assert len(list(iterator)) == 2
        total = iterator.stats().total
        assert (total.input_documents, total.input_empty, total.input_read) == (2, 4, 6)
        with open_stream(config) as resumed:
            resumed.set_state(iterator.get_state())
            assert list(resumed) == []
            assert resumed.stats().total == total
