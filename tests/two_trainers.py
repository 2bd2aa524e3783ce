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


def mesh():
    return jax.make_mesh((jax.device_count(),), ("data",))


def trained(source, steps=4, mechanism=MECH, **options):
    """Parameters after some steps."""
    options = {"secret": jaxdp.Secret.from_seed(1), **options}
    optimizer = optax.sgd(0.1, momentum=0.9)
    train = jaxdp.Trainer(loss_of, mechanism, optimizer, source, **options)
    state = train.init(PARAMS)
    if isinstance(source, Read):
        source.read.clear()  # some are read to see that all processes have the same
    for batch in train.batches(steps):
        state, info = train.step(state, batch)
    assert np.isfinite(float(info.update_norm))
    return jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), state.params), train.ledger.steps


def arrays_of_the_host():
    return trained(X, mesh=mesh())


def records_one_by_one():
    source = Read()
    found = trained(source, mesh=mesh())
    everybody = _processes.first(lambda: json.dumps(sorted(source.read)))
    same = sorted(source.read) == json.loads(everybody)
    return found, len(source.read) < 90, same == (INDEX == 0)


def noise_on_a_grid():
    return trained(X, mesh=mesh(), mechanism=ON_GRID)


def correlated_noise_on_a_grid():
    return trained(Read(), mesh=mesh(), mechanism=CORRELATED)


def in_several_passes():
    return trained(X, mesh=mesh(), physical_batch_size=8)


def records_on_all_devices():
    rows = jax.sharding.NamedSharding(mesh(), jax.P("data"))
    return trained(jax.make_array_from_callback(X.shape, rows, lambda index: X[index]))


def a_secret_of_the_system():
    return trained(X, mesh=mesh(), secret=None)


def run(name, folder=None, **options):
    options = {"mesh": mesh(), "secret": jaxdp.Secret.from_seed(1), "delta": 1e-5, **options}
    options["progress"] = lambda step, row: None
    options |= {"params": PARAMS, "every": 2}
    optimizer = optax.sgd(0.1, momentum=0.9)
    return jaxdp.Run((folder or FOLDER) / name, loss_of, MECH, optimizer, X, **options)


def a_run_goes_on_where_it_was():
    one = run("run")
    one.fit(4)
    two = run("run")
    params = two.fit(6)
    _processes.first(lambda: "")  # the report is written by process 0
    found = jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), params)
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


def a_run_of_other_records_is_refused():
    other = jaxdp.Run(
        FOLDER / "other", loss_of, MECH, optax.sgd(0.1), X + INDEX, params=PARAMS,
        mesh=mesh(), delta=1e-5,
    )  # fmt: skip
    return refused(lambda: other.fit(2)).split(";")[0]


def what_process_0_refuses_stops_all():
    (FOLDER / "file").touch()
    return "must be" in refused(lambda: run("file").fit(2))


def canaries_are_refused():
    return refused(lambda: run("canaries", canaries=10))


def no_mesh_is_refused():
    return refused(lambda: trained(X))


def a_mesh_of_one_process_is_refused():
    one = jax.sharding.Mesh(np.array(jax.local_devices()), ("data",))
    return refused(lambda: trained(X, mesh=one)).split("devices of [")[0]


def other_records_are_refused():
    return refused(lambda: trained(X + INDEX, mesh=mesh())).split(";")[0]


def of_init(params, **options):
    """The words of a refusal by init, and what was charged by then."""
    train = jaxdp.Trainer(loss_of, MECH, optax.sgd(0.1), X, **{"mesh": mesh(), **options})
    return refused(lambda: train.init(params)).split(";")[0], train.ledger.steps


def other_parameters_are_refused():
    return of_init(jax.tree.map(lambda leaf: leaf + INDEX, PARAMS))


def other_meshes_are_refused():
    turned = jax.sharding.Mesh(np.array(jax.devices()[:: 1 - 2 * INDEX]), ("data",))
    return of_init(PARAMS, mesh=turned)


def other_physical_batches_are_refused():
    return of_init(PARAMS, physical_batch_size=8 + 8 * INDEX)


def other_copies_on_the_mesh_are_refused():
    # As a program does that takes each process's own shard of the records for all of them.
    whole = jax.sharding.NamedSharding(mesh(), jax.P())
    put = lambda x: jax.make_array_from_callback(x.shape, whole, lambda index: x[index])  # noqa: E731
    records = refused(lambda: jaxdp.Trainer(loss_of, MECH, optax.sgd(0.1), put(X + INDEX)))
    params, _ = of_init(jax.tree.map(lambda leaf: put(leaf + INDEX), PARAMS))
    return records.split(";")[0], params


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
