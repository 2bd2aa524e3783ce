"""Imports, and packages that may be missing: words say what to install for them."""

import contextlib
import gc
import importlib.util
import sys
from collections.abc import Iterator

# Of jaxdp-privacy; jaxdp-accounting, which brings jaxdp/__init__.py, must be of the same.
VERSION = "0.1.0"
if (_beside := getattr(sys.modules["jaxdp"], "__version__", "not installed")) != VERSION:
    raise ImportError(
        f"jaxdp-privacy is {VERSION} and jaxdp-accounting {_beside}; install the same version of "
        f"both: pip install jaxdp-privacy=={VERSION} jaxdp-accounting=={VERSION}"
    )

# Where the distribution is not called like its module.
_DISTRIBUTIONS = {
    "PIL": "pillow",
    "orbax.checkpoint": "orbax-checkpoint",
    "sklearn": "scikit-learn",
    "tensorflow_datasets": "tensorflow-datasets",
}
# What jaxdp.Run needs, from its first step to its report.
RUN = ("orbax.checkpoint", "flax", "rich", "jinja2", "matplotlib")


class MissingExtra(ImportError):
    """A package that an extra brings is not installed."""


@contextlib.contextmanager
def needed(by: str, extra: str, *modules: str) -> Iterator[None]:
    """Refuses to go on without ``modules``; what needs them is imported inside.

    They are looked for, not imported: a run asks at its beginning for what its report needs.

    Args:
        by: what needs them, for the message.
        extra: the extra of this distribution that brings them.
        modules: as they are imported.

    Raises:
        MissingExtra: a module is not installed; the message names the extra.
    """
    missing = [_DISTRIBUTIONS.get(name, name) for name in modules if not installed(name)]
    if missing:
        raise MissingExtra(f"{by} needs {', '.join(missing)}: pip install 'jaxdp-privacy[{extra}]'")
    yield


def installed(*modules: str) -> bool:
    """True if every module can be found; none of them is imported."""
    try:
        return all(importlib.util.find_spec(name) is not None for name in modules)
    except ModuleNotFoundError:  # not even the package that it lies in
        return False


@contextlib.contextmanager
def imports_kept() -> Iterator[None]:
    """Turns garbage collection off during imports, which makes them faster."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
