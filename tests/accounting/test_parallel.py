"""Parallel composition: the worst part is all that is paid, and a split by position is none."""

import itertools
import json
import math

import numpy as np
import pytest

from jaxdp import accounting as acc
from jaxdp.accounting import events
from tests.accounting.judging import ADD, REPLACE, SPECIAL, cost, run
from tests.refusing import all_refused

NOTHING = acc.Composed(())
OUT = np.arange(-34, 39)  # outputs of a count with noise; beyond them lies less than 1e-7
SCALES = {"all": 1.9, "even": 1.0, "odd": 1.4}


def noisy(count, scale):
    """The law of a count with discrete Laplace noise, [outputs]."""
    mass = np.exp(-np.abs(OUT - count) / scale)
    return mass / mass.sum()


def law(all_units, even, odd):
    """All outputs of three releases, of which the third asks by what the first two showed.

    The common one counts all units, the next those of its part, the third 1s or 3s of its part.
    """
    first, second = noisy(len(all_units), SCALES["all"]), noisy(len(even), SCALES["even"])
    third = np.stack([noisy(odd.count(asked), SCALES["odd"]) for asked in (1, 3)])
    asked = (OUT[:, None] + OUT[None, :]) % 2
    return first[:, None, None] * second[None, :, None] * third[asked]


def by_rule(units):
    return law(units, [u for u in units if u % 2 == 0], [u for u in units if u % 2])


def most(pairs, epsilon):
    """The largest delta of pairs of laws, in both directions."""
    slack = math.exp(epsilon)
    return max(
        float(np.maximum(p - slack * q, 0).sum()) for one in pairs for p, q in (one, one[::-1])
    )


LAPLACE = {name: acc.DiscreteLaplace(scale) for name, scale in SCALES.items()}
PARALLEL = acc.Parallel(LAPLACE["all"], {name: LAPLACE[name] for name in ("even", "odd")})


def test_the_definition_on_all_small_data_sets():
    laws = {
        units: by_rule(list(units))
        for size in range(4)
        for units in itertools.combinations_with_replacement(range(4), size)
    }
    pairs = [
        (laws[units], laws[tuple(sorted((*units, one)))])
        for units in laws
        for one in range(4)
        if len(units) < 3
    ]
    added = acc.Composed(tuple(LAPLACE.values()))
    for epsilon in (0.0, 0.3, 0.9, 1.2):
        found, bound = most(pairs, epsilon), acc.delta(PARALLEL, epsilon)
        assert bound.lower - 1e-7 <= found <= bound.upper + 1e-7
        assert found == pytest.approx(bound.upper, rel=2e-3)  # attained in the worst part
        assert bound.upper < 0.95 * acc.delta(added, epsilon).lower
        # A null record adds nothing to a count, whatever part it is in: the pairs are the same.
        assert acc.delta(PARALLEL, epsilon, SPECIAL).upper == pytest.approx(bound.upper, rel=1e-6)


@pytest.mark.parametrize("halves", [False, True])
def test_parts_by_position_cost_more_than_the_sum(halves):
    """Without record 0 every part is another; each is summed."""

    def released(units):
        middle = -(-len(units) // 2)
        one, two = (units[:middle], units[middle:]) if halves else (units[::2], units[1::2])
        first, second = (noisy(sum(part), SCALES["even"]) for part in (one, two))
        return first[:, None] * second[None, :]

    lists = [list(u) for size in range(5) for u in itertools.product((-1, 1), repeat=size)]
    pairs = [(released(u), released(u[1:])) for u in lists if u]
    alone, both = LAPLACE["even"], acc.Repeated(LAPLACE["even"], 2)
    parallel = acc.Parallel(NOTHING, {"one": alone, "two": alone})
    assert cost(parallel) == pytest.approx(cost(alone))
    found = most(pairs, 1.0)
    assert found > acc.delta(both, 1.0).upper > acc.delta(parallel, 1.0).upper


# By hand: who saw what, for every choice of a part of every rule.


def choices(event):
    """{rule: names} of everything that is written down of an event."""
    found = {}

    def walk(node):
        if isinstance(node, dict):
            if node.get("type") == "Parallel":
                found.setdefault(node["rule"], set()).update(node["parts"])
            node = list(node.values())
        if isinstance(node, list):
            list(map(walk, node))

    walk(events.to_dict(event))
    return found


def seen(event, choice):
    """[(event, times)] that a unit with these parts saw."""
    if isinstance(event, acc.Repeated):
        return [(e, n * event.count) for e, n in seen(event.event, choice)]
    if isinstance(event, acc.Composed):
        return [each for inner in event.events for each in seen(inner, choice)]
    if isinstance(event, acc.Parallel):
        own = dict(event.parts).get(choice[event.rule], NOTHING)
        return seen(event.common, choice) + seen(own, choice)
    return [(event, 1)]


def worst(event):
    rules = choices(event)
    rows = []
    for names in itertools.product(*(sorted(each) for each in rules.values())):
        held = seen(event, dict(zip(rules, names, strict=True)))
        rows.append(acc.epsilon(acc.Composed([acc.Repeated(e, n) for e, n in held]), 1e-5))
    return max(row.lower for row in rows), max(row.upper for row in rows)


STEPS = [run(0.1, 1.0, 1), run(0.1, 2.0, 3), acc.Gaussian(4.0), acc.Laplace(9.0)]


def drawn(rng, depth):
    """A composition of parts by two or three rules, one within another at times."""
    kind = rng.integers(4) if depth else 4
    if kind == 0:
        return acc.Repeated(drawn(rng, depth - 1), int(rng.integers(4)))
    if kind == 1:
        return acc.Composed([drawn(rng, depth - 1) for _ in range(2)])
    if kind < 4:
        names = rng.choice(["a", "b", "c"], rng.integers(1, 4), replace=False)
        parts = {str(name): drawn(rng, depth - 1) for name in names}
        return acc.Parallel(drawn(rng, 0), parts, str(rng.choice(["one", "two", "three"])))
    return STEPS[rng.integers(len(STEPS))]


@pytest.mark.parametrize("seed", range(6))
def test_every_choice_of_parts_counts(seed):
    event = acc.Composed([drawn(np.random.default_rng([seed, i]), 3) for i in range(2)])
    assert events.from_dict(json.loads(json.dumps(events.to_dict(event)))) == event
    lower, upper = worst(event)
    found = acc.epsilon(event, 1e-5)
    assert (found.lower, found.upper) == pytest.approx((lower, upper), rel=2e-4)
    at = acc.delta(event, upper * 0.9) if upper else acc.delta(event, 0.0)
    assert at.upper >= acc.delta(event, max(upper, 0.1)).upper


def test_one_rule_is_put_together_part_by_part_and_another_adds():
    step, other = run(0.1, 1.0, 5), run(0.1, 1.5, 9)
    one = acc.Parallel(NOTHING, {"a": step}, "r")
    assert cost(acc.Composed([one, acc.Parallel(other, {"b": step}, "r")])) == pytest.approx(
        cost(acc.Composed([step, other])), rel=1e-6
    )
    # Two of no name are two partitions; one that is repeated is one.
    unlike = [acc.Parallel(NOTHING, {"a": step, "b": other}) for _ in range(2)]
    two = acc.Parallel(NOTHING, {"a": step, "b": other}, "r")
    assert unlike[0].rule != unlike[1].rule
    both, again = acc.Composed(unlike), acc.Repeated(two, 2)
    assert cost(both) == pytest.approx(
        max(cost(acc.Repeated(e, 2)) for e in (step, other)), rel=1e-3
    )
    assert cost(acc.Composed([two, acc.Parallel(NOTHING, {"b": step}, "r")])) < cost(
        acc.Composed([two, acc.Parallel(NOTHING, {"b": step})])
    )
    assert cost(again) <= cost(both) * (1 + 1e-6)
    # A part that is named behind another rule alone is a choice all the same.
    hidden = acc.Parallel(NOTHING, {"x": acc.Parallel(NOTHING, {"u": step}, "r2")}, "r1")
    assert cost(acc.Composed([acc.Parallel(NOTHING, {"v": other}, "r2"), hidden])) == pytest.approx(
        cost(step), rel=1e-6
    )


def test_other_questions_and_calibration():
    step, other = run(0.1, 1.0, 5), run(0.2, 3.0, 4)
    event = acc.Parallel(acc.Gaussian(9.0), {"a": step, "b": other}, "r")
    each = [acc.Composed([acc.Gaussian(9.0), inner]) for inner in (step, other)]
    for ask in (acc.advantage, lambda e: acc.mu_gdp(e, delta_min=1e-6)):
        assert ask(event).upper == pytest.approx(max(ask(e).upper for e in each), rel=1e-3)
    rates = np.array([0.01, 0.1, 0.5])
    assert (
        acc.trade_off(event, rates) <= np.min([acc.trade_off(e, rates) for e in each], 0) + 1e-3
    ).all()
    assert acc.group_epsilon(event, 1e-5, 2).upper >= acc.epsilon(event, 1e-5).upper
    assert acc.epsilon(event, 1e-5, tolerance=math.inf).estimate == pytest.approx(
        cost(event), rel=1e-3
    )
    noise = acc.calibrate(
        lambda z: acc.Parallel(acc.Gaussian(9.0), {"a": run(0.1, z, 50), "b": other}), 1.0, 1e-5
    )
    assert noise == pytest.approx(
        acc.calibrate(lambda z: acc.Composed([acc.Gaussian(9.0), run(0.1, z, 50)]), 1.0, 1e-5),
        rel=1e-3,
    )

    # A plan whose second region costs nothing more.
    one = run(0.1, 1.0, 1).event
    most = acc.Budget(3.0, 1e-5, plan=acc.Repeated(one, 99)).admitted[one]
    in_turn = [acc.Repeated(acc.Parallel(NOTHING, {n: one}, "r"), most) for n in "ab"]
    assert sum(acc.Budget(3.0, 1e-5, plan=in_turn).admitted.values()) == 2 * most


def test_what_has_no_bound_is_refused_by_name():
    gauss, wrong = acc.Gaussian(2.0), acc.UnsupportedEventError
    fixed = acc.FixedSizeSampled(gauss, 100, 10)
    sizes = [fixed, acc.TruncatedPoisson(gauss, 0.1, 20, 100), acc.ShuffledEpoch(gauss, 10)]
    sizes += [acc.CorrelatedNoise(gauss, 10)]
    parallel = acc.Parallel(NOTHING, {"a": gauss}, "r")

    def asked(event, relation=ADD):
        return lambda: acc.epsilon(event, 1e-5, relation)

    all_refused([("may change its part", asked(parallel, REPLACE))], wrong)
    all_refused(
        [
            ("How many units are in a part follows", asked(acc.Parallel(NOTHING, {"a": e}), each))
            for e in sizes
            for each in (ADD, SPECIAL)
        ],
        wrong,
    )
    # What all see may have public sizes under zero-out.
    assert cost(acc.Parallel(fixed, {"a": gauss}), SPECIAL) > cost(gauss, SPECIAL)
    within = [acc.PoissonSampled(parallel, 0.1), acc.Tuned(parallel, acc.Geometric(0.5))]
    within += [acc.GridNoise(parallel, 1e-20), acc.PerUser(parallel, 3)]
    all_refused([("it stands beside other events", asked(event)) for event in within], wrong)
    all_refused(
        [
            ("no other bound here", lambda: acc.renyi_curve(parallel, [2.0])),
            ("no other bound here", lambda: acc.RenyiFilter(1.0, 1e-5).fits(parallel)),
            ("unlike releases", asked(acc.Composed([
                acc.Parallel(NOTHING, {str(i): acc.Gaussian(2.0 + i + 99 * j) for i in range(40)})
                for j in range(2)
            ]))),
        ],
        wrong,
    )  # fmt: skip
    assert not acc.supports(parallel, REPLACE)
    assert acc.supports(parallel, SPECIAL)
    all_refused(
        [
            ("expected a mapping", lambda: acc.Parallel(NOTHING, {})),
            ("expected a mapping", lambda: acc.Parallel(NOTHING, (("a", gauss), ("a", gauss)))),
            ("expected a mapping", lambda: acc.Parallel(NOTHING, {1: gauss})),
            ("expected an event", lambda: acc.Parallel(NOTHING, {"a": 1.0})),
            ("expected an event", lambda: acc.Parallel(None, {"a": gauss})),
            ("expected a string", lambda: acc.Parallel(NOTHING, {"a": gauss}, 3)),
        ]
    )


def test_an_event_is_of_users_where_all_of_it_is():
    record = run(0.1, 1.0, 2)
    user = acc.PerUser(record, 4)
    whole = [user, acc.Repeated(user, 2), acc.Composed([user, user]), NOTHING]
    whole += [acc.GridNoise(user, 1e-20), acc.Parallel(NOTHING, {"a": user})]
    partly = [record, acc.Composed([user, record]), acc.Parallel(user, {"a": record})]
    partly += [acc.Parallel(NOTHING, {"PerUser(": record}), acc.Parallel(record, {"a": user})]
    assert [events.of_users(event) for event in whole + partly] == [True] * 6 + [False] * 5
