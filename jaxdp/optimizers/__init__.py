"""The optimizers of the papers, each repaired where its privacy claim does not hold."""

from jaxdp.optimizers import block_coordinate
from jaxdp.optimizers.layerwise_blocks import LayerwiseGrad, by_top_level, layerwise

__all__ = ["LayerwiseGrad", "block_coordinate", "by_top_level", "layerwise"]
