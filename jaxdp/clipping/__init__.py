"""Per-example clipping: rules that bound one record's contribution, and the engines."""

from jaxdp.clipping.engine import ClippedGrad, clipped_grad
from jaxdp.clipping.ghost.plan import LeafPlan
from jaxdp.clipping.losses import augmented, user_loss
from jaxdp.clipping.rules import (
    Rule,
    auto_s,
    clip,
    coordinate_box,
    normalize,
    per_layer,
)
from jaxdp.clipping.transform import clip_and_sum

__all__ = [
    "ClippedGrad",
    "LeafPlan",
    "Rule",
    "augmented",
    "auto_s",
    "clip",
    "clip_and_sum",
    "clipped_grad",
    "coordinate_box",
    "normalize",
    "per_layer",
    "user_loss",
]
