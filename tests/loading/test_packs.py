"""Rows of a pack plan come through the loader like windows: mixed, shuffled, resumed, divided."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.building import BuildSpec, build_chats, build_plan
from shardmill.chat import bind_template, known_template
from shardmill.errors import DamagedStoreError, OptionError, StateMismatchError, StoreNotFoundError
from shardmill.loading import (
    ChatRows,
    Loader,
    PackSource,
    RowSource,
    SampleStream,
    TokenSource,
    plan_step,
)
from shardmill.records import IGNORE_INDEX, ChatExamples
from shardmill.sources import open_chats
from shardmill.store import PlanOptions, StoredPlan, open_store
from shardmill.store.readers import ChatSpace
from shardmill.testing.loading import (
    RankShape,
    assert_order_is_one,
    assert_resume_is_elastic,
    assert_resumes_exactly,
)
from shardmill.testing.stores import build_small_chat_store, chat_examples, make_examples
from shardmill.tokenizers import open_tokenizer
from tests.loading.stores import write_small
from tests.packs import FIVE, PlainPiece, plain_row, plan_options, rows_of_plan

SPLIT = PlanOptions(seq_len=6, long="split")
PAD = 7


def plain_documents(plan: StoredPlan, pieces: list[PlainPiece]) -> list[int]:
    """Of a row's tokens: the number of the piece each belongs to; what follows the last piece
    has another number."""
    step, owner = plan.facts.options.align_to, []
    for number, piece in enumerate(pieces):
        owner += [number] * (-(-(piece.stop - piece.start) // step) * step)
    return owner + [len(pieces)] * (plan.facts.row_len - len(owner))


def plain_positions(owner: list[int]) -> list[int]:
    return [at - owner.index(number) for at, number in enumerate(owner)]


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(
    examples=chat_examples(max_examples=10),
    options=plan_options(),
    shuffle=st.sampled_from(["global", "block", "none"]),
    batch_size=st.integers(1, 5),
    documents=st.booleans(),
)
def test_an_epoch_is_every_row_of_the_plan_once(
    examples, options, shuffle, batch_size, documents
) -> None:
    with tempfile.TemporaryDirectory() as top:
        build_small_chat_store(Path(top, "s"), {"train": examples})
        plan = build_plan(Path(top, "s"), options=options, allow_empty=True)
        source = PackSource(Path(top, "s"), plan.path, pad_id=PAD)
        if not len(source):
            with pytest.raises(OptionError, match="no source has a window: 's' has 0 tokens"):
                SampleStream([source])
            return
        rows = rows_of_plan(plan, examples.ids.lengths.tolist())
        stream = SampleStream([source], seed=5, shuffle=shuffle)
        seen: Counter[int] = Counter()
        loader = Loader(stream, batch_size=batch_size, documents=documents, ahead=0)
        for batch in islice(loader, -(-len(source) // batch_size)):
            assert_is_packed(batch, plan, examples, rows, documents=documents)
            seen.update(batch.item[np.array(batch.samples) < len(source)].tolist())
        assert seen == Counter(range(len(source)))
        loader.close()


def assert_is_packed(batch, plan: StoredPlan, examples: ChatExamples, rows, *, documents) -> None:
    """Inputs, labels and documents of every row, by plain Python."""
    edges = [0]
    for at, item in enumerate(batch.item.tolist()):
        ids, trained, _ = plain_row(plan, rows[item], examples, PAD)
        owner = plain_documents(plan, rows[item])
        wanted = [i if t else IGNORE_INDEX for i, t in zip(ids[1:], trained[1:], strict=True)]
        assert batch.input_ids[at].tolist() == ids[:-1]
        assert batch.labels[at].tolist() == wanted
        assert any(label != IGNORE_INDEX for label in wanted), "a row trains nothing"
        if documents:
            inputs = owner[:-1]
            assert batch.doc_ids[at].tolist() == inputs
            assert batch.position_ids[at].tolist() == plain_positions(inputs)
            begin = at * len(inputs)
            edges += [begin + k for k in range(1, len(inputs)) if inputs[k] != inputs[k - 1]]
            edges.append(begin + len(inputs))
            for k, label in enumerate(wanted):
                assert label == IGNORE_INDEX or owner[k] == owner[k + 1], "a label over a border"
    if documents:
        assert batch.cu_seqlens.tolist() == edges
        assert batch.max_seqlen == max(b - a for a, b in pairwise(edges))
    else:
        assert batch.doc_ids is None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A chat store `s` with its plan train-6-split, and pretraining tokens `web`."""
    build_small_chat_store(tmp_path / "s", {"train": FIVE}, special_token_ids={"eot": 3})
    build_plan(tmp_path / "s", options=SPLIT)
    write_small(tmp_path / "web", 150, seed=1)
    return tmp_path


def mixed(folder: Path, **options) -> SampleStream:
    chats = PackSource(folder / "s", "train-6-split", name="chats")
    windows = TokenSource(folder / "web", seq_len=6)
    return SampleStream([windows, chats], weights=[0.6, 0.4], seed=3, **options)


def test_batches_by_hand(folder: Path) -> None:
    source = PackSource(folder / "s", "train-6-split")
    assert isinstance(source, RowSource)
    no = IGNORE_INDEX
    found = source.batch([1, 2])
    assert found.input_ids.tolist() == [[1, 10, 11, 12, 13, 1], [1, 10, 11, 12, 3, 3]]
    assert found.labels.tolist() == [[no, no, 12, 13, no, 10], [no, 11, 12, no, no, no]]
    assert found.item.tolist() == [1, 2]
    assert source.rows([2]).used.tolist() == [4]
    (one,) = islice(Loader(SampleStream([source], shuffle="none"), batch_size=3, documents=True), 1)
    assert one.doc_ids.tolist() == [[0] * 6, [0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 1, 1]]
    assert one.position_ids[1:].tolist() == [[0, 1, 2, 3, 4, 0], [0, 1, 2, 3, 0, 1]]
    assert one.cu_seqlens.tolist() == [0, 6, 11, 12, 16, 18]
    assert one.cu_seqlens.dtype == np.int32
    assert repr(source) == (
        f"PackSource('{folder}/s', 'train-6-split', name='s', seq_len=6, rows=3, reader='mapped')"
    )


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("shuffle", ["global", "block"])
def test_chats_and_windows_mix_in_one_order_that_resumes_on_any_ranks(
    folder: Path, documents, shuffle
) -> None:
    stream = mixed(folder, shuffle=shuffle)

    def make(*, batch_size: int = 2, rank: int = 0, world: int = 1) -> Loader:
        return Loader(
            stream, batch_size=batch_size, rank=rank, world=world, documents=documents, ahead=0
        )

    assert_order_is_one(make, [RankShape(2, 1), RankShape(1, 3), RankShape(4, 2)], 48)
    assert_resumes_exactly(make, 9)
    assert_resume_is_elastic(
        make, [(RankShape(2, 2), 3), (RankShape(1, 3), 4), (RankShape(5, 1), 2)]
    )
    counters = make().counters()
    assert sorted(counters) == ["chats", "web"]


def test_a_mixed_batch_holds_what_each_source_gives_alone(folder: Path) -> None:
    stream = mixed(folder)
    sources = set()
    for batch in islice(Loader(stream, batch_size=8, documents=True), 4):
        for at, (number, item) in enumerate(zip(batch.source, batch.item, strict=True)):
            source = stream.sources[number]
            sources.add(source.name)
            alone = np.empty((2, 1, 6), np.int64)
            source.fill([item], alone[0], alone[1])
            assert batch.input_ids[at].tolist() == alone[0, 0].tolist()
            crossed = np.diff(batch.doc_ids[at]) > 0
            assert (batch.labels[at, :-1][crossed] == IGNORE_INDEX).all()
            if source.name == "chats":
                assert batch.labels[at].tolist() == alone[1, 0].tolist()
    assert sources == {"chats", "web"}


def test_labels_are_those_of_the_examples_alone(folder: Path) -> None:
    source = PackSource(folder / "s", "train-6-split")
    labels = source.batch(np.arange(len(source))).labels
    alone = ChatRows(folder / "s", seq_len=20).batch(np.arange(5)).labels
    assert sorted(labels[labels != IGNORE_INDEX]) == sorted(alone[alone != IGNORE_INDEX])


def test_a_state_of_another_plan_is_refused_by_name(folder: Path) -> None:
    loader = Loader(mixed(folder), batch_size=2)
    next(iter(loader))
    state = loader.state_dict()
    loader.close()
    other = PlanOptions(seq_len=6, long="split", max_per_row=1)
    build_plan(folder / "s", options=other)
    chats = PackSource(folder / "s", "train-6-max1-split", name="chats")
    stream = SampleStream(
        [TokenSource(folder / "web", seq_len=6), chats], weights=[0.6, 0.4], seed=3
    )
    with pytest.raises(StateMismatchError, match="source 'chats': other data"):
        Loader(stream, batch_size=2).load_state_dict(state)


def test_a_step_is_described_without_reading(folder: Path) -> None:
    source = PackSource(folder / "s", "train-6-split")
    stream = SampleStream([source], shuffle="none")
    first, second, third = plan_step(stream, samples=0, batch_size=3)
    assert (first.source, first.path, first.split) == ("s", folder / "s", "train")
    assert (first.window, first.start, first.stop) == (0, 13, 20)
    assert first.documents == ((2, 13, 20),)
    assert second.documents == ((0, 0, 5), (1, 5, 7))
    assert third.documents == ((4, 21, 25),)


def test_a_loader_of_packed_rows_pickles_and_continues(folder: Path) -> None:
    loader = Loader(mixed(folder), batch_size=3, documents=True)
    list(islice(loader, 2))
    data = pickle.dumps(loader)
    assert len(data) < 10_000
    wanted = [batch.labels.tolist() for batch in islice(loader, 4)]
    again = pickle.loads(data)
    assert [batch.labels.tolist() for batch in islice(again, 4)] == wanted
    loader.close()
    again.close()
    build_plan(folder / "s", options=PlanOptions(seq_len=12), name="6-split", overwrite=True)
    with pytest.raises(DamagedStoreError, match="packed again meanwhile"):
        pickle.loads(data)


def test_asking_ahead_changes_nothing(folder: Path) -> None:
    asked, unasked = (
        [
            b.input_ids.tolist()
            for b in islice(Loader(mixed(folder), batch_size=4, ask_ahead=ask), 6)
        ]
        for ask in (True, False)
    )
    assert asked == unasked


def test_what_cannot_be_read_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(StoreNotFoundError, match=r"no plan 'train-9'.* plans are: train-6-split"):
        PackSource(folder / "s", "train-9")
    with pytest.raises(OptionError, match=r"pad_id=65,536: tokens of .* are uint16"):
        PackSource(folder / "s", "train-6-split", pad_id=65536)
    with pytest.raises(OptionError, match="name='': wanted a name"):
        PackSource(folder / "s", "train-6-split", name="")
    with pytest.raises(OptionError, match=r"read it with shardmill\.ChatRows, or packed with"):
        TokenSource(folder / "s", seq_len=6)
    source = PackSource(folder / "s", "train-6-split")
    with pytest.raises(OptionError, match="'web' has seq_len=5, but 's' has 6"):
        SampleStream([source, TokenSource(folder / "web", seq_len=5)])
    with pytest.raises(OptionError, match="wanted a list, also of one"):
        SampleStream(source)  # type: ignore[arg-type]
    with pytest.raises(
        OptionError, match=r"sources hold a ChatRows.*wanted TokenSource or PackSource"
    ):
        SampleStream([ChatRows(folder / "s", seq_len=6)])  # type: ignore[list-item]
    with pytest.raises(IndexError, match="row 3 of 3"):
        source.batch([3])
    with pytest.raises(OptionError, match=r"rows of int64 \(1, 5\); wanted int64 \(n, 6\)"):
        source.fill([0], *np.empty((2, 1, 5), np.int64))


def test_a_store_that_names_no_end_needs_a_pad_id(tmp_path: Path) -> None:
    build_small_chat_store(tmp_path / "s", {"train": make_examples([([1], [(2, [(5, True)])])])})
    build_plan(tmp_path / "s", options=PlanOptions(seq_len=4))
    with pytest.raises(OptionError, match="names no end of turn"):
        PackSource(tmp_path / "s", "train-4")
    assert PackSource(tmp_path / "s", "train-4", pad_id=9).batch([0]).input_ids.tolist() == [
        [1, 5, 9, 9]
    ]


REAL = os.environ.get("SHARDMILL_REAL_DATA")


@pytest.mark.slow
@pytest.mark.skipif(REAL is None, reason="SHARDMILL_REAL_DATA is not set")
def test_packed_real_conversations_train_every_label_once(tmp_path: Path) -> None:
    specials = {"sys": "<|s|>", "usr": "<|u|>", "asst": "<|a|>", "eot": "<|e|>"}
    tokenizer = open_tokenizer("byte:4", specials=specials)
    build_chats(
        open_chats(Path(str(REAL), "dolly/databricks-dolly-15k.jsonl")),
        tmp_path / "s",
        template=bind_template(known_template("four-marker"), tokenizer),
        tokenizer=tokenizer,
        spec=BuildSpec(shard_bytes=2**20),
    )
    space = ChatSpace(open_store(tmp_path / "s"), "train")
    every = space.examples(np.arange(len(space)))
    trained = every.mask.copy()
    trained[every.ids.offsets[:-1]] = False  # nothing predicts the first token of an example
    wanted = np.bincount(every.ids.values[trained], minlength=260)
    for align_to in (1, 16):
        options = PlanOptions(seq_len=1024, long="split", align_to=align_to)
        plan = build_plan(tmp_path / "s", options=options, name=f"aligned-to-{align_to}")
        source = PackSource(tmp_path / "s", plan.path)
        labels = [source.batch(part).labels for part in np.array_split(np.arange(len(source)), 64)]
        found = np.concatenate([part[part != IGNORE_INDEX] for part in labels])
        assert np.array_equal(np.bincount(found, minlength=260), wanted)
        assert len(found) == plan.facts.metrics.trained_labels > 5_000_000
        assert all((part != IGNORE_INDEX).any(axis=1).all() for part in labels)
