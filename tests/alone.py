"""A program for an environment with jaxdp-accounting, numpy and scipy alone; `make bare` makes one."""

import importlib
import pkgutil
import sys

import jaxdp
from jaxdp import accounting as acc

TRAINER = (
    "jaxdp.Trainer needs JAX and the rest of jaxdp; only jaxdp-accounting is installed: "
    "pip install jaxdp-privacy"
)


def said(ask):
    try:
        ask()
    except ImportError as error:
        return str(error)
    raise AssertionError("nothing was missing")


def main():
    """The accountant of the README, every module of it, and words for what is elsewhere."""
    step = acc.PoissonSampled(acc.Gaussian(noise_multiplier=1.23), sampling_prob=512 / 60_000)
    assert 2.4 < acc.epsilon(acc.Repeated(step, 5_000), delta=1e-5).upper < 2.5
    for name in acc.__all__:
        getattr(acc, name)
    modules = [found.name for found in pkgutil.walk_packages(jaxdp.__path__, "jaxdp.")]
    for name in modules:
        importlib.import_module(name)
    assert "jaxdp.accounting.certificate" in modules
    assert "jaxdp.types" not in modules
    assert said(lambda: jaxdp.Trainer) == TRAINER
    assert said(lambda: jaxdp.audit) == TRAINER.replace("Trainer", "audit")
    assert dir(jaxdp) == ["__version__", "accounting"]
    assert not hasattr(jaxdp, "Trainor")
    outside = {name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names
    assert "jax" not in outside
    print(f"alone: all done; {len(modules)} modules; from elsewhere: {sorted(outside)}")


if __name__ == "__main__":
    main()
