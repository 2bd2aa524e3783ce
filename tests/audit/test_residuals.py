"""Noise that is as charged is not accused; every way in which it can be wrong is, by its own name."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import jaxdp
from benchmarks.auditing_residuals import null_verdicts
from benchmarks.planted import APART, BUGS, CORRECT, NOISE, many_verdicts
from benchmarks.planted_subtle import SUBTLE
from jaxdp import optimizers as opt
from jaxdp.audit import audit_noise, audit_residuals, residuals
from jaxdp.audit.algorithms import audit_algorithm
from jaxdp.clipping import reduce
from jaxdp.clipping.rules import Clip
from jaxdp.schedules import NoiseSchedule
from tests.mechanisms import sgd_of
from tests.refusing import all_refused

SHAPE = (500, 4)
STD = 1.7


def honest(seed=0, shape=SHAPE, leaves=(4, 6)):
    """(un-noised sums, standard normals), each a list of leaves."""
    rng = np.random.default_rng(seed)
    clean = [rng.normal(size=(*shape, d)) * rng.choice([0, 1, 3], size=(*shape, 1)) for d in leaves]
    return clean, [rng.normal(size=leaf.shape) for leaf in clean]


def verdict(clean, noise, **more):
    released = [np.float32(c + STD * z) for c, z in zip(clean, noise, strict=True)]
    return audit_residuals(released, clean, STD, **more)


def accused_of(found):
    assert found.refuted
    assert found.in_words().startswith(f"noise: REFUTED: {found.findings[0]} (p ")
    return found.findings


def test_independent_normals_are_not_accused():
    """The share of accusations stays below 5 %; parameters may follow from earlier noise."""
    audits, accused = 60, 0
    for seed in range(audits):
        clean, noise = honest(seed, (60, 3), (5, 2, 1))
        gone = [np.cumsum(z, 1) - z for z in noise]
        drawn = np.random.default_rng(seed).random((60, 3, 4)) < 0.3
        accused += verdict(clean, noise, known={"the parameters": gone}, drawn=drawn).refuted
    assert accused <= stats.binom.ppf(0.999, audits, 0.05)
    # One run, step, leaf or coordinate is enough to be tested.
    for shape, leaves in (((300, 1), (1,)), ((2, 300), (1,)), ((2, 1), (500,))):
        assert not verdict(*honest(1, shape, leaves)).refuted


@pytest.mark.parametrize("name", ["dp-sgd, sampled", "adadp"])
def test_correct_algorithms_are_not_accused(name):
    """Neither their noise nor, in two worlds, their event."""
    assert name in CORRECT
    most = stats.binom.ppf(0.999, 10, 0.05)
    noise = null_verdicts(name, 10, 300, seed=3)
    assert sum(v.refuted for v in noise) <= most
    assert len(noise[0].p_values) == 26
    assert sum(verdict.refuted for verdict in many_verdicts(name, 10, 400)) <= most


def each(draw):
    """Every leaf z of the noise becomes draw(rng, z)."""
    return lambda clean, noise, rng: [draw(rng, z) for z in noise]


def in_leaf_1(where, value):
    """That part of the second leaf becomes value(noise, rng)."""

    def change(clean, noise, rng):
        noise[1][where] = value(noise, rng)
        return noise

    return change


def with_the_sum(clean, noise, rng):
    return [z + 0.1 * np.sign(c) for z, c in zip(noise, clean, strict=True)]


def leaning_on_the_run_before(rng, z):
    return np.concatenate([z[:1], (z[1:] + 0.15 * z[:-1]) / np.hypot(1, 0.15)])


def one_run_twice_far_apart(rng, z):
    z[431] = -z[17]
    return z


def other_signs(noise, rng):
    return noise[1][..., :3] * rng.choice([-1, 1], size=(*SHAPE, 1))


STEP_AGAIN = each(lambda rng, z: z[:, [0, 1, 2, 2]])
GRID, SHARDS, RUNS = "a coarse grid of values", "noise of two shards of a leaf", "noise of two runs"
NOT_FINITE, NO_NOISE = "numbers that are not finite", "steps or leaves without noise"
ONE = "its standard deviation in a coordinate"
# fmt: off
BROKEN = {
    "uniform": (each(lambda rng, z: rng.uniform(-(3**0.5), 3**0.5, z.shape)), "its distribution"),
    "too small": (each(lambda rng, z: 0.95 * z), "the noise's standard deviation"),
    "heavy tails": (each(lambda rng, z: rng.standard_t(5, z.shape) * 0.6**0.5), "its tails"),
    "float16": (each(lambda rng, z: np.float16(z)), GRID),
    "float16 once it has its scale": (each(lambda rng, z: np.float16(STD * z) / STD), GRID),
    "not finite": (each(lambda r, z: np.where(r.random(z.shape) < 1e-3, np.nan, z)), NOT_FINITE),
    "shifted": (each(lambda rng, z: z + 0.05), "its mean"),
    "missing in 2 %": (each(lambda rng, z: z * (rng.random((*SHAPE, 1)) > 0.02)), NO_NOISE),
    "one coordinate": (in_leaf_1(np.s_[..., 2], lambda noise, _: 0.8 * noise[1][..., 2]), ONE),
    "negated leaf": (in_leaf_1(np.s_[..., :4], lambda noise, _: -noise[0]), "noise of two leaves"),
    "equal shards": (in_leaf_1(np.s_[..., 3:], lambda noise, _: noise[1][..., :3]), SHARDS),
    "shards, random sign": (in_leaf_1(np.s_[..., 3:], other_signs), SHARDS),
    "a step again": (STEP_AGAIN, "noise of a step and of an earlier one"),
    "pairs of columns": (STEP_AGAIN, "noise of two coordinates or steps"),
    "alike runs": (each(leaning_on_the_run_before), RUNS),
    "two worlds": (each(lambda rng, z: np.concatenate([z[: len(z) // 2]] * 2)), RUNS),
    "a run twice": (each(one_run_twice_far_apart), "noise that is used twice"),
    "with the sum": (with_the_sum, "dependence on the un-noised sum"),
}
# fmt: on


def test_wrong_noise_is_named():
    assert not verdict(*honest(5)).refuted
    for name, (change, expected) in BROKEN.items():
        clean, noise = honest(5)
        wrong = change(clean, noise, np.random.default_rng(6))
        assert expected in accused_of(verdict(clean, wrong)), name


def test_noise_that_follows_the_draw_or_what_is_known_is_named():
    clean, noise = honest(7)
    drawn = np.random.default_rng(8).random((*SHAPE, 3)) < 0.5
    assert not verdict(clean, noise, drawn=drawn).refuted
    one = drawn[..., 1:2]
    for wrong in ([z + 0.15 * one for z in noise], [z * (1 + 0.1 * one) for z in noise]):
        assert "dependence on who took part" in accused_of(verdict(clean, wrong, drawn=drawn))
    clean, noise = honest(9)
    known = {"the parameters": [np.random.default_rng(3).normal(size=z.shape) for z in noise]}
    assert not verdict(clean, noise, known=known).refuted
    wrong = [z + 0.05 * p for z, p in zip(noise, known["the parameters"], strict=True)]
    assert "dependence on the parameters" in accused_of(verdict(clean, wrong, known=known))


def test_a_norm_above_the_sensitivity_is_named(monkeypatch):
    clean, noise = honest(10)
    norms = np.full((*SHAPE, 2), 0.9999)
    assert not verdict(clean, noise, norms=norms, l2=1.0).refuted
    for wrong in (1.0001, np.nan):
        norms[3, 2, 1] = wrong
        found = accused_of(verdict(clean, noise, norms=norms, l2=1.0))
        assert found == ("a record's norm above the sensitivity",)
    # Of a rule that understates it, too, should the engine take its word.
    monkeypatch.setattr(reduce, "PROVEN", (Understated,))
    algorithm = opt.sgd(jaxdp.mechanism.with_rule(Understated(1.0), NOISE, 4, 4, "full_batch"), 0.1)
    found = audit_noise(algorithm, APART, 2, runs=50, seed=0)
    assert accused_of(found)[0] == "a record's norm above the sensitivity"


@dataclasses.dataclass(frozen=True)
class Understated(Clip):
    """Clips to 1 and says 0.9."""

    def l2(self, params):
        return 0.9

    def factors(self, square_norms, bound=None):
        return Clip(1.0).factors(square_norms, bound)


# What two worlds show; the full lists are in benchmarks/auditing.py.
PLANTED = ("noise calibrated to the mean", "one leaf without noise", "one key for two leaves")
PLANTED += ("twice the bound", "a non-finite example passes", "PIGDO's raw moments")
PLANTED += ("one key for two steps", "noise reused after a resume")


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_flagged(name):
    assert BUGS[name].verdict(1000).p_value < 1e-3


@pytest.mark.parametrize("name", [n for n in SUBTLE if "uniform" not in n and "decay" not in n])
def test_a_subtle_bug_is_flagged(name):
    assert SUBTLE[name].noise().p_value < 1e-4


def test_the_audit_of_an_algorithm_says_so_follows_a_schedule_and_leaves_what_float32_rounds():
    algorithm = SUBTLE["float16 noise"].algorithm()
    found = audit_algorithm(algorithm, 2, 1e-5, runs=200, seed=0)
    assert not found.broken
    assert found.in_words().endswith(" BROKEN: the noise is not what was charged.")
    assert found.to_dict()["noise"].startswith("noise: REFUTED: a coarse grid of values (p ")
    noise = NoiseSchedule(((2.0, 1), (0.7, 2)))
    algorithm = opt.sgd(sgd_of(noise, 1.0, 4, 4, "full_batch"), 0.1)
    assert not audit_noise(algorithm, APART, 3, runs=200, seed=2, confidence=0.999).refuted
    # Noise too small for float32 is not tested.
    clean, noise = honest(11)
    released = [np.float32(1e6 + c + STD * z) for c, z in zip(clean, noise, strict=True)]
    found = audit_residuals(released, [1e6 + c for c in clean], STD)
    assert not found.refuted
    assert found.in_words().startswith("noise: not tested, for float32 rounds it to 0.")


def test_collisions_have_a_valid_p_value():
    """Against the exact law of the number of occupied cells, one draw at a time."""
    for draws, cells in ((6, 8), (9, 4), (2, 50)):
        taken = np.arange(draws + 1) / cells
        law = np.eye(draws + 1)[0]
        for _ in range(draws):
            law = law * taken + np.r_[0.0, (law * (1 - taken))[:-1]]
        for occupied in range(1, min(draws, cells) + 1):
            shown = np.r_[np.arange(occupied), np.zeros(draws - occupied, int)]
            assert residuals.test_collisions(shown, cells) >= law[: occupied + 1].sum() - 1e-12


def test_pairs_and_combinations_have_valid_p_values_and_are_found():
    rng = np.random.default_rng(12)
    found = [
        residuals.find_shared_noise(rng.normal(size=(20, 6)), 20, np.zeros(6)) for _ in range(400)
    ]
    assert np.mean([each.p_value <= 0.1 for each in found]) <= 0.14
    columns = rng.normal(size=(60, 8))
    columns -= columns.mean(1, keepdims=True)
    of_no_mean = residuals.find_shared_noise(columns, 60, np.zeros(8))
    ((block, weights, left), *_) = of_no_mean.combined
    assert of_no_mean.p_value < 1e-7
    scaled = columns[:, block] / np.linalg.norm(columns[:, block], axis=0)
    np.testing.assert_allclose(np.linalg.norm(scaled @ weights), left, atol=1e-12)
    # Coordinates whose sum is nothing at all.
    opposite = np.concatenate([columns[:, :1], -columns[:, :1]] * 50, axis=1)
    assert residuals.find_shared_noise(opposite, 60, np.zeros(100)).p_value < 1e-7
    # Of more coordinates than pairs are looked at, opposite ones are found all the same.
    wide = rng.normal(size=(60, 1_500))
    wide[:, 1_403] = -wide[:, 7]
    assert residuals.find_shared_noise(wide, 60, np.zeros(1_500)).p_value < 1e-7


LEAF = np.zeros((4, 3, 2), np.float32)
NO_RESIDUALS = [
    ("confidence must be above 0 and below 1, got 1.0", {"confidence": 1.0}),
    ("released must be float32 or float64, got float16", {"released": LEAF.astype(np.float16)}),
    ("released must be a pytree of arrays", {"released": [LEAF, LEAF[:2]]}),
    ("released must be a pytree of arrays", {"released": []}),
    ("released must be at least 2 runs", {"released": LEAF[:1], "unnoised": LEAF[:1]}),
    ("unnoised must be shaped like released", {"unnoised": LEAF[:, :2]}),
    ("std must be finite and above 0", {"std": 0.0}),
    ("std must be a number or", {"std": np.ones(3)}),
    ("known must be shaped like released", {"known": {"x": LEAF[..., :1]}}),
    ("drawn must be bool", {"drawn": np.ones((4, 3, 1))}),
    ("norms and l2 must be given together", {"norms": np.ones((4, 3, 1))}),
    ("norms must be float", {"norms": np.ones((4, 3)), "l2": 1.0}),
    ("l2 must be finite and above 0", {"norms": np.ones((4, 3, 1)), "l2": -1.0}),
]


def test_what_cannot_be_audited_is_refused_in_words():
    def of(mechanism, worlds=APART, **options):
        return functools.partial(audit_noise, opt.sgd(mechanism, 0.1), worlds, 2, **options)

    right, sgd = {"released": LEAF, "unnoised": LEAF, "std": 1.0}, sgd_of(1.0, 1.0, 4, 4)
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), APART.params)
    coarse = dataclasses.replace(APART, params=half)
    rows = [(w, functools.partial(audit_residuals, **right | given)) for w, given in NO_RESIDUALS]
    rows += [
        ("algorithm must add noise", of(sgd_of(0.0, 1.0, 4, 4))),
        ("noisy sums alone", of(sgd.with_leak("x"))),
        ("runs must be a whole", of(sgd, runs=0)),
        ("confidence must be", of(sgd, confidence=2)),
        ("worlds must have float32 parameters, got bfloat16", of(sgd, coarse)),
    ]
    all_refused(rows)
