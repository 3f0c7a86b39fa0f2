"""A state: read back exactly, refused by name, small, quick."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.compat.chomp import open_stream
from shardmill.errors import StateMismatchError
from shardmill.loading.state import (
    Counts,
    Position,
    ReadCounts,
    StreamCursor,
    read_position,
    read_stream_state,
)
from shardmill.loading.streaming.documents import StreamOrder
from shardmill.loading.streaming.stream import BatchShape
from tests.loading.streaming.pipelines import Case, some

counts = st.integers(0, 2**63 - 1)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
positions = st.builds(
    Position,
    block=st.builds(
        StreamCursor,
        epoch=counts,
        unit=counts,
        cursor=st.none() | st.dictionaries(st.text(max_size=9), json_values, max_size=3),
        skip=counts,
        number=counts,
        read=st.builds(
            ReadCounts,
            documents=counts,
            elsewhere=counts,
            empty=counts,
            dropped=counts,
            repaired=counts,
        ),
    ),
    document=counts,
    part=counts,
    counts=st.builds(Counts, rows=counts, tokens=counts, input_repaired=counts),
)


@settings(deadline=None, max_examples=60)
@given(position=positions)
def test_a_position_is_read_back_as_it_was_written(position: Position) -> None:
    text = position.to_json()
    assert text.isascii()
    assert read_position(text, 0) == position
    assert json.loads(text)["document"] == position.document


def test_the_text_of_a_position_is_literally_this() -> None:
    place = StreamCursor(
        epoch=1, unit=2, cursor={"row": 3}, skip=4, number=5, read=ReadCounts(documents=6)
    )
    counts = Counts(rows=9, input_repaired=1)
    position = Position(block=place, document=7, part=8, counts=counts)
    assert position.to_json() == (
        '{"place":{"epoch":1,"unit":2,"cursor":{"row":3},"skip":4,"number":5,'
        '"tally":[6,0,0,0,0]},"document":7,"part":8,"counts":[9,0,0,0,0,0,0,0,0,0,1]}'
    )


CASE = Case(units=((3, 4, 5),) * 4, order=StreamOrder(shuffle=True, buffer_documents=5))


@pytest.fixture(scope="module")
def saved() -> dict[str, Any]:
    with CASE.open() as iterator:
        some(iterator, 3)
        return iterator.get_state()


def refused(state: Any) -> str:
    with CASE.open() as iterator, pytest.raises(StateMismatchError) as error:
        iterator.set_state(state)
    return str(error.value)


def inner(saved: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The state with other values in the text of its stream; "place.x": in its place."""
    values = json.loads(saved["streams"]["0"])
    for name, value in changes.items():
        part, _, key = name.rpartition("__")
        (values[part] if part else values)[key] = value
    return {**saved, "streams": {"0": json.dumps(values)}}


def test_a_state_holds_what_was_promised(saved: dict[str, Any]) -> None:
    assert sorted(saved) == ["data", "kind", "num_streams", "seal", "streams", "totals", "version"]
    assert saved["version"] == 1
    assert saved["kind"] == "shardmill.stream"
    assert saved["num_streams"] == 1
    assert sorted(saved["streams"]) == ["0"]
    assert saved["totals"]["rows"] == 6
    assert saved["totals"]["tokens"] == 36


def test_a_value_that_is_not_a_state_is_refused_with_what_was_found(saved: dict[str, Any]) -> None:
    assert "found a list" in refused([])
    assert "of kind None, wanted 'shardmill.stream'" in refused({})
    assert "of kind 'shardmill.loader'" in refused({**saved, "kind": "shardmill.loader"})
    assert "version: the state has 2, which a later" in refused({**saved, "version": 2})
    assert "version: the state has True" in refused({**saved, "version": True})
    assert "unknown keys ['more'] and lacks []" in refused({**saved, "more": 1})
    without = {key: value for key, value in saved.items() if key != "totals"}
    assert "unknown keys [] and lacks ['totals']" in refused(without)


def test_a_changed_position_is_refused_by_name(saved: dict[str, Any]) -> None:
    def names(where: str, **changes: Any) -> bool:
        message = refused(inner(saved, **changes))
        return "changed since it was saved: stream 0 is" in message and f"`$.{where}`" in message

    assert names("part", part=-1)
    assert names("part", part=True)
    assert names("document", document=2.5)
    assert names("place.epoch", place__epoch="1")
    assert names("place.number", place__number=2**63)
    assert names("place.cursor", place__cursor=[])
    assert names("place.tally[1]", place__tally=[1, -1, 0, 0, 0])
    assert "counts are missing" in refused(inner(saved, place__tally=[1]))
    assert "unknown field `more`" in refused(inner(saved, more=1))
    assert "stream 0 is '{': Input data was truncated" in refused({**saved, "streams": {"0": "{"}})
    assert "Expected `str`, got `int`" in refused({**saved, "streams": {"0": 3}})
    assert "stream '00', wanted 0 to 0" in refused({**saved, "streams": {"00": "{}"}})
    assert "stream '1', wanted 0 to 0" in refused({**saved, "streams": {"1": "{}"}})
    assert "at `$.streams`" in refused({**saved, "streams": {}})
    assert "stream 0 is '9999" in refused({**saved, "streams": {"0": "9" * 5000}})
    assert "stream '9999" in refused({**saved, "streams": {"9" * 5000: "{}"}})
    assert "at `$.num_streams`" in refused({**saved, "num_streams": 0})
    assert "at `$.num_streams`" in refused({**saved, "num_streams": 2**62})
    deep = "[" * 100_000
    assert "stream 0 is '[[[" in refused({**saved, "streams": {"0": deep}})


def test_totals_that_do_not_follow_from_the_streams_are_refused(saved: dict[str, Any]) -> None:
    for name, change in (("tokens", 1), ("tokens", -1), ("rows", -1), ("documents", 1)):
        totals = {**saved["totals"], name: saved["totals"][name] + change}
        assert f"do not follow from its streams: {name}" in refused({**saved, "totals": totals})
    assert "at `$.totals`" in refused({**saved, "totals": 3})


@settings(deadline=None, max_examples=150)
@given(data=st.data(), value=json_values)
def test_no_changed_state_gives_anything_but_a_refusal(
    saved: dict[str, Any], data: st.DataObject, value: Any
) -> None:
    """Never a KeyError, never a hang, and never a change that goes through."""
    state: Any = copy.deepcopy(saved)
    state["streams"]["0"] = json.loads(state["streams"]["0"])
    where: Any = state
    key: Any = data.draw(st.sampled_from(sorted(where)))
    while isinstance(where[key], dict | list) and where[key] and data.draw(st.booleans()):
        where = where[key]
        key = data.draw(
            st.sampled_from(sorted(where) if isinstance(where, dict) else range(len(where)))
        )
    where[key] = value
    if isinstance(state["streams"], dict) and "0" in state["streams"]:
        state["streams"]["0"] = json.dumps(state["streams"]["0"], separators=(",", ":"))
    if json.dumps(state, sort_keys=True) == json.dumps(saved, sort_keys=True):
        read_stream_state(state)
        return
    with pytest.raises(StateMismatchError):
        read_stream_state(state)


def test_a_position_that_was_moved_by_hand_is_refused(saved: dict[str, Any]) -> None:
    with CASE.open() as iterator:
        for change in ({"document": 3}, {"part": 1}, {"place__skip": 1}, {"place__number": 6}):
            with pytest.raises(StateMismatchError, match="seal does not fit"):
                iterator.set_state(inner(saved, **change))


def test_every_value_that_decides_the_rows_is_refused_by_name() -> None:
    def config(data: dict[str, Any], train: dict[str, Any]) -> dict[str, Any]:
        texts = {"backend": "local_text", "local_text": ["one text", "another", "third"]}
        chosen: dict[str, Any] = {"tokenizer": {"kind": "byte", "byte_offset": 2}, "seed": 1}
        chosen |= texts | {"packing_mode": "bin", "packing_buffer_docs": 16}
        return {
            "data": chosen | data,
            "train": {"seq_len": 8, "batch_size": 1} | train,
            "model": {"eos_token_id": 0},
        }

    with open_stream(config({}, {})) as iterator:
        next(iterator)
        state = iterator.get_state()
    changes: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "dataset": ({"local_text": ["one text"]}, {}),
        "tokenizer": ({"tokenizer": {"kind": "byte", "byte_offset": 3}}, {}),
        "seed": ({"seed": 2}, {}),
        "shuffle": ({"shuffle": False}, {}),
        "shuffle_buffer_size": ({"shuffle_buffer_size": 5}, {}),
        "shuffle_buffer_bytes": ({"shuffle_buffer_bytes": 5}, {}),
        "repeat": ({"repeat": False}, {}),
        "packing_mode": ({"packing_mode": "sequential"}, {}),
        "packing_algorithm": ({"packing_algorithm": "best-fit"}, {}),
        "packing_buffer_docs": ({"packing_buffer_docs": 5}, {}),
        "packing_buffer_tokens": ({"packing_buffer_tokens": 5}, {}),
        "packing_max_docs_per_bin": ({"packing_max_docs_per_bin": 5}, {}),
        "mask_boundary_loss": ({"mask_boundary_loss": False}, {}),
        "train_on_eos": ({"train_on_eos": False}, {}),
        "state_update_interval": ({"state_update_interval": 7}, {}),
        "seq_len": ({}, {"seq_len": 9}),
    }
    for name, change in changes.items():
        with open_stream(config(*change)) as other:
            with pytest.raises(StateMismatchError) as error:
                other.set_state(state)
            assert f"{name}: the state has {state['data'][name]!r:.80}, this stream " in str(
                error.value
            ), name
    evaluation = open_stream(config({}, {}), purpose="eval")
    with pytest.raises(StateMismatchError, match="purpose: the state has 'train', this stream"):
        evaluation.set_state(state)
    free = {"grain_prefetch": 0}
    with open_stream(config(free, {"batch_size": 2, "grad_accum": 3})) as other:
        other.set_state(state)
        assert next(other).input_ids.shape == (3, 2, 8)


def test_a_state_with_a_large_shuffle_buffer_is_small() -> None:
    case = Case(
        units=((5,) * 12_000,),
        batch_rows=2000,
        order=StreamOrder(shuffle=True, buffer_documents=10_000),
        shape=BatchShape(batch_size=8, seq_len=31),
    )
    with case.open() as iterator:
        for _ in range(50):
            next(iterator)
        assert len(json.dumps(iterator.get_state())) < 2000
