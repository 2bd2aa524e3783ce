"""Private optimizers: each a mechanism and the optax chain that its noisy gradient goes into."""

from jaxdp.optimizers.adadp import adadp, scale_by_adadp
from jaxdp.optimizers.adafest import dp_adafest
from jaxdp.optimizers.adaptive import (
    dp_adagrad,
    dp_adam,
    dp_adam_bc,
    dp_rmsprop,
    scale_by_dp_adagrad,
    scale_by_dp_adam_bc,
    scale_by_dp_rmsprop,
    sgd,
)
from jaxdp.optimizers.algorithm import Algorithm, averaged
from jaxdp.optimizers.annealing import annealing, sa_dpsgd
from jaxdp.optimizers.energy import PrivateEnergy, PublicEnergy, energy_mechanism
from jaxdp.optimizers.pigdo import piadagrad, piadam, pirmsprop
from jaxdp.optimizers.quantile import quantile_algorithm, quantile_clip
from jaxdp.optimizers.zero_order import dp_zo

__all__ = [
    "Algorithm",
    "PrivateEnergy",
    "PublicEnergy",
    "adadp",
    "annealing",
    "averaged",
    "dp_adafest",
    "dp_adagrad",
    "dp_adam",
    "dp_adam_bc",
    "dp_rmsprop",
    "dp_zo",
    "energy_mechanism",
    "piadagrad",
    "piadam",
    "pirmsprop",
    "quantile_algorithm",
    "quantile_clip",
    "sa_dpsgd",
    "scale_by_adadp",
    "scale_by_dp_adagrad",
    "scale_by_dp_adam_bc",
    "scale_by_dp_rmsprop",
    "sgd",
]
