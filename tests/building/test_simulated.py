"""Same bytes in any order of work, with deaths of workers and of the coordinator.

They are simulated, so that many orders are tried.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.building import BuildSpec, Feed, build_store
from shardmill.building.splits import HashSplit
from shardmill.errors import BuildError
from shardmill.sources import JsonlSource, MemorySource
from shardmill.store import verify
from tests.building.corpora import SMALL, feeds_of, write_corpus
from tests.building.simulated import Draws, Mortal, simulated
from tests.helpers import folder_digest

TOKENIZER = Mortal(byte_offset=1, specials={"eot": "<|eot|>"})
SPEC = BuildSpec(shard_bytes=3_000, append_eot=True)
THREE = HashSplit(seed=3, fractions=(("val", 0.2), ("test", 0.1)))


class Stopped(Exception):
    """The coordinator ends in mid-build."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"), num_files=3)


def texts() -> list[str]:
    return [f"{number} " + "ab" * (number % 90) for number in range(300)]


def feeds(corpus: Path, kind: str) -> list[Feed]:
    pages = JsonlSource(corpus / "pages", on_bad="skip", limits=SMALL)
    memory = MemorySource(texts, name="memory", limits=SMALL)
    if kind == "hash":
        fill = tuple((split, None) for split in THREE.splits)
        return [Feed(source=source, fill=fill, by_hash=THREE) for source in (pages, memory)]
    fill, *more = FILLS[kind]
    made = [Feed(source=pages, fill=fill), Feed(source=memory, fill=fill)]
    return [*made, *feeds_of(corpus)] if more else made


Fill = tuple[tuple[str, int | None], ...]
FILLS: dict[str, list[Any]] = {
    "free": [(("train", None),)],
    "val": [(("val", 4_000), ("train", None))],
    "several feeds": [(("val", 500), ("test", 2_000), ("train", None)), True],
    "full": [(("val", 3_000), ("train", 9_000))],
    "small limits": [(("a", 3), ("b", 0), ("c", 40), ("d", 1), ("train", 6_000))],
    "nothing": [(("train", 0),)],
    "large": [(("val", 12_000), ("test", 3_000), ("train", 2_000))],
}


def build(corpus: Path, out: Path, kind: str, **how: Any) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardmill.building.plan.CHUNK_BYTES", 600)
        build_store(feeds(corpus, kind), out, tokenizer=TOKENIZER, spec=SPEC, max_loss=1.0, **how)
    return folder_digest(out)


_wanted: dict[str, str] = {}


def wanted(corpus: Path, folder: Path, kind: str) -> str:
    """What one process makes."""
    if kind not in _wanted:
        _wanted[kind] = build(corpus, folder / "one", kind, workers=1)
    return _wanted[kind]


def run_to_the_end(corpus: Path, out: Path, kind: str, draws: Draws, *, stops: float) -> str:
    return until_done(lambda **how: build(corpus, out, kind, **how), draws, stops)


def until_done(build: Callable[..., str], draws: Draws, stops: float) -> str:
    """Build, and resume what a death ends, with other workers and tasks each time."""
    for attempt in range(60):
        last = attempt == 59
        if last:
            draws.deaths = draws.errors = draws.losses = 0.0

        def stop(_progress: object, last: bool = last) -> None:
            if not last and draws.random.random() < stops:
                raise Stopped

        how = {
            "workers": draws.random.choice([1, 2, 3, 7]),
            "unit_bytes": draws.random.choice([1, 10**4, 10**9]),
            "on_progress": stop,
            "resume": True,
        }
        try:
            with simulated(draws):
                return build(**how)
        except Stopped:
            pass
        except BuildError as error:
            if "workers died of it" not in str(error):
                raise
    raise AssertionError("it never gets done")


@pytest.mark.slow
@settings(deadline=None, max_examples=12)
@given(
    kind=st.sampled_from([*FILLS, "hash"]),
    seed=st.integers(0, 10**6),
    deaths=st.sampled_from([0.0, 0.02, 0.1]),
    errors=st.sampled_from([0.0, 0.05]),
    stops=st.sampled_from([0.0, 0.05]),
)
def test_any_order_deaths_and_stops_give_the_bytes_of_one_process(
    tmp_path_factory, corpus, kind, seed, deaths, errors, stops
):
    folder = tmp_path_factory.mktemp("simulated")
    expected = wanted(corpus, folder, kind)
    draws = Draws(seed, deaths=deaths, errors=errors)
    with warnings_of("shardmill.building.run") as said:
        assert run_to_the_end(corpus, folder / "s", kind, draws, stops=stops) == expected
    assert said == [], "nothing that was settled is written again"
    assert verify(folder / "s").problems == []
    assert list(folder.glob(".*")) == []


@pytest.mark.slow
@settings(deadline=None, max_examples=12)
@given(kind=st.sampled_from([*FILLS]), seed=st.integers(0, 10**6), deaths=st.sampled_from([0, 0.1]))
def test_a_worker_that_was_given_up_and_lives_on_changes_no_byte(
    tmp_path_factory, corpus, kind, seed, deaths
):
    """As on a machine that a cluster has lost: it may write what others have made differently
    since, for the right state of the splits."""
    folder = tmp_path_factory.mktemp("simulated")
    expected = wanted(corpus, folder, kind)
    draws = Draws(seed, deaths=deaths, losses=0.1)
    assert run_to_the_end(corpus, folder / "s", kind, draws, stops=0.0) == expected
    assert verify(folder / "s").problems == []


@pytest.mark.slow
@settings(deadline=None, max_examples=8)
@given(
    kind=st.sampled_from(["free", "val", "several feeds", "hash"]),
    num_old=st.integers(0, 6),
    seed=st.integers(0, 10**6),
    deaths=st.sampled_from([0.0, 0.1]),
    stops=st.sampled_from([0.0, 0.05]),
)
def test_files_are_added_in_any_order_of_work(
    tmp_path_factory, corpus, kind, num_old, seed, deaths, stops
):
    """To a store of some of seven small files, of the others."""
    folder = tmp_path_factory.mktemp("append")
    (folder / "files").mkdir()
    for number in range(7):
        data = (corpus / "pages" / f"{number % 3}.jsonl").read_bytes()
        (folder / f"files/{number}.jsonl").write_bytes(data[: 900 * number])

    def build_of(count: int, name: str, **how: Any) -> str:
        paths = [folder / f"files/{number}.jsonl" for number in range(count)]
        source = JsonlSource(paths, field="text", on_bad="skip", name="all", limits=SMALL)
        feed = Feed(source=source, fill=tuple((split, None) for split in THREE.splits))
        feed = replace(feed, by_hash=THREE)
        if kind != "hash":
            feed = Feed(source=source, fill=FILLS[kind][0])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shardmill.building.plan.CHUNK_BYTES", 600)
            build_store([feed], folder / name, tokenizer=TOKENIZER, spec=SPEC, max_loss=1.0, **how)
        return folder_digest(folder / name)

    expected = build_of(7, "whole", workers=1)
    build_of(num_old + 1, "s", workers=1)
    draws = Draws(seed, deaths=deaths)
    found = until_done(lambda **how: build_of(7, "s", append=True, **how), draws, stops)
    assert found == expected
    assert verify(folder / "s").problems == []


@contextmanager
def warnings_of(name: str) -> Iterator[list[str]]:
    """What a logger says at least as a warning."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger(name).removeHandler(handler)
