"""DP-SBCD, block coordinate descent for Lipschitz networks, in the variants that hold and as published.

``ReleasedBlocks`` (R1) releases every update over Poisson batches: one subsampled Gaussian a sweep.
``HiddenBlocks`` (R2; R3 with ``direct=True`` and one layer) releases the last iterate of each block
over a fixed secret partition. ``AsPublished`` is Algorithm 2 of the paper, with its claim and
without a guarantee. See docs/hidden_state.md.
"""  # noqa: E501

from jaxdp.papers.block_coordinate.hidden import HiddenBlocks, train_hidden
from jaxdp.papers.block_coordinate.network import Network
from jaxdp.papers.block_coordinate.proximal import Proximal, Rescale
from jaxdp.papers.block_coordinate.published import AsPublished, train_as_published
from jaxdp.papers.block_coordinate.released import ReleasedBlocks, train
from jaxdp.papers.block_coordinate.schedules import SweepSchedule, constant, linear, step

__all__ = [
    "AsPublished",
    "HiddenBlocks",
    "Network",
    "Proximal",
    "ReleasedBlocks",
    "Rescale",
    "SweepSchedule",
    "constant",
    "linear",
    "step",
    "train",
    "train_as_published",
    "train_hidden",
]
