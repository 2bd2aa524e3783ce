"""The epsilons that papers claim, by their own formulas; never a guarantee.

No function that takes a guarantee accepts a ``Claim``, and a ``Claim`` is not a number. Each
records the assumptions that its paper makes and whether they held, so that a value below the proven
epsilon can be explained. All formulas are about q-sampled Gaussian steps as the paper at hand
prints them.
"""

import math
from collections.abc import Iterable

import numpy as np

from jaxdp import arguments as check
from jaxdp.accounting.events import Claim, Relation
from jaxdp.accounting.rdp import poisson_renyi
from jaxdp.papers.hidden_state import NoisyChain, averaged_renyi, log_sobolev
from jaxdp.papers.wbk import wbk_rdp

_ORDERS = tuple(float(a) for a in range(2, 65))


def _arguments(
    sampling_prob: float, noise_multiplier: float, steps: int, delta: float
) -> tuple[float, float, int, float]:
    q = check.share("sampling_prob", sampling_prob)
    if q == 0:
        raise ValueError(f"sampling_prob={sampling_prob!r}: expected a probability > 0")
    z = check.positive("noise_multiplier", noise_multiplier)
    return q, z, check.count("steps", steps, 1), check.error_probability("delta", delta)


def _mironov(rdp: np.ndarray, steps: int, delta: float) -> tuple[float, float]:
    orders = np.asarray(_ORDERS)
    epsilon = steps * rdp + math.log(1 / delta) / (orders - 1)
    best = int(np.nanargmin(epsilon))
    return float(epsilon[best]), float(orders[best])


def modified_moments_accountant(
    sampling_prob: float, noise_multiplier: float, steps: int, delta: float
) -> Claim:
    """PIGDO's MMA: 2 q log(1/delta) / (sigma sqrt(delta^(-1/T) - 1)), its Theorem 3.

    It can be below the truth even where its stated conditions hold: third and higher moments are
    dropped and only one direction is bounded.
    """
    q, z, steps, delta = _arguments(sampling_prob, noise_multiplier, steps, delta)
    log = math.log(1 / delta)
    value = 2 * q * log / (z * math.sqrt(math.expm1(log / steps)))
    order = 2 * log / value
    conditions = (
        ("sigma >= 1", z >= 1),
        ("q < 1/sigma", q < 1 / z),
        ("lambda <= 1/(10 q^2)", order <= 1 / (10 * q * q)),
        ("epsilon > 0.002 T/lambda", value > 0.002 * steps / order),
        ("sigma/(q lambda) > 10 (used in the proof)", z / (q * order) > 10),
        ("lambda <= 32 (the range the paper says it uses)", order <= 32),
        ("moments of third and higher order are negligible", False),
    )
    texts, holds = zip(*conditions, strict=True)
    return Claim("PIGDO MMA", value, texts, holds, "PIGDO, Theorem 3", order)


def moments_accountant(
    sampling_prob: float, noise_multiplier: float, steps: int, delta: float
) -> Claim:
    """Abadi et al.'s moments accountant: integer moments up to 32, plain conversion.

    Abadi et al. 2016, arXiv:1607.00133v2, Theorem 2 and Section 5.1.
    """
    q, z, steps, delta = _arguments(sampling_prob, noise_multiplier, steps, delta)
    orders = tuple(float(a) for a in range(2, 34))
    rdp = poisson_renyi(z, q, Relation.ADD_OR_REMOVE_ONE, orders)
    a = np.asarray(orders)
    epsilon = steps * rdp + math.log(1 / delta) / (a - 1)
    best = int(np.argmin(epsilon))
    return Claim(
        "moments accountant",
        float(epsilon[best]),
        ("Poisson sampling, add/remove",),
        (True,),
        "Abadi et al. 2016, Theorem 2",
        float(a[best] - 1),
    )


def moments_closed_form(
    sampling_prob: float, noise_multiplier: float, steps: int, delta: float
) -> Claim:
    """The closed form 3 q sqrt(T log(1/delta))/sigma that PIGDO's Remark 4 uses for Abadi et al."""
    q, z, steps, delta = _arguments(sampling_prob, noise_multiplier, steps, delta)
    value = 3 * q * math.sqrt(steps * math.log(1 / delta)) / z
    return Claim(
        "moments closed form",
        value,
        ("q < 1/(16 sigma)", "sigma >= 1", "epsilon below a constant times q^2 T"),
        (q < 1 / (16 * z), z >= 1, value < q * q * steps),
        "Abadi et al. 2016, Theorem 1, with the constant of PIGDO, Remark 4",
    )


def zcdp(sampling_prob: float, noise_multiplier: float, steps: int, delta: float) -> Claim:
    """zCDP: rho + 2 sqrt(rho log(1/delta)), rho = T q^2/sigma^2 (T/(2 sigma^2) for a full batch).

    Bun and Steinke 2016, arXiv:1605.02065v1, Proposition 1.3; the sampled rho is that of Yu et al.
    2019, arXiv:1904.02200v1, Section IV, valid only for small orders.
    """
    q, z, steps, delta = _arguments(sampling_prob, noise_multiplier, steps, delta)
    rho = steps * (0.5 if q == 1 else q * q) / z**2
    log = math.log(1 / delta)
    value = rho + 2 * math.sqrt(rho * log)
    order = 1 + math.sqrt(log / rho)
    small = q == 1 or (q * z < 1 and order - 1 <= z * z * math.log(1 / (q * z)))
    exact = q == 1
    return Claim(
        "zCDP",
        value,
        ("the order is below sigma^2 log(1/(q sigma))", "terms of order q^3 are negligible"),
        (small, exact),
        "Bun and Steinke 2016, Proposition 1.3; Yu et al. 2019, Section IV",
        order,
    )


def adadp_theorem_1(
    sampling_prob: float, noise_multiplier: float, steps: int, delta: float
) -> Claim:
    """AdaDp's Theorem 1 as printed, with plain conversion over orders 2..64."""
    q, z, steps, delta = _arguments(sampling_prob, noise_multiplier, steps, delta)
    value, order = _mironov(wbk_rdp(q, z, _ORDERS), steps, delta)
    return Claim(
        "AdaDp Theorem 1",
        value,
        (
            "batches have a fixed size (the algorithm samples with probability q)",
            "replacing a record moves the sum by one contribution (it moves it by two)",
            "clip bounds do not depend on un-noised gradients",
        ),
        (False, False, False),
        "AdaDp, Theorem 1",
        order,
    )


def sa_dpsgd_theorem_1(
    sampling_prob: float, noise_multiplier: float, steps: int, delta: float, printed: bool = False
) -> Claim:
    """SA-DPSGD's Theorem 1 for ``steps`` ACCEPTED updates; orders 2..64, plain conversion.

    Args:
        sampling_prob: q = B/N.
        noise_multiplier: sigma.
        steps: accepted updates tau (rejected candidates are not charged by the paper).
        delta: in (0, 1).
        printed: as printed, without the logarithm of the binomial sum; otherwise corrected.
    """
    q, z, steps, delta = _arguments(sampling_prob, noise_multiplier, steps, delta)
    orders = np.asarray(_ORDERS)
    rdp = poisson_renyi(z, q, Relation.ADD_OR_REMOVE_ONE, _ORDERS)
    if printed:
        rdp = np.exp(np.minimum((orders - 1) * rdp, 600.0)) / (orders - 1)
    value, order = _mironov(rdp, steps, delta)
    name = "SA-DPSGD Theorem 1" + (" (as printed)" if printed else "")
    return Claim(
        name,
        value,
        (
            "rejected candidates reveal nothing",
            "every candidate was accepted, or none is charged",
            "batches are Poisson-sampled (its code draws a fixed size)",
        ),
        (False, False, False),
        "SA-DPSGD, Theorem 1, equation (4)",
        order,
    )


def dp_sbcd_theorem_4_6(
    blocks: Iterable[NoisyChain], delta: float, order: float | None = None
) -> Claim:
    """DP-SBCD's Theorem 4.6, summed over the blocks; orders 2..64, plain conversion.

    The formulas are lost in the text at hand and rebuilt from its prose: the log-Sobolev recursion
    with decay raised to 1/L_P^2 (Corollary 4.5), averaged over the batch of the record block by
    block, replace-one. It can be below the truth.

    Args:
        blocks: one chain for each layer, over the whole run.
        delta: in (0, 1).
        order: a Renyi order > 1 at which to claim a divergence instead of an epsilon, as the
            paper's tables do.
    """
    chains = tuple(blocks)
    if not chains or not all(isinstance(chain, NoisyChain) for chain in chains):
        raise ValueError(f"blocks={blocks!r}: expected at least one NoisyChain")
    delta = check.error_probability("delta", delta)
    orders = np.asarray(_ORDERS if order is None else (check.positive("order", order),))
    if orders[0] <= 1:
        raise ValueError(f"order={order!r}: expected a number > 1")
    epsilon = np.zeros(orders.size) if order is not None else math.log(1 / delta) / (orders - 1)
    for chain in chains:
        epsilon = epsilon + averaged_renyi(log_sobolev(chain, published=True), orders)
    best = int(np.argmin(epsilon))
    one = len(chains) == 1
    return Claim(
        "DP-SBCD Theorem 4.6",
        float(epsilon[best]),
        (
            "a proximal step divides the loss by a power 1/L_P^2",
            "the other blocks do not depend on the record while a block is trained",
            "losses averaged over a shared partition block by block may be added",
        ),
        (all(p == 1 for c in chains for p in c.proximal), one, one),
        "DP-SBCD, Theorem 4.6, equation (11), Corollary 4.5 (rebuilt)",
        float(orders[best]),
    )


def all_claims(
    sampling_prob: float, noise_multiplier: float, steps: int, delta: float
) -> list[Claim]:
    """Every claim about a run of ``steps`` sampled Gaussian steps."""
    arguments = (sampling_prob, noise_multiplier, steps, delta)
    return [
        modified_moments_accountant(*arguments),
        moments_accountant(*arguments),
        moments_closed_form(*arguments),
        zcdp(*arguments),
        adadp_theorem_1(*arguments),
        sa_dpsgd_theorem_1(*arguments),
        sa_dpsgd_theorem_1(*arguments, printed=True),
    ]
