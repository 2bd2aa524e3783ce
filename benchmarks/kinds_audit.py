"""Noise on a grid or correlated, users, several processes: in two worlds, beside planted faults.

python -m benchmarks.kinds_audit [--quick] [--only grid]

As benchmarks.sampling_audit: the loop's own sampler, clipping and noise, gradients that are
known, the log-likelihood ratio of the sampled Gaussian, thresholds and seed fixed beforehand. Of
several processes two are really started, and take the steps of a ``Trainer`` over one mesh.
Correlated noise: benchmarks.kinds_correlated. Writes benchmarks/results/kinds_audit.json.
"""

import argparse
import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import special, stats

import jaxdp
from benchmarks.kinds_correlated import Correlated
from benchmarks.sampling_audit import DIRECTION, Case, loss_fn, released, scores
from jaxdp import clipping
from jaxdp.accounting import Relation
from jaxdp.audit import audit_event, audit_scores
from jaxdp.noise import grid
from jaxdp.noise.grid import grid_scale
from jaxdp.optimizers import Algorithm
from jaxdp.sampling import CyclicAllocation, CyclicPoisson, FixedOrder, Poisson
from jaxdp.sampling.users import User, users

RESULT = Path(__file__).parent / "results" / "kinds_audit.json"
SEED = 20_261_124  # not tried before; the attacks were not changed after a run with it
RECORDS = 3  # of a user


@dataclasses.dataclass(frozen=True)
class Grid(Case):
    """Noise on an integer grid; ``share`` of the charged one is a planted fault below 1.

    The fault is in the grid's own scale: a mechanism of another multiplier than was charged gives
    NaN, which nobody can miss.
    """

    share: float = 1.0

    def mechanism(self, run: int = 0) -> jaxdp.Mechanism:
        return dataclasses.replace(super().mechanism(run), noise="grid")

    def scores(self, sums: np.ndarray) -> np.ndarray:
        return scores(dataclasses.replace(self, noise=self.share * self.noise), sums)

    def sums(self, there: bool) -> np.ndarray:
        def coarse(*given):
            return grid_scale(*given) / self.share

        with mock.patch.object(grid, "grid_scale", coarse):
            return released(self, there)


@dataclasses.dataclass(frozen=True)
class OfUsers(Case):
    """Users of three records each, drawn by Poisson sampling; one is there or not.

    All that she has pulls one way.
    """

    def mechanism(self, run: int = 0) -> jaxdp.Mechanism:
        return dataclasses.replace(super().mechanism(run), records_per_user=RECORDS)

    def data(self, there: bool) -> User:
        rows = np.repeat(super().data(there), RECORDS, axis=0)
        ids = np.repeat(np.arange(len(rows) // RECORDS), RECORDS)
        source = users(rows, ids, RECORDS)
        return source.gather(np.arange(len(source)), np.ones(len(source), bool))

    def loss_fn(self, params, example):
        return clipping.user_loss(loss_fn)(params, example)


@dataclasses.dataclass(frozen=True)
class UsersAsRecords(Case):
    """A planted fault: records are drawn and clipped one by one, and charged as users."""

    def data(self, there: bool) -> np.ndarray:
        rows = super().data(True)
        rows[-RECORDS:] = rows[-1]
        return rows if there else rows[:-RECORDS]

    def scores(self, sums: np.ndarray) -> np.ndarray:
        times = np.arange(RECORDS + 1)
        logs = stats.binom.logpmf(times, RECORDS, self.sampling.sampling_prob)
        ratios = (2 * times * sums[..., None] - times**2) / (2 * self.noise**2)
        return special.logsumexp(logs + ratios, axis=-1).sum(axis=1, keepdims=True)


@dataclasses.dataclass(frozen=True)
class Processes(Case):
    """Steps of a ``Trainer`` in two processes; ``own`` is a planted fault.

    Each process then adds noise of its own, of the charged standard deviation over their number:
    the sum has that over the root of their number.
    """

    own: bool = False

    def noise_link(self) -> optax.GradientTransformation:
        charged = self.mechanism()
        inner, std = charged.privatize(), self.noise / charged.batch_size

        def update(summed, state, params=None, *, key):
            words, batch = jax.random.wrap_key_data(key.part("gradient")[0]), charged.batch_size
            mean = jax.tree.map(lambda leaf: leaf / batch, summed.value)
            noisy, state = inner.update(summed, state, params, key=key)
            second = jax.random.normal(jax.random.fold_in(words, 1), (2,)) * std
            own = jax.tree.map(lambda n, m: m + (n - m) / 2 + second / 2, noisy, mean)
            return own, state

        return optax.GradientTransformationExtraArgs(inner.init, update)

    def steps_of(self, there: bool, folder: Path) -> None:
        """One process's part: all runs are stretches of one stream of independent steps."""
        algorithm = Algorithm(self.mechanism(), optax.sgd(1.0))
        if self.own:
            algorithm = dataclasses.replace(algorithm, noise=self.noise_link())
        trainer = jaxdp.Trainer(
            loss_fn, algorithm, None, self.data(there),
            secret=jaxdp.Secret.from_seed(self.seed + there),
            mesh=jax.make_mesh((jax.device_count(),), ("data",)),
        )  # fmt: skip
        state, moves = trainer.init(jnp.zeros(2)), []
        for batch in trainer.batches(self.steps * self.runs):
            before = np.asarray(state.params)
            state, _ = trainer.step(state, batch)
            moves.append(before - np.asarray(state.params))
        if jax.process_index() == 0:
            sums = np.stack(moves) @ DIRECTION * self.mechanism().batch_size
            np.save(folder / f"{there}.npy", sums.reshape(self.runs, self.steps))

    def scores(self, sums: np.ndarray) -> np.ndarray:
        return scores(dataclasses.replace(self, noise=self.noise / 2 ** (self.own / 2)), sums)


def of_processes(case: Processes) -> tuple[np.ndarray, np.ndarray]:
    """The noisy sums [runs, steps] of both worlds, by two processes that are started for it."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "case.json").write_text(json.dumps(_written(case)))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "benchmarks.kinds_audit", "--process", str(port), folder]
        environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
        started = [subprocess.Popen([*command, str(i)], env=environment) for i in range(2)]
        codes = [process.wait(timeout=500) for process in started]
        if any(codes):
            raise RuntimeError("a process failed")
        return np.load(place / "True.npy"), np.load(place / "False.npy")


def _written(case: Processes) -> dict:
    return {**vars(case), "sampling": case.sampling.sampling_prob, "relation": None}


def _process(port: str, folder: str, index: int) -> None:
    jax.distributed.initialize(f"localhost:{port}", 2, index)
    row = json.loads((Path(folder) / "case.json").read_text())
    del row["relation"]
    case = Processes(**{**row, "sampling": Poisson(row["sampling"])})
    for there in (True, False):
        case.steps_of(there, Path(folder))


def cases(quick: bool) -> dict[str, tuple[Case, bool]]:
    """Each case, and whether it is a planted fault. Ten steps at a rate of 1/10."""
    runs = 300 if quick else 1_000
    ten = {"steps": 10, "delta": 1e-3, "runs": runs, "records": 20, "rows": 20, "threshold": 1.5}
    ten |= {"seed": SEED}
    pairs = {**ten, "runs": 100 if quick else 1_000}
    faults = {**pairs, "threshold": None}  # the event is tested, on runs that chose nothing
    poisson, half = Poisson(0.1), Poisson(0.5)
    cyclic, passes = CyclicPoisson(0.2, 2, 10), FixedOrder(10, 10)
    zeroed = {"relation": Relation.REPLACE_SPECIAL}
    return {
        "noise on a grid": (Grid(poisson, 0.7, **ten), False),
        "fault: half of the grid's noise": (Grid(poisson, 1.4, **faults, share=0.5), True),
        "users": (OfUsers(poisson, 0.7, **ten), False),
        "fault: a user's records drawn and clipped one by one": (
            UsersAsRecords(poisson, 1.4, **{**faults, "records": 60, "rows": 60}), True,
        ),
        "two processes": (Processes(poisson, 0.7, **pairs), False),
        "fault: each process adds its own half of the noise": (
            Processes(half, 1.4, **faults, own=True), True,
        ),
        "correlated: two bands, cyclic Poisson": (Correlated(cyclic, 0.8, **ten), False),
        "correlated: two bands, cyclic Poisson, on a grid": (
            Correlated(cyclic, 0.8, **ten, law="grid"), False,
        ),
        "correlated: two bands, cyclic allocation": (
            Correlated(CyclicAllocation(5, 2, 10), 0.8, **ten), False,
        ),
        "correlated: square root, fixed order": (Correlated(passes, 1.0, **ten, **zeroed), False),
        "correlated: square root, fixed order, on a grid": (
            Correlated(passes, 1.0, **ten, **zeroed, law="grid"), False,
        ),
        "fault: correlated, cyclic, half of the sensitivity": (
            Correlated(cyclic, 1.0, **faults, share=0.5), True,
        ),
        "fault: correlated, fixed order, half of the sensitivity": (
            Correlated(passes, 2.0, **faults, **zeroed, share=0.5), True,
        ),
    }  # fmt: skip


def found(case: Case) -> tuple[float, float]:
    """The lower bound on epsilon, and the p-value of the event that was charged."""
    if isinstance(case, Processes):
        sums = of_processes(case)
    else:
        sums = tuple(case.sums(there) for there in (True, False))
    inside, outside = (case.scores(each)[:, 0] for each in sums)
    bound = audit_scores(inside, outside, case.delta, threshold=case.threshold).epsilon
    event = case.mechanism().total(case.steps)
    return bound, audit_event(inside, outside, event, relation=case.relation).p_value


def row(case: Case, fault: bool) -> dict:
    """What is proven for the charge, and what is audited."""
    begun = time.perf_counter()
    proven = case.mechanism().epsilon(case.steps, case.delta, case.relation).upper
    bound, p_value = found(case)
    return {
        "sampling": repr(case.sampling), "relation": case.relation.value,
        "noise_multiplier": case.noise, "steps": case.steps,
        "delta": case.delta, "runs": 2 * case.runs, "fault": fault, "proven": proven,
        "audited": bound, "above": bound > proven, "p_value": p_value,
        "seconds": round(time.perf_counter() - begun, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the runs; writes nothing")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--process", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.process:
        _process(given.process[0], given.process[1], int(given.process[2]))
        return
    for name, (case, fault) in cases(given.quick).items():
        if given.only not in name:
            continue
        # Chosen with another seed; the seed of the results was used once.
        shown = row(dataclasses.replace(case, seed=7) if given.quick else case, fault)
        print(name, shown, flush=True)
        if not given.quick:
            rows = json.loads(RESULT.read_text()) if RESULT.exists() else {}
            RESULT.write_text(json.dumps({**rows, name: shown}, indent=1) + "\n")


if __name__ == "__main__":
    main()
