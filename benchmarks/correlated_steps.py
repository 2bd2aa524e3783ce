"""The noise of one step, correlated and independent, ours and jax_privacy's: time and memory."""

import gc
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import jaxdp
from benchmarks import networks, networks_large
from benchmarks.gradients import clipped
from jaxdp.ledger.tickets import simulated_key
from jaxdp.noise import MatrixNoise, Strategy, identity, optimise, privatize, strategies
from jaxdp.noise.normals import add_normals

STEPS, BATCH = 1_000, 64.0
# Bytes of state and temporary memory from which a contender is only compiled.
MOST = 12e9


class WideMLP(nn.Module):
    """784-1000-200-10."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.relu(nn.Dense(200)(nn.relu(nn.Dense(1000)(x)))))


NETWORKS = {
    "mlp": lambda: networks._classifier(WideMLP(), jax.random.normal(jax.random.key(0), (64, 784))),
    "transformer": lambda: networks_large.gpt(64, 64, 1_500, 128, 4, 4),
    "gpt2": lambda: networks_large.gpt(8, 128),
}


def made() -> dict[str, Strategy]:
    """The strategies by name."""
    return {
        "independent": identity(STEPS),
        **{f"banded {b}": optimise.optimal_banded(STEPS, b) for b in (4, 8, 16)},
        **{f"buffered {m}": optimise.optimal_buffered(STEPS, m) for m in (2, 4)},
        "lambda": strategies.MadeAgain((1.0, -0.9), STEPS),
        **{
            f"banded inverse {b}": strategies.banded_inverse_square_root(STEPS, b)
            for b in (2, 4, 8)
        },
    }


def ours(strategy: Strategy, independent: bool) -> tuple[Any, Any, Any]:
    """(update of sum, state and key; init; the key of each step)."""
    adds = MatrixNoise(1.0, strategy)
    link, part = privatize(adds, BATCH), adds.part
    if independent:
        link, part = jaxdp.privatize(1.0, BATCH), "gradient"

    def update(total, state, key):
        return link.update(jaxdp.Summed(total, 1.0), state, key=key)

    def key(step):
        each = [jax.random.fold_in(jax.random.key(7), at) for at in (step, max(step - 1, 0))]
        return simulated_key(each[0], {part: 1.0}, step, each[1])

    return update, link.init, key


def peers(strategy: Strategy) -> tuple[Any, Any, Any] | None:
    """The same by jax_privacy; None for a banded inverse, which it has no stream of."""
    from jax_privacy import noise_addition
    from jax_privacy.matrix_factorization import buffered_toeplitz, streaming_matrix, toeplitz

    if isinstance(strategy, strategies.Buffered):
        matrix = buffered_toeplitz.StreamingMatrixBuilder(
            buf_decay=np.asarray(strategy.decays, np.float32),
            output_scale=np.asarray(strategy.scales, np.float32),
        ).build_inverse()
    elif isinstance(strategy, strategies.BandedInverse):
        return None
    elif strategy.bands == 1:
        matrix = streaming_matrix.identity()
    else:
        coefficients = jnp.asarray(strategy.coefficients, jnp.float32)
        matrix = toeplitz.inverse_as_streaming_matrix(coefficients)
    link = noise_addition.matrix_factorization_privatizer(matrix, stddev=1.0, prng_key=0)

    def update(total, state, key):
        noisy, state = link.update(total, state)
        return jax.tree.map(lambda leaf: leaf / BATCH, noisy), state

    return update, link.init, lambda step: ()


def again(strategy: strategies.BandedInverse) -> tuple[Any, Any, Any]:
    """A banded inverse without buffers: the normals of earlier steps are made again."""
    weights = np.asarray(strategy.coefficients, np.float32)

    def update(total, state, words):
        for weight, each in zip(weights, words, strict=True):
            total = add_normals(total, weight, each)
        return jax.tree.map(lambda leaf: leaf / BATCH, total), state

    def words(step):
        key = jax.random.fold_in(jax.random.key(7), step)
        return jax.random.key_data(jax.random.split(key, len(weights)))

    return update, lambda params: (), words


def contenders(peer: bool) -> dict[str, tuple[Any, Any, Any]]:
    """(update, init, key) by label."""
    found: dict[str, tuple[Any, Any, Any]] = {}
    for name, strategy in made().items():
        found[f"{name}, jaxdp"] = ours(strategy, name == "independent")
        other = peers(strategy) if peer else None
        if other is not None:
            found[f"{name}, jax_privacy"] = other
        if name.startswith("banded inverse"):
            found[f"{name}, made again"] = again(strategy)
    return found


class Runner:
    """One contender's compiled update, which goes on from its own state."""

    def __init__(self, contender: tuple[Any, Any, Any], params: Any):
        update, self.init, self.key = contender
        self.params, self.step, self.at = params, 0, None
        state = jax.eval_shape(self.init, params)
        key = jax.device_get(self.key(0))
        self.run = jax.jit(update, donate_argnums=(0, 1)).lower(params, state, key).compile()
        found = self.run.memory_analysis()
        self.temporary, self.arguments = found.temp_size_in_bytes, found.argument_size_in_bytes

    def seconds(self) -> float:
        """Of one more step."""
        if self.at is None:
            fresh = jax.jit(lambda p: (jax.tree.map(jnp.zeros_like, p), self.init(p)))
            self.at = fresh(self.params)
        key = jax.device_get(self.key(self.step))
        began = time.perf_counter()
        self.at = jax.block_until_ready(self.run(*self.at, key))
        self.step += 1
        return time.perf_counter() - began


def measured(name: str, peer: bool, rounds: int) -> dict[str, Any]:
    """Milliseconds and megabytes of every contender, and of the step's clipped gradient."""
    params, loss_fn, batch = NETWORKS[name]()
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    step = clipped(loss_fn)
    jax.block_until_ready(step(params, batch))
    gradient = lambda: _timed(lambda: step(params, batch))  # noqa: E731
    runners = {label: Runner(each, shapes) for label, each in contenders(peer).items()}
    size = sum(p.size for p in jax.tree.leaves(params))
    times = (_together if size < 10e6 else _one_by_one)(runners, gradient, rounds)
    base = statistics.median(times["gradient"])
    rows = {label: _row(runners[label], times.get(label), base) for label in runners}
    for label, row in rows.items():
        row |= _ratios(label, times)
    found = {"parameters": size, "gradient, ms": _ms(base), "rounds": len(times["gradient"])}
    print(name, found, flush=True)
    for label, row in rows.items():
        print(f"  {label:32} {row}", flush=True)
    return found | {"rows": rows}


def _together(runners: dict[str, Runner], gradient: Callable[[], float], rounds: int) -> Any:
    """Seconds by label, all in turn; the first step of each is not counted."""
    for each in runners.values():
        each.seconds()
    times: dict[str, list[float]] = {"gradient": [], **{label: [] for label in runners}}
    for _ in range(rounds):
        times["gradient"].append(gradient())
        for label, each in runners.items():
            times[label].append(each.seconds())
    return times


def _one_by_one(runners: dict[str, Runner], gradient: Callable[[], float], rounds: int) -> Any:
    """The same one after the other, where the states of all together are too large."""
    times: dict[str, list[float]] = {"gradient": [gradient() for _ in range(3)]}
    for label, each in runners.items():
        if each.temporary + each.arguments > min(MOST, 0.8 * _free()):
            continue
        each.seconds()
        times[label] = [each.seconds() for _ in range(min(rounds, 3))]
        each.at = None
        gc.collect()
        print(f"  {label}: {statistics.median(times[label]):.2f} s", flush=True)
    return times


def _free() -> float:
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _row(runner: Runner, times: list[float] | None, base: float) -> dict[str, Any]:
    memory = {
        "temporary, MB": round(runner.temporary / 1e6, 1),
        "arguments, MB": round(runner.arguments / 1e6, 1),
    }
    if times is None:
        return {"ms": None} | memory
    median = statistics.median(times)
    share = round(median / base, 3)
    return {"ms": _ms(median), "least, ms": _ms(min(times)), "over the gradient": share} | memory


def _ratios(label: str, times: dict[str, list[float]]) -> dict[str, float]:
    """Medians over the rounds: over independent noise, and over the peer in the same round."""
    name, who = label.split(", ")
    others = {"over independent": "independent, jaxdp", "over jax_privacy": f"{name}, jax_privacy"}
    return {
        key: round(
            statistics.median(a / b for a, b in zip(times[label], times[other], strict=True)), 2
        )
        for key, other in others.items()
        if who == "jaxdp" and other != label and {label, other} <= times.keys()
    }


def _timed(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - began


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)
