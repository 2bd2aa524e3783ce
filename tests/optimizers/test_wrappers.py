"""Every algorithm, by its line in the registry, inside optax's wrappers and under vmap over seeds."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import optimizers as opt
from jaxdp.optimizers import registry
from jaxdp.optimizers.adadp import Box
from jaxdp.types import Summed
from tests.compiling import QUICK
from tests.optimizers.test_registry import ENERGY, KEY, PARAMS, extras, keys_of, sums

ALL = jax.tree.map(lambda _: "all", PARAMS)


def algorithm(name, key):
    rate = optax.linear_schedule(0.1, 0.05, 4)
    made = registry.build(name, registry.Numbers(1.0, 1.0, 6, 24, rate, momentum=0.0, key=key))
    return (
        made
        if made.energy is None
        else opt.Algorithm(made.mechanism, made.after_noise, counts=made.counts)
    )  # judged by ENERGY here


def final(made, key, values, wrap=None):
    """The last parameters; ``wrap`` is (wrapper of the chain, its state -> the chain's)."""
    wrapper, inner_state = wrap or (lambda tx: tx, lambda state: state)
    tx = optax.with_extra_args_support(
        optax.chain(made.mechanism.privatize(), wrapper(made.after_noise))
    )

    def body(carry, given):
        (params, state), (value, noise) = carry, given
        scale = made.context((None, inner_state(state[1]))).get("scale")
        value = value if scale is None else jax.tree.map(jnp.divide, value, scale)
        summed = Summed(value, made.mechanism.l2(params), scale)
        updates, state = tx.update(summed, state, params, key=noise, **extras(made, value))
        return (optax.apply_updates(params, updates), state), None

    noises = keys_of(made, 4, jax.random.wrap_key_data(key))
    return jax.lax.scan(body, (PARAMS, tx.init(PARAMS)), (values, noises))[0][0]


def in_all_wrappers(after):
    once = optax.inject_hyperparams(optax.scale)(step_size=optax.constant_schedule(1.0))
    return optax.multi_transform({"all": optax.chain(after, once)}, ALL)


@pytest.mark.parametrize("name", registry.ALGORITHMS)
def test_wrappers_and_vmap_over_seeds_change_nothing(name):
    """Also with the rate on a schedule."""
    keys, values = jax.vmap(jax.random.key_data)(jax.random.split(KEY, 2)), sums(4)
    wrap = in_all_wrappers, lambda state: state.inner_states["all"].inner_state[0]
    with jax.numpy_dtype_promotion("standard"):  # optax.adam is not strict
        plain = jax.jit(lambda k: final(algorithm(name, k), k, values), compiler_options=QUICK)
        many = jax.jit(
            jax.vmap(lambda k: final(algorithm(name, k), k, values, wrap)), compiler_options=QUICK
        )
        ends, alone = many(keys), [plain(key) for key in keys]
    for i, one in enumerate(alone):
        jax.tree.map(
            lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=1e-6), ends, one
        )
    assert not np.array_equal(ends["w"][0], ends["w"][1])
    assert np.isfinite(ends["w"]).all()


@pytest.mark.parametrize("name", ["dp-sgd", "piadam"])  # a candidate of NaN is rejected
def test_one_key_for_every_seed_is_refused(name):
    """Also inside all the wrappers, through jit and scan: equal keys give NaN, a shared one words."""
    keys, values = jax.random.key_data(KEY), sums(4)
    wrap = in_all_wrappers, lambda state: state.inner_states["all"].inner_state[0]
    many = jax.jit(
        jax.vmap(lambda k: final(algorithm(name, k), k, values, wrap)), compiler_options=QUICK
    )
    assert np.isnan(many(jnp.stack([keys, keys]))["w"]).any()
    shared = jax.vmap(lambda v: final(algorithm(name, keys), keys, v, wrap))
    with pytest.raises(ValueError, match="another one for every member of a vmap"):
        shared(jax.tree.map(lambda v: jnp.stack([v, v]), values))


MECH = jaxdp.mechanism.with_rule(jaxdp.coordinate_box(1.0), 1.0, 6, 24)
OWN = {
    "scale_by_dp_adam_bc": ((MECH.noise_std,), ("noise_std",), {"b1", "b2", "eps", "noise_floor"}),
    "scale_by_dp_rmsprop": ((0.3,), (), {"noise_std", "decay", "eps", "noise_floor"}),
    "scale_by_dp_adagrad": ((MECH.noise_std,), ("noise_std",), {"eps", "noise_floor"}),
    "scale_by_adadp": ((MECH, Box(1.0, 6)), (), {"rate_decay", "moment_decay", "eps"}),
    "annealing": ((optax.sgd(0.1), KEY), ("key",), {"temperature", "max_rejections"}),
}


@pytest.mark.parametrize("name", OWN)
def test_own_transformations_take_injected_hyperparameters(name):
    arguments, static, expected = OWN[name]
    make, energy = getattr(opt, name), {"energy": ENERGY} if name == "annealing" else {}
    outcomes = []
    for tx in (make(*arguments), optax.inject_hyperparams(make, static_args=static)(*arguments)):
        state, params = tx.init(PARAMS), PARAMS
        step = jax.jit(
            lambda s, p, tx=tx: tx.update(PARAMS, s, p, **energy), compiler_options=QUICK
        )
        for _ in range(3):
            updates, state = step(state, params)
            params = optax.apply_updates(params, updates)
        outcomes.append(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *outcomes)
    assert set(state.hyperparams) == expected
    assert not np.array_equal(params["w"], PARAMS["w"])


def test_a_part_of_the_parameters_does_not_know_adadps_noise():
    part = optax.multi_transform(
        {"some": opt.scale_by_adadp(MECH, Box(1.0, 6)), "still": optax.set_to_zero()},
        {"w": "some", "b": "still"},
    )
    with pytest.raises(ValueError, match="params must be all that are trained"):
        part.init(PARAMS)
