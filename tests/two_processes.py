"""One of two processes: run by test_processes.py, ``python -m tests.two_processes PORT INDEX DIR``.

Prints one line of JSON for every scenario, by name; the test compares the two processes. Those here
are of ledgers and samplers; with ``trainers`` behind DIR, those of tests/two_trainers.py are taken.
"""

import json
import os
import sys
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxdp
from jaxdp import _durable, _processes
from jaxdp import accounting as acc
from jaxdp._entries import Entry
from tests import two_trainers
from tests.two_trainers import refused

INDEX, FOLDER = int(sys.argv[2]), Path(sys.argv[3])
EARLY = jaxdp.Ledger()
EARLIER = jaxdp.Ledger()
EARLIER.charge(acc.Gaussian(2.0), 4)
TEXT = EARLIER.to_json()
MECH = jaxdp.dp_sgd(1.0, 1.0, 20, 200)


def drawn(sampler, count=3):
    """The positions and the noise keys of so many draws."""
    draws = [sampler.draw() for _ in range(count)]
    positions = [np.sort(draw.indices[draw.mask]).tolist() for draw in draws]
    return positions, [draw.key().words.tolist() for draw in draws]


def the_draws_and_keys_are_one():
    sampler, seeded = MECH.sampler(200), MECH.sampler(200, secret=jaxdp.Secret.from_seed(3))
    found = drawn(sampler), drawn(seeded)
    return *found, sampler.ledger.steps, sampler.ledger.epsilon(1e-5).upper


def a_file_is_written_once():
    path = FOLDER / "ledger.jsonl"
    sampler = MECH.sampler(200, ledger=jaxdp.Ledger(path), reserve=4)
    found = drawn(sampler, 6)
    _processes.first(lambda: "")  # nobody looks at the file before both are done
    entries = [entry.to_dict() for entry in jaxdp.Ledger(path).entries]
    sampler.close()
    head = sampler.ledger.head.hex()
    sampler.ledger.close()
    again = jaxdp.Ledger(path)
    later = drawn(MECH.sampler(200, ledger=again), 2)
    again.close()
    return entries, (again.steps, again.begun), head, found, later


def a_long_file_is_told_in_parts():
    path = FOLDER / "long.jsonl"
    if INDEX == 0:
        with path.open("w", encoding="utf-8") as file:  # of the format before there was a chain
            for step in range(1_200):
                entry = Entry(acc.Gaussian(1.0 + step % 2), step, 1, "old")
                file.write(json.dumps(entry.to_dict()) + "\n")
    _processes.first(lambda: "")
    ledger = jaxdp.Ledger(path)
    ledger.charge(acc.Gaussian(3.0))
    return ledger.steps, ledger.head.hex()


def other_mechanisms_are_refused():
    mech = jaxdp.dp_sgd(1.0, 1.0, 20 + INDEX, 200)
    path = FOLDER / "other.jsonl"
    said = refused(lambda: mech.sampler(200, ledger=jaxdp.Ledger(path)))
    return said.split(";")[0], path.exists()


def what_is_refused():
    charged, seed = jaxdp.Ledger(), jaxdp.Secret.from_seed(INDEX)
    charged.charge(acc.Gaussian(2.0), stream="a")
    return {
        "secrets": refused(lambda: MECH.sampler(200, secret=seed)).split(";")[0],
        "one step twice": refused(lambda: charged.charge(acc.Gaussian(2.0), stream="a")),
        "a ledger from before": refused(lambda: MECH.sampler(200, ledger=EARLY)),
        "a projection": refused(lambda: jaxdp.preprocess.dp_pca(np.eye(4) + INDEX, 2, 1.0)),
    }


def other_events_are_refused():
    ledger = jaxdp.Ledger()
    ledger.charge(acc.Gaussian(1.0), stream="a")
    said = refused(lambda: ledger.charge(acc.Gaussian(1.0 + INDEX), stream="a", first_step=1))
    return said is None if INDEX == 0 else "process 0 charged" in said


def charges_by_hand_are_one():
    ledger, old = jaxdp.Ledger(), jaxdp.Ledger.from_json(TEXT)
    for each in (ledger, ledger, ledger, old):
        each.charge(acc.Gaussian(2.0))
    return [(each.steps, each.epsilon(1e-5).upper) for each in (ledger, old)], ledger.to_json()


def what_process_0_cannot_write_nobody_draws():
    sampler = MECH.sampler(200, ledger=jaxdp.Ledger(FOLDER / "full.jsonl"))
    drawn(sampler, 1)
    write = _durable.append_line

    def full(file, line):
        raise OSError(28, "No space left on device")

    _durable.append_line = full
    said = refused(sampler.draw)
    _durable.append_line = write
    _processes.first(lambda: "")
    return "No space left" in said, drawn(sampler, 1)  # and then there is room


def more_are_charged_than_used_and_none_given_back():
    path = FOLDER / "ahead.jsonl"
    sampler = MECH.sampler(200, ledger=jaxdp.Ledger(path), reserve=8)
    first = drawn(sampler, 3)
    sampler.close()
    return first, drawn(sampler, 2), sampler.ledger.steps


def a_sum_of_one_process_is_refused():
    # As in other libraries: each process has its own shard, and no mesh.
    own = np.full((100, 3), 1.0 + INDEX, np.float32)
    grad_fn, sampler = MECH.clipped_grad(lambda w, x: jnp.sum(w * x)), MECH.sampler(100)
    tx = MECH.privatize()
    params, draw = jnp.zeros(3), sampler.draw()
    summed, _ = grad_fn.sum(params, own, draw)
    eager = refused(lambda: tx.update(summed, tx.init(params), params))
    own_step = refused(lambda: jaxdp.compile_update(tx)(params, tx.init(params), summed))
    gridded = jaxdp.dp_sgd(1.0, 1.0, 20, 200, noise="grid")
    draw = gridded.sampler(100).draw()
    summed, _ = gridded.clipped_grad(lambda w, x: jnp.sum(w * x)).sum(params, own, draw)
    link = gridded.privatize()
    on_grid = refused(lambda: link.update(summed, link.init(params), params))
    return eager is not None, own_step is not None, on_grid is not None


def told(names, module):
    """Prints what every scenario of a module returns; ends at once where one fails."""
    try:
        for name, scenario in list(names.items()):
            if getattr(scenario, "__module__", "") == module and name.count("_") > 1:
                print(json.dumps([name, scenario()]), flush=True)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # JAX would wait for the other process


if __name__ == "__main__":
    _processes.PATIENCE = 240.0  # a fault is a failed test, and not a long one
    two_trainers.INDEX, two_trainers.FOLDER = INDEX, FOLDER
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, INDEX)
    if sys.argv[4:] == ["trainers"]:
        told(vars(two_trainers), two_trainers.__name__)
    else:
        told(globals(), __name__)
