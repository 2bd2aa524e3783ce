"""AGD: every release is charged to the filter before it is made, and the run ends where it must."""

import itertools
import math
from collections import Counter
from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate

from benchmarks.papers import agd, agd_releases, choices
from benchmarks.papers.agd_releases import Asked
from jaxdp import accounting as acc
from jaxdp.ledger import entries, file, ledger, tickets
from jaxdp.ledger.seeds import Secret
from jaxdp.runs import assemble
from jaxdp.sampling import Poisson, sampler
from jaxdp.sampling.sampler import pad
from tests.laws import is_binomial
from tests.ledger.test_faults import interrupted, interrupting
from tests.runs import small

BUDGET = 3.0


def config(**changes):
    """200 records, one in five a draw, on eight private components."""
    given = {"pca_dimensions": 8, "pca_noise_multiplier": 8.0, "noise_multiplier": 4.0}
    return small.config(**{**given, "l2_clip_norm": 1.0, "steps": 12, **changes})


def asked(given, epsilon=BUDGET, secret=None, share=1.0):
    rows = small.dataset()
    rows, _ = assemble.projected(given, rows, Secret.from_seed(1), None)
    budget = acc.RenyiFilter(epsilon, 1e-5)
    data = (rows.train_x, rows.train_y)
    return Asked(given, data, share, secret or Secret.from_seed(2), budget), budget


def test_a_run_charges_every_release_before_its_draw(monkeypatch):
    told = []
    charge, draw, patch = acc.RenyiFilter.charge, agd_releases.Sampler.draw, monkeypatch.setattr
    patch(acc.RenyiFilter, "charge", lambda self, e: told.append(e) or charge(self, e))
    patch(agd_releases.Sampler, "draw", lambda self: told.append("draw") or draw(self))
    found = agd.run(config(), small.dataset(), 1.0, Secret.from_seed(3))
    pca, *rest = told
    assert pca == acc.Gaussian(8.0)
    assert rest[1::2] == ["draw"] * (len(rest) // 2)
    kinds = [type(event) for event in rest[::2]]
    assert kinds.count(acc.PoissonSampled) == found["releases"]["gradient"]
    assert kinds.count(acc.EpsilonDelta) == found["releases"]["choice"]
    assert {event.sampling_prob for event in rest[::2] if hasattr(event, "sampling_prob")} == {0.2}
    # Of 4.0 at first, and 1/4 a choice, of a fifth of the records.
    assert rest[0].event == acc.Gaussian(4.0)
    assert rest[2].epsilon == pytest.approx(math.log1p(0.2 * math.expm1(0.25)))
    assert found["proven_epsilon"] == acc.epsilon(config().total(12), 1e-5).upper
    assert found["curve"][-1][0] == found["steps"] < 12


def test_what_does_not_fit_is_not_released(monkeypatch):
    """However often it is asked, within a budget that holds a few releases."""
    question, budget = asked(config(), epsilon=1.5)
    params = assemble.fresh_params(config(), Secret.from_seed(4))
    made = 0
    while question.direction(params) is not None:
        made += 1
    assert 0 < made < 100
    assert question.releases.made["gradient"] == made
    assert budget.spent() <= 1.5
    sizes = np.linspace(0, 1, 3, dtype=np.float32)
    choices_made = sum(question.best(params, params, sizes) is not None for _ in range(100))
    assert question.releases.made["choice"] == choices_made < 100
    assert budget.spent() <= 1.5
    # A refused direction is averaged, and raises the budget.
    question, _ = asked(config())
    params = assemble.fresh_params(config(), Secret.from_seed(4))
    made = iter((1.0, 12.0))
    told = []

    def noisy(of, multiplier):
        told.append(multiplier)
        value = next(made)
        return jax.tree.map(lambda leaf: jnp.full(leaf.shape, value, jnp.float32), of)

    monkeypatch.setattr(question, "_noisy", noisy)
    question.direction(params)
    better = question.improved(params)
    assert told == [4.0, pytest.approx(4.0 / math.sqrt(0.1))]
    # Precisions add: 1 and γ of the first.
    assert 1 / question.multiplier**2 == pytest.approx(1 / told[0] ** 2 + 1 / told[1] ** 2)
    average = jax.tree.leaves(question._gradient)[0]
    np.testing.assert_allclose(average, (1 + 0.1 * 12) / 1.1, rtol=1e-6)
    squares = sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(better))
    assert squares == pytest.approx(1, rel=1e-5)


FILES = {m.__file__ for m in (agd_releases, sampler, tickets, ledger, entries, file)}


def test_a_step_that_an_interrupt_took_is_passed_over_as_what_was_decided_for_it(monkeypatch):
    """Before: what was asked next was another event for a step that was held, refused for ever."""
    at, charged, charge = 0, [], acc.RenyiFilter.charge
    record = lambda self, event: charge(self, event) or charged.append(event)  # noqa: E731
    monkeypatch.setattr(acc.RenyiFilter, "charge", record)
    passed = 0
    while True:
        at, charged[:] = at + 1, []
        releases = agd_releases.Releases(acc.RenyiFilter(50.0, 1e-5), 0.2)
        draws = sampler.Sampler(Poisson(0.2), 200, 64, tickets.issuer_of(releases))
        if not interrupted(partial(releases.gradient, draws, 4.0), interrupting(at, [], FILES)):
            break
        other = interrupting(at % 60 + 1, [], FILES)
        again = interrupted(partial(releases.choice, draws, Fraction(1, 4)), other)
        drawn = [releases.choice(draws, Fraction(1, 2)), releases.gradient(draws, 8.0)]
        held = {n: e.event for e in draws.ledger.entries for n in range(e.first_step, e.end)}
        # Each ticket is of its own event, and every step that the ledger holds was paid for.
        assert again
        assert [held[draw.step] for draw in drawn] == charged[-2:]
        assert [draw.ticket.multipliers for draw in drawn] == [{"choice": 0.0}, {"gradient": 8.0}]
        assert all(count <= Counter(charged)[e] for e, count in Counter(held.values()).items())
        assert drawn[1].step == drawn[0].step + 1 == max(held)
        passed += len(held) > 2
    assert at > 100
    assert passed > 20


def test_a_record_adds_at_most_one_bound_to_the_loss_of_every_step():
    """Also where its loss is no number, or is in another physical batch: all others stay."""
    params = {"w": jnp.ones(2)}
    sizes, places = jnp.linspace(0.0, 2.0, 4), np.zeros(3, np.int32)
    mask, value = np.array([True, False, False]), lambda p, x: x
    for loss in (0.0, 1.5, 4.0, np.inf, np.nan, -1.0):
        data = jnp.asarray([loss, 1.0], jnp.float32)
        found = agd_releases._losses(value, params, params, sizes, data, places, mask)
        share = 1.0 if np.isnan(loss) else min(max(loss, 0.0), 3.0) / 3
        np.testing.assert_array_equal(found[:, 0], int(share * choices.UNITS), err_msg=str(loss))
        assert not np.asarray(found)[:, 1:].any()
    # Its own loss is cut at the bound, after every step.
    rng, count, features = np.random.default_rng(0), 32, 300
    shapes = {"a": (features, 32), "b": (32, 10)}
    params = {k: jnp.asarray(rng.normal(size=v), jnp.float32) / 8 for k, v in shapes.items()}
    direction = jax.tree.map(lambda leaf: 0.1 * leaf, params)
    records = jnp.asarray(rng.normal(size=(count + 1, features)), jnp.float32)
    bias = jnp.zeros(count + 1).at[count].set(10.0)

    def loss(at, record):
        x, more = record
        return jax.nn.logsumexp(jnp.tanh(x @ at["a"]) @ at["b"]) + more

    def totals(n):
        draw = pad(np.arange(n), count, 0, count + 1)
        sizes = jnp.linspace(0.0, 1.0, 21)
        return agd_releases._totals(loss, params, direction, sizes, (records, bias), draw)

    added = np.subtract(totals(count + 1), totals(count))
    np.testing.assert_array_equal(added, choices.UNITS)


def coins_of(question, monkeypatch):
    """Of its next choice."""
    told = []
    keep = lambda totals, epsilon, rng: told.append(rng.bytes(16)) or 1  # noqa: E731
    monkeypatch.setattr(choices, "permute_and_flip", keep)
    params = assemble.fresh_params(config(), Secret.from_seed(4))
    question.best(params, params, np.zeros(2, np.float32))
    return told[0]


def test_two_runs_of_one_secret_share_no_coins_draw_or_noise(monkeypatch):
    """Nor of a seed, where the configuration is another."""
    secret, seed = Secret.new(), Secret.from_seed(5)
    one, other = (asked(config(), secret=secret)[0] for _ in range(2))
    assert coins_of(one, monkeypatch) != coins_of(other, monkeypatch)
    one, other = (asked(config(), secret=seed, share=share)[0] for share in (1.0, 2.0))
    assert coins_of(one, monkeypatch) != coins_of(other, monkeypatch)
    # Nor a draw or a noise: one noise, of two sizes, would subtract to none.
    changes = ({}, {"noise_multiplier": 2.0}, {"l2_clip_norm": 2.0})
    questions = [asked(config(**change), secret=Secret.from_seed(5))[0] for change in changes]
    draws = [question.releases.gradient(question._sampler, 4.0) for question in questions]
    assert len({draw.indices.tobytes() for draw in draws}) == 3
    assert len({draw.key().words.tobytes() for draw in draws}) == 3
    # The noise is that of the multiplier: of two answers the difference has twice the variance.
    given = config(noise_multiplier=50.0)
    question, _ = asked(given, epsilon=50.0)
    params = assemble.fresh_params(given, Secret.from_seed(4))
    ends = [jax.tree.leaves(question._noisy(params, 50.0)) for _ in range(2)]
    apart = np.concatenate([np.ravel(a - b) for a, b in zip(*ends, strict=True)])
    assert apart.std() == pytest.approx(50.0 * math.sqrt(2), rel=0.3)


# The exact private choice of its step size, and the published one that it stands in for
def probabilities(totals, epsilon):
    """Of every place, by all orders in which places are tried."""
    found = np.zeros(len(totals))
    orders = list(itertools.permutations(range(len(totals))))
    for order in orders:
        left = 1.0
        for place in order:
            heads = math.exp(-epsilon * (totals[place] - min(totals)))
            found[place] += left * heads
            left *= 1 - heads
    return found / len(orders)


def test_the_choice_has_the_law_of_permute_and_flip_and_its_coins_theirs():
    totals, epsilon = (30, 10, 25, 10), Fraction(1, 20)
    rng = np.random.default_rng(6)
    found = np.bincount(
        [choices.permute_and_flip(totals, epsilon, rng) for _ in range(20_000)], minlength=4
    )
    for hits, p in zip(found, probabilities(totals, float(epsilon)), strict=True):
        assert is_binomial(int(hits), 20_000, p)
    for x in map(Fraction, ("0", "1/7", "1", "12/5")):
        rng = np.random.default_rng(5)
        hits = sum(choices.happens(x, rng) for _ in range(20_000))
        assert is_binomial(hits, 20_000, math.exp(-x)), x
    # A record changes the published choice by its epsilon for every other place: losses that are
    # level, and a record whose loss is 0 after every step but one.
    for places in (3, 21):
        alike, moved = [5] * places, [6] + [5] * (places - 1)
        ratio = published(alike, 0.25) / published(moved, 0.25)
        assert math.log(ratio) == pytest.approx((places - 1) * 0.25, rel=1e-6)
    sound = probabilities(alike[:3], 0.25)[0] / probabilities(moved[:3], 0.25)[0]
    assert math.log(sound) <= 0.25


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), min_size=2, max_size=4),
    st.floats(0.01, 2),
)
def test_a_record_changes_a_probability_by_its_epsilon_at_most(places, epsilon):
    totals = [total for total, _ in places]
    without = probabilities(totals, epsilon)
    with_it = probabilities([total + added for total, added in places], epsilon)
    assert np.abs(np.log(with_it / without)).max() <= 3 * epsilon + 1e-9


def published(totals, epsilon):
    """P(place 0) where the least of total + noise is taken, its noise exponential of rate epsilon.

    The choice of the program of AGD's authors.
    """

    def density(t):
        others = (math.exp(-epsilon * max(0.0, t - other)) for other in totals[1:])
        return epsilon * math.exp(-epsilon * (t - totals[0])) * math.prod(others)

    return integrate.quad(density, totals[0], totals[0] + 60 / epsilon)[0]
