import jax
import jax.numpy as jnp
import optax
import pytest

import jaxdp

KEY = jax.random.key(0)
PARAMS = {"w": jnp.zeros((2,))}
SUMMED = jaxdp.Summed({"w": jnp.ones((2,))}, 1.0)


@pytest.mark.parametrize(
    "before",
    [
        optax.scale(10.0),
        optax.clip(1.0),
        optax.clip_by_global_norm(1.0),
        optax.masked(optax.scale(10.0), {"w": True}),
        optax.sgd(0.1, momentum=0.9),
        optax.adam(0.1),
        optax.add_decayed_weights(0.1),
        optax.zero_nans(),
    ],
)
def test_nothing_changes_a_sum_before_its_noise(before):
    tx = optax.chain(before, jaxdp.privatize(1.0, 10.0, KEY))
    with pytest.raises((TypeError, ValueError, AttributeError)):
        tx.update(SUMMED, tx.init(PARAMS), PARAMS)


def test_repr_shows_no_value():
    assert "1." not in repr(SUMMED).replace("l2=1.0", "")


def test_summed_does_not_cross_jit_as_a_pytree():
    with pytest.raises(TypeError):
        jax.jit(lambda s: s)(SUMMED)
