"""Per-example clipping: rules that bound one record's contribution, and the engine."""

from jaxdp.clipping.engine import ClippedGrad, clipped_grad
from jaxdp.clipping.rules import Clip, Rule, clip
from jaxdp.clipping.transform import clip_and_sum

__all__ = ["Clip", "ClippedGrad", "Rule", "clip", "clip_and_sum", "clipped_grad"]
