"""Weights become whole numbers.

In: weights as people write them, a temperature.  Out: integers whose ratios are the shares.
Promise: exact where it can be. 0.7, 0.2, 0.1 are 7 : 2 : 1, and 1/3, 2/3 are 1 : 2. Shares that
need a common denominator over 2**40 are rounded to that: each is off by less than 2**-40, which a
run of 10**11 samples does not notice. The same integers on every machine.
Not here: what is done with them.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from decimal import Context, Decimal
from fractions import Fraction
from typing import TypeAlias

from shardmill.errors import OptionError

Weight: TypeAlias = "float | int | Fraction"

FINEST = 2**40
"""The largest common denominator of the shares."""
LEAST_SHARE = Fraction(1, 2**20)


def whole_shares(
    weights: Sequence[Weight], names: Sequence[str], *, temperature: float = 1.0
) -> tuple[int, ...]:
    """One integer a source, without a common factor: source `s` has the share `w[s] / sum(w)`."""
    if len(weights) != len(names):
        raise OptionError(f"{len(weights)} weights for {len(names)} sources ({', '.join(names)})")
    exact = [_fraction(weight, name) for weight, name in zip(weights, names, strict=True)]
    if not any(exact):
        raise OptionError("weights sum to 0; wanted at least one above 0")
    heated = _heated(exact, _checked_temperature(temperature))
    shares = [weight / sum(heated) for weight in heated]
    for share, asked, name in zip(shares, exact, names, strict=True):
        if asked and share < LEAST_SHARE:
            raise OptionError(
                f"source {name!r}: a share of {float(share):.2g}, wanted at least 1 in 2**20 "
                f"({float(LEAST_SHARE):.1g}); raise its weight, or make it 0 to leave it out"
            )
    return _integers(shares)


def _fraction(weight: Weight, name: str) -> Fraction:
    """The weight as it is written: 0.1 is 1/10, not the binary number next to it."""
    if isinstance(weight, bool) or not isinstance(weight, numbers.Real):
        raise OptionError(f"source {name!r}: weight {weight!r}, wanted a number of at least 0")
    if isinstance(weight, numbers.Rational):
        exact = Fraction(int(weight.numerator), int(weight.denominator))
    elif math.isfinite(weight):
        exact = Fraction(repr(float(weight)))
    else:
        raise OptionError(f"source {name!r}: weight {weight}, wanted a finite number")
    if exact < 0:
        raise OptionError(f"source {name!r}: weight {weight} is negative, wanted at least 0")
    return exact


def _checked_temperature(temperature: float) -> Fraction:
    number = isinstance(temperature, numbers.Real) and not isinstance(temperature, bool)
    if not number or not math.isfinite(temperature) or temperature <= 0:
        raise OptionError(f"temperature={temperature!r}: wanted a finite number above 0")
    return _fraction(temperature, "temperature")


def _heated(weights: Sequence[Fraction], temperature: Fraction) -> list[Fraction]:
    """`w ** (1 / temperature)`, up to a factor. In decimals of 50 digits, because a processor's
    own power function is not the same everywhere."""
    if temperature == 1:
        return list(weights)
    context = Context(prec=50, Emin=-1000, Emax=1000, traps=[])
    most, heat = max(weights), _decimal(temperature, context)

    def power(weight: Fraction) -> Fraction:
        if not weight:
            return Fraction(0)
        log = _decimal(weight / most, context).ln(context)
        return Fraction(context.divide(log, heat).exp(context))

    return [power(weight) for weight in weights]


def _decimal(value: Fraction, context: Context) -> Decimal:
    return context.divide(Decimal(value.numerator), Decimal(value.denominator))


def _integers(shares: Sequence[Fraction]) -> tuple[int, ...]:
    """The shares over their common denominator, or over `FINEST` if that is smaller: rounded
    down, and what is left goes to the largest remainders."""
    common = math.lcm(*(share.denominator for share in shares))
    if common <= FINEST:
        return tuple(int(share * common) for share in shares)
    rounded = [math.floor(share * FINEST) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda s: rounded[s] - shares[s] * FINEST)
    for source in by_remainder[: FINEST - sum(rounded)]:
        rounded[source] += 1
    divisor = math.gcd(*rounded)
    return tuple(number // divisor for number in rounded)
