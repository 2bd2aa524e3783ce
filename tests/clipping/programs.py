"""Random small losses out of composable pieces, and records built to break them.

A piece maps rows [t, WIDTH] to rows of that width. It computes in the type of its rows, so one program
runs in float32 and in float64, where ``lowered`` casts to bfloat16 only in the former.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.clipping import pieces

WIDTH, WORDS = 4, 5
# What a program's text says it is made of.
FEATURES = (
    "stacked", "repeated", "recurrent", "by_rows", "checkpoint", "branched", "bfloat16", "joined",
    "slope", "convolved", "pictured", "looked_up", "attention", "normalised", "adapted",
    "positioned", "experts", "ruled", "dropped", "measured",
)  # fmt: skip


class Weights:
    """Makes parameters; now and then an earlier one of the same shape serves again."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng, self.shapes = rng, {}

    def __call__(self, *shape: int) -> str:
        """The name of a parameter of this shape."""
        alike = [name for name, other in self.shapes.items() if other == shape]
        if alike and self.rng.random() < 0.3:
            return str(self.rng.choice(alike))
        name = f"w{len(self.shapes)}"
        self.shapes[name] = shape
        return name


class Stack:
    """Makes parameters with a slice for each pass of a loop, along any axis; some are shared."""

    def __init__(self, outer: Any, passes: int) -> None:
        self.outer, self.rng, self.passes = outer, outer.rng, passes
        self.axes: dict[str, tuple[str, int]] = {}

    def __call__(self, *shape: int) -> str:
        """The name that the slices have inside the loop, or that of a weight of all passes."""
        if self.rng.random() < 0.2:
            return str(self.outer(*shape))
        axis = int(self.rng.integers(len(shape) + 1)) if self.rng.random() < 0.3 else 0
        stack = self.outer(*shape[:axis], self.passes, *shape[axis:])
        name = f"{stack}[{axis}]"
        self.axes[name] = stack, axis
        return name

    def sliced(self, p: dict[str, Any]) -> dict[str, Any]:
        """The stacks, for ``scan``."""
        return {name: jnp.moveaxis(p[stack], axis, 0) for name, (stack, axis) in self.axes.items()}


@dataclasses.dataclass(frozen=True)
class Program:
    """A loss of one example, its parameters and what it is made of.

    Attributes:
        text: the pieces, in words.
        loss: (parameters, record) to a scalar.
        shapes: of the parameters.
        exact: False if it casts to bfloat16.
    """

    text: str
    loss: Callable[[Any, Any], Any]
    shapes: dict[str, tuple[int, ...]]
    exact: bool


def program(seed: int) -> Program:
    """The random program of this seed."""
    rng = np.random.default_rng(seed)
    weights = Weights(rng)
    made = [piece(rng, weights, 2) for _ in range(int(rng.integers(1, 4)))]
    last = weights(WIDTH, WORDS)
    kind = ["pulled", "classified", "waved"][int(rng.integers(3))]

    def loss(p: Any, record: Any) -> Any:
        h = record["x"]
        for _, apply in made:
            h = apply(p, h, record)
        if kind == "classified":
            rates = jax.nn.log_softmax(h @ p[last])
            wanted = jnp.clip(record["tokens"][: len(h)], 0, WORDS - 1)
            return -jnp.sum(jnp.take_along_axis(rates, wanted[:, None], 1))
        h = h @ p[last]
        return jnp.sum(h * record["pull"][: len(h)] if kind == "pulled" else jnp.sin(h))

    text = " | ".join([*(text for text, _ in made), kind])
    return Program(text, loss, weights.shapes, "bfloat16" not in text)


def piece(rng: np.random.Generator, weights: Any, depth: int) -> tuple[str, Any]:
    """A random piece, or one inside something, at most ``depth`` times."""
    if depth and rng.random() < 0.55:
        maker = _AROUND[int(rng.integers(len(_AROUND)))]
        return maker(rng, weights, depth - 1)
    maker = pieces.PIECES[int(rng.integers(len(pieces.PIECES)))]
    text, apply = maker(rng, weights)
    return f"{maker.__name__}({text})", apply


def stacked(rng: np.random.Generator, weights: Any, depth: int) -> tuple[str, Any]:
    """A scan over layers with weights of their own."""
    passes = int(rng.choice([1, 2, 2, 3]))
    own = Stack(weights, passes)
    text, inner = piece(rng, own, depth)
    reverse, remat, unroll = rng.random() < 0.3, rng.random() < 0.4, int(rng.choice([1, 1, 2]))

    def apply(p: Any, h: Any, record: Any) -> Any:
        def layer(h: Any, slices: Any) -> Any:
            return _fit(inner({**p, **slices}, h, record), h), 0.0

        layer = jax.checkpoint(layer) if remat else layer
        options = {"length": passes, "reverse": reverse, "unroll": unroll}
        return lax.scan(layer, h, own.sliced(p), **options)[0]

    return f"stacked{passes}{'r' * reverse}{'c' * remat}[{text}]", apply


def repeated(rng: np.random.Generator, weights: Any, depth: int) -> tuple[str, Any]:
    """One piece several times."""
    text, inner = piece(rng, weights, depth)

    def apply(p: Any, h: Any, record: Any) -> Any:
        return lax.fori_loop(0, 2, lambda _, h: _fit(inner(p, h, record), h), h)

    return f"repeated[{text}]", apply


def by_rows(rng: np.random.Generator, weights: Any, depth: int) -> tuple[str, Any]:
    """A piece of every row by itself."""
    text, inner = piece(rng, weights, depth)
    how = [lax.map, lambda f, x: jax.vmap(f)(x)][int(rng.integers(2))]

    def apply(p: Any, h: Any, record: Any) -> Any:
        return how(lambda row: inner(p, row[None], record).sum(0), h)

    return f"by_rows[{text}]", apply


def within(rng: np.random.Generator, weights: Any, depth: int) -> tuple[str, Any]:
    """A piece inside a checkpoint, a jit, a sum or a gradient."""
    text, inner = piece(rng, weights, depth)
    name = ["checkpoint", "jit", "residual", "slope"][int(rng.integers(4))]

    def apply(p: Any, h: Any, record: Any) -> Any:
        if name == "residual":
            return h + 0.5 * _fit(inner(p, h, record), h)
        if name == "slope":
            return h + jax.grad(lambda h: jnp.sum(jnp.sin(inner(p, h, record))))(h)
        return getattr(jax, name)(lambda p, h: inner(p, h, record))(p, h)

    return f"{name}[{text}]", apply


def lowered(rng: np.random.Generator, weights: Any, depth: int) -> tuple[str, Any]:
    """A piece in bfloat16, weights or rows or both."""
    text, inner = piece(rng, weights, depth)

    def apply(p: Any, h: Any, record: Any) -> Any:
        kind = jnp.bfloat16 if h.dtype == jnp.float32 else h.dtype
        low = {name: leaf.astype(kind) for name, leaf in p.items()}
        return inner(low, h.astype(kind), record).astype(h.dtype)

    return f"bfloat16[{text}]", apply


def branched(rng: np.random.Generator, weights: Any, depth: int) -> tuple[str, Any]:
    """One of two pieces, as the record says."""
    (one, first), (other, second) = (piece(rng, weights, depth) for _ in range(2))

    def apply(p: Any, h: Any, record: Any) -> Any:
        return lax.cond(
            record["tokens"][0] > 1,
            lambda: _fit(first(p, h, record), h),
            lambda: _fit(second(p, h, record), h),
        )

    return f"branched[{one}; {other}]", apply


_AROUND = [stacked, stacked, stacked, repeated, by_rows, within, within, lowered, branched]


def _fit(rows: Any, like: Any) -> Any:
    """As many rows as ``like``: strides leave fewer."""
    return jnp.tile(rows, (-(-len(like) // len(rows)), 1))[: len(like)]


def parameters(found: Program, seed: int) -> dict[str, Any]:
    """Parameters of unlike kinds, of about unit gain."""
    rng = np.random.default_rng([seed, 1])

    def one(shape: tuple[int, ...]) -> Any:
        gain = rng.choice([1.0, 1.0, 0.3]) / np.sqrt(max(1, shape[0] if len(shape) > 1 else 1))
        made = rng.normal(size=shape) * gain
        kind = rng.random()
        made = np.full(shape, 0.3) if kind < 0.08 else np.zeros(shape) if kind < 0.12 else made
        return np.asarray(made, np.float32)

    return {name: one(shape) for name, shape in found.shapes.items()}


def batch(seed: int) -> dict[str, Any]:
    """A few records: random, constant, cancelling, huge, tiny; one may not be finite."""
    rng = np.random.default_rng([seed, 2])
    rows, time = int(rng.choice([3, 5, 7])), int(rng.choice([2, 3, 4]))
    made = [_record(rng, time) for _ in range(rows)]
    return {name: np.stack([record[name] for record in made]) for name in made[0]}


def _record(rng: np.random.Generator, time: int) -> dict[str, Any]:
    x, pull = rng.normal(size=(time, WIDTH)), rng.normal(size=(time, WORDS))
    kind = rng.choice(["plain", "plain", "flat", "cancelling", "huge", "tiny", "apart", "broken"])
    if kind == "flat":
        x[:] = rng.choice([1.0, 1 / 3, 0.7])
    if kind in ("flat", "cancelling"):
        close = 10.0 ** rng.uniform(-8, -1)
        x = np.broadcast_to(x[0], x.shape) * (1.0 + close * rng.normal(size=x.shape))
        pull -= pull.mean(axis=0) * (1.0 - close)
    if kind == "huge":
        x, pull = x * 10.0 ** rng.uniform(1, 12), pull * 10.0 ** rng.uniform(-3, 12)
    if kind == "tiny":
        x, pull = x * 10.0 ** rng.uniform(-30, -3), pull * 10.0 ** rng.uniform(-20, 3)
    if kind == "apart":
        x = x * 10.0 ** rng.uniform(-6, 6, size=(time, 1))
    if kind == "broken":
        x.flat[rng.integers(x.size)] = rng.choice([np.inf, -np.inf, np.nan])
    tokens = rng.integers(-1, WORDS + 1, size=time).astype(np.int32)
    return {"x": x.astype(np.float32), "pull": pull.astype(np.float32), "tokens": tokens}
