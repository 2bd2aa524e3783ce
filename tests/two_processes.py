"""One of two processes: run by test_processes.py, ``python -m tests.two_processes PORT INDEX DIR``.

Prints one line of JSON for every scenario, by name; the test compares the two processes, of two
devices each. First those of ledgers and samplers, then what the two train together.
"""

import dataclasses
import functools
import json
import os
import sys
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import jaxdp
from jaxdp import accounting as acc
from jaxdp.devices import processes
from jaxdp.sampling import as_source
from jaxdp.training.trainer import look_through
from tests.compiling import lower_quickly
from tests.mechanisms import mf_of, sgd_of
from tests.refusing import all_refused, refused

HERE = __name__ == "__main__"  # the test imports what a single process compares
INDEX, FOLDER = (int(sys.argv[2]), Path(sys.argv[3])) if HERE else (0, Path())
EARLY = jaxdp.Ledger()
N = 200
MECH = sgd_of(1.0, 1.0, 20, N)
SAME = "must be the same in every process"


def drawn(sampler, count=3):
    """The positions and the noise keys of so many draws."""
    draws = [sampler.draw() for _ in range(count)]
    positions = [np.sort(draw.indices[draw.mask]).tolist() for draw in draws]
    return positions, [draw.key().words.tolist() for draw in draws]


def the_draws_and_keys_are_one():
    sampler, seeded = MECH.sampler(N), MECH.sampler(N, secret=jaxdp.Secret.from_seed(3))
    (positions, keys), others = drawn(sampler), drawn(seeded)
    assert len({tuple(p) for p in positions}) == len({str(k) for k in keys}) == 3
    assert sampler.ledger.steps == 3
    return positions, keys, others, sampler.ledger.epsilon(1e-5).upper


def a_file_is_written_once():
    path = FOLDER / "ledger.jsonl"
    sampler = MECH.sampler(N, ledger=jaxdp.Ledger(path), reserve=4)
    found = drawn(sampler, 6)
    processes.from_process_0(lambda: "")  # nobody looks at the file before both are done
    (entry,) = jaxdp.Ledger(path).entries  # process 0 writes every charge once
    assert (entry.first_step, entry.steps) == (0, 8)
    if INDEX:  # what no process was handed is taken out
        drawn(sampler, 1)
    sampler.close()
    assert sampler.ledger.steps == 7
    head = sampler.ledger.head.hex()
    sampler.ledger.close()
    again = jaxdp.Ledger(path)
    later = drawn(MECH.sampler(N, ledger=again), 2)
    again.close()
    assert (again.steps, len(again.begun)) == (9, 2)
    return head, found, later


def what_differs_is_refused_in_both_before_a_charge():
    path, charged, mech = (
        FOLDER / "other.jsonl",
        jaxdp.Ledger(),
        sgd_of(1.0, 1.0, 20 + INDEX, N),
    )
    charged.charge(acc.Gaussian(2.0), stream="a")
    seed, again = jaxdp.Secret.from_seed(INDEX), {"event": acc.Gaussian(2.0), "stream": "a"}
    early = "made after jax.distributed.initialize"
    refused(f"mechanism {SAME}", mech.sampler, N, ledger=jaxdp.Ledger(path))
    assert not path.exists()
    refused("secret must be the same", MECH.sampler, N, secret=seed)
    refused("two releases from one draw", charged.charge, **again)
    refused(early, MECH.sampler, N, ledger=EARLY)
    pca = jaxdp.preprocess.dp_pca
    refused("must be computed in one process", pca, np.eye(4) + INDEX, 2, 1.0)
    other = functools.partial(charged.charge, acc.Gaussian(2.0 + INDEX), stream="a", first_step=1)
    refused("every process must charge the same", other)
    assert charged.steps == 1


def a_sum_of_one_process_is_refused():
    """As in other libraries: each process has its own shard, and no mesh; both would add one noise."""
    own, params = np.full((100, 3), 1.0 + INDEX, np.float32), jnp.zeros(3)
    for mech in (MECH, sgd_of(1.0, 1.0, 20, N, noise="grid")):
        grad_fn, tx = mech.clipped_grad(lambda w, x: jnp.sum(w * x)), mech.privatize()
        summed = grad_fn(params, own, mech.sampler(100).draw())
        refused("", tx.update, summed, tx.init(params), params)
        if mech is MECH:
            refused("", jaxdp.compile_update(tx, donate=False), params, tx.init(params), summed)


ON_GRID = sgd_of(1.0, 1.0, 20, N, noise="grid")
CORRELATED = mf_of(
    1.0, 1.0, 20, N, "fixed_order", steps=4, strategy="banded", bands=2, noise="grid"
)
X = np.random.default_rng(0).normal(size=(N, 6)).astype(np.float32)
SGD = optax.sgd(0.1, momentum=0.9)
PARAMS = {"w": np.zeros((6, 3), np.float32), "b": np.zeros(3, np.float32)}


def loss_of(params, x):
    return jnp.sum(jnp.sin(x @ params["w"] + params["b"]))


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
    everybody = processes.from_process_0(lambda: json.dumps(sorted(source.read)))
    same = sorted(source.read) == json.loads(everybody)
    assert len(source.read) < 90  # each process reads few, and its own
    assert same == (INDEX == 0)
    return found


def run(name, folder=None, source=X, **options):
    options = {"mesh": mesh(), "secret": jaxdp.Secret.from_seed(1), "delta": 1e-5, **options}
    options["progress"] = lambda step, row: None
    options |= {"params": PARAMS, "every": 2}
    return jaxdp.Run((folder or FOLDER) / name, loss_of, MECH, SGD, source, **options)


def a_run_goes_on_where_it_was_and_leaves_out_a_damaged_checkpoint():
    logged = []
    run("run", report=False, log=lambda row: logged.append(row["step"])).fit(4)
    assert logged == [2, 4] * (INDEX == 0)
    two, told = run("run"), []
    found = listed(two.fit(6))
    # Process 0 writes the file, and the others go on once it is there.
    two.export(FOLDER / "exported.msgpack")
    assert listed(jaxdp.load(FOLDER / "exported.msgpack", like=PARAMS)) == found
    for path in ("exported.orbax", "exported.txt"):
        refused("must end in .msgpack", two.export, FOLDER / path)
    for damaged in (False, True):
        if damaged:
            if INDEX == 0:
                kept = (FOLDER / "run/secret/checkpoints/6").rglob("*")
                largest = max((p for p in kept if p.is_file()), key=lambda p: p.stat().st_size)
                largest.write_bytes(bytes(100))
            processes.from_process_0(lambda: "")
            two = run("run", report=False)
            two.fit(8)
        processes.from_process_0(lambda: "")  # the report is written by process 0
        ledger = jaxdp.Ledger(FOLDER / "run" / "ledger.jsonl")
        told.append((ledger.steps, two.epsilon().upper, [row["step"] for row in two.history]))
    return found, told


def an_own_loop_goes_on_from_a_checkpoint_by_orbax():
    """As docs/howto/own_loop.md has it: killed after step 5 of 8, and saved after step 4."""
    mechanism = dataclasses.replace(MECH, steps=8, delta=1e-5)
    folder = FOLDER / "own"
    processes.from_process_0(lambda: str(folder.mkdir()))

    def program(stop=None):
        options = {"mesh": mesh(), "ledger": folder / "ledger.jsonl", "reserve": 1}
        train = jaxdp.Trainer(loss_of, mechanism, SGD, X, **options)
        state = train.init(PARAMS)
        with ocp.CheckpointManager(folder / "checkpoints") as kept:
            if kept.latest_step() is not None:
                state = kept.restore(kept.latest_step(), args=ocp.args.StandardRestore(state))
            for batch in train.batches(state=state):
                state, _ = train.step(state, batch)
                if state.step % 2 == 0:
                    kept.save(int(state.step), args=ocp.args.StandardSave(state))
                if state.step == stop:
                    break
        train.close()
        return int(state.step), train.ledger.steps, listed(state.params)

    assert program(5)[:2] == (5, 5)
    found = program()
    assert found[:2] == (7, 8)
    return found


def trainers_of_what_differs_are_refused():
    """Sources that differ, meshes of one process, and what cannot be in several."""
    (FOLDER / "file").touch()  # seen by process 0, whose refusal stops all
    one = jax.sharding.Mesh(np.array(jax.local_devices()), ("data",))
    turned = jax.sharding.Mesh(np.array(jax.devices()[:: 1 - 2 * INDEX]), ("data",))
    whole = jax.sharding.NamedSharding(mesh(), jax.P())
    # As a program does that takes each process's own shard of the records for all of them.
    put = lambda x: jax.make_array_from_callback(x.shape, whole, lambda index: x[index])  # noqa: E731
    other, moved = X + INDEX, jax.tree.map(lambda leaf: leaf + INDEX, PARAMS)
    devices = "mesh must hold devices of all 2 processes"
    # The last record, which process 1 holds, and one that it alone cannot read.
    rows = jax.sharding.NamedSharding(mesh(), jax.P("data"))
    ill_of = np.where(np.arange(N)[:, None] < N - 1, X, np.nan).astype(np.float32)
    ill = jax.make_array_from_callback(X.shape, rows, lambda index: ill_of[index])
    gone = as_source([*map(tuple, X[:-1]), "a text"])

    def begun(params=PARAMS, **options):
        train = jaxdp.Trainer(loss_of, MECH, SGD, X, **{"mesh": mesh(), **options})
        try:
            train.init(params)
        finally:
            assert train.ledger.steps == 0

    all_refused(
        [
            (devices, lambda: trained(X), "no mesh"),
            (devices, lambda: trained(X, mesh=one)),
            (f"source {SAME}", lambda: trained(other, mesh=mesh())),
            ("source must be the same", lambda: jaxdp.Trainer(loss_of, MECH, SGD, put(other))),
            (f"source {SAME}", lambda: run("other", source=other).fit(2), "a run"),
            ("canaries must be 0 in several processes", lambda: run("canaries", canaries=10)),
            ("must be", lambda: run("file").fit(2)),
            ("params must be the same", lambda: begun(moved)),
            ("params must be the same", lambda: begun(jax.tree.map(put, moved)), "on the mesh"),
            ("mesh must be the same", lambda: begun(mesh=turned)),
            (f"physical_batch_size {SAME}", lambda: begun(physical_batch_size=8 + 8 * INDEX)),
            ("source must hold finite", lambda: trained(ill)),
            ("1 cannot go on|one with another", lambda: look_through(gone, everything=True)),
        ]
    )


def a_process_that_lost_a_step_releases_nothing():
    """Else both would add one noise to other sums, or other noises to one."""
    fixed = sgd_of(1.0, 1.0, 20, N, "fixed_size")
    for rows in (20, 8):  # a step of one physical batch, and of several
        options = {"mesh": mesh(), "physical_batch_size": rows}
        train = jaxdp.Trainer(loss_of, fixed, optax.sgd(0.1), X, **options)
        state, batches = train.init(PARAMS), train.batches(4)
        state, info = train.step(state, next(batches))
        assert np.isfinite(float(info.update_norm))
        if INDEX:  # its loop went on after an error
            next(batches)
        state, info = train.step(state, next(batches))
        assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(state.params))
        refused(f"step {SAME}", train.batches, 1)


def nothing_is_written_after_a_shutdown():
    """As programs end: process 0 was handed out three of eight steps, the other one five."""
    path = FOLDER / "shutdown.jsonl"
    sampler = MECH.sampler(N, ledger=jaxdp.Ledger(path), reserve=8)
    drawn(sampler, 3 + 2 * INDEX)
    processes.agree(drawn=True)
    jax.distributed.shutdown()
    for used in (sampler.draw, sampler.close):
        refused("closed before shutdown", used)
    sampler.ledger.close()
    assert sampler.ledger.steps == jaxdp.Ledger(path).steps == 8


if HERE:
    lower_quickly()
    processes.PATIENCE = 240.0  # a fault is a failed test, and not a long one
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, INDEX)
    try:
        for name, scenario in list(globals().items()):
            if getattr(scenario, "__module__", "") == __name__ and name.count("_") > 1:
                print(json.dumps([name, scenario()]), flush=True)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # JAX would wait for the other process
