"""Private optimizers: each a mechanism and the optax chain that its noisy gradient goes into."""

from jaxdp.optimizers.adadp import adadp, scale_by_adadp
from jaxdp.optimizers.adaptive import (
    adam_on_noise,
    dp_adagrad,
    dp_adam,
    dp_rmsprop,
    dp_sgd,
    scale_by_dp_adagrad,
    scale_by_dp_adam,
    scale_by_dp_rmsprop,
)
from jaxdp.optimizers.annealing import annealing, sa_dpsgd
from jaxdp.optimizers.energy import PrivateEnergy, PublicEnergy, energy_mechanism
from jaxdp.optimizers.method import Method
from jaxdp.optimizers.pigdo import piadagrad, piadam, pirmsprop
from jaxdp.optimizers.quantile import QuantileState, quantile_clip, quantile_method

__all__ = [
    "Method",
    "PrivateEnergy",
    "PublicEnergy",
    "QuantileState",
    "adadp",
    "adam_on_noise",
    "annealing",
    "dp_adagrad",
    "dp_adam",
    "dp_rmsprop",
    "dp_sgd",
    "energy_mechanism",
    "piadagrad",
    "piadam",
    "pirmsprop",
    "quantile_clip",
    "quantile_method",
    "sa_dpsgd",
    "scale_by_adadp",
    "scale_by_dp_adagrad",
    "scale_by_dp_adam",
    "scale_by_dp_rmsprop",
]
