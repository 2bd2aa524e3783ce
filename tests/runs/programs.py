"""Programs whose form is compared between processes: `python -m tests.runs.programs` prints it."""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxdp.optimizers.algorithm import as_algorithm
from jaxdp.runs import program
from jaxdp.training.step import PrivateStep
from tests.mechanisms import sgd_of

EXAMPLE = jax.ShapeDtypeStruct((8,), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
MECHANISM = sgd_of(1.0, 1.0, 10, 100)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def form(loss, optimizer, params, mechanism=MECHANISM):
    step = PrivateStep.of(as_algorithm(mechanism, optimizer), loss)
    return program.program_of(step, jax.tree.map(np.asarray, params), EXAMPLE, b"key")


def linen(rate=0.3, constant=2.0, decay=0.01, width=16):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.LayerNorm()(nn.silu(nn.remat(nn.Dense)(width)(x)))
            return nn.Dense(4)(nn.Dropout(rate, deterministic=False)(x))

    model, array = Model(), jnp.linspace(0.0, constant, 4)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}

    def loss(params, x, y, rng):
        return cross_entropy(model.apply(params, x, rngs={"dropout": rng}) + array, y)

    return loss, optax.adamw(1e-3, weight_decay=decay), model.init(keys, jnp.zeros(8))


def nnx_model(steps=100, momentum=0.9):
    graph, params = nnx.split(nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 10, steps)
    return (
        lambda params, x, y: cross_entropy(nnx.gelu(nnx.merge(graph, params)(x)), y),
        optax.sgd(schedule, momentum=momentum),
        params,
    )


def by_hand(slope=1.5, factor=1.01, rate=0.1, frozen=1.0, where=None):
    """A gradient of its own, a scan, a branch, a set, and a rate in the optimizer's state."""

    @jax.custom_vjp
    def wave(x):
        return jnp.sin(x)

    wave.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x) * slope,))
    names = {"one", "two", "three"}

    def loss(params, x, y):
        carry, _ = jax.lax.scan(lambda h, w: (jnp.tanh(w @ h), None), x, params["w"])
        if where is not None:
            carry = jax.lax.with_sharding_constraint(carry, where)
        carry = jax.lax.cond(carry[0] > 0, lambda h: h * factor, lambda h: -h, carry)
        return cross_entropy(wave(carry[:4]) * len(names) + params["frozen"], y)

    params = {"w": jnp.ones((3, 8, 8)), "frozen": jnp.full(4, frozen)}
    return loss, optax.inject_hyperparams(optax.sgd)(rate), params


PROGRAMS = {"linen": linen, "nnx": nnx_model, "by hand": by_hand}


if __name__ == "__main__":
    mesh = jax.make_mesh((2,), ("data",))
    where = jax.sharding.NamedSharding(mesh, jax.P())
    jax.jit(nn.silu)(jnp.ones(8))  # traces that the other process does not have
    made = [by_hand(where=where), nnx_model(), linen()]
    names = ["by hand", "nnx", "linen"]
    print(json.dumps({n: form(*each).to_dict() for n, each in zip(names, made, strict=True)}))
