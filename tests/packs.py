"""Small chat stores and options that all tests of pack plans share."""

from __future__ import annotations

from hypothesis import strategies as st

from shardmill.store import PlanOptions
from shardmill.testing.stores import make_examples


@st.composite
def plan_options(draw) -> PlanOptions:
    """Options that every example can be packed with."""
    algorithm = draw(st.sampled_from(["best-fit", "first-fit", "first-fit-shuffle", "concatenate"]))
    align_to = draw(st.sampled_from([1, 1, 2, 3]))
    return PlanOptions(
        seq_len=align_to * draw(st.integers(1, 14)),
        algorithm=algorithm,
        seed=draw(st.integers(0, 2**62 - 1)) if algorithm == "first-fit-shuffle" else None,
        max_per_row=draw(st.none() | st.integers(1, 3)),
        align_to=align_to,
        long=draw(st.sampled_from(["truncate", "split", "drop"])),
    )


def talk(
    *turns: tuple[int, int, int],
) -> tuple[list[int], list[tuple[int, list[tuple[int, bool]]]]]:
    """A conversation of turns (role, tokens, whether they are trained); ids count up."""
    number, said = 10, []
    for role, count, trained in turns:
        said.append((role, [(number + at, bool(trained)) for at in range(count)]))
        number += count
    return [1], said


FIVE = make_examples(
    [
        talk((1, 2, 0), (2, 2, 1)),  # 5 tokens, labels at 3 and 4
        talk((2, 1, 1)),  # 2 tokens, a label at 1
        talk((1, 9, 0), (2, 3, 1)),  # 13 tokens, labels at 10, 11 and 12
        ([], [(2, [(7, True)])]),  # 1 token, which nothing predicts
        talk((1, 1, 0), (2, 2, 1)),  # 4 tokens, labels at 2 and 3
    ]
)
