"""Sums of many parts of one draw: rounded as the proof of the clip bound says, in any order."""

import functools
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp.clipping.rounding import UNIT
from jaxdp.types import Summed

PARTS = 1_001


def parts(values):
    """Sums that are known to be of one draw, with these values."""
    ticket = jaxdp.dp_sgd(1.0, 1.0, 20, 60).sampler(60).draw().ticket
    return [
        Summed({"w": jnp.full(3, v, jnp.float32)}, 1.0).of_draw(ticket, [n], known=True)
        for n, v in enumerate(values)
    ]


def halves(some):
    while len(some) > 1:
        some = [sum(some[i + 1 : i + 2], some[i]) for i in range(0, len(some), 2)]
    return some[0]


ORDERS = {
    "one by one": lambda some: functools.reduce(lambda a, b: a + b, some),
    "from the other end": lambda some: functools.reduce(lambda a, b: b + a, some[::-1]),
    "by halves": halves,
}


# Before: 1 + 1,000 * 0.95 * 2^-24 was 1, off by 950 roundings; the proof has room for four.
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("small", [0.95 * 2.0**-24, -0.45 * 2.0**-24, 0.3])
def test_a_thousand_parts_are_rounded_as_one(order, small):
    values = [1.0] + [small] * (PARTS - 1)
    some = parts(values)
    exact = sum(Fraction(float(part.value["w"][0])) for part in some)
    found = ORDERS[order](some)
    off = max(abs(Fraction(float(v)) - exact) for v in np.asarray(found.value["w"]))
    assert off <= Fraction(1.01 * UNIT) * abs(exact)
    assert found.untouched
    assert found.passes == set(range(PARTS))


def test_random_parts_are_rounded_as_one():
    values = np.random.default_rng(0).normal(size=PARTS)
    some = parts(values)
    terms = [Fraction(float(part.value["w"][0])) for part in some]
    found = Fraction(float(ORDERS["one by one"](some).value["w"][0]))
    assert abs(found - sum(terms)) <= Fraction(1.01 * UNIT) * abs(sum(terms)) + Fraction(2.0**-40)
