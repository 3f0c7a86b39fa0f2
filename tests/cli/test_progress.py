"""Progress of a build."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from shardmill.building import Progress
from shardmill.cli.terminal import LINE_SECONDS, BuildProgress, build_progress


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def report(source: str, tokens: int, share: float | None = None, feed: int = 0) -> Progress:
    return Progress(source=source, documents=tokens // 10, tokens=tokens, share=share, feed=feed)


def test_progress_has_documents_tokens_speed_share_and_time_left():
    clock = Clock()
    board = BuildProgress(Console(file=io.StringIO()), clock=clock)
    assert board.words(report("a", 100_000, 0.1)) == "10,000 documents, 100,000 tokens, 10%"
    clock.now += 10
    assert board.words(report("a", 5_100_000, 0.35)) == (
        "510,000 documents, 5,100,000 tokens, 0.50M tokens/s, 35%, 0:00:26 left"
    )
    clock.now += 5000
    assert board.words(report("a", 6_000_000, 0.36)).endswith("36%, 3:25:32 left")
    assert board.words(report("b", 10)) == "1 documents, 10 tokens"


@given(before=st.integers(0, 10**12), made=st.integers(0, 10**9), seconds=st.floats(0.1, 10**6))
def test_an_earlier_run_does_not_count_as_speed(before, made, seconds):
    clock = Clock()
    board = BuildProgress(Console(file=io.StringIO()), clock=clock)
    board.words(report("a", before))
    clock.now += seconds
    assert f" {made / seconds / 1e6:.2f}M tokens/s" in board.words(report("a", before + made))


def test_without_a_terminal_every_source_that_moved_has_a_line_now_and_then():
    clock, out = Clock(), io.StringIO()
    lines = BuildProgress(Console(file=out, soft_wrap=True), clock=clock)
    lines.show(report("[a]", 10, 0.1))
    lines.show(report("b", 10, feed=1))
    assert out.getvalue() == ""
    clock.now += LINE_SECONDS
    lines.show(report("b", 20, feed=2))
    assert out.getvalue().splitlines() == [
        "[a]: 1 documents, 10 tokens, 10%",
        "b: 1 documents, 10 tokens",
        "b: 2 documents, 20 tokens",
    ]
    clock.now += LINE_SECONDS
    lines.show(report("[a]", 300, 0.4))
    assert out.getvalue().splitlines()[3:] == [
        "[a]: 30 documents, 300 tokens, 0.00M tokens/s, 40%, 0:02:00 left"
    ]


def test_on_a_terminal_all_sources_are_shown_at_once():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=200)
    with build_progress(console) as bars:
        bars.show(report("first", 1000, 0.5))
        bars.show(report("[second]", 2000))
        bars.show(report("second", 3000, 0.25, feed=1))
    frame = out.getvalue()
    for words in (
        "first",
        "[second]",
        "100 documents, 1,000 tokens, 50%",
        "200 documents, 2,000",
    ):
        assert words in frame
