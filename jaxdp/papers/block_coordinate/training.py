"""Takes the steps of block coordinate descent in a run: as ``jaxdp.Trainer``, for sweeps."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import accounting as acc
from jaxdp.devices import processes
from jaxdp.ledger import Ledger
from jaxdp.ledger.durable import write_atomically
from jaxdp.ledger.tickets import Issuer, Ticket
from jaxdp.papers.block_coordinate.hidden import HiddenBlocks, secret_partition, train_block
from jaxdp.papers.block_coordinate.network import Weights
from jaxdp.papers.block_coordinate.released import ReleasedBlocks
from jaxdp.sampling import Sampler
from jaxdp.training.trainer import TrainState
from jaxdp.types import Draw, StepInfo

Data = tuple[jax.Array, jax.Array]
Step = tuple[TrainState, StepInfo, list[Any]]


def named(weights: Weights) -> dict[str, jax.Array]:
    """The weights by name, as checkpoints and exports have them."""
    return {f"block_{number:02}": w for number, w in enumerate(weights)}


def unnamed(params: dict[str, jax.Array]) -> Weights:
    """The weights of ``named``."""
    return tuple(params[name] for name in sorted(params))


class _Charging:
    """A ledger and an issuer on it, for both kinds of training."""

    def __init__(self, ledger: Ledger, issuer: Issuer):
        processes.require_single_process("a run of block coordinate descent")
        self.ledger, self.issuer = ledger, issuer

    def epsilon(self, delta: float, relation: acc.Relation) -> acc.Bound:
        """Bounds on epsilon for everything charged and handed out so far."""
        return self.ledger.epsilon(delta, relation)

    def released(self, state: TrainState) -> dict[str, jax.Array]:
        """The weights to evaluate and publish."""
        return state.params

    def moved(self, state: TrainState, weights: Weights) -> Step:
        """The state after a step, and how far the released weights moved."""
        squares = (
            jnp.sum((new - old) ** 2)
            for new, old in zip(weights, unnamed(state.params), strict=True)
        )
        past = np.frombuffer(self.ledger.head, np.uint32)
        new = TrainState(named(weights), state.opt_state, state.step + 1, past)
        return new, StepInfo(jnp.sqrt(sum(squares))), []


class SweepTrainer(_Charging):
    """The sweeps of R1: each is charged, drawn and released.

    Args:
        algorithm: R1.
        data: (x [N, d_0], y [N, d_L]) on the device.
        ledger: of the run.
        issuer: of ``Charged(algorithm)``, on the run's stream.
    """

    def __init__(self, algorithm: ReleasedBlocks, data: Data, ledger: Ledger, issuer: Issuer):
        super().__init__(ledger, issuer)
        count = len(data[0])
        algorithm.sampling.check(count, algorithm.dataset_size)
        self._algorithm, self._data = algorithm, data
        self._sampler = Sampler(algorithm.sampling, count, algorithm.physical_batch_size, issuer)

    def batches(self, steps: int) -> Iterator[Draw]:
        """The next draws, each charged when it is handed out; the run has reserved them."""
        for _ in range(steps):
            yield self._sampler.draw()

    def step_with_info(self, state: TrainState, draw: Draw, return_info: bool = False) -> Step:
        """One sweep; nothing un-noised is told."""
        del return_info
        return self.moved(state, self._algorithm.step(unnamed(state.params), self._data, draw))


class HiddenTrainer(_Charging):
    """A whole run of R2 or R3 as one step: one charge, one secret partition, one release.

    Nothing leaves it before its end. Blocks that are trained are kept in ``kept``, a secret file,
    so that a run which was killed need not train them again. It goes on with the same partition,
    which belongs to the event, and with fresh noise. Of a block in training nothing is kept, not
    even in secret: its inner iterates never leave the compiled loop.

    Args:
        algorithm: R2 or R3.
        data: (x [N, d_0], y [N, d_L]), N the declared size.
        ledger: of the run.
        issuer: of ``ChargedWhole(algorithm)``, on the run's stream.
        kept: path of the secret file.
    """

    def __init__(
        self, algorithm: HiddenBlocks, data: Data, ledger: Ledger, issuer: Issuer, kept: Path
    ):
        super().__init__(ledger, issuer)
        if len(data[0]) != algorithm.dataset_size:
            raise ValueError(
                f"dataset_size must be the number of records ({len(data[0])}) for a fixed "
                f"partition, got {algorithm.dataset_size}"
            )
        self._algorithm, self._data, self._kept = algorithm, data, kept

    def batches(self, steps: int) -> Iterator[Ticket]:
        """The ticket of the run, once it is charged."""
        for _ in range(steps):
            if (ticket := self.issuer.take(until=self.issuer.next + 1)) is not None:
                yield ticket

    def step_with_info(self, state: TrainState, ticket: Ticket, return_info: bool = False) -> Step:
        """The whole run."""
        del return_info
        # The same at every start of the run, and another one where it is charged anew; of a seed
        # that a person chose, another one in a run of other settings.
        name = f"{self._algorithm!r}|{self.issuer.stream}|{ticket.step}"
        rng = self.issuer.secret.child(name).philox("partition", 0)
        batches = secret_partition(self._data, self._algorithm.batch_size, rng)
        words = ticket.spend("a hidden run", verified=True).words[0]
        key = jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")
        weights, done = self._restored(unnamed(state.params), name)
        for at, (sweep, block) in enumerate(self._algorithm.order):
            if at < done:
                continue
            one = jax.random.fold_in(key, at)
            weights = train_block(self._algorithm, block, weights, batches, one, sweep, None)
            self._keep(weights, at + 1, name)
        return self.moved(state, weights)

    def _keep(self, weights: Weights, done: int, name: str) -> None:
        text = [base64.b64encode(np.asarray(w, np.float32).tobytes()).decode() for w in weights]
        row = {"release": name, "done": done, "weights": text}
        write_atomically(self._kept, json.dumps(row), mode=0o600)

    def _restored(self, start: Weights, name: str) -> tuple[Weights, int]:
        """The blocks of this very release that were trained before, and how many."""
        if not self._kept.exists():
            return start, 0
        try:
            row = json.loads(self._kept.read_text(encoding="utf-8"))
            if row["release"] != name:  # charged anew, on another partition
                return start, 0
            parts = [np.frombuffer(base64.b64decode(t), np.float32) for t in row["weights"]]
            shaped = (p.reshape(w.shape) for p, w in zip(parts, start, strict=True))
            return tuple(jnp.asarray(w) for w in shaped), int(row["done"])
        except (ValueError, KeyError, TypeError, RecursionError):  # damaged: it was seen by nobody
            return start, 0
