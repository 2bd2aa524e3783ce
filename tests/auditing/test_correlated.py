"""Audits of correlated noise: what is right is not accused, what is wrong is caught."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxdp
from jaxdp import auditing
from jaxdp.noise.sensitivity import Sensitivity, sensitivity
from jaxdp.optimizers.algorithm import Algorithm

STEPS = 12


def amplified(noise=1.0):
    return jaxdp.dp_mf(noise, 0.5, 2, 16, steps=STEPS, bands=3)


def in_order(noise=3.0):
    return jaxdp.dp_mf(noise, 0.5, 4, 16, "fixed_order", steps=STEPS, strategy="square_root")


def audited(mechanism, runs=800, **options):
    algorithm = Algorithm(mechanism, optax.sgd(0.1))
    return auditing.audit_algorithm(algorithm, STEPS, 1e-3, runs=runs, seed=1, **options)


@pytest.mark.parametrize(("make", "runs"), [(amplified, 500), (in_order, 1500)])
def test_what_is_right_is_not_accused_and_is_nearly_reached(make, runs):
    found = audited(make(), runs)
    assert not found.broken
    assert not found.noise.refuted
    assert found.profile.epsilon > 0.5 * found.proven


@pytest.mark.parametrize("make", [amplified, in_order])
def test_a_sensitivity_that_is_too_low_is_caught(make, monkeypatch):
    def halved(strategy, participation):
        return Sensitivity(sensitivity(strategy, participation).value / 2, exact=True)

    monkeypatch.setattr(jaxdp.mechanism, "sensitivity", halved)
    found = audited(make(), residuals=False)
    assert found.verdict.p_value < 1e-3


def drawn_twice(tx):
    """Step 7 has the normals of step 3."""

    def init(params):
        return tx.init(params), jnp.zeros((1, 2), jnp.uint32)

    def update(updates, state, params=None, *, key, **extra):
        inner, kept = state
        kept = jnp.where(key.step == 3, key.words, kept)
        words = jnp.where(key.step == 7, kept, key.words)
        again = dataclasses.replace(key, words=words)
        found, inner = tx.update(updates, inner, params, key=again)
        return found, (inner, kept)

    return init, update


def not_taken_back(tx):
    """The noise of a step without what the steps before owe it."""

    def update(updates, state, params=None, *, key, **extra):
        forgotten = jax.tree.map(jnp.zeros_like, state.buffers)
        return tx.update(updates, state._replace(buffers=forgotten), params, key=key)

    return tx.init, update


@pytest.mark.parametrize("broken", [drawn_twice, not_taken_back])
def test_broken_noise_is_caught(broken):
    algorithm = Algorithm(in_order(), optax.sgd(0.1))
    link = optax.GradientTransformationExtraArgs(*broken(in_order().privatize()))
    object.__setattr__(algorithm, "noise", link)
    found = auditing.audit_algorithm(algorithm, STEPS, 1e-3, runs=300, seed=1)
    assert found.noise.refuted
