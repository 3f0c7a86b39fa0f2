"""Pairs and labelled answers come through one order: whole, shuffled, mixed, resumed, divided."""

from __future__ import annotations

import pickle
import tempfile
from collections import Counter
from collections.abc import Sequence
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardmill
from shardmill.errors import OptionError, StateMismatchError
from shardmill.formats.packed.spool import ChatStoreSpool
from shardmill.formats.stores import StoreSplit
from shardmill.loading import (
    Loader,
    PreferenceBatch,
    PreferenceLoader,
    PreferenceSource,
    SampleStream,
    TokenSource,
    plan_step,
)
from shardmill.records import IGNORE_INDEX
from shardmill.store import exclude_documents
from shardmill.testing.loading import (
    RankShape,
    assert_only_excluded_places_change,
    assert_order_is_one,
    assert_resume_is_elastic,
    assert_resumes_exactly,
)
from tests.preferences import (
    TOKENIZER,
    Row,
    build_preferences,
    pair,
    ranked_lists,
    records_of,
    rows_of_pairs,
)

LENGTH = 48


def texts_of(batch: PreferenceBatch) -> list[tuple[str, ...]]:
    """Of each pair the prompt, the chosen and the rejected answer; and that padding is padding."""
    found = []
    num, rows = len(batch), []
    for ids, mask, trained, prompt in zip(
        *(batch.input_ids, batch.attention_mask, batch.completion_mask, batch.prompt_lengths),
        strict=True,
    ):
        length = int(mask.sum())
        assert mask[:length].all()
        assert np.flatnonzero(trained).tolist() == [*range(prompt, length)]
        rows.append((TOKENIZER.decode(ids[:prompt]), TOKENIZER.decode(ids[prompt:length])))
    for at in range(num):
        own = rows[at::num]
        assert {prompt for prompt, _ in own} == {own[0][0]}, "a pair has one prompt"
        found.append((own[0][0], *(answer for _, answer in own)))
    return found


def rows_of(batch: PreferenceBatch) -> list[Any]:
    return list(zip(batch.samples, texts_of(batch), strict=True))


def plain_pairs(folder: Path, rule: str = "all") -> list[tuple[str, str, str]]:
    found = []
    for prompt, answers in records_of(folder):
        for (good, best), (bad, worse) in combinations(answers, 2):
            if best < worse and (rule == "all" or best == 0):
                found.append((prompt, good, bad))
    return found


@settings(max_examples=12, deadline=None)
@given(rows=rows_of_pairs() | ranked_lists(), rule=st.sampled_from(["all", "best"]))
def test_an_epoch_gives_every_pair_once(rows: list[Row], rule: Any) -> None:
    with tempfile.TemporaryDirectory() as place:
        build_preferences(Path(place), rows)
        source = PreferenceSource(Path(place) / "store", seq_len=256, pairs=rule)
        stream = SampleStream([source], seed=3)
        wanted = Counter(plain_pairs(Path(place) / "store", rule))
        loader = PreferenceLoader(stream, batch_size=1, num_samples=2 * len(source))
        found = [text for batch in loader for text in texts_of(batch)]
        assert Counter(found[: len(source)]) == Counter(found[len(source) :]) == wanted


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two stores of pairs, one of ranked lists among them."""
    folders = []
    rows: Sequence[list[Row]] = (
        [pair(f"why {n // 2}", f"good {n}", f"bad {n}" * (n % 3 + 1)) for n in range(17)],
        [
            {"prompt": f"how {n}", "completions": ["a", "b", "c"], "scores": [n % 3, 1, 2]}
            for n in range(5)
        ],
    )
    for number, own in enumerate(rows):
        folder = tmp_path_factory.mktemp(f"pref{number}")
        build_preferences(folder, own)
        folders.append((folder / "store").rename(folder / f"pref{number}"))
    return folders


def loader_of(stores: list[Path], **options: Any) -> PreferenceLoader:
    found = shardmill.load(dict(zip(stores, (2, 1), strict=True)), seq_len=LENGTH, **options)
    assert isinstance(found, PreferenceLoader)
    return found


def test_the_order_is_one_on_any_ranks(stores: list[Path]) -> None:
    def make(*, batch_size: int, rank: int, world: int) -> PreferenceLoader:
        return loader_of(stores, batch_size=batch_size, rank=rank, world=world, seed=1)

    shapes = [RankShape(3, 1), RankShape(2, 2), RankShape(1, 3)]
    assert_order_is_one(make, shapes, 60, rows=rows_of)
    assert_resume_is_elastic(
        make, [(RankShape(2, 1), 3), (RankShape(1, 3), 5), (RankShape(3, 2), 4)], rows=rows_of
    )
    assert_resumes_exactly(lambda: make(batch_size=4, rank=0, world=1), 12, rows=rows_of)


def test_a_copy_of_a_loader_continues(stores: list[Path]) -> None:
    loader = loader_of(stores, batch_size=2)
    next(iter(loader))
    again = pickle.loads(pickle.dumps(loader))
    wanted = [rows_of(batch) for batch in islice(loader, 5)]
    assert [rows_of(batch) for batch in islice(again, 5)] == wanted


def test_a_state_of_other_pairs_is_refused(stores: list[Path]) -> None:
    sources = [PreferenceSource(stores[1], seq_len=LENGTH, pairs=rule) for rule in ("all", "best")]
    before, after = (PreferenceLoader(SampleStream([one]), batch_size=1) for one in sources)
    with pytest.raises(StateMismatchError, match="other data"):
        after.load_state_dict(before.state_dict())


def test_excluded_answers_and_prompts_are_replaced(tmp_path: Path) -> None:
    build_preferences(tmp_path, [pair(f"why {n // 2}", f"good {n}", "bad") for n in range(12)])
    store = tmp_path / "store"
    before = SampleStream([PreferenceSource(store, seq_len=LENGTH)], seed=2)
    exclude_documents(store, [0, 8], reason="no", split="train")  # a prompt of two pairs, an answer
    after = SampleStream([PreferenceSource(store, seq_len=LENGTH)], seed=2)
    excluded = after.sources[0].excluded
    assert excluded is not None
    assert excluded.num_excluded == 3
    spans = shardmill.store.read_exclusions(shardmill.open_store(store)).spans("train").tolist()
    assert assert_only_excluded_places_change(before, after, {"store": spans}, 36) == 9
    copied = pickle.loads(pickle.dumps(after))
    assert copied.take(range(36)).item.tolist() == after.take(range(36)).item.tolist()


def test_prompts_are_cut_on_the_left_and_answers_never(tmp_path: Path) -> None:
    rows = [pair("x" * 30, "good", "bad"), pair("y", "z" * 40, "bad"), pair("w", "good", "b")]
    build_preferences(tmp_path, rows)
    # <|u|> ... <|e|><|a|> is 3 tokens beside the prompt, and an answer has its end
    dropped = PreferenceSource(tmp_path / "store", seq_len=20)
    assert (len(dropped), dropped.num_too_long, dropped.num_cut) == (1, 2, 0)
    cut = PreferenceSource(tmp_path / "store", seq_len=20, long="cut-prompt")
    assert (len(cut), cut.num_too_long, cut.num_cut) == (2, 1, 1)
    kept = "x" * 13 + "<|e|><|a|>"
    wanted = [(kept, "good<|e|>", "bad<|e|>"), ("<|u|>w<|e|><|a|>", "good<|e|>", "b<|e|>")]
    assert texts_of(cut.rows([0, 1])) == wanted
    with pytest.raises(OptionError, match=r"none of the 3 pairs .* fits"):
        PreferenceSource(tmp_path / "store", seq_len=4)


def packed_texts(batch: PreferenceBatch) -> list[list[tuple[str, str, str]]]:
    """The pairs of each packed row, from its segments."""
    assert batch.segment_ids is not None
    assert batch.position_ids is not None
    found = []
    for ids, trained, segment, position in zip(
        *(batch.input_ids, batch.completion_mask, batch.segment_ids, batch.position_ids),
        strict=True,
    ):
        texts = []
        for number in range(1, int(segment.max()) + 1):
            at = np.flatnonzero(segment == number)
            assert position[at].tolist() == [*range(len(at))]
            first = int(trained[at].argmax())
            assert trained[at].tolist() == [0] * first + [1] * (len(at) - first)
            texts.append((TOKENIZER.decode(ids[at[:first]]), TOKENIZER.decode(ids[at[first:]])))
        pairs = []
        for (one, good), (two, bad) in zip(texts[::2], texts[1::2], strict=True):
            assert one == two
            pairs.append((one, good, bad))
        found.append(pairs)
    return found


@settings(max_examples=12, deadline=None)
@given(rows=rows_of_pairs() | ranked_lists())
def test_a_packed_row_has_whole_pairs(rows: list[Row]) -> None:
    with tempfile.TemporaryDirectory() as place:
        build_preferences(Path(place), rows)
        source = PreferenceSource(Path(place) / "store", seq_len=128, packed=True)
        loader = shardmill.load(source, seq_len=128, batch_size=1, num_samples=len(source))
        found = [pair for batch in loader for row in packed_texts(batch) for pair in row]
        assert Counter(found) == Counter(plain_pairs(Path(place) / "store"))
        assert loader.counters()["store"].tokens == 128 * len(source)
        assert len(source) < len(found) or len(found) == 1 or len(rows) < 4


def test_packed_rows_resume_and_are_replaced(stores: list[Path], tmp_path: Path) -> None:
    def make(*, batch_size: int = 2, rank: int = 0, world: int = 1) -> PreferenceLoader:
        sources = [PreferenceSource(one, seq_len=100, packed=True) for one in stores]
        stream = SampleStream(sources, seed=5)
        return PreferenceLoader(stream, batch_size=batch_size, rank=rank, world=world)

    def rows(batch: PreferenceBatch) -> list[Any]:
        return list(zip(batch.samples, packed_texts(batch), strict=True))

    assert_resumes_exactly(make, 6, rows=rows)
    assert_order_is_one(make, [RankShape(1, 2), RankShape(2, 3)], 12, rows=rows)
    with pytest.raises(OptionError, match="packed"):
        next(iter(make())).columns()
    other = PreferenceSource(stores[0], seq_len=100)
    with pytest.raises(OptionError, match="mix sources of one kind"):
        SampleStream([make().stream.sources[1], other])
    build_preferences(tmp_path, [pair(f"why {n}", f"good {n}", "bad") for n in range(12)])
    before = SampleStream([PreferenceSource(tmp_path / "store", seq_len=100, packed=True)])
    exclude_documents(tmp_path / "store", [4], reason="no", split="train")
    after = SampleStream([PreferenceSource(tmp_path / "store", seq_len=100, packed=True)])
    spans = shardmill.store.read_exclusions(shardmill.open_store(tmp_path / "store"))
    wanted = {"store": spans.spans("train").tolist()}
    assert (
        assert_only_excluded_places_change(before, after, wanted, 2 * len(before.sources[0])) == 2
    )


def test_packed_prompts_are_cut_alike(tmp_path: Path) -> None:
    build_preferences(tmp_path, [pair("x" * 30, "good", "bad"), pair("y", "z" * 90, "bad")])
    cut = PreferenceSource(tmp_path / "store", seq_len=40, packed=True, long="cut-prompt")
    assert (len(cut), cut.num_too_long, cut.num_cut) == (1, 1, 1)
    kept = "x" * 13 + "<|e|><|a|>"  # 15 tokens twice, and answers of 5 and 4
    assert packed_texts(cut.rows([0])) == [[(kept, "good<|e|>", "bad<|e|>")]]


def test_labelled_answers_come_one_to_a_row(tmp_path: Path) -> None:
    rows = [{"prompt": "why", "completion": f"c{n}", "label": n % 3 == 0} for n in range(7)]
    build_preferences(tmp_path, rows)
    loader = shardmill.load(tmp_path / "store", seq_len=LENGTH, batch_size=3, num_samples=6)
    found = {}
    for batch in loader:
        assert batch.input_ids.shape == (3, LENGTH)
        for (_, answer), label in zip(texts_of(batch), batch.label, strict=True):
            found[answer] = bool(label)
    known = {f"c{n}<|e|>": n % 3 == 0 for n in range(7)}
    assert len(found) == 6
    assert found.items() <= known.items()
    assert list(batch.columns())[-1] == "label"


def test_columns_have_the_names_of_trl(stores: list[Path]) -> None:
    batch = next(iter(loader_of(stores, batch_size=5)))
    assert batch.input_ids.shape == (10, LENGTH)
    columns = batch.columns()
    for at, part in enumerate(("chosen", "rejected")):
        for name in ("input_ids", "attention_mask", "completion_mask", "labels"):
            wanted = getattr(batch, name)[5 * at : 5 * at + 5]
            np.testing.assert_array_equal(columns[f"{part}_{name}"], wanted)
    trained = batch.completion_mask == 1
    np.testing.assert_array_equal(batch.labels[trained], batch.input_ids[trained])
    assert (batch.labels[~trained] == IGNORE_INDEX).all()
    for row, length in enumerate(batch.prompt_lengths[:5].tolist()):
        ids, mask = columns["prompt_input_ids"][row], columns["prompt_attention_mask"][row]
        assert ids[LENGTH - length :].tolist() == batch.input_ids[row, :length].tolist()
        assert mask.tolist() == [0] * (LENGTH - length) + [1] * length


def test_tensors_share_the_order(stores: list[Path]) -> None:
    pytest.importorskip("torch")
    tensors = next(iter(shardmill.load(stores[0], seq_len=LENGTH, batch_size=2, to="torch")))
    batch = next(iter(shardmill.load(stores[0], seq_len=LENGTH, batch_size=2)))
    for name in ("input_ids", "attention_mask", "completion_mask", "labels"):
        np.testing.assert_array_equal(tensors[name].numpy(), getattr(batch, name))


def test_readers_that_would_misread_preferences_refuse_them(stores: list[Path]) -> None:
    folder = stores[0]
    for read in (
        lambda: ChatStoreSpool(folder, "train"),
        lambda: StoreSplit(folder, "train"),
        lambda: TokenSource(folder, seq_len=8),
        lambda: shardmill.ChatRows(folder, seq_len=8),
        lambda: shardmill.pack(folder, 8),
    ):
        with pytest.raises(OptionError, match="a store of preferences"):
            read()
    source = PreferenceSource(folder, seq_len=LENGTH)
    with pytest.raises(OptionError, match="gives preferences"):
        Loader(SampleStream([source]), batch_size=1)
    with pytest.raises(OptionError, match="documents"):
        shardmill.load(folder, seq_len=LENGTH, batch_size=1, documents=True)


def test_a_step_is_planned_without_reading_a_token(stores: list[Path]) -> None:
    loader = loader_of(stores, batch_size=3)
    (batch,) = islice(loader, 1)
    assert batch.item is not None
    planned = plan_step(loader.stream, samples=0, batch_size=3)
    assert [one.window for one in planned] == batch.item.tolist()
    assert all(one.documents is not None and len(one.documents) == 3 for one in planned)
