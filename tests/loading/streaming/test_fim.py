"""Fill in the middle in streams: the same rows as without, in another order, from any state."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardmill as sm
from shardmill.errors import OptionError, StateMismatchError
from shardmill.loading import FimCounts, FimOptions, FimTokens
from shardmill.loading.fim import fim_rules
from shardmill.loading.streaming import TextStream, join_states
from shardmill.loading.streaming.documents import StreamOrder
from shardmill.loading.streaming.stream import BatchShape
from shardmill.tokenizers import open_tokenizer
from tests.loading import fim_rows
from tests.loading.streaming.pipelines import (
    EOS,
    Case,
    assert_equal,
    cases,
    some,
    through_json,
    with_states,
)

MARKS = FimTokens(prefix=900_001, suffix=900_002, middle=900_003)
AS_TESTED = {**dict(zip(MARKS.ids, range(3), strict=True)), EOS: fim_rows.END}
NAMES = {name: f"<|{name}|>" for name in ("fim_prefix", "fim_suffix", "fim_middle", "eot")}


def with_fim(case: Case, rate: float = 1.0, **changes: Any) -> Any:
    rules = fim_rules(FimOptions(rate=rate, tokens=MARKS), {"eos": EOS}, "here", seed=5, path=())
    return case.pipeline(fim=rules, **changes)


def rows_of(batch: Any) -> list[tuple[list[int], list[int]]]:
    """The tokens and segments of each row, without padding, as `fim_rows` names them. The last
    token of a row is its last label; its segment is not known and is that before it."""
    found = []
    width = batch.input_ids.shape[-1]
    for ids, labels, segments in zip(
        *(one.reshape(-1, width) for one in (batch.input_ids, batch.labels, batch.segment_ids)),
        strict=True,
    ):
        row, own = ids[segments > 0].tolist(), segments[segments > 0].tolist()
        if labels[-1] != -100:
            row, own = [*row, int(labels[-1])], [*own, own[-1]]
        found.append(([AS_TESTED.get(token, token) for token in row], own))
    return found


@st.composite
def long_cases(draw: st.DrawFn, **options: Any) -> Case:
    case = draw(cases(**options))
    longest = max(case.lengths) + draw(st.integers(0, 30))
    shape = replace(case.shape, seq_len=max(longest, 10))
    return replace(case, shape=shape, max_doc_tokens=None)  # every document has its end


@given(case=long_cases(), rate=st.sampled_from([0.4, 1.0]))
@settings(deadline=None, max_examples=40)
def test_rows_are_those_without_it_in_another_order_and_less_what_is_counted(case, rate):
    with case.open() as plain, TextStream(with_fim(case, rate)) as stream:
        before, old_states = with_states(plain)
        after, states = with_states(stream)
        counts, total, wanted = stream.stats().fim, stream.stats().total, plain.stats().total
    rearranged = cut = 0
    for old_batch, new_batch in zip(before, after, strict=True):
        for (old, old_segments), (new, segments) in zip(
            rows_of(old_batch), rows_of(new_batch), strict=True
        ):
            found, parts = fim_rows.put_back(new)
            assert found == old[: len(found)]
            rearranged += len(parts)
            cut += len(old) - len(found)
            assert len(new) == len(old) or len(old) < len(new) <= case.shape.seq_len + 1
            assert segments == sorted(segments)
            ends = [segments[at] for at, token in enumerate(new[:-1]) if token == fim_rows.END]
            old_ends = zip(old[:-1], old_segments, strict=False)
            assert ends == [own for token, own in old_ends if token == fim_rows.END][: len(ends)]
            marks = [own for token, own in zip(new, segments, strict=True) if token < 3]
            assert marks == [own for own in sorted(set(marks)) for _ in range(3)]
    assert (counts.documents, counts.tokens_cut) == (rearranged, cut)
    assert total.tokens - 3 * rearranged + cut == wanted.tokens
    assert total.tokens + total.padding == wanted.tokens + wanted.padding
    for old_state, state in zip(old_states, states, strict=True):
        places = [json.loads(one["streams"]["0"]) for one in (old_state, state)]
        for place in places:
            place.pop("fim", None), place.pop("counts")
        assert places[0] == places[1]


@given(case=long_cases(), data=st.data())
@settings(deadline=None, max_examples=20)
def test_a_state_continues_exactly_with_its_counts(case, data):
    pipeline = with_fim(case, 0.6)
    with TextStream(pipeline) as undisturbed:
        batches, states = with_states(undisturbed)
        counts = undisturbed.stats().fim
    at = data.draw(st.integers(0, len(batches)))
    with TextStream(pipeline) as resumed:
        resumed.load_state_dict(through_json(states[at]))
        assert resumed.state_dict() == states[at]
        assert_equal(some(resumed, len(batches) - at), batches[at:])
        assert resumed.state_dict() == states[-1]
        assert resumed.stats().fim == counts


def case_of_streams(num_streams: int) -> Case:
    units = tuple(tuple(range(9, 15)) for _ in range(16 * num_streams))
    shape = BatchShape(batch_size=num_streams, seq_len=40)
    order = StreamOrder(seed=3, shuffle=True, repeat=True)
    return Case(units=units, order=order, shape=shape, num_streams=num_streams)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_rows_and_share_are_the_same_on_any_number_of_ranks(world):
    """Six streams; after five steps on one rank, ten more on several."""
    case, rate = case_of_streams(6), 0.3
    with TextStream(with_fim(case, rate)) as alone:
        wanted = [sorted(rows_of(batch)) for batch in islice(alone, 15)]
    with TextStream(with_fim(case, rate)) as first:
        found = [sorted(rows_of(batch)) for batch in islice(first, 5)]
        state = first.state_dict()
    shape = replace(case.shape, batch_size=6 // world)
    ranks = [
        TextStream(with_fim(case, rate, shape=shape), rank=rank, world=world)
        for rank in range(world)
    ]
    for rank in ranks:
        rank.load_state_dict(through_json(state))
    for _ in range(10):
        found.append(sorted(row for rank in ranks for row in rows_of(next(rank))))
    assert found == wanted
    # every row holds a document that can be rearranged
    changed = np.cumsum([sum(0 in row for row, _ in step) for step in found])
    assert abs(changed - 6 * rate * np.arange(1, 16)).max() < 1
    joined = join_states([rank.state_dict() for rank in ranks])
    with TextStream(with_fim(case, rate)) as whole:
        whole.load_state_dict(joined)
        assert whole.stats().fim.rows == changed[-1]
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize("pack", ["sequential", "first-fit"])
def test_documents_read_back_from_text(tmp_path: Path, pack: Any) -> None:
    texts = [f"document {n}: " + "\u00e9x" * (n % 9) for n in range(200)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    tokenizer = open_tokenizer("byte:4", specials=NAMES)
    given_options: dict[str, Any] = {"tokenizer": tokenizer, "seq_len": 120, "batch_size": 4}
    found = 0
    with sm.stream(tmp_path / "a.jsonl", **given_options, pack=pack, fim=1) as stream:
        for batch in islice(stream, 20):
            for row, own in zip(batch.input_ids, batch.segment_ids, strict=True):
                for parts in fim_rows.put_back([*row[own > 0].tolist(), 3])[1]:
                    ids = [token for part in parts for token in part]
                    whole = tokenizer.decode(ids)
                    assert whole in texts
                    found += 1
        assert found <= stream.stats().fim.documents < found + 80
        state = stream.state_dict()
    assert found > 50
    for fim, words in (
        (None, "fim_rate: the state has '1.0', this stream does not know it"),
        (0.5, "fim_rate: the state has '1.0', this stream '0.5'"),
        (FimOptions(rate=1, seed=4), "fim_seed: the state has 0, this stream 4"),
    ):
        with (
            sm.stream(tmp_path / "a.jsonl", **given_options, pack=pack, fim=fim) as other,
            pytest.raises(StateMismatchError) as caught,
        ):
            other.load_state_dict(state)
        assert words in str(caught.value)


def test_a_stream_without_it_has_the_state_that_it_had(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 90)
    with sm.stream(tmp_path / "a.txt", tokenizer="byte", seq_len=9, batch_size=2) as stream:
        next(stream)
        state = stream.state_dict()
        assert stream.stats().fim == FimCounts()
        assert "fim" not in stream.stats().to_dict()
    assert "fim" not in json.dumps(state)


def test_a_tokenizer_without_marks_and_several_shares_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    given_options: dict[str, Any] = {"tokenizer": "byte:1", "seq_len": 9, "batch_size": 2}
    with pytest.raises(OptionError, match="names no tokens to mark prefix, suffix and middle"):
        sm.stream(tmp_path / "a.txt", **given_options, fim=0.5)
    with pytest.raises(OptionError, match="wanted one share, since a stream has one source"):
        sm.stream(tmp_path / "a.txt", **given_options, fim={"a": 0.5})
    with pytest.raises(OptionError, match=r"the id 900,003 is given, but .* vocabulary of 258 ids"):
        sm.stream(tmp_path / "a.txt", **given_options, fim=FimOptions(rate=1, tokens=MARKS))
