"""Chains and steps of one's own on meshes of eight devices: checks that on_mesh.py runs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdp
from jaxdp import clipping
from tests.meshes import (
    MECHANISM,
    ONE,
    PLACES,
    ROWS,
    TWO,
    X,
    Y,
    by_tensors,
    close,
    fresh,
    loss_fn,
    trained,
)


def chains():
    """``sum`` and ``compile_update`` follow arrays that lie on a mesh, whatever its axes."""
    grad_fn, tx = (
        MECHANISM.clipped_grad(loss_fn),
        optax.chain(MECHANISM.privatize(), optax.adam(1e-2)),
    )

    def after(params, data, donate=False):
        sampler = MECHANISM.sampler(ROWS, secret=jaxdp.Secret.from_seed(3), physical_batch_size=30)
        update, opt_state = jaxdp.compile_update(tx, donate=donate), tx.init(params)
        for _ in range(2):
            summed, _ = grad_fn.sum(params, data, sampler.draw())
            params, opt_state, _ = update(params, opt_state, summed)
        return summed, params, opt_state

    data = jax.device_put((X, Y))
    first, alone, _ = after(fresh(), data)
    for name in ("8x1, fully sharded", "8x1, explicit axes"):
        mesh, _, lay = PLACES[name]
        for records in (P("data"), P()):
            rows = jax.device_put(data, NamedSharding(mesh, records))
            summed, found, opt_state = after(lay(mesh, fresh()), rows, donate=records == P())
            close(alone, found)
            assert float(summed.l2) == float(first.l2)
            for leaf in jax.tree.leaves((found, opt_state)):
                assert len(leaf.sharding.device_set) == 8, name
            assert opt_state[1][0].mu[0]["w"].sharding.spec == P("data")


def own_steps():
    """Steps of one's own: a mesh by name, under ``jit``; ``shard_map`` with both ``check_vma``."""
    mask = np.arange(ROWS) % 3 != 0
    rows = NamedSharding(ONE, P("data"))
    batch, there = jax.device_put(((X, Y), mask), rows)
    params = fresh()
    for engine, rule, micro, bound in (
        ("auto", clipping.clip(0.5), None, 0.3),
        ("ghost", clipping.per_layer([0.1, 0.2, 0.3]), 5, None),
        ("vmap", clipping.auto_s(), None, None),
    ):
        options = {"engine": engine, "microbatch_size": micro}
        alone = jaxdp.clipped_grad(loss_fn, rule, **options)
        named = jaxdp.clipped_grad(loss_fn, rule, mesh=ONE, **options)

        def total(grad_fn, params, batch, mask, bound=bound):
            found, info = grad_fn(params, batch, mask, bound=bound)
            return (found.value, found.votes), info.norms

        one, norms = jax.jit(total, static_argnums=0)(alone, params, (X, Y), mask)
        found, others = jax.jit(total, static_argnums=0)(named, params, batch, there)
        close(one, found)
        close(norms, others)
        for check in (True, False):

            def part(params, batch, mask, alone=alone):
                found, norms = total(alone, params, batch, mask)
                return jax.tree.map(lambda v: jax.lax.psum(v, "data"), found), norms

            mapped = jax.shard_map(
                part,
                mesh=ONE,
                in_specs=(P(), P("data"), P("data")),
                out_specs=(P(), P("data")),
                check_vma=check,
            )
            found, others = jax.jit(mapped)(params, batch, there)
            close(one, found)
            close(norms, others)


def members():
    """Several models at once inside ``shard_map``, their types tracked or not."""
    grad_fn = jaxdp.clipped_grad(loss_fn, clipping.clip(0.5))
    two = jax.tree.map(lambda leaf: jnp.stack([leaf, -leaf]), fresh())
    whole = lambda params, *rows: grad_fn(params, rows, "all")[0].value  # noqa: E731
    every = jax.vmap(whole, (0, None, None))
    one = jax.jit(every)(two, X, Y)

    def part(params, x, y):
        return jax.tree.map(lambda v: jax.lax.psum(v, "data"), every(params, x, y))

    specs = {"in_specs": (P(), P("data"), P("data")), "out_specs": P()}
    close(one, jax.jit(jax.shard_map(part, mesh=ONE, **specs))(two, X, Y))


def summed_before():
    """Gradients of one's own that ``shard_map`` has summed before they clip are refused."""
    clip = jaxdp.clip_and_sum(clipping.clip(0.5))

    def step(cast, own, params, batch, mask):
        params = jax.lax.pcast(params, ("data",), to="varying") if cast else params
        grads = jax.vmap(jax.grad(loss_fn), (None, 0, 0))(params, *batch)
        mask = jnp.ones(ROWS // 8, bool) if own else mask
        return jax.lax.psum(clip.update(grads, None, params, mask=mask)[0].value, "data")

    def mapped(cast, own=False):
        specs = {"in_specs": (P(), P("data"), P("data")), "out_specs": P()}
        fn = jax.shard_map(lambda *a: step(cast, own, *a), mesh=ONE, **specs)
        return jax.jit(fn)(fresh(), (X, Y), np.ones(ROWS, bool))

    for own in (False, True):
        with pytest.raises(ValueError, match="has summed over"):
            mapped(False, own)
    alone = clip.update(
        jax.vmap(jax.grad(loss_fn), (None, 0, 0))(fresh(), X, Y), None, fresh(), mask="all"
    )[0]
    close(alone.value, mapped(True))


def refused():
    """What cannot be meant is refused in words."""

    def says(words, call):
        with pytest.raises(ValueError, match=re.escape(words)):
            call()

    says("mesh must be a jax.sharding.Mesh", lambda: trained(fresh(), mesh=8))
    says("data_axes must be axes of the mesh", lambda: trained(fresh(), ONE, ("rows",)))
    says("mesh must be the one that", lambda: trained(by_tensors(TWO, fresh()), ONE))
    grad_fn = jaxdp.clipped_grad(loss_fn, clipping.clip(0.5), mesh=ONE)
    says("a multiple of 8 rows", lambda: grad_fn(fresh(), (X[:12], Y[:12]), "all"))
