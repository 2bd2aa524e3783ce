"""How programs of the tests are compiled: most of the suite's time is XLA's, and most of that LLVM's.

Without LLVM's optimisations, with XLA's older emitters of fused loops, and in one piece (the workers
take the cores), the CPU compiles small programs up to ten times as fast as those that users get.
Whatever is proven of rounding itself, and the notebooks, keep the users'.

JAX makes an MLIR context for each program and throws it away: a quarter of a small one's time.
"""

import contextlib
import functools
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


def lower_quickly():
    """Lets this process lower all programs in one MLIR context, without places in the source."""
    jax.config.update("jax_traceback_in_locations_limit", 0)
    if _KNOWN:
        from jax._src.interpreters import mlir

        mlir.make_ir_context = functools.cache(mlir.make_ir_context)


@contextlib.contextmanager
def compilations(name):
    """Yields a list that grows by one whenever a program of the name is compiled."""
    found = []

    def heard(event, seconds, fun_name="", **_):
        if event.endswith("backend_compile_duration") and fun_name == f"jit({name})":
            found.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)


def with_flags(*flags):
    """The environment of a process that compiles like this one, with more flags."""
    return {**os.environ, "XLA_FLAGS": " ".join([os.environ.get("XLA_FLAGS", ""), *flags])}


def of_users():
    """The environment of a process that compiles as users do."""
    left = os.environ.get("XLA_FLAGS", "").split()
    return {**os.environ, "XLA_FLAGS": " ".join(flag for flag in left if flag not in FLAGS)}
