"""What follows the noise gives one answer with and without jit, on and off the device."""

import chex
import jax
import jax.numpy as jnp
import optax
from absl.testing import parameterized

import jaxdp
from jaxdp import optimizers as opt
from jaxdp.optimizers.adadp import Box

PARAMS = {"w": jnp.array([[0.5, -1.0], [2.0, 0.25]]), "b": jnp.array([0.1, -0.2])}
MECHANISM = jaxdp.dp_sgd(1.0, 1.0, 6, 24)
BOXED = jaxdp.dp_sgd(1.0, None, 6, 24, rule=jaxdp.coordinate_box(1.0))
TRANSFORMATIONS = {
    "dp_adam_bc": opt.scale_by_dp_adam_bc(MECHANISM.noise_std),
    "dp_rmsprop": opt.scale_by_dp_rmsprop(MECHANISM.noise_std),
    "dp_adagrad": opt.scale_by_dp_adagrad(MECHANISM.noise_std),
    "adadp": opt.scale_by_adadp(BOXED, Box(1.0, 6, 1.2, 1e-6, 0.1, 1.0)),
    "annealing": opt.annealing(optax.sgd(0.1), jax.random.key(3)),
}


class VariantsTest(chex.TestCase, parameterized.TestCase):
    """One step from the same state."""

    @chex.all_variants(with_pmap=False)
    @parameterized.named_parameters((name, name) for name in TRANSFORMATIONS)
    def test_one_update(self, name):
        tx = optax.with_extra_args_support(TRANSFORMATIONS[name])
        energy = opt.PublicEnergy(lambda params, x: jnp.sum(params["b"]) * x, jnp.ones(4))
        extra = {"energy": energy} if name == "annealing" else {}

        def step(grads, state):
            return tx.update(grads, state, PARAMS, **extra)

        grads, state = jax.tree.map(jnp.cos, PARAMS), tx.init(PARAMS)
        updates, after = self.variant(step)(grads, state)
        expected, expected_after = step(grads, state)
        chex.assert_trees_all_close((updates, after), (expected, expected_after), rtol=1e-6)
        chex.assert_trees_all_equal_shapes_and_dtypes(updates, PARAMS)
        chex.assert_tree_all_finite(updates)
