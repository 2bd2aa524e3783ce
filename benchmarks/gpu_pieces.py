"""What `python -m benchmarks.gpu` measures in JAX: each piece yields its figures as they come."""

import functools
import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import special

import jaxdp
from benchmarks import networks, networks_gpu
from jaxdp.noise import grid, normals
from jaxdp.noise._integers import integers

CLIP = 0.1
SMALL = jax.default_backend() == "cpu"
ROUNDS, SECONDS = (2, 0.0) if SMALL else (7, 0.02)
MOST_ROWS = 2**4 if SMALL else 2**18
# How products are computed: of the device's default (TF32 on an NVIDIA GPU, bfloat16 passes on a
# TPU), in full float32, or with a loss that casts parameters and examples to bfloat16.
PRECISIONS = ("default", "float32", "bfloat16")

Figures = Iterator[dict[str, Any]]


def device() -> Figures:
    """Which device, and what computes on it."""
    from importlib import metadata

    found = {"device": jax.devices()[0].device_kind, "count": len(jax.devices())}
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    peers = {
        name: metadata.version(name)
        for name in ("jax_privacy", "opacus", "torch")
        if importlib.util.find_spec(name)
    }
    yield {
        **found,
        "megabytes": limit and round(limit / 2**20),
        "jax": jax.__version__,
        "jaxdp": jaxdp.__version__,
        **peers,
    }


def network(name: str) -> networks_gpu.Network:
    return networks_gpu.made(name, SMALL)


def size_of(batch: Any) -> int:
    return len(jax.tree.leaves(batch)[0])


# Gradients.


def ordinary(net: networks_gpu.Network) -> Any:
    """The gradient of the mean loss of a batch: (trained, frozen, rows) -> a tree like trained."""

    def mean(trained: Any, frozen: Any, rows: Any) -> Any:
        return jax.vmap(net.loss_of_parts, (None, None, 0))(trained, frozen, rows).mean()

    return jax.jit(jax.grad(mean))


def clipped(net: networks_gpu.Network, engine: str = "auto", info: bool = False) -> Any:
    """The clipped sum of a batch, with ``info`` the norms too: of (parameters, rows)."""
    grad_fn = jaxdp.clipped_grad(
        net.loss_fn, jaxdp.clip(CLIP), engine, trainable=net.trainable, most_records=MOST_ROWS
    )

    def summed(params: Any, rows: Any) -> Any:
        found, more = grad_fn.with_info(params, rows, "all")
        return (found.value, more.norms) if info else found.value

    return jax.jit(summed)


def jax_privacy_of(net: networks_gpu.Network) -> Any:
    import jax_privacy

    return jax.jit(
        jax_privacy.clipped_grad(
            net.loss_of_parts, batch_argnums=2, l2_clip_norm=CLIP, keep_batch_dim=False
        )
    )


def contenders(net: networks_gpu.Network) -> dict[str, Callable[[Any], tuple[Any, tuple]]]:
    """Label -> of the rows of a batch the jitted gradient and its arguments."""
    found = {
        "ordinary": lambda rows: (ordinary(net), (*net.parts, rows)),
        "jaxdp": lambda rows: (clipped(net), (net.params, rows)),
        "jaxdp, vmap": lambda rows: (clipped(net, "vmap"), (net.params, rows)),
    }
    if importlib.util.find_spec("jax_privacy"):
        found["jax_privacy"] = lambda rows: (jax_privacy_of(net), (*net.parts, rows))
    return found


def compiled(jitted: Any, args: tuple) -> tuple[Callable[[], Any], dict[str, float]]:
    """A function that runs the program, and seconds to trace and to compile it and its plan."""
    began = time.perf_counter()
    lowered = jitted.lower(*args)
    traced = time.perf_counter()
    program = lowered.compile()
    done = time.perf_counter()
    return lambda: program(*args), {
        "trace, s": round(traced - began, 2),
        "compile, s": round(done - traced, 2),
        "plan, MB": round(program.memory_analysis().temp_size_in_bytes / 2**20, 1),
    }


def in_turn(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Milliseconds of each, medians of rounds in which they run one after another.

    A round runs each so often that it takes ``SECONDS``, and waits once: what a device does, not
    how long a host takes to learn that it did.
    """
    times, seconds = {}, {name: [] for name in runs}
    for name, run in runs.items():
        began = time.perf_counter()
        jax.block_until_ready(run())
        times[name] = max(1, min(50, math.ceil(SECONDS / (time.perf_counter() - began))))
    for _ in range(ROUNDS):
        for name, run in runs.items():
            began = time.perf_counter()
            for _ in range(times[name]):
                out = run()
            jax.block_until_ready(out)
            seconds[name].append((time.perf_counter() - began) / times[name])
            del out
    return {name: round(1e3 * statistics.median(found), 3) for name, found in seconds.items()}


def over_ordinary(found: dict[str, float]) -> dict[str, float]:
    return {name: round(ms / found["ordinary"], 3) for name, ms in found.items()}


def gradient(name: str) -> Figures:
    """The clipped gradient of a batch beside the ordinary one and peers'."""
    net = network(name)
    found: dict[str, Any] = {"batch": size_of(net.batch), "programs": {}, "failed": {}}
    runs: dict[str, Callable[[], Any]] = {}
    for label, make in contenders(net).items():
        try:
            run, found["programs"][label] = compiled(*make(net.batch))
            jax.block_until_ready(run())
            runs[label] = run
        except Exception as error:  # it has no way to do this network, or no memory: a figure too
            found["failed"][label] = first_line(error)
        if "ordinary" not in runs:
            raise RuntimeError(f"no ordinary gradient: {found['failed']['ordinary']}")
        if len(runs) > 1:
            found["milliseconds"] = in_turn(runs)
            found["over ordinary"] = over_ordinary(found["milliseconds"])
        yield found


def precision(name: str) -> Figures:
    """Ordinary and clipped gradients in full float32 and with a loss in bfloat16."""
    net, found = network(name), {}
    for label in PRECISIONS[1:]:
        other = in_bfloat16(net) if label == "bfloat16" else net
        with jax.default_matmul_precision("highest" if label == "float32" else "default"):
            runs, programs = {}, {}
            for who in ("ordinary", "jaxdp"):
                runs[who], programs[who] = compiled(*contenders(other)[who](net.batch))
            milliseconds = in_turn(runs)
        found[label] = {
            "milliseconds": milliseconds,
            "over ordinary": over_ordinary(milliseconds),
            "programs": programs,
        }
        yield found


def in_bfloat16(net: networks_gpu.Network) -> networks_gpu.Network:
    """The same network by a loss that casts parameters and example, as its author would."""
    half = functools.partial(
        jax.tree.map, lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x
    )

    def loss_fn(params: Any, example: Any) -> Any:
        return net.loss_fn(half(params), half(example)).astype(jnp.float32)

    return networks_gpu.Network(net.params, loss_fn, net.batch, net.trainable)


def peak(name: str) -> Figures:
    """The most memory that was in use, in a process of its own: after each gradient."""
    net = network(name)
    if jax.devices()[0].memory_stats() is None:
        yield {"peak, MB": {}, "why": "the device does not tell its memory"}
        return
    at = lambda kind: jax.devices()[0].memory_stats()[kind] / 2**20  # noqa: E731
    jax.block_until_ready((net.params, net.batch))
    found: dict[str, Any] = {"parameters and batch, MB": round(at("bytes_in_use"), 1)}
    found["peak before, MB"] = round(at("peak_bytes_in_use"), 1)
    found["peak, MB"] = {}
    for label in ("ordinary", "jaxdp"):
        jitted, args = contenders(net)[label](net.batch)
        jax.block_until_ready(jitted(*args))
        # One that needs less than what ran before it shows that one's.
        found["peak, MB"][label] = round(at("peak_bytes_in_use"), 1)
        yield found


def largest(name: str) -> Figures:
    """The largest batch of one gradient, doubling until it does not fit, and its speed.

    It begins where the plan for the network's own batch says that the memory ends.
    """
    net = network(name)
    own, stats = size_of(net.batch), jax.devices()[0].memory_stats() or {}
    free = stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
    found: dict[str, Any] = {}

    def tried(label: str, rows: int) -> float | str:
        """Records a second, or why so many rows do not run."""
        try:
            run, _ = compiled(*contenders(net)[label](net.rows(rows)))
            jax.block_until_ready(run())
            began = time.perf_counter()
            jax.block_until_ready(run())
            return round(rows / (time.perf_counter() - began), 1)
        except Exception as error:
            return first_line(error)

    for label in ("ordinary", "jaxdp"):
        _, program = compiled(*contenders(net)[label](net.batch))
        each = max(1.0, program["plan, MB"] * 2**20 / own)
        rows, speeds, why = own, {}, None
        while rows * 2 <= MOST_ROWS and rows * 2 * each < 0.9 * free:
            rows *= 2
        while 1 <= rows <= MOST_ROWS and rows not in speeds:
            speeds[rows] = tried(label, rows)
            if isinstance(speeds[rows], str):
                why, rows = speeds[rows], rows // 2
            elif why is None:
                rows *= 2
        right = [count for count, speed in speeds.items() if not isinstance(speed, str)]
        most = max(right, default=0)
        why = why or f"more than {MOST_ROWS:,} rows are not tried"
        found[label] = {"rows": most, "records a second": speeds.get(most), "end": why}
        yield found


# A step.


def step(name: str) -> Figures:
    """A whole private step by the front door, as it comes, beside an optax loop, in turn."""
    net = network(name)
    batch = size_of(net.batch)
    records = 8 * batch
    data = net.rows(records)
    found: dict[str, Any] = {"batch": batch}

    began = time.perf_counter()
    loops: dict[str, Any] = {"optax": Ordinary(net, data, batch)}
    loops["optax"].take(1)
    found["seconds to the first step"] = {"optax": round(time.perf_counter() - began, 2)}
    began = time.perf_counter()
    loops["jaxdp.Trainer"] = Private(net, data, batch)
    loops["jaxdp.Trainer"].take(1)
    seconds = round(time.perf_counter() - began, 2)
    found["seconds to the first step"]["jaxdp.Trainer"] = seconds
    found["rows of a physical batch"] = loops["jaxdp.Trainer"].trainer.physical_batch_size
    yield found

    steps = {}
    for label, loop in loops.items():
        loop.take(2 if SMALL else 5)  # a draw of several passes has programs of its own
        began = time.perf_counter()
        loop.take(1)
        wanted = 0 if SMALL else 0.25
        steps[label] = max(2, min(100, math.ceil(wanted / (time.perf_counter() - began))))
    taken: dict[str, list[dict[str, float]]] = {label: [] for label in loops}
    for _ in range(2 if SMALL else 5):
        for label, loop in loops.items():
            taken[label].append(loop.take(steps[label]))
    middle = {
        label: {
            kind: round(statistics.median(one[kind] for one in rounds), 3) for kind in rounds[0]
        }
        for label, rounds in taken.items()
    }
    ours, theirs = (middle[label]["step"] for label in ("jaxdp.Trainer", "optax"))
    found |= {
        "milliseconds": middle,
        "ratio": round(ours / theirs, 3),
        "records a second": round(1e3 * batch / ours),
    }
    yield found


class Ordinary:
    """A hand-written optax loop: the mean gradient of so many rows, gathered on the device."""

    def __init__(self, net: networks_gpu.Network, data: Any, batch: int):
        tx = optax.adam(1e-3)
        self.trained, self.frozen = net.parts
        self.trained = jax.tree.map(jnp.copy, self.trained)
        self.state, self.data, self.batch = tx.init(self.trained), data, batch
        self.rng = np.random.default_rng(0)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def one(trained: Any, state: Any, frozen: Any, data: Any, indices: Any) -> Any:
            rows = jax.tree.map(lambda x: x[indices], data)
            grads = ordinary(net)(trained, frozen, rows)
            updates, state = tx.update(grads, state, trained)
            return optax.apply_updates(trained, updates), state

        self.one = one

    def take(self, steps: int) -> dict[str, float]:
        """Milliseconds of a step, and of these those that the host was busy."""
        drawing, calling, whole = 0.0, 0.0, time.perf_counter()
        for _ in range(steps):
            began = time.perf_counter()
            indices = self.rng.integers(0, size_of(self.data), self.batch).astype(np.int32)
            drawn = time.perf_counter()
            self.trained, self.state = self.one(
                self.trained, self.state, self.frozen, self.data, indices
            )
            drawing, calling = drawing + drawn - began, calling + time.perf_counter() - drawn
        jax.block_until_ready(self.trained)
        return per_step(steps, time.perf_counter() - whole, drawing, calling)


class Private:
    """The trainer as it comes."""

    def __init__(self, net: networks_gpu.Network, data: Any, batch: int):
        mechanism = jaxdp.dp_sgd(
            noise_multiplier=1.0,
            l2_clip_norm=CLIP,
            batch_size=batch,
            dataset_size=size_of(data),
        )
        self.trainer = jaxdp.Trainer(
            net.loss_fn, mechanism, optax.adam(1e-3), data, trainable=net.trainable
        )
        self.state = self.trainer.init(net.params)

    def take(self, steps: int) -> dict[str, float]:
        """Milliseconds of a step; of these those for the next batch, and in the call of a step."""
        drawing, calling, whole = 0.0, 0.0, time.perf_counter()
        batches = iter(self.trainer.batches(steps, state=self.state))
        for _ in range(steps):
            began = time.perf_counter()
            batch = next(batches)
            drawn = time.perf_counter()
            self.state, _ = self.trainer.step(self.state, batch)
            drawing, calling = drawing + drawn - began, calling + time.perf_counter() - drawn
        jax.block_until_ready(self.state.params)
        return per_step(steps, time.perf_counter() - whole, drawing, calling)


def per_step(steps: int, whole: float, drawing: float, calling: float) -> dict[str, float]:
    """The same in milliseconds of one step."""
    found = {"step": whole, "next batch": drawing, "call": calling}
    return {kind: 1e3 * seconds / steps for kind, seconds in found.items()}


# Whether it is right there.


def bound() -> Figures:
    """The largest float64 norm of one record's clipped gradient, over what one record may add."""
    makers = {
        "cnn": networks.cnn,
        "mlp": networks.mlp,
        "transformer": functools.partial(
            networks.language_model, length=16, vocabulary=100, width=32
        ),
    }
    found: dict[str, float] = {}
    for name, make in makers.items():
        params, loss_fn, batch = make(16)
        for engine in ("auto", "ghost", "vmap"):
            grad_fn = jaxdp.clipped_grad(
                lambda p, b, f=loss_fn: 1e3 * f(p, b), jaxdp.clip(CLIP), engine
            )

            @jax.jit
            def one(params: Any, batch: Any, mask: Any, grad_fn: Any = grad_fn) -> Any:
                summed = grad_fn(params, batch, mask)
                return summed.value, summed.l2

            worst = 0.0
            for record in range(16):
                value, l2 = one(params, batch, np.arange(16) == record)
                worst = max(worst, norm_of(jax.tree.leaves(value)) / float(l2))
            found[f"{name}, {engine}"] = worst
            yield {"norm over l2": found, "held": max(found.values()) <= 1.0}


def exact(name: str) -> Figures:
    """Largest relative errors of norms and sum of four records against the vmap engine.

    The reference is in full float32: of the small network on the CPU.
    """
    net, rows = network(name), network(name).rows(4)
    cpu = cpu_device() if name == "cnn" or SMALL else None
    with jax.default_matmul_precision("highest"), jax.default_device(cpu):
        given = (net.params, rows) if cpu is None else jax.device_put((net.params, rows), cpu)
        total, norms = jax.device_get(clipped(net, "vmap", info=True)(*given))
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(total)]
    where = "same device" if cpu is None else "CPU"
    found: dict[str, Any] = {"reference": f"vmap in float32, {where}"}
    for label, engine in (("float32", "auto"), ("default", "auto"), ("default", "vmap")):
        with jax.default_matmul_precision("highest" if label == "float32" else "default"):
            other, again = clipped(net, engine, info=True)(net.params, rows)
        gap = [np.asarray(a) - b for a, b in zip(jax.tree.leaves(other), leaves, strict=True)]
        found[f"{engine}, {label}"] = {
            "norms": float(np.max(np.abs(np.asarray(again, np.float64) / norms - 1.0))),
            "sum": norm_of(gap) / norm_of(leaves),
        }
        yield found


def noise() -> Figures:
    """The law of both noises for one key on this device, and whether the CPU makes the same."""
    count = 10_000 if SMALL else 1_000_000
    words = np.asarray([7, 11], np.uint32)
    key = np.arange(8, dtype=np.uint32) * np.uint32(0x9E3779B9)
    law = grid.integer_law(1.0, count)
    makers = {
        "normals": jax.jit(
            lambda: normals.add_normals([jnp.zeros(count), jnp.zeros(33)], 1.0, words)[0]
        ),
        "integers": jax.jit(lambda: integers(jnp.asarray(key), count, law)[0]),
    }
    cpu, found = cpu_device(), {}
    for label, make in makers.items():
        here = np.asarray(make())
        values = np.sort(here.astype(np.float64) / (law.std if label == "integers" else 1.0))
        above = special.ndtr(values)
        steps = np.arange(count + 1) / count
        distance = max(np.max(steps[1:] - above), np.max(above - steps[:-1]))
        found[label] = {
            "deviation": float(np.std(values)),
            "Kolmogorov distance, times the root of the number": float(distance * math.sqrt(count)),
        }
        if cpu is not None:
            with jax.default_device(cpu):
                there = np.asarray(make())
            apart = np.abs(here.view(np.int32).astype(np.int64) - there.view(np.int32))
            found[label] |= {
                "equal to the CPU's": float(np.mean(here == there)),
                "largest difference, in the last place": int(apart.max()),
            }
        yield found


def norm_of(leaves: list[Any]) -> float:
    """The Euclidean norm over arrays, in float64."""
    return float(np.sqrt(sum(np.sum(np.asarray(leaf, np.float64) ** 2) for leaf in leaves)))


def cpu_device() -> Any:
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:
        return None


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:200]


ALONE = {"device": device, "bound": bound, "noise": noise}
OF_NETWORKS = {
    "step": step,
    "gradient": gradient,
    "peak": peak,
    "exact": exact,
    "largest": largest,
    "precision": precision,
}


def figures(piece: str) -> Figures:
    """The figures of a piece, each time with one more."""
    kind, _, name = piece.partition(" ")
    return ALONE[kind]() if kind in ALONE else OF_NETWORKS[kind](name)
