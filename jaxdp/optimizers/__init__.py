"""Private optimizers: each a mechanism and the optax chain that its noisy gradient goes into."""

from jaxdp.optimizers import block_coordinate
from jaxdp.optimizers.adadp import adadp, adadp_as_published, adal, scale_by_adadp
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
from jaxdp.optimizers.layerwise_blocks import (
    LayerwiseGrad,
    by_top_level,
    layerwise,
    layerwise_method,
)
from jaxdp.optimizers.method import Method
from jaxdp.optimizers.pigdo import piadagrad, piadam, pigdo_as_published, pirmsprop
from jaxdp.optimizers.quantile import QuantileState, quantile_clip, quantile_method

__all__ = [
    "LayerwiseGrad",
    "Method",
    "PrivateEnergy",
    "PublicEnergy",
    "QuantileState",
    "adadp",
    "adadp_as_published",
    "adal",
    "adam_on_noise",
    "annealing",
    "block_coordinate",
    "by_top_level",
    "dp_adagrad",
    "dp_adam",
    "dp_rmsprop",
    "dp_sgd",
    "energy_mechanism",
    "layerwise",
    "layerwise_method",
    "piadagrad",
    "piadam",
    "pigdo_as_published",
    "pirmsprop",
    "quantile_clip",
    "quantile_method",
    "sa_dpsgd",
    "scale_by_adadp",
    "scale_by_dp_adagrad",
    "scale_by_dp_adam",
    "scale_by_dp_rmsprop",
]
