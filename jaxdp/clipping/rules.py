"""Clipping rules: the factor that shortens each example's gradient, and the resulting bound."""

import dataclasses
import math
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxdp.clipping import losses, rounding
from jaxdp.clipping.options import check_bound
from jaxdp.types import PyTree

# Below this norm the squares of single entries may have underflowed.
_SMALLEST_NORM = 1e-12


@runtime_checkable
class Rule(Protocol):
    """The protocol of a clipping rule. It sees squared norms only, never gradients.

    Any frozen dataclass with these two methods is a rule. The bound of one that is not jaxdp's own
    does not rest on what it answers (``bounded_factors``). docs/gradients.md shows one.
    """

    def l2(self, params: PyTree) -> float:
        """The largest Euclidean norm, over all leaves together, of one clipped contribution.

        Public, in [1e-10, 1e10], from the shapes of the parameters at most.
        """

    def factors(self, square_norms: PyTree, bound: jax.Array | None = None) -> PyTree:
        """Per-leaf multipliers [m] from per-leaf squared gradient norms [m].

        ``bound`` takes the place of the rule's own, where the rule allows that. A rule that is not
        jaxdp's own is given the norms of one record at a time, a scalar for every leaf.
        """


@dataclasses.dataclass(frozen=True)
class Clip:
    """Flat clipping, g · min(1, C / ‖g‖₂) (Abadi et al. 2016, arXiv:1607.00133v2, Algorithm 1).

    Formal guarantee: the contribution of one record has norm at most ``l2_clip_norm``, under every
    relation, also after rounding in float32 (docs/proofs/clip_bound.md, Theorems 1 and 2).

    Attributes:
        l2_clip_norm: the bound C, a public constant in [1e-10, 1e10]: further out, squares in
            float32 underflow or overflow and the norm could not be trusted.
    """

    l2_clip_norm: float

    def __post_init__(self) -> None:
        if isinstance(self.l2_clip_norm, float) and self.l2_clip_norm == math.inf:
            raise ValueError(
                "l2_clip_norm must be a finite number above 0, got inf: to clip nothing, as in "
                "training without privacy (noise_multiplier=0), take a norm that no gradient "
                "reaches, such as 1e6"
            )
        check_bound("l2_clip_norm", self.l2_clip_norm)

    def l2(self, params: PyTree) -> float:
        """The bound C."""
        return float(self.l2_clip_norm)

    def factors(self, square_norms: PyTree, bound: jax.Array | None = None) -> PyTree:
        """The same min(1, C / ‖g‖) [m] for every leaf, ‖g‖ taken over all leaves."""
        limit = self.l2(square_norms) if bound is None else bound
        factor = _shortening(square_norms, limit)
        return jax.tree.map(lambda _: factor, square_norms)


@dataclasses.dataclass(frozen=True)
class AutoS:
    """AUTO-S, g · R / (‖g‖₂ + γ) (Bu et al. 2022, arXiv:2206.07136v3, equation 4.1).

    Formal guarantee: the contribution of one record has norm below ``radius``, under every
    relation, also after rounding in float32 (docs/proofs/clip_bound.md). There is no
    threshold to tune: the radius only rescales the learning rate.

    Attributes:
        radius: R, a public constant in [1e-10, 1e10].
        stability: γ > 0, which keeps small gradients small; at least 1e-10.
    """

    radius: float = 1.0
    stability: float = 0.01

    def __post_init__(self) -> None:
        check_bound("radius", self.radius)
        check_bound("stability", self.stability)

    def l2(self, params: PyTree) -> float:
        """The radius R."""
        return float(self.radius)

    def factors(self, square_norms: PyTree, bound: jax.Array | None = None) -> PyTree:
        """The same R / (‖g‖ + γ) [m] for every leaf."""
        _refuse_bound("auto_s", bound)
        factor = self.radius * (1.0 - rounding.MARGIN) / (_norm(square_norms) + self.stability)
        return jax.tree.map(lambda _: factor, square_norms)


@dataclasses.dataclass(frozen=True)
class Normalize:
    """Normalisation, g · R / ‖g‖₂ (Das et al. 2021, arXiv:2106.13805; AUTO-V of Bu et al. 2022).

    Formal guarantee: the contribution of one record has norm at most ``radius``, under every
    relation, also after rounding in float32 (docs/proofs/clip_bound.md). A gradient of
    norm up to 1e-12 contributes zero.

    Attributes:
        radius: R, a public constant in [1e-10, 1e10].
    """

    radius: float = 1.0

    def __post_init__(self) -> None:
        check_bound("radius", self.radius)

    def l2(self, params: PyTree) -> float:
        """The radius R."""
        return float(self.radius)

    def factors(self, square_norms: PyTree, bound: jax.Array | None = None) -> PyTree:
        """The same R / ‖g‖ [m] for every leaf."""
        _refuse_bound("normalize", bound)
        norm = _norm(square_norms)
        aim = self.radius * (1.0 - rounding.MARGIN)
        factor = jnp.where(norm > _SMALLEST_NORM, aim / jnp.maximum(norm, _SMALLEST_NORM), 0.0)
        return jax.tree.map(lambda _: factor, square_norms)


@dataclasses.dataclass(frozen=True)
class PerLayer:
    """Flat clipping of every group of parameters by itself; made by ``per_layer``.

    (McMahan et al. 2018, arXiv:1710.06963v3, section 3.)

    Formal guarantee: the contribution of one record to a group has norm at most the group's bound,
    and altogether at most the square root of the sum of their squares, under every relation, also
    after rounding in float32 (docs/proofs/clip_bound.md).

    Attributes:
        bounds: the groups' bounds, public constants.
        structure: a prefix of the parameters' tree; each of its leaves is a group.
    """

    bounds: tuple[float, ...]
    structure: jax.tree_util.PyTreeDef

    def __post_init__(self) -> None:
        for bound in self.bounds:
            check_bound("bounds", bound)

    def l2(self, params: PyTree) -> float:
        """sqrt(sum of the squared bounds) of the groups that are trained."""
        groups = self._groups(params)
        trained = [
            float(b) for b, group in zip(self.bounds, groups, strict=True) if jax.tree.leaves(group)
        ]
        return math.sqrt(sum(bound * bound for bound in trained))

    def factors(self, square_norms: PyTree, bound: jax.Array | None = None) -> PyTree:
        """min(1, C_group / ‖g_group‖) [m] for every leaf of each group."""
        _refuse_bound("per_layer", bound)
        factors = []
        for limit, group in zip(self.bounds, self._groups(square_norms), strict=True):
            trained = bool(jax.tree.leaves(group))
            factor = _shortening(group, limit) if trained else None
            factors.append(jax.tree.map(lambda _, factor=factor: factor, group))
        return jax.tree.unflatten(self.structure, factors)

    def _groups(self, tree: PyTree) -> list[PyTree]:
        try:
            return self.structure.flatten_up_to(tree)
        except ValueError as error:
            raise ValueError(
                f"bounds must be a prefix of the parameters' tree, got {self.structure}: {error}"
            ) from None


@dataclasses.dataclass(frozen=True)
class CoordinateBox:
    """Every coordinate clipped to [-bound, bound] (AdaDp, Xu et al. 2019; see docs/algorithms.md).

    Formal guarantee: the contribution of one record has norm at most bound · √m for m trained
    coordinates, under every relation. Clipping a coordinate rounds nothing.

    Attributes:
        bound: a public constant in [1e-10, 1e10].
    """

    bound: float = 1.0

    def __post_init__(self) -> None:
        check_bound("bound", self.bound)

    def l2(self, params: PyTree) -> float:
        """bound · √m for m coordinates, enlarged by the bound's rounding to float32."""
        coordinates = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
        return float(self.bound) * math.sqrt(coordinates) * (1.0 + 2.0**-22)

    def factors(self, square_norms: PyTree, bound: jax.Array | None = None) -> PyTree:
        """Raises ValueError: a box clips coordinates and has no factors."""
        raise ValueError("coordinate_box has no factors: it clips coordinates, not norms")


def clip(l2_clip_norm: float) -> Clip:
    """The rule of flat clipping to the norm ``l2_clip_norm``; see ``Clip``."""
    return Clip(l2_clip_norm)


def auto_s(radius: float = 1.0, stability: float = 0.01) -> AutoS:
    """The rule of automatic clipping without a threshold (AUTO-S); see ``AutoS``."""
    return AutoS(radius, stability)


def normalize(radius: float = 1.0) -> Normalize:
    """The rule that rescales every gradient to the norm ``radius``; see ``Normalize``."""
    return Normalize(radius)


def per_layer(bounds: PyTree) -> PerLayer:
    """The rule of clipping each group of parameters to a bound of its own; see ``PerLayer``.

    Args:
        bounds: a prefix of the parameters' tree with a number at each group, such as
            ``{"conv": 0.1, "dense": 0.3}``.

    Raises:
        ValueError: there is no bound, or one is not a number in [1e-10, 1e10].
    """
    leaves, structure = jax.tree.flatten(bounds)
    if not leaves:
        raise ValueError(f"bounds must hold a number for every group of parameters, got {bounds!r}")
    for bound in leaves:
        check_bound("bounds", bound)
    return PerLayer(tuple(float(bound) for bound in leaves), structure)


def coordinate_box(bound: float = 1.0) -> CoordinateBox:
    """The rule that clips every coordinate to [-bound, bound]; see ``CoordinateBox``."""
    return CoordinateBox(bound)


# Their own factors keep their bound: docs/proofs/clip_bound.md.
PROVEN = (Clip, AutoS, Normalize, PerLayer)


def limit_of(rule: Rule, trained: PyTree, bound: jax.Array | None = None) -> float | jax.Array:
    """The most that one record may add to a sum: the bound that is given, or the rule's own.

    To be asked once for a sum: what its records are shortened to and its ``l2`` is one number, also
    of a rule of the user's whose answer changes.

    Args:
        rule: the clipping rule.
        trained: the parameters, with None where they are frozen.
        bound: takes the place of the rule's own.

    Raises:
        ValueError: a rule that is not jaxdp's own names no number in [1e-10, 1e10].
    """
    if bound is not None:
        return bound
    limit = float(rule.l2(trained))
    if type(rule) not in (*PROVEN, CoordinateBox):
        check_bound(f"l2 of {type(rule).__name__}", limit)
    return limit


def bounded_factors(
    rule: Rule,
    square_norms: PyTree,
    limit: float | jax.Array,
    bound: jax.Array | None = None,
) -> PyTree:
    """The factors [m] of a rule that is not jaxdp's own, so that no record adds more than a limit.

    The rule is asked about one record at a time, by operations that see one record alone, so that
    no record can change another's factors, and a record that would add more than the limit less the
    margin for rounding is shortened to it: a rule that is wrong trains badly, and breaks nothing.

    Args:
        rule: the clipping rule.
        square_norms: squared norms [m] of every trained leaf, rounded up.
        limit: of ``limit_of``.
        bound: takes the place of the rule's own.

    Raises:
        ValueError: the factors are no numbers of one record, or could be made of other records.
    """
    name = f"{type(rule).__name__}.factors"

    def asked(squares: PyTree, bound: jax.Array | None) -> PyTree:
        factors = rule.factors(squares, bound)
        given = jax.tree.leaves(factors)
        structure: Any = jax.tree.structure(factors)
        alike = structure == jax.tree.structure(squares)
        if not alike or any(jnp.shape(f) or jnp.iscomplexobj(f) for f in given):
            raise ValueError(
                f"{name} must return a tree like square_norms, with a real number (a scalar) for "
                f"every leaf, got {factors}"
            )
        return [jnp.asarray(f).astype(jnp.float32) for f in given]

    leaves, structure = jax.tree.flatten(square_norms)
    one = [jax.ShapeDtypeStruct((), leaf.dtype) for leaf in leaves]
    traced = jax.make_jaxpr(asked)(jax.tree.unflatten(structure, one), bound)
    losses.captured_alone(traced, name)
    answer, given_bound = core.jaxpr_as_fun(traced), jax.tree.leaves(bound)
    aim = (1.0 - rounding.MARGIN) * limit

    def of_one(squares: list[jax.Array]) -> list[jax.Array]:
        factors = [jnp.where(jnp.isfinite(f), f, 0.0) for f in answer(*squares, *given_bound)]
        # What squares may hide by underflow counts, too; a factor's own square may underflow.
        lengths = [
            f * jnp.sqrt(s + _SMALLEST_NORM**2) for f, s in zip(factors, squares, strict=True)
        ]
        norm = _norm([length**2 for length in lengths])
        shorter = jnp.where(norm > aim, aim / norm, 1.0)
        return [f * shorter for f in factors]

    return jax.tree.unflatten(structure, jax.vmap(of_one)(leaves))


def check_rule(rule: Rule, trained: PyTree) -> None:
    """Raises ValueError for a rule of the user's that cannot be used; it is traced on shapes.

    Args:
        rule: the clipping rule.
        trained: the parameters, with None where they are frozen.
    """
    limit = limit_of(rule, trained)
    if type(rule) in (*PROVEN, CoordinateBox):
        return
    squares = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1,), jnp.float32), trained)
    jax.eval_shape(lambda squares: bounded_factors(rule, squares, limit), squares)


def _shortening(square_norms: PyTree, limit: float | jax.Array) -> jax.Array:
    norm = _norm(square_norms)
    aim = limit * (1.0 - rounding.MARGIN)
    return jnp.where(norm > aim, aim / jnp.maximum(norm, aim), 1.0)


def _norm(square_norms: PyTree) -> jax.Array:
    return jnp.sqrt(rounding.sum_arrays(jax.tree.leaves(square_norms)))


def _refuse_bound(rule: str, bound: jax.Array | None) -> None:
    if bound is not None:
        raise ValueError(f"bound must be None for {rule}: only jaxdp.clip takes one at run time")


def rule_of(l2_clip_norm: float | None, rule: Rule | None) -> Rule:
    """The clipping rule that was given, or flat clipping; ValueError for both or neither."""
    if (rule is None) == (l2_clip_norm is None):
        raise ValueError(f"give one of l2_clip_norm and rule, got {l2_clip_norm!r} and {rule!r}")
    return clip(l2_clip_norm) if rule is None else rule  # type: ignore[arg-type]
