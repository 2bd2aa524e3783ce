"""Per-example gradients of plain JAX, and what the rules make of them, in float64 by NumPy.

A network has one compiled reference: every rule, bound, scale and mask is applied to it on the host.
"""

import jax
import numpy as np

import jaxdp
from jaxdp.clipping import rules
from jaxdp.clipping.rounding import MARGIN
from tests.clipping.architectures import jit


def gap(a, b):
    """Relative distance of two trees."""
    a, b = (
        np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(t)])
        for t in (a, b)
    )
    return np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0)


def together(parts):
    """One loss of several, name -> (parameters, loss of one example): one program for all.

    Under ``per_layer`` each is clipped by itself, so the sum of each tells of its own norms.
    """
    params = {name: part for name, (part, _) in parts.items()}

    def loss_fn(params, example):
        return sum(fn(params[name], example) for name, (_, fn) in parts.items())

    return params, loss_fn


def _root(rows):
    return np.sqrt(sum(np.sum(np.square(x.reshape(len(x), -1)), axis=1) for x in rows))


class Reference:
    """The losses and gradients of a batch, each example's apart; by ``vmap``, where JAX can."""

    def __init__(self, params, loss_fn, batch, vmapped=True):
        one = jax.value_and_grad(loss_fn)
        if vmapped:
            each = jit(jax.vmap(one, (None, 0)))(params, batch)
        else:
            alone = jit(one)
            rows = [alone(params, row) for row in batch]
            each = jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
        self.losses, self.grads = jax.device_get(each)

    def rows(self, scale=None):
        """float64 [m, ...] of every parameter, divided by the scale (made safe, as is promised)."""
        rows = [np.asarray(x, np.float64) for x in jax.tree.leaves(self.grads)]
        if scale is None:
            return rows
        scales = [np.clip(np.asarray(s, np.float64), 1e-10, 1e10) for s in jax.tree.leaves(scale)]
        return [x / s for x, s in zip(rows, scales, strict=True)]

    def norms(self, scale=None):
        """float64 [m]."""
        return _root(self.rows(scale))

    def half(self, scale=None):
        """The rule that shortens half of the examples, of every entry of the parameters' dict."""
        grads = jax.tree.unflatten(jax.tree.structure(self.grads), self.rows(scale))
        norms = {name: _root(jax.tree.leaves(g)) for name, g in grads.items()}
        return jaxdp.per_layer({n: float(np.median(x[x > 0])) for n, x in norms.items()})

    def clipped(self, rule, keep=True, scale=None, bound=None):
        """The sum of the clipped gradients of the rows that are kept."""
        structure, rows = jax.tree.structure(self.grads), self.rows(scale)
        kept = np.broadcast_to(keep, len(rows[0]))
        if isinstance(rule, rules.CoordinateBox):
            total = [np.clip(x[kept], -rule.bound, rule.bound).sum(0) for x in rows]
            return jax.tree.unflatten(structure, total)
        weights = self._weights(rule, structure, rows, bound)
        total = [np.tensordot(w[kept], x[kept], 1) for w, x in zip(weights, rows, strict=True)]
        return jax.tree.unflatten(structure, total)

    def _weights(self, rule, structure, rows, bound):
        if isinstance(rule, rules.PerLayer):
            groups = rule.structure.flatten_up_to(jax.tree.unflatten(structure, rows))
            return [
                np.minimum(1.0, limit * (1.0 - MARGIN) / np.maximum(_root(leaves), 1e-30))
                for limit, group in zip(rule.bounds, groups, strict=True)
                for leaves in [jax.tree.leaves(group)]
                for _ in leaves
            ]
        norms, aim = _root(rows), (1.0 - MARGIN) * (rule.l2(None) if bound is None else bound)
        if isinstance(rule, rules.Clip):
            return [np.minimum(1.0, aim / norms)] * len(rows)
        stability = getattr(rule, "stability", 0.0)
        return [aim / (norms + stability)] * len(rows)


def agrees(run, reference, rule, *args, within=1e-5, norms=1e-5, scale=None, bound=None):
    """That the sum and the norms of ``opened(...)`` are the reference's; gives the information."""
    given = {"scale": scale, "bound": bound}  # None is another program than nothing
    found, info = run(*args, **{name: value for name, value in given.items() if value is not None})
    boxed = isinstance(rule, rules.CoordinateBox)
    true = reference.norms(None if boxed else scale)
    np.testing.assert_allclose(info.norms, true, rtol=norms, atol=1e-7)
    wanted = reference.clipped(rule, scale=scale, bound=bound)
    assert not far(found, wanted, within)
    return info


def far(found, wanted, within):
    """What is not within this relative distance: of a sum, or of each of ``together``."""
    if not isinstance(wanted, dict) or any(isinstance(x, np.ndarray) for x in wanted.values()):
        found, wanted = {"all": found}, {"all": wanted}
    off = {name: gap(found[name], wanted[name]) for name in wanted}
    return {name: distance for name, distance in off.items() if not distance < within}
