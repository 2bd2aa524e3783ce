"""How programs of the tests are compiled: most of the suite's time is XLA's, and most of that LLVM's.

Without LLVM's optimisations, with XLA's older emitters of fused loops, and in one piece (the workers
take the cores), the CPU compiles small programs up to ten times as fast as those that users get.
Whatever is proven of rounding itself, and the notebooks, keep the users'.
"""

import os

import jax

_EMITTERS = "xla_cpu_use_fusion_emitters"
_LEVEL = "xla_backend_optimization_level"
_PARTS = "xla_cpu_parallel_codegen_split_count"  # LLVM modules of a program, one thread each
# XLA ends a process that gives it a flag it does not know: only where it is known to be one.
_KNOWN = jax.__version_info__[:2] == (0, 10)

QUICK = {_LEVEL: 0, **({_EMITTERS: False, _PARTS: 1} if _KNOWN else {})}
AS_USERS = {_LEVEL: 3, **({_EMITTERS: True, _PARTS: 32} if _KNOWN else {})}
FLAGS = [f"--{name}={str(value).lower()}" for name, value in QUICK.items()]
FLAGS += ["--xla_cpu_multi_thread_eigen=false"]  # of a run, not of a program


def with_flags(*flags):
    """The environment of a process that compiles like this one, with more flags."""
    return {**os.environ, "XLA_FLAGS": " ".join([os.environ.get("XLA_FLAGS", ""), *flags])}


def of_users():
    """The environment of a process that compiles as users do."""
    left = os.environ.get("XLA_FLAGS", "").split()
    return {**os.environ, "XLA_FLAGS": " ".join(flag for flag in left if flag not in FLAGS)}
