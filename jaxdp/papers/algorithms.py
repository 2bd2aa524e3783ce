"""The papers' algorithms by name: importing this module registers them.

Algorithms as published, whose claims are shown beside what is proven, and AdaDp's ablations.
"""

from collections.abc import Callable

from jaxdp import arguments
from jaxdp.clipping import coordinate_box
from jaxdp.optimizers.adadp import adadp
from jaxdp.optimizers.algorithm import Algorithm
from jaxdp.optimizers.registry import (
    ADADP_RECIPE,
    ANNEALED_RECIPE,
    AlgorithmEntry,
    Numbers,
    built_from,
    register,
)
from jaxdp.papers.adadp import adadp_as_published, adadp_step_only
from jaxdp.papers.pigdo import pigdo_as_published
from jaxdp.papers.sa_dpsgd import sa_dpsgd_as_published


def _sa_published(n: Numbers, temperature: float = 10.0, max_rejections: int = 10) -> Algorithm:
    return _annealed(n, temperature, max_rejections)


def _sa_published_train(
    n: Numbers, temperature: float = 10.0, max_rejections: int = 10
) -> Algorithm:
    return _annealed(n, temperature, max_rejections, energy_on_private=True)


def _annealed(n: Numbers, temperature: float, max_rejections: int, **variant: bool) -> Algorithm:
    return sa_dpsgd_as_published(
        n.mechanism(),
        n.learning_rate,
        n.acceptance_key(),
        momentum=n.momentum,
        temperature=temperature,
        max_rejections=max_rejections,
        **variant,
    )


def _adadp_noise_only(
    n: Numbers,
    beta: float = 1.2,
    threshold: float = 1e-6,
    floor: float = 0.1,
    cap: float = 1.0,
    moment_decay: float = 0.9,
) -> Algorithm:
    return adadp(
        n.mechanism(coordinate_box(1.0)),
        n.learning_rate,
        bound=n.l2_clip_norm,
        beta=beta,
        threshold=threshold,
        floor=floor,
        cap=cap,
        moment_decay=moment_decay,
        adaptive_rate=False,
    )


def _adadp_published(
    n: Numbers, beta: float = 1.2, threshold: float = 1e-6, of_lot: int = 0
) -> Algorithm:
    return _adadp_to_the_letter(n, beta, threshold, of_lot)


def _adadp_noise_only_published(
    n: Numbers, beta: float = 1.2, threshold: float = 1e-6, of_lot: int = 0
) -> Algorithm:
    return _adadp_to_the_letter(n, beta, threshold, of_lot, adaptive_rate=False)


def _adadp_to_the_letter(
    n: Numbers, beta: float, threshold: float, of_lot: int, adaptive_rate: bool = True
) -> Algorithm:
    return adadp_as_published(
        n.noise_multiplier,
        n.batch_size,
        n.dataset_size,
        n.learning_rate,
        bound=n.l2_clip_norm,
        beta=beta,
        threshold=threshold,
        of_lot=bool(arguments.integer("of_lot", of_lot, least=0, most=1)),
        adaptive_rate=adaptive_rate,
        sampling=n.sampling,
    )


def _pigdo_published(name: str) -> Callable[..., Algorithm]:
    def make(n: Numbers, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Algorithm:
        return pigdo_as_published(n.mechanism(), n.learning_rate, name, b1=b1, b2=b2, eps=eps)

    return make


_ADAN = {"learning_rate": 0.1, "l2_clip_norm": 4.0}
_PIGDO = {"learning_rate": 0.001, "l2_clip_norm": 4.0}
ALGORITHMS = {
    "sa-dpsgd-as-published": AlgorithmEntry(
        _sa_published, energy="test", momentum=True, recipe=ANNEALED_RECIPE
    ),
    "sa-dpsgd-as-published-train": AlgorithmEntry(
        _sa_published_train, energy="train", momentum=True, recipe=ANNEALED_RECIPE
    ),
    "adadp-noise-only": AlgorithmEntry(_adadp_noise_only, recipe=_ADAN),
    "adadp-step-only": AlgorithmEntry(
        built_from(adadp_step_only), recipe={"learning_rate": 0.001, "l2_clip_norm": 4.0}
    ),
    "adadp-as-published": AlgorithmEntry(_adadp_published, recipe=ADADP_RECIPE),
    "adadp-noise-only-as-published": AlgorithmEntry(_adadp_noise_only_published, recipe=_ADAN),
    "piadam-as-published": AlgorithmEntry(_pigdo_published("adam"), recipe=_PIGDO),
    "pirmsprop-as-published": AlgorithmEntry(_pigdo_published("rmsprop"), recipe=_PIGDO),
    "piadagrad-as-published": AlgorithmEntry(_pigdo_published("adagrad"), recipe=_PIGDO),
}
for _name, _entry in ALGORITHMS.items():
    register(_name, _entry)
