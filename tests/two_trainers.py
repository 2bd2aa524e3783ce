"""What two processes train together: scenarios that tests/two_processes.py runs, two devices each."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from jaxdp import _processes

INDEX, FOLDER = 0, Path()  # of this process; the one that starts it sets them
N = 200
MECH = jaxdp.dp_sgd(1.0, 1.0, 20, N)
ON_GRID = jaxdp.dp_sgd(1.0, 1.0, 20, N, noise="grid")
CORRELATED = jaxdp.dp_mf(
    1.0, 1.0, 20, N, "fixed_order", steps=4, strategy="banded", bands=2, noise="grid"
)
X = np.random.default_rng(0).normal(size=(N, 6)).astype(np.float32)
SGD = optax.sgd(0.1, momentum=0.9)
PARAMS = {"w": np.zeros((6, 3), np.float32), "b": np.zeros(3, np.float32)}


def loss_of(params, x):
    return jnp.sum(jnp.sin(x @ params["w"] + params["b"]))


def refused(call):
    """The words of a refusal; None where there was none."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


class Read:
    """Records that note who read them."""

    def __init__(self):
        self.read = set()

    def __len__(self):
        return N

    def __getitem__(self, n):
        self.read.add(int(n))
        return X[n]


def listed(params):
    return jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), params)


def mesh():
    return jax.make_mesh((jax.device_count(),), ("data",))


def trained(source, mechanism=MECH, **options):
    """Parameters after four steps."""
    options = {"secret": jaxdp.Secret.from_seed(1), **options}
    train = jaxdp.Trainer(loss_of, mechanism, SGD, source, **options)
    state = train.init(PARAMS)
    if isinstance(source, Read):
        source.read.clear()  # some are read to see that all processes have the same
    for batch in train.batches(4):
        state, info = train.step(state, batch)
    assert np.isfinite(float(info.update_norm))
    return listed(state.params), train.ledger.steps


def models_of_one_seed():
    """Of one seed, but for the last, by where their records lie and what their noise is."""
    rows = jax.sharding.NamedSharding(mesh(), jax.P("data"))
    on_devices = jax.make_array_from_callback(X.shape, rows, lambda index: X[index])
    return {
        "arrays": trained(X, mesh=mesh()),
        "on devices": trained(on_devices),
        "in passes": trained(X, mesh=mesh(), physical_batch_size=8),
        "grid": trained(X, mesh=mesh(), mechanism=ON_GRID),
        "correlated": trained(Read(), mesh=mesh(), mechanism=CORRELATED),
        "secret of the system": trained(X, mesh=mesh(), secret=None),
    }


def records_one_by_one():
    source = Read()
    found = trained(source, mesh=mesh())
    everybody = _processes.first(lambda: json.dumps(sorted(source.read)))
    same = sorted(source.read) == json.loads(everybody)
    return found, len(source.read) < 90, same == (INDEX == 0)


def run(name, folder=None, source=X, **options):
    options = {"mesh": mesh(), "secret": jaxdp.Secret.from_seed(1), "delta": 1e-5, **options}
    options["progress"] = lambda step, row: None
    options |= {"params": PARAMS, "every": 2}
    return jaxdp.Run((folder or FOLDER) / name, loss_of, MECH, SGD, source, **options)


def a_run_goes_on_where_it_was():
    run("run").fit(4)
    two = run("run")
    found = listed(two.fit(6))
    _processes.first(lambda: "")  # the report is written by process 0
    ledger = jaxdp.Ledger(FOLDER / "run" / "ledger.jsonl")
    return found, ledger.steps, two.epsilon().upper, [row["step"] for row in two.history]


def a_damaged_checkpoint_is_left_out():
    run("damaged").fit(4)
    if INDEX == 0:
        kept = FOLDER / "damaged" / "secret" / "checkpoints" / "4"
        largest = max((p for p in kept.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
        largest.write_bytes(bytes(100))
    _processes.first(lambda: "")
    two = run("damaged")
    two.fit(6)
    _processes.first(lambda: "")
    ledger = jaxdp.Ledger(FOLDER / "damaged" / "ledger.jsonl")
    return ledger.steps, [row["step"] for row in two.history]


def what_is_refused():
    """Sources that differ, meshes of one process, and what cannot be in several."""
    (FOLDER / "file").touch()  # seen by process 0
    one = jax.sharding.Mesh(np.array(jax.local_devices()), ("data",))
    whole = jax.sharding.NamedSharding(mesh(), jax.P())
    # As a program does that takes each process's own shard of the records for all of them.
    put = lambda x: jax.make_array_from_callback(x.shape, whole, lambda index: x[index])  # noqa: E731
    copies = lambda: jaxdp.Trainer(loss_of, MECH, optax.sgd(0.1), put(X + INDEX))  # noqa: E731
    said = {
        "no mesh": refused(lambda: trained(X)),
        "a mesh of one process": refused(lambda: trained(X, mesh=one)).split("devices of [")[0],
        "records": refused(lambda: trained(X + INDEX, mesh=mesh())),
        "copies of records": refused(copies),
        "records of a run": refused(lambda: run("other", source=X + INDEX).fit(2)),
        "canaries": refused(lambda: run("canaries", canaries=10)),
        "file": str("must be" in refused(lambda: run("file").fit(2))),
    }
    turned = jax.sharding.Mesh(np.array(jax.devices()[:: 1 - 2 * INDEX]), ("data",))
    for name, options in (
        ("params", {"params": jax.tree.map(lambda leaf: leaf + INDEX, PARAMS)}),
        ("params of the mesh", {"params": jax.tree.map(lambda leaf: put(leaf + INDEX), PARAMS)}),
        ("mesh", {"mesh": turned}),
        ("physical_batch_size", {"physical_batch_size": 8 + 8 * INDEX}),
    ):
        options = {"mesh": mesh(), **options}
        params = options.pop("params", PARAMS)
        train = jaxdp.Trainer(loss_of, MECH, optax.sgd(0.1), X, **options)
        said[name] = refused(lambda train=train, params=params: train.init(params))
        assert train.ledger.steps == 0, name
    return {name: words.split(";")[0] for name, words in said.items()}


def a_process_that_lost_a_step_releases_nothing():
    fixed, found = jaxdp.dp_sgd(1.0, 1.0, 20, N, "fixed_size"), []
    for rows in (20, 8):  # a step of one physical batch, and of several
        options = {"mesh": mesh(), "physical_batch_size": rows}
        train = jaxdp.Trainer(loss_of, fixed, optax.sgd(0.1), X, **options)
        state, batches = train.init(PARAMS), train.batches(4)
        state, info = train.step(state, next(batches))
        found.append(bool(np.isfinite(float(info.update_norm))))
        if INDEX:  # its loop went on after an error
            next(batches)
        state, info = train.step(state, next(batches))
        found += [bool(np.isnan(leaf).all()) for leaf in jax.tree.leaves(state.params)]
        found.append(refused(lambda train=train: train.batches(1)).split(";")[0])
    return found
