"""Random small losses out of composable pieces, and records built to break them.

A piece maps rows [t, WIDTH] to rows of that width. It computes in the type of its rows, so one program
runs in float32 and in float64, where ``lowered`` casts to bfloat16 only in the former.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

WIDTH, WORDS, LONGEST = 4, 5, 8
# What a program's text says it is made of.
FEATURES = (
    "stacked", "repeated", "recurrent", "by_rows", "checkpoint", "branched", "bfloat16", "joined",
    "slope", "convolved", "pictured", "looked_up", "attention", "normalised", "adapted",
    "positioned", "experts", "ruled", "dropped", "measured",
)  # fmt: skip


class Weights:
    """Makes parameters; now and then an earlier one of the same shape serves again."""

    def __init__(self, rng):
        self.rng, self.shapes = rng, {}

    def __call__(self, *shape):
        """The name of a parameter of this shape."""
        alike = [name for name, other in self.shapes.items() if other == shape]
        if alike and self.rng.random() < 0.3:
            return str(self.rng.choice(alike))
        name = f"w{len(self.shapes)}"
        self.shapes[name] = shape
        return name


class Stack:
    """Makes parameters with a slice for each pass of a loop, along any axis; some are shared."""

    def __init__(self, outer, passes):
        self.outer, self.rng, self.passes, self.axes = outer, outer.rng, passes, {}

    def __call__(self, *shape):
        """The name that the slices have inside the loop, or that of a weight of all passes."""
        if self.rng.random() < 0.2:
            return str(self.outer(*shape))
        axis = int(self.rng.integers(len(shape) + 1)) if self.rng.random() < 0.3 else 0
        stack = self.outer(*shape[:axis], self.passes, *shape[axis:])
        self.axes[f"{stack}[{axis}]"] = stack, axis
        return f"{stack}[{axis}]"

    def sliced(self, p):
        """The stacks, for ``scan``."""
        return {name: jnp.moveaxis(p[stack], axis, 0) for name, (stack, axis) in self.axes.items()}


@dataclasses.dataclass(frozen=True)
class Program:
    """A loss (parameters, record), what it is made of, its shapes, and whether all is float32."""

    text: str
    loss: Callable
    shapes: dict
    exact: bool


def program(seed):
    """The random program of this seed."""
    rng = np.random.default_rng(seed)
    weights = Weights(rng)
    made = [piece(rng, weights, 2) for _ in range(int(rng.integers(1, 4)))]
    last = weights(WIDTH, WORDS)
    kind = ["pulled", "classified", "waved"][int(rng.integers(3))]

    def loss(p, record):
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


def piece(rng, weights, depth):
    """A random piece, or one inside something, at most ``depth`` times."""
    if depth and rng.random() < 0.55:
        maker = _AROUND[int(rng.integers(len(_AROUND)))]
        return maker(rng, weights, depth - 1)
    maker = PIECES[int(rng.integers(len(PIECES)))]
    text, apply = maker(rng, weights)
    return f"{maker.__name__}({text})", apply


def stacked(rng, weights, depth):
    """A scan over layers with weights of their own."""
    passes = int(rng.choice([1, 2, 2, 3]))
    own = Stack(weights, passes)
    text, inner = piece(rng, own, depth)
    reverse, remat, unroll = rng.random() < 0.3, rng.random() < 0.4, int(rng.choice([1, 1, 2]))

    def apply(p, h, record):
        def layer(h, slices):
            return _fit(inner({**p, **slices}, h, record), h), 0.0

        layer = jax.checkpoint(layer) if remat else layer
        options = {"length": passes, "reverse": reverse, "unroll": unroll}
        return lax.scan(layer, h, own.sliced(p), **options)[0]

    return f"stacked{passes}{'r' * reverse}{'c' * remat}[{text}]", apply


def repeated(rng, weights, depth):
    """One piece several times."""
    text, inner = piece(rng, weights, depth)
    once = lambda p, h, record: _fit(inner(p, h, record), h)  # noqa: E731
    twice = lambda p, h, record: lax.fori_loop(0, 2, lambda _, h: once(p, h, record), h)  # noqa: E731
    return f"repeated[{text}]", twice


def by_rows(rng, weights, depth):
    """A piece of every row by itself."""
    text, inner = piece(rng, weights, depth)
    how = [lax.map, lambda f, x: jax.vmap(f)(x)][int(rng.integers(2))]
    one = lambda p, row, record: inner(p, row[None], record).sum(0)  # noqa: E731
    return f"by_rows[{text}]", lambda p, h, record: how(lambda row: one(p, row, record), h)


def within(rng, weights, depth):
    """A piece inside a checkpoint, a jit, a sum or a gradient."""
    text, inner = piece(rng, weights, depth)
    name = ["checkpoint", "jit", "residual", "slope"][int(rng.integers(4))]

    def apply(p, h, record):
        if name == "residual":
            return h + 0.5 * _fit(inner(p, h, record), h)
        if name == "slope":
            return h + jax.grad(lambda h: jnp.sum(jnp.sin(inner(p, h, record))))(h)
        return getattr(jax, name)(lambda p, h: inner(p, h, record))(p, h)

    return f"{name}[{text}]", apply


def lowered(rng, weights, depth):
    """A piece in bfloat16, weights or rows or both."""
    text, inner = piece(rng, weights, depth)

    def apply(p, h, record):
        kind = jnp.bfloat16 if h.dtype == jnp.float32 else h.dtype
        low = {name: leaf.astype(kind) for name, leaf in p.items()}
        return inner(low, h.astype(kind), record).astype(h.dtype)

    return f"bfloat16[{text}]", apply


def branched(rng, weights, depth):
    """One of two pieces, as the record says."""
    (one, first), (other, second) = (piece(rng, weights, depth) for _ in range(2))

    def apply(p, h, record):
        one_of = (lambda: _fit(first(p, h, record), h), lambda: _fit(second(p, h, record), h))
        return lax.cond(record["tokens"][0] > 1, *one_of)

    return f"branched[{one}; {other}]", apply


_AROUND = [stacked, stacked, stacked, repeated, by_rows, within, within, lowered, branched]


def _fit(rows, like):
    """As many rows as ``like``: strides leave fewer."""
    return jnp.tile(rows, (-(-len(like) // len(rows)), 1))[: len(like)]


def parameters(found, seed):
    """Parameters of unlike kinds, of about unit gain."""
    rng = np.random.default_rng([seed, 1])

    def one(shape):
        gain = rng.choice([1.0, 1.0, 0.3]) / np.sqrt(max(1, shape[0] if len(shape) > 1 else 1))
        made = rng.normal(size=shape) * gain
        kind = rng.random()
        made = np.full(shape, 0.3) if kind < 0.08 else np.zeros(shape) if kind < 0.12 else made
        return np.asarray(made, np.float32)

    return {name: one(shape) for name, shape in found.shapes.items()}


def batch(seed):
    """A few records: random, constant, cancelling, huge, tiny; one may not be finite."""
    rng = np.random.default_rng([seed, 2])
    rows, time = int(rng.choice([3, 5, 7])), int(rng.choice([2, 3, 4]))
    made = [_record(rng, time) for _ in range(rows)]
    return {name: np.stack([record[name] for record in made]) for name in made[0]}


def _record(rng, time):
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


# Pieces: the text of one, and a function of the parameters, the rows and the record. ---------------


def dense(rng, weights):
    """A product over axes in any order, the weight first or last, square or through a wider one."""
    letters = list("abcd")  # the width is a·b before, c·d after
    w = "".join(letters[i] for i in rng.permutation(4))
    name = weights(2, 2, 2, 2)
    out = "t" + "".join(rng.permutation(["c", "d"]))
    first = rng.random() < 0.5
    spec = f"{w},tab->{out}" if first else f"tab,{w}->{out}"

    def apply(p, h, record):
        factors = (p[name], h.reshape(-1, 2, 2)) if first else (h.reshape(-1, 2, 2), p[name])
        return jnp.tanh(jnp.einsum(spec, *factors).reshape(-1, WIDTH))

    return f"{name} {spec}", apply


def wide(rng, weights):
    """Up and down again, by another weight or the same one turned."""
    up = weights(WIDTH, 6)
    tied = rng.random() < 0.4
    down = up if tied else weights(6, WIDTH)
    smooth = [jax.nn.gelu, jnp.sin, jax.nn.silu][int(rng.integers(3))]
    back = lambda p: p[down].T if tied else p[down]  # noqa: E731
    return f"{up} {'T' if tied else down}", lambda p, h, record: smooth(h @ p[up]) @ back(p)


def joined(rng, weights):
    """Weights joined along an axis of the result, or of what is summed over; some turned or twice."""
    names = [weights(WIDTH, WIDTH) for _ in range(int(rng.integers(2, 4)))]
    names += names[:1] if rng.random() < 0.3 else []
    turned = [rng.random() < 0.3 for _ in names]
    axis, first = int(rng.integers(2)), rng.random() < 0.3

    def apply(p, h, record):
        each = [p[name].T if turn else p[name] for name, turn in zip(names, turned, strict=True)]
        whole = jnp.concatenate(each, axis=axis)
        if axis == 0:
            h = jnp.concatenate([h * (i + 1) for i in range(len(names))], axis=1)
        found = jnp.einsum("ab,ta->bt", whole, h).T if first else h @ whole
        return jnp.tanh(found.reshape(len(h), -1, WIDTH).sum(1))

    return f"{names} {axis}{' first' if first else ''}", apply


def convolved(rng, weights):
    """Over time, with stride, holes and groups."""
    groups, stride, hole = (int(rng.choice([1, 2])) for _ in range(3))
    kernel = weights(WIDTH, WIDTH // groups, 2)
    options = {"rhs_dilation": (hole,), "feature_group_count": groups}

    def apply(p, h, record):
        return lax.conv_general_dilated(h.T[None], p[kernel], (stride,), "SAME", **options)[0].T

    return f"{kernel} groups {groups} stride {stride} hole {hole}", apply


def pictured(rng, weights):
    """Rows as a picture of one channel."""
    kernel, back = weights(2, 1, 2, 2), weights(1, 2, 2, 2)
    edges = ["SAME", [(1, 0), (0, 1)]][int(rng.integers(2))]

    def apply(p, h, record):
        seen = jnp.tanh(lax.conv_general_dilated(h[None, None], p[kernel], (1, 1), edges))
        return lax.conv_general_dilated(seen, p[back], (1, 1), "SAME")[0, 0]

    return f"{kernel} {back} {edges}", apply


def looked_up(rng, weights):
    """Rows of a table, and now and then its other side."""
    table = weights(WORDS, WIDTH)
    mode = str(rng.choice(["fill", "clip"]))
    tied = rng.random() < 0.5

    def apply(p, h, record):
        tokens = jnp.resize(record["tokens"], (len(h),))
        found = h + p[table].at[tokens].get(mode=mode, fill_value=0)
        return jnp.tanh(found @ p[table].T) @ jnp.ones((WORDS, WIDTH), h.dtype) if tied else found

    return f"{table} {mode}{' tied' if tied else ''}", apply


def attention(rng, weights):
    """Two heads, with projections apart or joined."""
    together = rng.random() < 0.5
    parts = [weights(WIDTH, WIDTH) for _ in range(3)]
    out = weights(2, 2, WIDTH)

    def apply(p, h, record):
        if together:
            each = jnp.split(h @ jnp.concatenate([p[n] for n in parts], axis=1), 3, axis=1)
        else:
            each = [h @ p[name] for name in parts]
        q, k, v = (x.reshape(-1, 2, 2) for x in each)
        mask = jnp.tril(jnp.ones((len(h), len(h)), bool))
        scores = jnp.where(mask, jnp.einsum("thd,shd->hts", q, k), jnp.asarray(-1e9, h.dtype))
        mixed = jnp.einsum("hts,shd->thd", jax.nn.softmax(scores), v)
        return jnp.einsum("thd,hde->te", mixed, p[out])

    return f"{parts} {out}{' joined' if together else ''}", apply


def normalised(rng, weights):
    """A layer, group or root-mean-square norm with scale and shift."""
    groups, centred = int(rng.choice([1, 2])), rng.random() < 0.7
    scale, shift = weights(WIDTH), weights(WIDTH)

    def apply(p, h, record):
        x = h.reshape(len(h), groups, -1)
        x = x - x.mean(-1, keepdims=True) if centred else x
        x = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + jnp.asarray(1e-3, h.dtype))
        return x.reshape(h.shape) * p[scale][None] + p[shift][None]

    return f"{scale} {shift} {groups}{' centred' if centred else ''}", apply


def adapted(rng, weights):
    """A weight and a product of two thin ones, added before or after."""
    whole, down, up = weights(WIDTH, WIDTH), weights(WIDTH, 1), weights(1, WIDTH)
    if rng.random() < 0.5:
        before = lambda p, h, record: h @ (p[whole] + p[down] @ p[up])  # noqa: E731
        return f"{whole} {down} {up} before", before
    return f"{whole} {down} {up}", lambda p, h, record: h @ p[whole] + h @ p[down] @ p[up]


def positioned(rng, weights):
    """The first rows of a table added, and a slice of a weight."""
    table, weight = weights(LONGEST, WIDTH), weights(WIDTH, 2 * WIDTH)
    start = int(rng.integers(WIDTH))

    def apply(p, h, record):
        h = h + p[table][: len(h)]
        return jnp.sin(h @ p[weight][:, start : start + WIDTH])

    return f"{table} {weight} from {start}", apply


def recurrent(rng, weights):
    """A cell over time: plain, gated, or with a memory whose gates are joined."""
    kind = ["plain", "gated", "memory"][int(rng.integers(3))]
    count = {"plain": 1, "gated": 3, "memory": 4}[kind]
    inner, outer = ([weights(WIDTH, WIDTH) for _ in range(count)] for _ in range(2))
    together, reverse, remat = (bool(rng.random() < 0.5) for _ in range(3))

    def apply(p, h, record):
        u, v = (jnp.concatenate([p[n] for n in names], axis=1) for names in (inner, outer))

        def step(carry, row):
            if together:
                gates = jnp.split(row @ u, count), jnp.split(carry[0] @ v, count)
            else:
                gates = [row @ p[n] for n in inner], [carry[0] @ p[n] for n in outer]
            carry = _CELLS[kind](carry, *gates)
            return carry, carry[0]

        step = jax.checkpoint(step) if remat else step
        start = (jnp.zeros(WIDTH, h.dtype),) * 2
        return lax.scan(step, start, h, reverse=reverse)[1]

    marks = [word for word, flag in (("joined", together), ("reverse", reverse)) if flag]
    return " ".join([kind, *marks, "checkpoint" * remat, str(inner), str(outer)]), apply


def _plain(carry, of_row, of_state):
    return jnp.tanh(of_row[0] + of_state[0]), carry[1]


def _gated(carry, of_row, of_state):
    reset, update = (jax.nn.sigmoid(a + b) for a, b in zip(of_row[:2], of_state[:2], strict=True))
    new = jnp.tanh(of_row[2] + reset * of_state[2])
    return update * carry[0] + (jnp.asarray(1, new.dtype) - update) * new, carry[1]


def _memory(carry, of_row, of_state):
    gates = [a + b for a, b in zip(of_row, of_state, strict=True)]
    keep, take, give = (jax.nn.sigmoid(gate) for gate in gates[:3])
    memory = keep * carry[1] + take * jnp.tanh(gates[3])
    return give * jnp.tanh(memory), memory


_CELLS = {"plain": _plain, "gated": _gated, "memory": _memory}


def experts(rng, weights):
    """Two experts, mixed by a gate."""
    gate, each = weights(WIDTH, 2), weights(2, WIDTH, WIDTH)
    mixed = lambda p, h: jnp.einsum("te,eab,ta->tb", jax.nn.softmax(h @ p[gate]), p[each], h)  # noqa: E731
    return f"{gate} {each}", lambda p, h, record: mixed(p, h)


def ruled(rng, weights):
    """Functions with gradient rules of their own, of data or of a weight."""
    name = weights(WIDTH, WIDTH)
    if rng.random() < 0.4:
        return f"{name} of weight", lambda p, h, record: _product(h, p[name])
    return name, lambda p, h, record: _bent(h @ p[name])


_bent, _product = jax.custom_jvp(jnp.tanh), jax.custom_vjp(lambda x, w: x @ w)
_bent.defjvps(lambda tangent, found, x: tangent * jnp.asarray(0.5, x.dtype) * jnp.cos(found))
_product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))


def dropped(rng, weights):
    """Dropout by a key that a loop carries."""
    name = weights(WIDTH, WIDTH)

    def apply(p, h, record):
        def step(key, row):
            key, own = jax.random.split(key)
            kept = jax.random.uniform(own, (WIDTH,), jnp.float32) < 0.7
            return key, (row @ p[name]) * kept.astype(row.dtype)

        return lax.scan(step, jax.random.key(record["tokens"][0]), h)[1]

    return name, apply


def measured(rng, weights):
    """A weight divided by its length, and a vector met by every row."""
    name, vector = weights(WIDTH, WIDTH), weights(WIDTH)

    def apply(p, h, record):
        length = jnp.sqrt(jnp.square(p[name]).sum() + jnp.asarray(0.1, h.dtype))
        return h @ (p[name] / length) + jnp.tanh(h @ p[vector])[:, None]

    return f"{name} {vector}", apply


PIECES = [
    dense, dense, wide, joined, joined, convolved, pictured, looked_up, attention, normalised,
    adapted, positioned, recurrent, recurrent, experts, ruled, dropped, measured,
]  # fmt: skip
