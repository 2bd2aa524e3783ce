"""How programs of the tests are compiled: most of the suite's time is XLA's, and most of that MLIR's.

XLA's older emitters of fused loops on the CPU compile small programs three times as fast as those
that users get. Whatever is proven of rounding itself, and the notebooks, keep the users'.
"""

import os

import jax

_EMITTERS = "xla_cpu_use_fusion_emitters"
# XLA ends a process that gives it a flag it does not know: only where it is known to be one.
_KNOWN = jax.__version_info__[:2] == (0, 10)

QUICK = {"xla_backend_optimization_level": 0, **({_EMITTERS: False} if _KNOWN else {})}
AS_USERS = {_EMITTERS: True} if _KNOWN else {}
FLAG = f"--{_EMITTERS}=false" if _KNOWN else ""


def with_flags(*flags):
    """The environment of a process that compiles like this one, with more flags."""
    return {**os.environ, "XLA_FLAGS": " ".join([os.environ.get("XLA_FLAGS", ""), *flags])}


def of_users():
    """The environment of a process that compiles as users do."""
    left = os.environ.get("XLA_FLAGS", "").split()
    return {**os.environ, "XLA_FLAGS": " ".join(flag for flag in left if flag != FLAG)}
