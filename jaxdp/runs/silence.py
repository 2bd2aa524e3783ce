"""A silence in which what runs leaves no trace that could be counted."""

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator

import jax

_NEVER = 1e9  # seconds that a compilation would have to take to be kept


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Shows and keeps nothing of what runs inside, in this process.

    Prints, warnings and log records go nowhere, whatever file a handler writes to; neither does
    what libraries in other languages write to the descriptors of stdout and stderr. Nothing is
    added to JAX's cache of compiled programs on disk, which else grows by one file or more for
    every program with other constants. All of it belongs to the whole process: other threads are
    silent too.
    """
    with contextlib.ExitStack() as stack:
        nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        stack.enter_context(_descriptors(nowhere.fileno()))
        stack.enter_context(contextlib.redirect_stdout(nowhere))
        stack.enter_context(contextlib.redirect_stderr(nowhere))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(sys.maxsize)
        name = "jax_persistent_cache_min_compile_time_secs"
        stack.callback(jax.config.update, name, getattr(jax.config, name))
        jax.config.update(name, _NEVER)
        yield


@contextlib.contextmanager
def _descriptors(nowhere: int) -> Iterator[None]:
    """Points the descriptors of stdout and stderr elsewhere; one that is closed stays so."""
    kept: list[tuple[int, int]] = []
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.flush()
    try:
        for number in (1, 2):
            with contextlib.suppress(OSError):
                kept.append((number, os.dup(number)))
                os.dup2(nowhere, number)
        yield
    finally:
        for number, copy in kept:
            os.dup2(copy, number)
            os.close(copy)
