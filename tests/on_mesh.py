"""One step on meshes of eight devices: run by test_mesh.py, which forces so many."""

import sys
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdp
from jaxdp.sources import as_source
from tests.collectives import summary
from tests.meshes import (
    ONE,
    PLACES,
    ROWS,
    THREE,
    TWO,
    X,
    Y,
    close,
    compiled,
    fresh,
    loss_fn,
    mesh_of,
    ordinary,
    taken,
    trained,
)
from tests.on_mesh_own_steps import chains, members, own_steps, refused, summed_before


def steps():
    """Draws, sums and parameters are those of one device, wherever the parameters lie."""
    _, alone, drawn = trained(fresh())
    for name, (mesh, _, lay) in PLACES.items():
        params = lay(mesh, fresh())
        trainer, state, found = taken(name)
        assert found == drawn, name
        close(alone.params, state.params)
        assert trainer.clipped_grad.placement.devices in (4, 8), name
        for leaf in jax.tree.leaves((state.params, state.opt_state)):
            assert len(leaf.sharding.device_set) == 8, name
        if "fully sharded" in name:  # as a checkpoint holds it
            plain = jax.tree.map(np.asarray, state)
            (batch,) = trainer.batches(1)
            state = trainer.step(plain, batch)[0]
        moments = [state.opt_state[1][0].mu, state.opt_state[1][0].nu]
        for like in (state.params, *moments):
            cuts = zip(jax.tree.leaves(params), jax.tree.leaves(like), strict=True)
            assert all(
                NamedSharding(
                    trainer.clipped_grad.placement.mesh, a.sharding.spec
                ).is_equivalent_to(b.sharding, b.ndim)
                for a, b in cuts
            ), name


def exchanged():
    """The devices exchange what they do in ordinary training, and nothing of an example."""
    for name, (mesh, axes, lay) in PLACES.items():
        if name.startswith("2x2x2") or "explicit" in name:
            continue
        trainer, state, _ = taken(name)
        ours = summary(compiled(trainer, state))
        rows = trainer.physical_batch_size
        theirs = summary(ordinary(lay(mesh, fresh()), rows, axes or ("data",), mesh))
        print(name, ours, theirs)
        # Numbers of every row: norms, where parameters are cut over other axes than rows.
        of_rows = 4 * 4 * 8 * rows if "tensor" in name else 0
        assert ours["all"]["bytes"] <= 1.05 * theirs["all"]["bytes"] + of_rows, name
        assert set(ours) <= set(theirs) | {"reduce-scatter"}, name
        if name == "8x1":
            assert ours["all"]["count"] == 1
        if name == "8x1, fully sharded":
            size = sum(4 * leaf.size for leaf in jax.tree.leaves(state.params))
            assert ours["all"]["bytes"] <= 2 * size + 64


def noise():
    """The very noise of one device: of one value one noise, of a shard the global one's slice."""
    params = {"large": jnp.zeros((256, 300)), "w": jnp.zeros((16, 8)), "b": jnp.zeros(5)}
    nothing = lambda p, x: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(p)) * 0.0 * x[0]  # noqa: E731
    specs = {
        "8x1": (ONE, (P(), P(), P())),
        "8x1, fully sharded": (ONE, (P("data"), P("data"), P())),
        "4x2": (TWO, (P("data", "model"), P(None, "model"), P())),
        "2x2x2": (THREE, (P(("data", "model"), "fsdp"), P("fsdp"), P())),
    }
    before = jax.config.jax_threefry_partitionable
    try:
        alone = trained(params, source=X, loss=nothing, optimizer=optax.sgd(1.0))[1].params
        assert float(jnp.std(alone["large"])) > 0.001
        for name, (mesh, each) in specs.items():
            jax.config.update("jax_threefry_partitionable", name.startswith("8x1"))
            at = dict(zip(params, (NamedSharding(mesh, spec) for spec in each), strict=True))
            put = {key: jax.device_put(params[key], at[key]) for key in params}
            state = trained(put, mesh, source=X, loss=nothing, optimizer=optax.sgd(1.0))[1]
            for key, leaf in state.params.items():
                np.testing.assert_array_equal(alone[key], leaf, err_msg=f"{name} {key}")
                copies = {}
                for shard in leaf.addressable_shards:
                    copies.setdefault(str(shard.index), []).append(np.asarray(shard.data))
                for same in copies.values():
                    assert all((copy == same[0]).all() for copy in same), name
    finally:
        jax.config.update("jax_threefry_partitionable", before)


def correlated():
    """Correlated noise is that of one device, and its buffers are cut as the parameters are."""
    for strategy, bands in (("banded", 3), ("identity", None)):
        mechanism = jaxdp.dp_mf(1.0, 0.5, 64, ROWS, steps=6, strategy=strategy, bands=bands)
        _, alone, drawn = trained(fresh(), mechanism=mechanism, steps=4)
        for name in ("8x1, fully sharded", "2x2x2, fully sharded and tensor parallel"):
            mesh, axes, lay = PLACES[name]
            params = lay(mesh, fresh())
            _, state, found = trained(params, mesh, axes, mechanism=mechanism, steps=4)
            assert found == drawn
            close(alone.params, state.params)
            kept = state.opt_state[0].buffers
            for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(kept), strict=True):
                cut = NamedSharding(mesh, P(None, *a.sharding.spec))
                assert not b.size or b.sharding.is_equivalent_to(cut, b.ndim), name


def grid():
    """Integers on the grid are those of one device, made between the devices, correlated or not."""
    params = {"large": jnp.zeros((256, 300)), "w": jnp.zeros((16, 8)), "b": jnp.zeros(5)}
    nothing = lambda p, x: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(p)) * 0.0 * x[0]  # noqa: E731
    places = {
        "8x1": (ONE, (P(), P(), P())),
        "8x1, fully sharded": (ONE, (P("data"), P("data"), P())),
        "2x2x2": (THREE, (P(("data", "model"), "fsdp"), P("fsdp"), P())),
        "explicit": (mesh_of((8,), ("data",), AxisType.Explicit), (P("data"), P(), P())),
    }
    numbers = {"batch_size": 64, "dataset_size": ROWS, "noise": "grid"}
    for mechanism in (
        jaxdp.dp_sgd(1.0, 0.5, **numbers),
        jaxdp.dp_mf(1.0, 0.5, steps=4, bands=3, **numbers),
    ):
        options = {"source": X, "loss": nothing, "optimizer": optax.sgd(1.0), "steps": 4}
        options["mechanism"] = mechanism
        alone = trained(params, **options)[1].params
        assert float(jnp.std(alone["large"])) > 0.001
        for name, (mesh, each) in places.items():
            at = dict(zip(params, (NamedSharding(mesh, spec) for spec in each), strict=True))
            put = {key: jax.device_put(params[key], at[key]) for key in params}
            state = trained(put, None if name == "explicit" else mesh, **options)[1]
            for key, leaf in state.params.items():
                np.testing.assert_array_equal(alone[key], leaf, err_msg=f"{name} {key}")
                cut = NamedSharding(leaf.sharding.mesh, at[key].spec)
                assert leaf.sharding.is_equivalent_to(cut, leaf.ndim), name
            for a, b in zip(
                jax.tree.leaves(put),
                jax.tree.leaves(getattr(state.opt_state[0], "buffers", ())),
                strict=False,
            ):
                cut = NamedSharding(b.sharding.mesh, P(None, *a.sharding.spec))
                assert b.sharding.is_equivalent_to(cut, b.ndim), name


def sources():
    """Records on the mesh, on the host, in files and in buckets; microbatches; keys."""
    alone = trained(fresh())[1].params
    cut = jax.device_put((X, Y), NamedSharding(ONE, P("data")))
    trainer, state, _ = trained(fresh(), source=cut)
    assert trainer.clipped_grad.placement.records == ("data",)
    close(alone, state.params)
    hosted = as_source([(x, y) for x, y in zip(X, Y, strict=True)])
    trainer, state, _ = trained(fresh(), ONE, source=hosted, physical_batch_size=100)
    assert trainer.physical_batch_size == 104
    close(alone, state.params)
    close(alone, trained(fresh(), ONE, microbatch_size=24, physical_batch_size=48)[1].params)

    def noisy(params, x, y, rng):
        return loss_fn(params, x + jax.random.normal(rng, x.shape), y)

    close(*(trained(fresh(), mesh, loss=noisy)[1].params for mesh in (None, ONE)))


def broken():
    """A record that is not finite counts nowhere, and keeps no device waiting for another."""
    x = X.copy()
    x[3] = np.nan
    x[200, 5] = np.inf
    mechanism = jaxdp.dp_sgd(1.0, 0.5, ROWS, ROWS, sampling="full_batch")
    found = []
    for name in (None, "8x1", "4x2, tensor parallel"):
        mesh, _, lay = PLACES[name] if name else (None, None, lambda mesh, params: params)
        trainer = jaxdp.Trainer(
            loss_fn,
            mechanism,
            optax.sgd(0.1),
            (x, Y),
            secret=jaxdp.Secret.from_seed(7),
            mesh=mesh,
            engine="vmap",  # gradients so large that rows are dropped in a loop
            physical_batch_size=ROWS,
        )
        state = trainer.init(lay(mesh, fresh(128)))
        (batch,) = trainer.batches(1)
        found.append(trainer.step(state, batch)[0].params)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found[-1]))
    close(found[0], found[1])
    close(found[0], found[2])


CHECKS = (
    steps,
    exchanged,
    noise,
    correlated,
    grid,
    sources,
    broken,
    chains,
    own_steps,
    members,
    summed_before,
    refused,
)
if __name__ == "__main__":
    for check in CHECKS:
        if len(sys.argv) > 1 and check.__name__ not in sys.argv[1:]:
            continue
        try:
            check()
            print("passed", check.__name__, flush=True)
        except Exception:
            print("failed", check.__name__, traceback.format_exc()[-1_500:], flush=True)
