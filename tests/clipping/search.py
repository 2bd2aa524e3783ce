"""Programs and records built to add more than the bound, and what they really add, in float64.

A contribution is measured on the factors as they enter the contraction: what the engine multiplies
and adds, weights included, read out of the compiled program. A difference of two float32 sums could
not tell it from the rounding of the other rows.
"""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxdp
from jaxdp.clipping import reduce
from jaxdp.clipping.ghost.leaves import Arrays, Factors, Slices
from jaxdp.clipping.rules import CoordinateBox
from tests.compiling import AS_USERS


class Recorder:
    """A leaf that notes the weights it is summed with, or the rows that a box keeps."""

    def __init__(self, leaf, log):
        self.leaf, self.log, self.squares = leaf, log, leaf.squares

    def boxed_sum(self, bound, keep, scale):
        self.log.append((self.leaf, keep))
        return self.leaf.boxed_sum(bound, keep, scale)

    def weighted_sum(self, weights, keep, finite):
        self.log.append((self.leaf, weights))
        return self.leaf.weighted_sum(weights, keep, finite)


def compiled(loss_fn, rule, engine, flags=AS_USERS, **options):
    """(params, batch, scale, mask) -> the sum, what every leaf multiplies, norms; jitted."""
    grad_fn = jaxdp.clipped_grad(loss_fn, rule, engine, **options)
    kinds = []

    @functools.partial(jax.jit, compiler_options=flags)
    def run(params, batch, scale=None, mask=None):
        log = []
        plain = reduce.clipped_sum

        def recorded(rule, grads, *rest):
            scaled = rest[2] is not None and not isinstance(rule, CoordinateBox)
            factored = (Factors, Slices)
            each = [g.for_scale() if scaled and isinstance(g, factored) else g for g in grads]
            return plain(rule, [g if g is None else Recorder(g, log) for g in each], *rest)

        mask = jnp.ones(len(jax.tree.leaves(batch)[0]), bool) if mask is None else mask
        with mock.patch.object(reduce, "clipped_sum", recorded):
            summed, info = grad_fn.with_info(params, batch, mask, scale=scale)
        kinds[:] = [type(leaf) for leaf, _ in log]
        return summed.value, [(_parts(leaf), weights) for leaf, weights in log], info.norms

    return run, kinds


def _parts(leaf):
    if isinstance(leaf, Arrays):
        return {"rows": leaf.grads}
    if isinstance(leaf, Slices):
        return {"slices": [_parts(each) for each in leaf.each]}
    found = {}
    if leaf._lookups is not None:
        found["lookups"] = (leaf._lookups.rows, leaf._lookups.grads)
    if leaf._dense:
        found["dense"] = [use.factors(leaf.site.key) for use in leaf._dense]
    return found


def contributed(loss_fn, params, batch, rule, engine):
    """float64 [m]: the norms of what every record adds, for rules with weights and no scale."""
    return added(compiled(loss_fn, rule, engine), params, batch)


def added(made, params, batch):
    """As ``contributed``, of what ``compiled`` made."""
    run, kinds = made
    value, log, _ = run(params, batch)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(value))
    assert set(kinds) <= {Arrays, Factors, Slices}
    return np.sqrt(sum(added_squares(parts, np.asarray(weights)) for parts, weights in log))


def added_squares(parts, weights):
    """float64 [m]: the squares of what every record adds to one parameter's sum."""
    if "slices" in parts:  # which share no entry
        return sum(added_squares(each, weights) for each in parts["slices"])
    if "rows" in parts:
        rows = np.asarray(parts["rows"], np.float64).reshape(len(weights), -1)
        # A row that is not finite has no weight and is dropped.
        rows = np.where(weights[:, None] > 0, rows, 0.0)
        return np.sum(np.square(rows * weights[:, None].astype(np.float64)), axis=1)
    dense = [_weighted(a, b, weights) for a, b in parts.get("dense", [])]
    found = []
    for i in range(len(weights)):
        each = [(a[i], b[i]) for a, b in dense]
        if "lookups" in parts:
            rows, grads = (np.asarray(x) for x in parts["lookups"])
            grads = (grads * weights[:, None, None]).astype(np.float32)
            each.append(_one_hot(rows[i], grads[i], each, rows))
        found.append(_square_of_sum(each))
    return np.asarray(found)


def _weighted(a, b, weights):
    """The float32 factors [m, g, t, ...] with the weights on the smaller one, as the engine does."""
    a, b = np.asarray(a), np.asarray(b)
    column = weights[:, None, None, None]
    a, b = (a * column, b) if a.size <= b.size else (a, b * column)
    drop = column > 0
    return np.where(drop, a, 0.0).astype(np.float64), np.where(drop, b, 0.0).astype(np.float64)


def _one_hot(rows, grads, dense, every):
    size = dense[0][0].shape[-1] if dense else int(every.max()) + 1
    hot = np.float64(rows[:, None] == np.arange(size))
    return hot[None], np.asarray(grads, np.float64)[None]


def _square_of_sum(pairs):
    """||sum_t a_t b_t'||² in float64, from the gram matrices of all positions."""
    sides = (np.concatenate(side, axis=1) for side in zip(*pairs, strict=True))
    a, b = (np.einsum("gtp,gsp->gts", x, x, optimize=True) for x in sides)
    return max(0.0, float(np.sum(a * b)))


# Programs: name -> (loss, parameters, record of one seed and closeness). ------------------------


def _siamese(p, x):
    return jnp.sum(jnp.square(x[0] @ p["w"] - x[1] @ p["w"]))


def _ranking(p, x):
    """A linear score of two flat images; the margin is never reached."""
    waves = jnp.sum(jnp.sin(x[0] @ p["w"]) - jnp.sin(x[1] @ p["w"]))
    return jnp.sum(jnp.maximum(0.0, 1e30 - (x[0] - x[1]) @ p["w"])) + waves


def _triplet(p, x):
    anchor, near, far = (x[i] @ p["w"] for i in range(3))
    return jnp.sum(jnp.square(anchor - near)) - jnp.sum(jnp.square(anchor - far))


def _alternating(p, x):
    """Positions with cotangents that cancel: x is [t, p + 1], the last column the cotangent."""
    return jnp.sum(x[:, -1:] * (x[:, :-1] @ p["w"]))


def _over_time(p, x):
    """As ``_alternating``, position by position in a loop."""
    step = lambda total, row: (total + jnp.sum(row[-1] * (row[:-1] @ p["w"])), None)  # noqa: E731
    return lax.scan(step, jnp.float32(0.0), x)[0]


def _over_layers(p, x):
    """Two layers with weights of their own, each of which sees positions that cancel."""
    step = lambda total, w: (total + _alternating({"w": w}, x), None)  # noqa: E731
    return lax.scan(step, jnp.float32(0.0), p["w"])[0]


def _joined(p, x):
    """The same inputs through two joined weights."""
    both = jnp.concatenate([p["w"], p["v"]], axis=1)
    return jnp.sum(x[:, -1:] * (x[:, :-1] @ both))


def _sliced(p, x):
    """Slices of one weight, times a number, one with inputs of its own."""
    same = x[:, :-1] @ (-0.3 * p["w"][:, :2]) + x[:, :-1] @ p["w"][:, 2:4]
    return jnp.sum(x[:, -1:] * (same - x[::-1, :-1] @ p["w"][:, 4:]))


def _tied(p, x):
    hidden = jnp.tanh(x @ p["w"])
    return jnp.sum(hidden @ p["w"].T * jnp.sign(x)) - jnp.sum(jnp.square(x @ p["w"]))


def _attention(p, x):
    q, k, v = (x @ p[n] for n in ("q", "k", "v"))
    return jnp.sum(jnp.sin(jax.nn.softmax(q @ k.T) @ v))


def _shared_kernel(p, x):
    numbers = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(x[None], p["k"], (1, 1), "VALID", dimension_numbers=numbers)
    signs = jnp.where(jnp.arange(y.shape[1]) % 2 == 0, 1.0, -1.0)
    return jnp.sum(y * signs[None, :, None, None])


def _looked_up_twice(p, x):
    tokens, pull = x
    return jnp.sum(p["w"][tokens] * pull)


def _tied_lookup(p, x):
    """Each lookup taken back by a product with nearly the same one-hot row."""
    tokens, pull, hot = x
    return jnp.sum(p["w"][tokens] * pull) - jnp.sum((hot @ p["w"]) * pull)


def _flat(rng, shape, closeness):
    """Nearly constant numbers: entries of their gram matrix all round the same way."""
    base = np.float32(rng.choice([1.0, 1.0 / 3.0, 0.1, 0.7, rng.uniform(0.1, 2.0)]))
    return (base + closeness * rng.normal(size=shape)).astype(np.float32)


def _pairs(count, size, rng, closeness):
    shared = _flat(rng, (1, size), rng.choice([0.0, 0.0, 0.3]))
    # Images that differ in brightness, or pixel by pixel: either way they nearly cancel.
    shift = rng.normal(size=(count, rng.choice([1, 1, size])))
    return (shared * (1.0 + closeness * shift)).astype(np.float32)


def _cancelling(positions, size, rng, closeness):
    """Equal inputs up to closeness, cotangents of either sign that add up to nearly nothing."""
    levels = rng.uniform(0.1, 2.0, size=(positions, 1)) if rng.random() < 0.7 else 1.0
    b = rng.normal(size=(positions, 1))
    b -= b.mean() * (1.0 - closeness)
    # Parallel inputs of unlike lengths: entries of their gram matrix round in unlike ways.
    x = levels * (_flat(rng, (1, size), 0.0) + closeness * _flat(rng, (positions, size), 1.0))
    return np.concatenate([x, b / levels * 2.0 ** rng.integers(-40, 40)], axis=1).astype(np.float32)


def _rows_with(positions, size, rng, closeness):
    tokens = rng.integers(0, 3, positions).astype(np.int32)
    pull = rng.normal(size=(positions, size))
    for token in range(3):
        chosen = tokens == token
        if chosen.any():
            pull[chosen] -= pull[chosen].mean(axis=0) * (1.0 - closeness)
    return tokens, (pull * 10.0 ** rng.uniform(-3, 8)).astype(np.float32)


def _rows_taken_back(positions, size, words, rng, closeness):
    tokens, pull = _rows_with(positions, size, rng, 1.0)
    hot = np.eye(words, dtype=np.float32)[tokens]
    noise = rng.normal(size=hot.shape)
    return tokens, pull, (hot * (1.0 + closeness * noise)).astype(np.float32)


def _wide(positions, size, rng, closeness):
    """One huge position among small ones, or powers of two far apart, denormals included."""
    x = np.array(_cancelling(positions, size, rng, closeness))
    factor = 2.0 ** rng.choice([-140.0, -70.0, -30.0, 0.0, 20.0, 50.0], size=(len(x), 1))
    return (x * factor).astype(np.float32)


def _dense(size, out, seed=0):
    rng = np.random.default_rng(seed)
    return {"w": jnp.asarray(rng.normal(size=(size, out)) / np.sqrt(size), jnp.float32)}


def programs(long=False):
    """name -> (loss, params, make_record)."""
    keys, made = jax.random.split(jax.random.key(0), 4), functools.partial
    heads = {n: jax.random.normal(k, (8, 8)) for n, k in zip("qkv", keys, strict=False)}
    kernel = {"k": jax.random.normal(keys[3], (3, 3, 2, 3))}
    stack = {"w": jnp.stack([_dense(20, 4, seed)["w"] for seed in (0, 1)])}
    found = {
        "siamese-784": (_siamese, _dense(784, 64), made(_pairs, 2, 784)),
        "ranking-784": (_ranking, _dense(784, 16), made(_pairs, 2, 784)),
        "triplet-300": (_triplet, _dense(300, 32), made(_pairs, 3, 300)),
        "positions-2": (_alternating, _dense(2, 3), made(_cancelling, 2, 2)),
        "positions-40": (_alternating, _dense(50, 4), made(_cancelling, 40, 50)),
        "positions-300": (_alternating, _dense(9, 4), made(_cancelling, 300, 9)),
        "long-4096": (_alternating, _dense(4096, 5), made(_cancelling, 4, 4096)),
        "wide": (_alternating, _dense(20, 4), made(_wide, 6, 20)),
        "over-time": (_over_time, _dense(50, 4), made(_cancelling, 40, 50)),
        "over-layers": (_over_layers, stack, made(_cancelling, 12, 20)),
        "joined": (_joined, _dense(20, 4) | {"v": _dense(20, 3, 1)["w"]}, made(_cancelling, 9, 20)),
        "sliced": (_sliced, _dense(20, 6), made(_cancelling, 9, 20)),
        "tied": (_tied, _dense(30, 12), made(_cancelling, 7, 29)),
        "attention": (_attention, heads, made(_cancelling, 6, 7)),
        "kernel": (_shared_kernel, kernel, lambda rng, c: _flat(rng, (8, 8, 2), c)),
        "lookups": (_looked_up_twice, _dense(5, 6), made(_rows_with, 9, 6)),
        "tied-lookups": (_tied_lookup, _dense(5, 6), made(_rows_taken_back, 9, 6, 5)),
    }
    if long:
        found |= {
            "siamese-3072": (_siamese, _dense(3072, 128), made(_pairs, 2, 3072)),
            "siamese-150528": (_siamese, _dense(150_528, 16), made(_pairs, 2, 150_528)),
            "long-1e6": (_alternating, _dense(1_000_000, 2), made(_cancelling, 4, 1_000_000)),
            "positions-1000": (_alternating, _dense(16, 8), made(_cancelling, 1000, 16)),
        }
    return found


def records(make, rows, seed):
    """A batch of constructed records, from random to nearly cancelled."""
    rng = np.random.default_rng(seed)
    made = [make(rng, 10.0 ** rng.uniform(-8, 0)) for _ in range(rows)]
    return jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *made)


def ascent(loss_fn, params):
    """(record, rows) -> records on the way to where its terms cancel most.

    Each is moved down the gradient of its gradient's norm.
    """

    def log_norm(x):
        grads = jax.tree.leaves(jax.grad(loss_fn)(params, x))
        return jnp.log(sum(jnp.sum(jnp.square(g)) for g in grads) + 1e-30)

    @functools.partial(jax.jit, static_argnums=1)
    def climb(record, rows):
        def step(x, _):
            slope = jax.grad(log_norm)(x)
            length = jnp.sqrt(jnp.sum(jnp.square(slope)))
            moved = x - 0.03 * slope * jnp.sqrt(jnp.sum(jnp.square(x))) / jnp.maximum(length, 1e-30)
            return jnp.where(jnp.isfinite(moved), moved, x), x

        return lax.scan(step, record, length=rows)[1]

    return climb
