"""Soundness by attack: repaired algorithms stand, algorithms as published and every mutant fall."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp import optimizers as opt
from jaxdp.mechanism import with_rule
from jaxdp.optimizers import registry
from jaxdp.optimizers.energy import DrawnEnergy, PublicEnergy
from jaxdp.papers.adadp import adadp_as_published
from jaxdp.papers.pigdo import pigdo_as_published
from jaxdp.papers.raw_gradient import RawGradient, ToTheLetter
from jaxdp.papers.sa_dpsgd import sa_dpsgd_as_published
from jaxdp.types import Summed
from tests.mechanisms import sgd_of
from tests.optimizers import attack
from tests.refusing import refused

STEPS = 4
KEY = jax.random.key(2)
FULL = (5, 5, "full_batch")
HALF = (3, 6, "poisson")  # every record in half of the draws


def flat(noise=2.0, sizes=HALF):
    return sgd_of(noise, 1.0, *sizes)


def box(noise=2.0, sizes=HALF):
    return with_rule(jaxdp.coordinate_box(1.0), noise, *sizes)


def adaptive(make):
    return lambda noise=2.0, sizes=HALF: make(flat(noise, sizes), 0.1)


REPAIRED = {
    "dp_adam_bc": adaptive(opt.dp_adam_bc),
    "adadp": lambda noise=2.0, sizes=HALF: opt.adadp(box(noise, sizes), 0.1, bound=1.0),
    "piadam": adaptive(opt.piadam),
    "pirmsprop": adaptive(opt.pirmsprop),
    "piadagrad": adaptive(opt.piadagrad),
}


def slow_but(names, *quick):
    """The others repeat what these show."""
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.parametrize("name", slow_but(REPAIRED, "adadp", "piadam"))
def test_a_repaired_method_stands(name):
    event = flat().total(STEPS)
    assert not attack.claim_breaks(REPAIRED[name](), event, steps=STEPS, prob=0.5)


def fed_raw(algorithm):
    """The mutant whose moments see the un-noised gradient."""
    inner = optax.with_extra_args_support(algorithm.after_noise)

    def update(updates, state, params=None, *, leaked, **extra):
        _, moved = inner.update(leaked, state, params, **extra)
        return inner.update(updates, state, params, **extra)[0], moved

    def gradient(loss_fn):
        summed = algorithm.clipped_grad(loss_fn)

        def leaky(params, batch, mask, **context):
            total = summed(params, batch, mask, **context)
            raw = total.value
            if total.unscale is not None:
                raw = jax.tree.map(jnp.multiply, raw, total.unscale)
            leaked = jax.tree.map(lambda g: g / 5, raw)
            return Summed(total.value, total.l2, total.unscale, leaked=leaked)

        leaky.trained = lambda params: params
        return leaky

    changed = {
        # A mechanism that names no leak adds no noise to such a sum.
        "mechanism": algorithm.mechanism.with_leak("moments of un-noised gradients"),
        "after_noise": optax.GradientTransformationExtraArgs(inner.init, update),
        "gradient": gradient,
    }
    return dataclasses.replace(algorithm, **changed)


@pytest.mark.parametrize("name", slow_but(["adadp", "piadam"], "adadp"))
def test_half_the_noise_a_missing_charge_a_reused_key_and_raw_moments_fall(name):
    make, event = REPAIRED[name], flat(sizes=FULL).total(STEPS)
    shown = attack.runs(make(noise=1.0, sizes=FULL), steps=STEPS)
    assert attack.broken(*shown, event, STEPS)
    assert attack.broken(*shown, flat(1.0, FULL).total(1), STEPS)
    half = flat().total(STEPS)
    assert attack.claim_breaks(make(), half, steps=STEPS, prob=0.5, broken_key=True)
    assert attack.claim_breaks(fed_raw(make(sizes=FULL)), event, steps=STEPS)


def published(name):
    if name == "adadp":
        return adadp_as_published(2.0, *FULL[:2], 0.1, bound=1.0, sampling="full_batch")
    return pigdo_as_published(flat(sizes=FULL), 0.1, name)


@pytest.mark.parametrize("name", slow_but(["adam", "rmsprop", "adagrad"], "rmsprop"))
def test_one_record_in_pigdos_shared_raw_moments_moves_all_contributions(name):
    """Of the latter two only the second is shared: the others' contributions all but vanish."""
    event, options = flat(sizes=FULL).total(STEPS), {"steps": STEPS}
    if name != "adam":
        options["data"] = attack.DWARFED
        assert not attack.claim_breaks(REPAIRED[f"pi{name}"](sizes=FULL), event, **options)
    algorithm = published(name)
    assert attack.claim_breaks(algorithm, event, **options)
    assert algorithm.epsilon(STEPS, 1e-5).upper == float("inf")
    words = "mechanism must name its leak"
    refused(words, dataclasses.replace, algorithm, mechanism=flat())


def shrewd(words, mask):
    """A public energy that falls only far along the record's direction: a shrewd choice of it.

    Steeply where the first candidate lands, so that only a jump along the record is accepted.
    """

    def energy(params, example):
        moved = -(params["w"][0] + params["w"][2]) / jnp.sqrt(2.0)
        return jnp.where(moved > 2.2, -moved, 1.0) + 0.0 * example

    return PublicEnergy(energy, jnp.zeros(2))


def annealed(noise=1.0, make=opt.sa_dpsgd, **changes):
    return make(flat(noise, FULL), 5.0, KEY, temperature=1e9, max_rejections=1000, **changes)


def started(algorithm):
    """With one candidate accepted already, so that the first is judged like the others."""
    init = algorithm.after_noise.init

    def begun(params):
        return init(params)._replace(
            energy=jnp.ones([], jnp.float32) * 0.999, accepted=jnp.ones([], jnp.int32)
        )

    after = optax.GradientTransformationExtraArgs(begun, algorithm.after_noise.update)
    return dataclasses.replace(algorithm, after_noise=after)


def test_annealing_stands_on_every_proposal_and_falls_on_acceptances():
    algorithm, proposals = started(annealed()), 12
    shown = attack.runs(algorithm, steps=proposals, energy=shrewd)
    assert not attack.broken(*shown, algorithm.total(proposals), proposals)
    # Nearly no run accepts a second candidate without many tries: charging acceptances is wrong.
    assert attack.broken(*shown, algorithm.mechanism.total(1), proposals)


@pytest.mark.slow
def test_annealing_stands_with_all_candidates_seen_and_its_mutants_fall():
    shown = {"steps": STEPS, "energy": shrewd, "candidates": True}

    def made(noise, sizes):
        return started(opt.sa_dpsgd(flat(noise, sizes), 5.0, KEY, temperature=1e9))

    event = flat().total(STEPS)
    assert not attack.claim_breaks(made(2.0, HALF), event, prob=0.5, **shown)
    assert attack.claim_breaks(made(2.0, HALF), event, prob=0.5, broken_key=True, **shown)
    assert attack.claim_breaks(made(1.0, FULL), flat(2.0, FULL).total(STEPS), **shown)


def record_loss(params, example):
    """Only the record's loss rises with a large candidate: the others are zero there."""
    return jnp.abs(params["w"][0]) * example[0]


def energy_of(noise):
    """An energy over the very records: noisy with its event, or with no noise at all."""
    batch = jnp.concatenate([attack.OTHERS, attack.RECORD])

    def at(words, mask):
        return DrawnEnergy(
            batch, jnp.arange(5)[None], mask[None], jnp.asarray(1), words, record_loss,
            1e-3, 1e-3, noise, 5,
        )  # fmt: skip

    return at


def test_a_private_energy_stands_with_its_event_and_falls_without():
    quiet, blind = 1.5, started(annealed(noise=40.0))
    with_event = dataclasses.replace(blind, energy=sgd_of(quiet, 1e-3, *FULL))
    shown = attack.runs(blind, steps=STEPS, energy=energy_of(quiet))
    assert not attack.broken(*shown, with_event.total(STEPS), STEPS)
    assert attack.broken(*shown, blind.mechanism.total(STEPS), STEPS)
    loud = attack.runs(blind, steps=STEPS, energy=energy_of(quiet / 2))
    assert attack.broken(*loud, with_event.total(STEPS), STEPS)


def test_an_unnoised_energy_and_adadps_zero_variance_coordinate_give_the_record_away():
    judged = annealed(40.0, sa_dpsgd_as_published, energy_on_private=True)
    shown = attack.runs(judged, steps=STEPS, energy=energy_of(0.0))
    assert attack.broken(*shown, flat(40.0, FULL).total(STEPS), STEPS)
    # AdaDP's coordinate of variance zero does with certainty.
    adadp = published("adadp")
    seen, unseen = attack.runs(adadp, steps=STEPS)
    # One number is the same in every run without the record, and in none with it.
    one = unseen[0]
    assert ((unseen == one).all(0) & (seen != one).all(0)).any()
    for algorithm in (judged, adadp):
        assert algorithm.epsilon(STEPS, 1e-5).upper == float("inf")


def test_the_attack_knows_the_truth_of_one_gaussian():
    """The yardstick itself: nearly the event's own δ is reached, never more."""
    shown = attack.runs(opt.sgd(flat(1.0, FULL), 0.1), steps=1)
    assert not attack.broken(*shown, acc.Gaussian(1.0), 1)
    assert attack.broken(*shown, acc.Gaussian(1.6), 1)


# Un-noised means beside a sum: told, or refused where the mechanism names no leak.
DATA = {"x": np.ones((100, 3), np.float32), "y": np.ones(100, np.float32)}


def square_loss(w, example):
    return (example["x"] @ w - example["y"]) ** 2


def mechanism():
    return jaxdp.dp_sgd(noise_multiplier=1.0, l2_clip_norm=0.1, batch_size=10, dataset_size=100)


def a_thousand_gradients(loss_fn, made=RawGradient):
    """Nothing sees that these contributions stay within l2."""
    leaking = ToTheLetter.of(mechanism(), "a thousand times too much")
    return made(loss_fn, leaking, lambda raw: lambda g: (g * 1000, g))


def test_a_sum_beside_un_noised_means_is_never_without_a_word():
    grad_fn, params = a_thousand_gradients(square_loss), jnp.zeros(3)
    for compiled in (False, True):
        sampler, tx = grad_fn.mechanism.sampler(100), optax.chain(grad_fn.mechanism.privatize())
        summed = grad_fn(params, DATA, sampler.draw(), raw=jnp.zeros(3))
        if compiled:
            jaxdp.compile_update(tx, donate=False)(params, tx.init(params), summed)
        else:
            tx.update(summed, tx.init(params), params)
        assert any("un-noised means" in said for said in sampler.ledger.unverified()), compiled


class Leaky(RawGradient):
    def sum_draw(self, params, data, draw, rng=None, **options):
        return super().sum_draw(params, data, draw, raw=params, **options)


ON_HOST = [{name: leaf[n] for name, leaf in DATA.items()} for n in range(100)]


@pytest.mark.parametrize("source", [DATA, ON_HOST], ids=["arrays", "on the host"])
def test_a_trainer_refuses_un_noised_means_where_no_leak_is_named(source):
    def update(updates, state, params=None, *, leaked, **extra):
        return leaked, state

    tx = optax.GradientTransformationExtraArgs(lambda params: (), update)
    leaky = lambda loss_fn: a_thousand_gradients(loss_fn, Leaky)  # noqa: E731
    algorithm = opt.Algorithm(mechanism(), tx, gradient=leaky)
    trainer = jaxdp.Trainer(square_loss, algorithm, source=source)
    state, (batch,) = trainer.init(jnp.zeros(3)), trainer.batches(1)
    refused("mechanism must name its leak", trainer.step, state, batch)


def test_what_is_registered_names_its_leak_and_its_numbers_as_it_likes(monkeypatch):
    monkeypatch.setattr(registry, "ALGORITHMS", dict(registry.ALGORITHMS))

    def judged(n):
        return opt.sa_dpsgd(n.mechanism(), n.learning_rate, n.acceptance_key())

    def build(numbers, rate=1.0):
        return opt.Algorithm(numbers.mechanism(), optax.sgd(rate))

    registry.register("judged-by-train", registry.AlgorithmEntry(judged, energy="train"))
    numbers = registry.Numbers(1.0, 0.1, 10, 100, 0.1, key=jaxdp.Secret.new().jax_key("coin"))
    registry.register("any-name", registry.AlgorithmEntry(build))
    assert registry.settings_of("any-name") == ("rate",)
    refused("must name its leak", registry.build, "judged-by-train", numbers)
    refused("entry must be", registry.register, "no-entry", build)
