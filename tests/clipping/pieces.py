"""Pieces of random programs: each maps rows [t, 4] to rows of that width, with weights of its own."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Made = tuple[str, Any]
_WIDTH, _WORDS, _LONGEST = 4, 5, 8


def dense(rng: np.random.Generator, weights: Any) -> Made:
    """A product over axes in any order, the weight first or last, square or through a wider one."""
    letters = list("abcd")  # the width is a·b before, c·d after
    order = [letters[i] for i in rng.permutation(4)]
    name = weights(2, 2, 2, 2)
    out = "t" + "".join(rng.permutation(["c", "d"]))
    first = rng.random() < 0.5
    w = "".join(order)
    spec = f"{w},tab->{out}" if first else f"tab,{w}->{out}"

    def apply(p: Any, h: Any, record: Any) -> Any:
        rows = h.reshape(-1, 2, 2)
        found = jnp.einsum(spec, p[name], rows) if first else jnp.einsum(spec, rows, p[name])
        return jnp.tanh(found.reshape(-1, _WIDTH))

    return f"{name} {spec}", apply


def wide(rng: np.random.Generator, weights: Any) -> Made:
    """Up and down again, by another weight or the same one turned."""
    up = weights(_WIDTH, 6)
    tied = rng.random() < 0.4
    down = up if tied else weights(6, _WIDTH)
    smooth = [jax.nn.gelu, jnp.sin, jax.nn.silu][int(rng.integers(3))]

    def apply(p: Any, h: Any, record: Any) -> Any:
        return smooth(h @ p[up]) @ (p[down].T if tied else p[down])

    return f"{up} {'T' if tied else down}", apply


def joined(rng: np.random.Generator, weights: Any) -> Made:
    """Weights joined along an axis of the result, or of what is summed over; some turned or twice."""
    names = [weights(_WIDTH, _WIDTH) for _ in range(int(rng.integers(2, 4)))]
    names += names[:1] if rng.random() < 0.3 else []
    turned = [rng.random() < 0.3 for _ in names]
    axis, first = int(rng.integers(2)), rng.random() < 0.3

    def apply(p: Any, h: Any, record: Any) -> Any:
        each = [p[name].T if turn else p[name] for name, turn in zip(names, turned, strict=True)]
        whole = jnp.concatenate(each, axis=axis)
        if axis == 0:
            h = jnp.concatenate([h * (i + 1) for i in range(len(names))], axis=1)
        found = jnp.einsum("ab,ta->bt", whole, h).T if first else h @ whole
        return jnp.tanh(found.reshape(len(h), -1, _WIDTH).sum(1))

    return f"{names} {axis}{' first' if first else ''}", apply


def convolved(rng: np.random.Generator, weights: Any) -> Made:
    """Over time, with stride, holes and groups."""
    groups, stride, hole = (int(rng.choice([1, 2])) for _ in range(3))
    kernel = weights(_WIDTH, _WIDTH // groups, 2)

    def apply(p: Any, h: Any, record: Any) -> Any:
        options = {"rhs_dilation": (hole,), "feature_group_count": groups}
        return lax.conv_general_dilated(h.T[None], p[kernel], (stride,), "SAME", **options)[0].T

    return f"{kernel} groups {groups} stride {stride} hole {hole}", apply


def pictured(rng: np.random.Generator, weights: Any) -> Made:
    """Rows as a picture of one channel."""
    kernel, back = weights(2, 1, 2, 2), weights(1, 2, 2, 2)
    edges = ["SAME", [(1, 0), (0, 1)]][int(rng.integers(2))]

    def apply(p: Any, h: Any, record: Any) -> Any:
        seen = jnp.tanh(lax.conv_general_dilated(h[None, None], p[kernel], (1, 1), edges))
        return lax.conv_general_dilated(seen, p[back], (1, 1), "SAME")[0, 0]

    return f"{kernel} {back} {edges}", apply


def looked_up(rng: np.random.Generator, weights: Any) -> Made:
    """Rows of a table, and now and then its other side."""
    table = weights(_WORDS, _WIDTH)
    mode = str(rng.choice(["fill", "clip"]))
    tied = rng.random() < 0.5

    def apply(p: Any, h: Any, record: Any) -> Any:
        tokens = jnp.resize(record["tokens"], (len(h),))
        found = h + p[table].at[tokens].get(mode=mode, fill_value=0)
        return jnp.tanh(found @ p[table].T) @ jnp.ones((_WORDS, _WIDTH), h.dtype) if tied else found

    return f"{table} {mode}{' tied' if tied else ''}", apply


def attention(rng: np.random.Generator, weights: Any) -> Made:
    """Two heads, with projections apart or joined."""
    together = rng.random() < 0.5
    parts = [weights(_WIDTH, _WIDTH) for _ in range(3)]
    out = weights(2, 2, _WIDTH)

    def apply(p: Any, h: Any, record: Any) -> Any:
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


def normalised(rng: np.random.Generator, weights: Any) -> Made:
    """A layer, group or root-mean-square norm with scale and shift."""
    groups, centred = int(rng.choice([1, 2])), rng.random() < 0.7
    scale, shift = weights(_WIDTH), weights(_WIDTH)

    def apply(p: Any, h: Any, record: Any) -> Any:
        x = h.reshape(len(h), groups, -1)
        x = x - x.mean(-1, keepdims=True) if centred else x
        x = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + jnp.asarray(1e-3, h.dtype))
        return x.reshape(h.shape) * p[scale][None] + p[shift][None]

    return f"{scale} {shift} {groups}{' centred' if centred else ''}", apply


def adapted(rng: np.random.Generator, weights: Any) -> Made:
    """A weight and a product of two thin ones, added before or after."""
    whole, down, up = weights(_WIDTH, _WIDTH), weights(_WIDTH, 1), weights(1, _WIDTH)
    before = rng.random() < 0.5

    def apply(p: Any, h: Any, record: Any) -> Any:
        if before:
            return h @ (p[whole] + p[down] @ p[up])
        return h @ p[whole] + h @ p[down] @ p[up]

    return f"{whole} {down} {up}{' before' if before else ''}", apply


def positioned(rng: np.random.Generator, weights: Any) -> Made:
    """The first rows of a table added, and a slice of a weight."""
    table, weight = weights(_LONGEST, _WIDTH), weights(_WIDTH, 2 * _WIDTH)
    start = int(rng.integers(_WIDTH))

    def apply(p: Any, h: Any, record: Any) -> Any:
        h = h + p[table][: len(h)]
        return jnp.sin(h @ p[weight][:, start : start + _WIDTH])

    return f"{table} {weight} from {start}", apply


def recurrent(rng: np.random.Generator, weights: Any) -> Made:
    """A cell over time: plain, gated, or with a memory whose gates are joined."""
    kind = ["plain", "gated", "memory"][int(rng.integers(3))]
    count = {"plain": 1, "gated": 3, "memory": 4}[kind]
    inner, outer = ([weights(_WIDTH, _WIDTH) for _ in range(count)] for _ in range(2))
    together, reverse, remat = (bool(rng.random() < 0.5) for _ in range(3))
    cell = functools.partial(_CELLS[kind])

    def apply(p: Any, h: Any, record: Any) -> Any:
        u, v = (jnp.concatenate([p[n] for n in names], axis=1) for names in (inner, outer))

        def step(carry: Any, row: Any) -> Any:
            if together:
                gates = jnp.split(row @ u, count), jnp.split(carry[0] @ v, count)
            else:
                gates = [row @ p[n] for n in inner], [carry[0] @ p[n] for n in outer]
            carry = cell(carry, *gates)
            return carry, carry[0]

        step = jax.checkpoint(step) if remat else step
        start = (jnp.zeros(_WIDTH, h.dtype),) * 2
        return lax.scan(step, start, h, reverse=reverse)[1]

    marks = [word for word, flag in (("joined", together), ("reverse", reverse)) if flag]
    return " ".join([kind, *marks, "checkpoint" * remat, str(inner), str(outer)]), apply


def _plain(carry: Any, of_row: Any, of_state: Any) -> Any:
    return jnp.tanh(of_row[0] + of_state[0]), carry[1]


def _gated(carry: Any, of_row: Any, of_state: Any) -> Any:
    reset, update = (jax.nn.sigmoid(a + b) for a, b in zip(of_row[:2], of_state[:2], strict=True))
    new = jnp.tanh(of_row[2] + reset * of_state[2])
    return update * carry[0] + (jnp.asarray(1, new.dtype) - update) * new, carry[1]


def _memory(carry: Any, of_row: Any, of_state: Any) -> Any:
    gates = [a + b for a, b in zip(of_row, of_state, strict=True)]
    keep, take, give = (jax.nn.sigmoid(gate) for gate in gates[:3])
    memory = keep * carry[1] + take * jnp.tanh(gates[3])
    return give * jnp.tanh(memory), memory


_CELLS = {"plain": _plain, "gated": _gated, "memory": _memory}


def experts(rng: np.random.Generator, weights: Any) -> Made:
    """Two experts, mixed by a gate."""
    gate, each = weights(_WIDTH, 2), weights(2, _WIDTH, _WIDTH)

    def apply(p: Any, h: Any, record: Any) -> Any:
        return jnp.einsum("te,eab,ta->tb", jax.nn.softmax(h @ p[gate]), p[each], h)

    return f"{gate} {each}", apply


def ruled(rng: np.random.Generator, weights: Any) -> Made:
    """Functions with gradient rules of their own, of data or of a weight."""
    name, of_weight = weights(_WIDTH, _WIDTH), rng.random() < 0.4

    def apply(p: Any, h: Any, record: Any) -> Any:
        return _product(h, p[name]) if of_weight else _bent(h @ p[name])

    return f"{name}{' of weight' if of_weight else ''}", apply


@jax.custom_jvp
def _bent(x: Any) -> Any:
    return jnp.tanh(x)


_bent.defjvps(lambda tangent, found, x: tangent * jnp.asarray(0.5, x.dtype) * jnp.cos(found))


@jax.custom_vjp
def _product(x: Any, w: Any) -> Any:
    return x @ w


_product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))


def dropped(rng: np.random.Generator, weights: Any) -> Made:
    """Dropout by a key that a loop carries."""
    name = weights(_WIDTH, _WIDTH)

    def apply(p: Any, h: Any, record: Any) -> Any:
        def step(key: Any, row: Any) -> Any:
            key, own = jax.random.split(key)
            kept = jax.random.uniform(own, (_WIDTH,), jnp.float32) < 0.7
            return key, (row @ p[name]) * kept.astype(row.dtype)

        return lax.scan(step, jax.random.key(record["tokens"][0]), h)[1]

    return name, apply


def measured(rng: np.random.Generator, weights: Any) -> Made:
    """A weight divided by its length, and a vector met by every row."""
    name, vector = weights(_WIDTH, _WIDTH), weights(_WIDTH)

    def apply(p: Any, h: Any, record: Any) -> Any:
        length = jnp.sqrt(jnp.square(p[name]).sum() + jnp.asarray(0.1, h.dtype))
        return h @ (p[name] / length) + jnp.tanh(h @ p[vector])[:, None]

    return f"{name} {vector}", apply


PIECES = [
    dense, dense, wide, joined, joined, convolved, pictured, looked_up, attention, normalised,
    adapted, positioned, recurrent, recurrent, experts, ruled, dropped, measured,
]  # fmt: skip
