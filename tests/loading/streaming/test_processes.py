"""One run on several processes, and on other numbers of them later."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.compat.chomp import build_train_iterator, open_stream
from shardmill.errors import OptionError, StateMismatchError
from shardmill.loading.state import join_states
from shardmill.loading.streaming.documents import StreamOrder
from shardmill.loading.streaming.stream import BatchShape, Pipeline, TextStream
from tests.loading.streaming.pipelines import Case, assert_equal, cases, rows_of, some, through_json

CASE = Case(
    units=((3, 4, 5, 6, 7, 8, 9),) * 3,
    order=StreamOrder(shuffle=True, buffer_documents=5),
    shape=BatchShape(batch_size=2, seq_len=4),
)


def processes(pipeline: Pipeline, count: int) -> list[TextStream]:
    return [TextStream(pipeline, rank=index, world=count) for index in range(count)]


def states_after(pipeline: Pipeline, count: int, steps: int) -> list[dict[str, Any]]:
    states = []
    for one in processes(pipeline, count):
        with one:
            some(one, steps)
            states.append(through_json(one.get_state()))
    return states


def remaining(pipeline: Pipeline, count: int, state: Any) -> Counter[tuple[int, ...]]:
    """The rows that are left, of all processes."""
    rows: Counter[tuple[int, ...]] = Counter()
    for one in processes(pipeline, count):
        with one:
            one.set_state(state)
            rows.update(rows_of(one))
    return rows


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@given(
    case=cases(repeat=False, streams=6),
    before=st.sampled_from([1, 2, 3, 6]),
    after=st.sampled_from([1, 2, 3, 6]),
    steps=st.integers(0, 6),
)
def test_joined_states_resume_with_the_same_rows_on_any_count_that_divides_the_streams(
    case: Case, before: int, after: int, steps: int
) -> None:
    pipeline = case.pipeline(num_streams=6)
    states = states_after(pipeline, before, steps)
    rest: Counter[tuple[int, ...]] = Counter()
    for one, state in zip(processes(pipeline, before), states, strict=True):
        with one:
            one.set_state(state)
            rest.update(rows_of(one))
    joined = join_states(states[::-1])
    assert remaining(pipeline, after, joined) == rest


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@given(case=cases(streams=6), count=st.sampled_from([1, 2, 3, 6]), steps=st.integers(0, 6))
def test_a_joined_state_gives_each_process_its_very_next_batches(
    case: Case, count: int, steps: int
) -> None:
    pipeline = case.pipeline(num_streams=6)
    running = processes(pipeline, count)
    for one in running:
        some(one, steps)
    joined = join_states([one.get_state() for one in running])
    for one, other in zip(running, processes(pipeline, count), strict=True):
        with one, other:
            other.set_state(through_json(joined))
            assert other.stats().total == one.stats().total
            assert_equal(some(other, 5), some(one, 5))
            assert other.get_state() == one.get_state()


def test_the_totals_of_a_joined_state_are_sums_and_stay_so_on_another_count() -> None:
    pipeline = CASE.pipeline(num_streams=4)
    states = states_after(pipeline, 4, 1000)  # to the end: the last batches hold rows of padding
    joined = join_states(states)
    totals = [state["totals"] for state in states]
    assert joined["totals"] == {name: sum(one[name] for one in totals) for name in totals[0]}
    assert joined["totals"]["documents"] == 21
    assert joined["totals"]["tokens"] == 3 * (3 + 4 + 5 + 6 + 7 + 8 + 9) + 21
    two = processes(pipeline, 2)
    for one in two:
        one.set_state(joined)
    assert join_states([one.get_state() for one in two])["totals"] == joined["totals"]
    assert join_states([joined]) == joined


def test_a_count_that_does_not_divide_the_streams_is_refused_with_those_that_do() -> None:
    pipeline = CASE.pipeline()
    joined = join_states(states_after(pipeline, 6, 1))
    with pytest.raises(StateMismatchError, match=r"6 streams.* 4 processes.*can: 1, 2, 3, 6$"):
        TextStream(pipeline, rank=0, world=4).set_state(joined)
    with pytest.raises(OptionError, match=r"num_streams=6 .*4 processes.*can: 1, 2, 3, 6$"):
        TextStream(CASE.pipeline(num_streams=6), rank=0, world=4)


def test_a_states_number_of_streams_wins_over_the_default_but_not_over_a_chosen_one() -> None:
    joined = join_states(states_after(CASE.pipeline(), 6, 1))
    one = TextStream(CASE.pipeline(), rank=0, world=2)
    assert one.num_streams == 2
    one.set_state(joined)
    assert one.num_streams == 6
    assert sorted(one.get_state()["streams"]) == ["0", "2", "4"]  # type: ignore[arg-type]
    chosen = TextStream(CASE.pipeline(num_streams=2), rank=0, world=2)
    with pytest.raises(StateMismatchError, match="num_streams: the state has 6, this stream 2"):
        chosen.set_state(joined)


def test_the_state_of_another_process_is_refused_and_the_missing_streams_named() -> None:
    pipeline = CASE.pipeline()
    states = states_after(pipeline, 2, 1)
    with pytest.raises(StateMismatchError, match=r"process 1 of 2 needs streams \[1\] of 2.*\[0\]"):
        TextStream(pipeline, rank=1, world=2).set_state(states[0])
    with pytest.raises(StateMismatchError, match=r"process 0 of 1 needs streams \[1\] of 2"):
        TextStream(pipeline).set_state(states[0])


def test_states_that_do_not_belong_together_are_not_joined() -> None:
    states = states_after(CASE.pipeline(num_streams=4), 4, 1)
    with pytest.raises(StateMismatchError, match=r"state 2 \(from 0\) holds streams \[0\]"):
        join_states([*states[:2], states[0]])
    with pytest.raises(StateMismatchError, match=r"streams \[2, 3\] of 4 are in none of the 2"):
        join_states(states[:2])
    with pytest.raises(StateMismatchError, match=r"num_streams: state 0 has 4, .* 2; join"):
        join_states([states[0], states_after(CASE.pipeline(), 2, 1)[1]])
    other = {**states[1], "data": {**states[1]["data"], "seed": 9}}
    with pytest.raises(StateMismatchError, match=r"seed: state 1 \(from 0\) has 9, state 0 0"):
        join_states([states[0], other, *states[2:]])
    with pytest.raises(StateMismatchError, match="wants a list"):
        join_states([])


def config(**data: Any) -> dict[str, Any]:
    texts = [f"text number {number} " * (number % 5 + 1) for number in range(40)]
    chosen = {"backend": "local_text", "local_text": texts, "shuffle_buffer_size": 7}
    chosen |= {"tokenizer": {"kind": "byte", "byte_offset": 1}, "state_update_interval": 3}
    return {
        "data": chosen | data,
        "train": {"seq_len": 16, "batch_size": 2, "grad_accum": 2},
        "model": {"eos_token_id": 0},
    }


def test_under_several_ranks_the_process_index_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match=r"WORLD_SIZE=2 .*process_index .*process_count"):
        build_train_iterator(config())
    with pytest.raises(OptionError, match="WORLD_SIZE=2"):
        open_stream(config())
    with open_stream(config(), process_index=1, process_count=2) as one:
        assert sorted(one.get_state()["streams"]) == ["1"]  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="process_index=1, process_count=None: wanted both"):
        open_stream(config(), process_index=1)
    with pytest.raises(OptionError, match="process_index=2: wanted 0 to 1"):
        open_stream(config(), process_index=2, process_count=2)


WORKER = """
import hashlib, json, sys
from itertools import islice
from shardmill.compat.chomp import build_train_iterator
given = json.load(sys.stdin)
with build_train_iterator(given["config"]) as batches:
    batches.set_state(given["state"])
    for batch in islice(batches, 12):
        print(hashlib.sha256(b"".join(array.tobytes() for array in batch)).hexdigest())
"""


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["sequential", "bin"])
def test_a_fresh_process_resumes_with_the_very_next_batch(tmp_path: Path, packing: str) -> None:
    import hashlib

    chosen = config(packing_mode=packing, packing_buffer_docs=9)
    with build_train_iterator(chosen) as batches:
        some(batches, 11)
        given = json.dumps({"config": chosen, "state": batches.get_state()})
        digests = [
            hashlib.sha256(b"".join(array.tobytes() for array in batch)).hexdigest()
            for batch in some(batches, 12)
        ]
    done = subprocess.run(
        [sys.executable, "-c", WORKER],
        input=given,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        cwd=tmp_path,
        env={**os.environ, "PYTHONHASHSEED": "5"},
    )
    assert done.stdout.split() == digests, done.stderr
    assert len(set(digests)) == 12
