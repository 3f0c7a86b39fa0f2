"""Mixture: exact shares at every prefix, whole epochs, phases, and what is refused."""

from __future__ import annotations

import pickle
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.errors import OptionError
from shardmill.sampling import BlockShuffle, InOrder, Mixture, Permutation
from shardmill.sampling.mixture import LONGEST_PERIOD, Schedule, counts_at, turns, whole_shares
from tests.sampling.shares import (
    assert_prefixes_keep_their_shares,
    assert_sources_are_exhausted_before_they_repeat,
)

NAMES = ("a", "b", "c")
SMALL = st.lists(st.integers(0, 12), min_size=1, max_size=7).filter(any)
SKEWED = st.lists(st.sampled_from([0, 1, 2, 50, 100, 999]), min_size=1, max_size=9).filter(any)
FLOATS = st.lists(
    st.floats(0.001, 1) | st.just(0.0) | st.floats(0.4, 0.5), min_size=1, max_size=9
).filter(any)
WEIGHTS = SMALL | SKEWED | FLOATS


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(weights=SMALL | SKEWED)
def test_counts_without_walking_equal_counts_by_walking(weights: list[int]) -> None:
    counts = [0] * len(weights)
    for n, source in enumerate(turns(weights, counts, 0, 200)):
        assert counts_at(weights, n) == counts
        counts[source] += 1


@settings(deadline=None, max_examples=60)
@given(weights=FLOATS, start=st.integers(0, 10**15))
def test_a_walk_may_start_at_any_sample(weights: list[float], start: int) -> None:
    shares = whole_shares(weights, [str(s) for s in range(len(weights))])
    counts = counts_at(shares, start)
    for source in turns(shares, counts, start, 200):
        counts[source] += 1
    assert counts == counts_at(shares, start + 200)


@settings(deadline=None, max_examples=60)
@given(weights=WEIGHTS, start=st.just(0) | st.integers(0, 10**14))
def test_every_prefix_keeps_every_share(weights: list[float], start: int) -> None:
    mixture = Mixture([10**9] * len(weights), weights, seed=0)
    assert_prefixes_keep_their_shares(mixture, start, start + 200)


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(data=st.data(), num_sources=st.integers(1, 5))
def test_every_prefix_of_every_phase_keeps_every_share(data, num_sources: int) -> None:
    weights = st.lists(st.integers(0, 9), min_size=num_sources, max_size=num_sources).filter(any)
    starts = sorted(data.draw(st.sets(st.integers(1, 150), max_size=4)))
    phases = [(start, data.draw(weights)) for start in starts]
    mixture = Mixture([7] * num_sources, data.draw(weights), seed=1, phases=phases)
    assert_prefixes_keep_their_shares(mixture, 0, 200)
    assert_prefixes_keep_their_shares(mixture, 60, 170)
    assert_sources_are_exhausted_before_they_repeat(mixture, 200)


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(data=st.data(), num_sources=st.integers(2, 5), length=st.integers(1, 12))
def test_deviations_do_not_add_up_over_many_changes_of_weights(
    data, num_sources: int, length: int
) -> None:
    weights = st.lists(st.integers(1, 30), min_size=num_sources, max_size=num_sources)
    changes = [data.draw(weights) for _ in range(40)]
    phases = [(length * number, chosen) for number, chosen in enumerate(changes[1:], start=1)]
    mixture = Mixture([7] * num_sources, changes[0], seed=1, phases=phases)
    exact = [Fraction(0)] * num_sources
    for n in range(40 * length):
        chosen = changes[n // length]
        exact = [due + Fraction(w, sum(chosen)) for due, w in zip(exact, chosen, strict=True)]
        counts = mixture.counts(n + 1).tolist()
        owed = tuple(due - count for due, count in zip(exact, counts, strict=True))
        assert mixture.owed(n + 1) == owed
        assert max(map(abs, owed)) < (1.5 if num_sources == 2 else 3)


def test_a_slow_curriculum_in_short_phases_starves_no_source() -> None:
    small = [0.1 + 0.0001 * (number % 7) for number in range(300)]
    phases = [(4 * number, [w, 1 - w]) for number, w in enumerate(small) if number]
    mixture = Mixture([1000] * 2, [small[0], 1 - small[0]], seed=0, phases=phases)
    assert mixture.counts(1200).tolist() == [120, 1080]  # exact: 120.36


def test_a_mixture_that_replaces_another_carries_over_what_is_owed() -> None:
    first = Mixture([1000] * 2, [1, 2], seed=0)
    assert first.owed(1) == (Fraction(1, 3), Fraction(-1, 3))
    second = Mixture([1000] * 2, [1, 2], seed=0)
    second.carry_over(first.owed(1))
    assert second.take([0, 1, 2]).source.tolist() == first.take([1, 2, 3]).source.tolist()
    with pytest.raises(OptionError, match="1 numbers owed for 2 sources"):
        Mixture([1, 1], [1, 1], seed=0).carry_over([0.5])


def test_shares_hold_against_the_weights_as_written_after_a_trillion_samples() -> None:
    """Irrational-looking weights of five sources: within one sample, though rounded to 2**-40."""
    weights = [0.31415926535, 0.27182818284, 0.14142135623, 0.17320508075, 0.0999999999]
    mixture = Mixture([10**6] * 5, weights, seed=0)
    exact = [Fraction(str(weight)) / sum(Fraction(str(w)) for w in weights) for weight in weights]
    for n in (10**6, 10**9 + 7, 10**11 + 3):
        for count, share in zip(mixture.counts(n).tolist(), exact, strict=True):
            assert abs(count - n * share) < 1.1


@settings(deadline=None, max_examples=40)
@given(
    weights=WEIGHTS,
    sizes=st.lists(st.integers(1, 30), min_size=9, max_size=9),
    seed=st.integers(0, 2**64 - 1),
)
def test_no_source_repeats_before_it_is_exhausted(
    weights: list[float], sizes: list[int], seed: int
) -> None:
    mixture = Mixture(sizes[: len(weights)], weights, seed=seed)
    assert_sources_are_exhausted_before_they_repeat(mixture, 300)


def test_a_mixture_by_hand() -> None:
    mixture = Mixture([5, 3, 100], [0.5, 0.3, 0.2], seed=7, names=NAMES, phases=[(10, [0, 1, 1])])
    samples = mixture.take(range(20))
    assert samples.source.tolist() == [0, 1, 0, 2, 0, 1, 0, 1, 0, 2] + [1, 2] * 5
    assert samples.epoch.tolist() == [0] * 10 + [1, 0, 1, 0, 1, 0, 2, 0, 2, 0]
    assert samples.item.tolist() == [
        2, 0, 0, 96, 3, 1, 1, 2, 4, 52, 0, 73, 1, 98, 2, 54, 0, 11, 2, 14
    ]  # fmt: skip
    assert mixture.counts(0).tolist() == [0, 0, 0]
    assert mixture.counts(10).tolist() == [5, 3, 2]
    assert mixture.counts(11).tolist() == [5, 4, 2]
    assert mixture.counts(20).tolist() == [5, 8, 7]
    assert mixture.shares(9) == (Fraction(1, 2), Fraction(3, 10), Fraction(1, 5))
    assert mixture.shares(10) == (0, Fraction(1, 2), Fraction(1, 2))
    assert mixture.phase_starts == (0, 10)
    assert repr(mixture) == "Mixture(a: 0.5, b: 0.3, c: 0.2; seed=7, phases=2)"


def test_a_sources_items_come_in_the_order_of_its_name_and_epoch() -> None:
    mixture = Mixture([50, 40], [1, 1], seed=3, names=["x", "y"])
    samples = mixture.take(range(200))
    own = samples.item[(samples.source == 1) & (samples.epoch == 1)]
    expected = Permutation(40, 3, "source", "y", "epoch", 1).take(range(40))
    assert own.tolist() == expected.tolist()


def test_a_source_keeps_its_order_when_another_one_joins() -> None:
    alone = Mixture([50], [1], seed=3, names=["x"]).take(range(50)).item
    joined = Mixture([9, 50], [1, 4], seed=3, names=["new", "x"]).take(range(200))
    assert joined.item[joined.source == 1][:50].tolist() == alone.tolist()


@settings(deadline=None, max_examples=40)
@given(
    weights=FLOATS,
    asked=st.lists(st.integers(0, 10**6) | st.integers(0, 10**13), min_size=1, max_size=20),
)
def test_answers_do_not_depend_on_what_was_asked_before(
    weights: list[float], asked: list[int]
) -> None:
    sizes = [1000] * len(weights)
    used = Mixture(sizes, weights, seed=0, phases=[(5000, list(reversed(weights)))])
    together = used.take(asked)
    for row, index in enumerate(asked[:4]):
        fresh = Mixture(sizes, weights, seed=0, phases=[(5000, list(reversed(weights)))])
        one = fresh.take([index])
        assert (one.source[0], one.epoch[0], one.item[0]) == (
            together.source[row],
            together.epoch[row],
            together.item[row],
        )


def test_short_and_long_periods_follow_the_same_rule() -> None:
    """The same shares, once kept as a period and once in stretches."""
    weights = (5001, 3000, 1999, 10_007)
    whole, pieces = Schedule(weights), Schedule(weights)
    assert sum(weights) <= LONGEST_PERIOD
    pieces._length = 512
    numbers = np.concatenate([np.arange(45_000), 10**12 + np.arange(5000)])
    for one, other in zip(whole.locate(numbers), pieces.locate(numbers), strict=True):
        assert np.array_equal(one, other)


def test_block_shuffle_and_no_shuffle_serve_as_orders() -> None:
    blocks = Mixture([40, 9], [2, 1], seed=0, order=partial(BlockShuffle, block_items=4))
    assert_sources_are_exhausted_before_they_repeat(blocks, 300)
    plain = Mixture([40, 9], [2, 1], seed=0, order=InOrder).take(range(9))
    assert plain.source.tolist() == [0, 0, 1] * 3
    assert plain.item.tolist() == [0, 1, 0, 2, 3, 1, 4, 5, 2]


def test_a_source_of_weight_zero_never_comes_even_if_it_is_empty() -> None:
    mixture = Mixture([5, 0, 5], [1, 0, 3], seed=0)
    assert set(mixture.take(range(1000)).source.tolist()) == {0, 2}
    assert mixture.counts(1000).tolist() == [250, 0, 750]


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ([0.7, 0.2, 0.1], (7, 2, 1)),
        ([1 / 3, 1 / 3, 1 / 3], (1, 1, 1)),
        ([1 / 3, 2 / 3, 0], (1, 2, 0)),
        ([Fraction(1, 7), Fraction(2, 7), 0], (1, 2, 0)),
        ([10, 20, 70], (1, 2, 7)),
        ([1e300, 1e300, 2e300], (1, 1, 2)),
        ([np.float64(0.5), np.float32(0.25), np.int64(1)], (2, 1, 4)),
    ],
)
def test_weights_are_taken_as_written(weights: list[float], shares: tuple[int, ...]) -> None:
    assert whole_shares(weights, NAMES) == shares


def test_temperature_flattens_and_sharpens() -> None:
    assert whole_shares([1, 4, 16], NAMES, temperature=1) == (1, 4, 16)
    heated = np.array(whole_shares([1, 4, 16], NAMES, temperature=2))
    assert heated / heated.sum() == pytest.approx([1 / 7, 2 / 7, 4 / 7], abs=1e-12)
    cooled = np.array(whole_shares([1, 4, 16], NAMES, temperature=0.5))
    assert cooled / cooled.sum() == pytest.approx([1 / 273, 16 / 273, 256 / 273], abs=1e-12)
    assert whole_shares([3, 3, 0], NAMES, temperature=3.7) == (1, 1, 0)
    assert whole_shares([0.3, 0.1, 0.6], NAMES, temperature=1.7) == (
        363184647217, 190312765354, 546014215205,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([0.5, -0.1, 1], "source 'b': weight -0.1 is negative, wanted at least 0"),
        ([0, 0, 0], "weights sum to 0; wanted at least one above 0"),
        ([0.5, float("nan"), 1], "source 'b': weight nan, wanted a finite number"),
        ([0.5, 0.5, float("inf")], "source 'c': weight inf, wanted a finite number"),
        ([0.5, 0.5], r"2 weights for 3 sources \(a, b, c\)"),
        ([], r"0 weights for 3 sources \(a, b, c\)"),
        ([1, "2", 3], "source 'b': weight '2', wanted a number"),
        ([1, None, 3], "source 'b': weight None, wanted a number"),
        ([1, True, 3], "source 'b': weight True, wanted a number"),
        ([1, 1e-7, 3], "source 'b': a share of 2.5e-08, wanted at least 1 in .*set it to 0"),
        ([1, 5e-324, 1e308], "source 'a': a share of 1e-308"),
    ],
)
def test_a_wrong_weight_is_refused_by_name(weights: list[float], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Mixture([1, 1, 1], weights, seed=0, names=NAMES)
    with pytest.raises(OptionError, match=message):
        Mixture([1, 1, 1], [1, 1, 1], seed=0, names=NAMES, phases=[(10, weights)])


@pytest.mark.parametrize("temperature", [0, -1, float("nan"), float("inf"), "1", None, True])
def test_a_wrong_temperature_is_refused(temperature: float) -> None:
    with pytest.raises(OptionError, match=r"temperature=.*wanted a finite number above 0"):
        whole_shares([1], ["a"], temperature=temperature)


def test_a_temperature_that_freezes_a_source_out_is_refused_by_its_name() -> None:
    with pytest.raises(OptionError, match="source 'b': a share of 0"):
        whole_shares([1, 0.5, 0], NAMES, temperature=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sizes": [], "weights": []}, "a mixture of no sources"),
        ({"sizes": [1, 0]}, "source '1' is empty, but has a weight above 0"),
        ({"sizes": [1, -3]}, "source '1': size=-3: wanted at least 0"),
        ({"names": ["a", "a"]}, "sources share the name 'a'"),
        ({"names": ["a"]}, "1 names for 2 sizes: a"),
        ({"names": "ab"}, "names='ab': wanted one str per source"),
        ({"names": ["a", 3]}, "wanted one str per source"),
        ({"seed": -1}, "seed=-1: wanted at least 0"),
        ({"phases": [(0, [1, 1])]}, "phase_start=0: wanted at least 1"),
        ({"phases": [(5, [1, 1]), (5, [1, 2])]}, r"phases start at \[5, 5\]: wanted ascending"),
        ({"phases": [(9, [1, 1]), (5, [1, 2])]}, r"phases start at \[9, 5\]: wanted ascending"),
        ({"phases": [(9, [1, 1, 1])]}, "3 weights for 2 sources"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Mixture(**{"sizes": [1, 1], "weights": [1, 1], "seed": 0, **arguments})  # type: ignore[arg-type]


def test_a_source_that_is_empty_in_a_later_phase_is_refused() -> None:
    with pytest.raises(OptionError, match="source 'b' is empty"):
        Mixture([1, 0], [1, 0], seed=0, names=["a", "b"], phases=[(5, [1, 1])])


@pytest.mark.parametrize("index", [-1, 2**63 - 1])
def test_an_index_outside_is_refused(index: int) -> None:
    with pytest.raises(IndexError, match="index"):
        Mixture([1], [1], seed=0).take([index])


def test_the_fingerprint_covers_everything_that_decides_the_samples() -> None:
    def fingerprint(**changed: object) -> str:
        first = {"sizes": [5, 6], "weights": [1, 2], "seed": 0, "names": ["a", "b"]}
        return Mixture(**{**first, **changed}).fingerprint  # type: ignore[arg-type]

    others = [
        fingerprint(sizes=[5, 7]), fingerprint(weights=[1, 3]), fingerprint(seed=1),
        fingerprint(names=["a", "c"]), fingerprint(order=InOrder),
        fingerprint(phases=[(5, [1, 1])]), fingerprint(phases=[(6, [1, 1])]),
        fingerprint(order=partial(BlockShuffle, block_items=2)),
    ]  # fmt: skip
    assert fingerprint() == fingerprint(weights=[0.5, 1.0])  # the same shares
    assert len({fingerprint(), *others}) == 9


def test_a_mixture_survives_pickling() -> None:
    mixture = Mixture([50, 60], [0.3, 0.123456789], seed=0)
    expected = mixture.take(range(1000)).item.tolist()
    assert pickle.loads(pickle.dumps(mixture)).take(range(1000)).item.tolist() == expected


class _Drifting(Mixture):
    """A mixture that counts one sample of the first source too many from sample 50 on."""

    def counts(self, n):
        return super().counts(n) + (np.array([1, -1]) if int(n) >= 50 else 0)


def test_the_guarantee_of_shares_detects_a_drift() -> None:
    with pytest.raises(AssertionError):
        assert_prefixes_keep_their_shares(_Drifting([9, 9], [1, 2], seed=0), 0, 60)
