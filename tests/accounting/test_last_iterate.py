"""Hidden-state events: what is asked, what is refused, and the average over a secret partition."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import integrate, stats

from jaxdp import accounting as acc
from jaxdp.accounting import hidden_state as hs
from jaxdp.accounting.canonical import batch_values
from jaxdp.papers import claims

REPLACE = acc.Relation.REPLACE_ONE
CHAIN = acc.chains.NoisyChain(10, 50, 0.05, 1.0)


def hidden(*chains, **options):
    return acc.events.HiddenState(chains or (CHAIN,), **options)


def gdp(mu, delta=1e-5):
    """A mu-GDP release under replace-one."""
    return acc.epsilon(acc.Gaussian(2 / mu), delta, REPLACE).upper


def test_the_worst_batch_is_a_gaussian_mechanism():
    mu = math.sqrt(2 * hs.shifted(CHAIN).max())
    bound = acc.epsilon(hidden(), 1e-5, REPLACE)
    assert bound.upper == pytest.approx(gdp(mu), rel=1e-9)
    assert bound.lower == 0
    assert "secret" in bound.note
    everything = math.sqrt(2 * hs.composed(CHAIN).max())
    assert everything > 2.5 * mu
    assert everything == pytest.approx(math.sqrt(50) * 2 * 0.05)


def test_blocks_and_other_releases_compose():
    mu = math.sqrt(2 * hs.shifted(CHAIN).max())
    two = acc.epsilon(hidden(CHAIN, CHAIN), 1e-5, REPLACE).upper
    apart = acc.epsilon(acc.Repeated(hidden(), 2), 1e-5, REPLACE).upper
    assert two == pytest.approx(gdp(math.sqrt(2) * mu), rel=1e-9)
    assert apart == pytest.approx(two, rel=1e-9)
    full = acc.Composed([hidden(), acc.Gaussian(3.0)])
    assert acc.epsilon(full, 1e-5, REPLACE).upper == pytest.approx(
        gdp(math.hypot(mu, 2 / 3)), rel=1e-9
    )
    sampled = acc.Composed([hidden(), acc.Repeated(acc.PoissonSampled(acc.Gaussian(1.0), 0.01), 9)])
    more = acc.epsilon(sampled, 1e-5, REPLACE)
    assert more.upper > acc.epsilon(hidden(), 1e-5, REPLACE).upper
    assert more.lower == 0


def test_batches_of_different_blocks_meet_the_same_record():
    """The worst batch of a shared partition, not the sum of each block's worst."""
    early = acc.chains.NoisyChain(2, 1, (1.0, 0.0), 1.0)
    late = acc.chains.NoisyChain(2, 1, (0.0, 1.0), 1.0)
    shared = batch_values(hidden(early, late)).max()
    assert shared == max(hs.shifted(early)[0], hs.shifted(late)[1])


@pytest.mark.parametrize("relation", [acc.Relation.ADD_OR_REMOVE_ONE, acc.Relation.REPLACE_SPECIAL])
def test_other_relations_are_refused_by_name(relation):
    assert not acc.supports(hidden(), relation)
    with pytest.raises(acc.UnsupportedEventError, match=r"HiddenState under .*replace_one"):
        acc.epsilon(hidden(), 1e-5, relation)


@pytest.mark.parametrize(
    "event",
    [acc.PoissonSampled(hidden(), 0.1), acc.FixedSizeSampled(acc.Repeated(hidden(), 2), 10, 2)],
)
def test_a_sampled_hidden_state_is_refused(event):
    with pytest.raises(acc.UnsupportedEventError, match="of a HiddenState event"):
        acc.epsilon(event, 1e-5, REPLACE)


def test_what_left_the_loop_costs_the_hidden_state_number_and_is_named():
    watched = hidden(exposed="parameters were evaluated after every epoch")
    bound = acc.epsilon(watched, 1e-5, REPLACE)
    assert bound.upper == pytest.approx(gdp(math.sqrt(50) * 2 * 0.05), rel=1e-9)
    assert "lost (parameters were evaluated after every epoch)" in bound.note
    assert acc.epsilon(watched, 1e-5, REPLACE, accountant="log_sobolev").upper > bound.upper


@pytest.mark.parametrize("accountant", ["auto", "gdp", "exact", "rdp", "log_sobolev"])
def test_every_accountant_is_above_the_linear_gaussian_truth_and_claims_no_lower_bound(accountant):
    chain = acc.chains.NoisyChain(4, 6, 0.1, 1.0, 0.9, 0.95)
    mean = variance = 0.0
    for k in range(24):
        mean, variance = 0.9 * mean + 0.2 * (k % 4 == 3), 0.81 * variance + 1.0
        mean, variance = 0.95 * mean, 0.95**2 * variance
    bound = acc.epsilon(hidden(chain), 1e-5, REPLACE, accountant)
    assert (
        bound.upper
        >= acc.epsilon(acc.Gaussian(2 * math.sqrt(variance) / mean), 1e-5, REPLACE).lower
    )
    assert bound.lower == 0


def test_log_sobolev_is_refused_where_it_says_nothing():
    with pytest.raises(acc.UnsupportedEventError, match="no hidden-state event"):
        acc.epsilon(acc.Gaussian(1.0), 1e-5, REPLACE, accountant="log_sobolev")
    apart = hidden(acc.chains.NoisyChain(1, 5, 0.1, 1.0, start_distance=0.3))
    assert acc.supports(apart, REPLACE)
    with pytest.raises(acc.UnsupportedEventError, match="equal starts"):
        acc.epsilon(apart, 1e-5, REPLACE, accountant="log_sobolev")


def hockey_stick(means, variances, epsilon):
    """Exact delta between the uniform mixtures of N(m_j, v_j) and of N(-m_j, v_j)."""

    def excess(x):
        p = np.mean(
            [stats.norm.pdf(x, m, math.sqrt(v)) for m, v in zip(means, variances, strict=True)]
        )
        q = np.mean(
            [stats.norm.pdf(x, -m, math.sqrt(v)) for m, v in zip(means, variances, strict=True)]
        )
        return max(p - math.exp(epsilon) * q, 0.0)

    return integrate.quad(excess, -12, 12, limit=400, points=[0.0])[0]


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_the_average_is_above_the_exact_mixture_and_below_the_worst_batch(epsilon):
    chain = acc.chains.NoisyChain(5, 3, 0.6, 1.0, 0.8)
    means = [0.0] * 5
    variance = 0.0
    for k in range(15):
        means = [0.8 * m + 0.6 * (k % 5 == j) for j, m in enumerate(means)]
        variance = 0.64 * variance + 1.0
    exact = hockey_stick(means, [variance] * 5, epsilon)
    average = acc.delta(hidden(chain, average=True), epsilon, REPLACE).upper
    worst = acc.delta(hidden(chain), epsilon, REPLACE).upper
    assert exact <= average <= worst
    assert average < 0.8 * worst
    at = acc.epsilon(hidden(chain, average=True), average, REPLACE).upper
    assert at == pytest.approx(epsilon, abs=1e-6)


def test_the_average_is_taken_once_over_all_blocks():
    """Averaging block by block and adding is lower: it is not what a shared partition allows."""
    values = hs.shifted(acc.chains.NoisyChain(10, 3, 1.0, 1.0))
    orders = np.array([2.0, 8.0])
    once = hs.averaged_renyi(2 * values, orders)
    assert np.all(once > 2 * hs.averaged_renyi(values, orders))
    np.testing.assert_allclose(hs.averaged_renyi(np.full(4, 0.3), orders), 0.3 * orders)


def test_averages_of_fresh_partitions_fall_back_on_renyi():
    average = hidden(average=True)
    twice = acc.epsilon(acc.Repeated(average, 2), 1e-5, REPLACE)
    assert twice.upper <= acc.epsilon(acc.Repeated(hidden(), 2), 1e-5, REPLACE).upper
    assert twice.upper >= acc.epsilon(average, 1e-5, REPLACE).upper
    assert 0 < acc.delta(acc.Repeated(average, 2), 0.3, REPLACE).upper < 1
    one = acc.Composed([average, acc.Gaussian(4.0), hidden()])
    assert (
        acc.epsilon(one, 1e-5, REPLACE).upper
        <= acc.epsilon(acc.Composed([hidden(), hidden(), acc.Gaussian(4.0)]), 1e-5, REPLACE).upper
    )


def test_a_filter_charges_it():
    budget = acc.RenyiFilter(1.0, 1e-5, REPLACE)
    for _ in range(2):
        budget.charge(hidden(acc.chains.NoisyChain(10, 5, 0.05, 1.0)))
    assert budget.spent() > 0
    with pytest.raises(acc.BudgetExceededError):
        budget.charge(hidden(acc.chains.NoisyChain(10, 5, 5.0, 1.0)))


def test_json_round_trip():
    bounded = acc.chains.NoisyChain(2, 3, (0.1, 0.2, 0.3), 1.0, proximal=0.9, diameter=4.0)
    for event in (
        hidden(),
        hidden(bounded, CHAIN.__class__(2, 1, 0.1, 1.0), average=True, exposed="x"),
    ):
        assert acc.events.from_dict(json.loads(json.dumps(acc.events.to_dict(event)))) == event


def test_nothing_moved_is_nothing_released():
    bound = acc.epsilon(hidden(acc.chains.NoisyChain(3, 3, 0.0, 1.0)), 1e-5, REPLACE)
    assert bound.upper == 0


def chain_of(**changes):
    arguments = {
        "epochs": 5,
        "dataset_size": 100,
        "batch_size": 10,
        "step_sizes": 0.5,
        "noise_multipliers": 2.0,
        "l2_clip_norm": 1.0,
        "smoothness": 4.0,
    }
    return acc.chains.clipped_gradient_chain(**{**arguments, **changes})


def test_the_chain_of_clipped_gradients():
    chain = chain_of(weight_decay=1.0)
    assert (chain.batches, chain.epochs) == (10, 5)
    assert chain.contributions == (0.05,)
    assert chain.variances == pytest.approx((0.01,))
    assert chain.contractions == (1.0,)
    assert chain.proximal == pytest.approx((1 / 1.5,))
    assert chain_of(dataset_size=101).batches == 11
    varying = chain_of(noise_multipliers=[5, 4, 3, 2, 1], step_sizes=[0.5, 0.4, 0.3, 0.2, 0.1])
    assert varying.variances == pytest.approx(
        [(z * s) ** 2 for z, s in zip((5, 4, 3, 2, 1), varying.contributions, strict=True)]
    )


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: acc.chains.NoisyChain(0, 1, 1.0, 1.0), "batches"),
        (lambda: acc.chains.NoisyChain(1, 0, 1.0, 1.0), "epochs"),
        (lambda: acc.chains.NoisyChain(1, 1, -1.0, 1.0), "contributions"),
        (lambda: acc.chains.NoisyChain(1, 1, 1.0, 0.0), "variances"),
        (lambda: acc.chains.NoisyChain(1, 1, 1.0, math.nan), "variances"),
        (lambda: acc.chains.NoisyChain(2, 3, 1.0, 1.0, (1.0, 1.0)), "contractions"),
        (lambda: acc.chains.NoisyChain(1, 1, 1.0, 1.0, proximal="x"), "proximal"),
        (lambda: acc.chains.NoisyChain(1, 1, 1.0, 1.0, start_distance=-1), "start_distance"),
        (lambda: acc.chains.NoisyChain(1, 1, 1.0, 1.0, diameter=0), "diameter"),
        (lambda: acc.events.HiddenState([]), "blocks"),
        (lambda: acc.events.HiddenState([CHAIN, acc.chains.NoisyChain(3, 1, 1.0, 1.0)]), "blocks"),
        (lambda: acc.events.HiddenState([acc.Gaussian(1.0)]), "blocks"),
        (lambda: acc.events.HiddenState([CHAIN], average=1), "average"),
        (lambda: acc.events.HiddenState([CHAIN], exposed=None), "exposed"),
        (lambda: chain_of(step_sizes=0.6), "step_sizes"),
        (lambda: chain_of(step_sizes=[0.1, 0.2]), "step_sizes"),
        (lambda: chain_of(batch_size=200), "batch_size"),
        (lambda: chain_of(noise_multipliers=0.0), "noise_multipliers"),
        (lambda: chain_of(l2_clip_norm=0.0), "l2_clip_norm"),
        (lambda: claims.dp_sbcd_theorem_4_6([], 1e-5), "blocks"),
        (lambda: claims.dp_sbcd_theorem_4_6([CHAIN], 1e-5, order=1.0), "order"),
    ],
)
def test_bad_input_is_named(build, name):
    with pytest.raises(ValueError, match=name):
        build()


def test_theorem_4_6_is_a_claim_below_the_proven_value():
    decayed = acc.chains.NoisyChain(10, 30, 0.05, 1.0, proximal=0.9)
    claim = claims.dp_sbcd_theorem_4_6([decayed] * 4, 1e-5)
    proven = acc.epsilon(hidden(*[decayed] * 4), 1e-5, REPLACE, accountant="log_sobolev")
    assert claim.value < proven.upper
    assert claim.holds == (False, False, False)
    plain = claims.dp_sbcd_theorem_4_6([CHAIN], 1e-5)
    assert plain.holds == (True, True, True)
    loss = claims.dp_sbcd_theorem_4_6([CHAIN], 1e-5, order=8.0)
    assert loss.value == pytest.approx(hs.averaged_renyi(hs.log_sobolev(CHAIN), np.array([8.0]))[0])
    assert loss.order == 8


def test_the_page_runs_as_it_stands():
    page = (Path(__file__).parents[2] / "docs" / "hidden_state.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert blocks
    namespace = {}
    for block in blocks:
        exec(compile(block, "hidden_state.md", "exec"), namespace)
    assert acc.epsilon(namespace["run"], 1e-5, REPLACE).upper < 2


@pytest.mark.parametrize("average", [False, True])
def test_what_is_released_beside_a_hidden_state_is_charged_too(average):
    beside = acc.Composed([hidden(average=average), acc.EpsilonDelta(1.0, 0.1, relation=REPLACE)])
    assert acc.delta(beside, 1.0, REPLACE).upper >= 0.1
    laplace = acc.Laplace(0.2)
    both = acc.epsilon(acc.Composed([hidden(average=average), laplace]), 1e-5, REPLACE).upper
    assert both > acc.epsilon(laplace, 1e-5, REPLACE).upper


def test_the_average_names_what_it_needs_of_the_batches():
    assert "one size" in acc.epsilon(hidden(average=True), 1e-5, REPLACE).note
    assert "one size" not in acc.epsilon(hidden(), 1e-5, REPLACE).note
