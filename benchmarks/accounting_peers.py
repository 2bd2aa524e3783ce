"""The peers' epsilon of a DP-SGD run: add/remove, Poisson sampling, at one delta each.

Opacus and opake-accounting are measured by their accountants alone: `pip install --no-deps opacus
opake-accounting` is enough. Opacus' package imports torch, which its accountants do not use, so
they are loaded past it; opake's Python layer needs its other packages and Python 3.11.8, so its
native module is asked. A peer that is not installed raises ImportError.
"""

import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any


def dp_accounting_pld(q: float, z: float, steps: int, delta: float) -> float:
    """dp_accounting's PLD accountant at its default grid."""
    import dp_accounting as dpa
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant()
    step = dpa.PoissonSampledDpEvent(q, dpa.GaussianDpEvent(z))
    accountant.compose(dpa.SelfComposedDpEvent(step, steps))
    return accountant.get_epsilon(delta)


def prv(q: float, z: float, steps: int, delta: float) -> float:
    """prv_accountant at eps_error 0.01, its upper end."""
    from prv_accountant.dpsgd import DPSGDAccountant

    accountant = DPSGDAccountant(
        noise_multiplier=z,
        sampling_probability=q,
        eps_error=0.01,
        delta_error=1e-10,
        max_steps=steps,
    )
    return accountant.compute_epsilon(delta=delta, num_steps=steps)[2]


def opacus_rdp(q: float, z: float, steps: int, delta: float) -> float:
    """Opacus' RDPAccountant at its default orders."""
    accountant = _opacus("rdp").RDPAccountant()
    accountant.history = [(z, q, steps)]
    return float(accountant.get_epsilon(delta))


def opacus_prv(q: float, z: float, steps: int, delta: float) -> float:
    """Opacus' PRVAccountant at its default errors (0.01, delta/1000), its upper end."""
    accountant = _opacus("prv").PRVAccountant()
    accountant.history = [(z, q, steps)]
    return float(accountant.get_epsilon(delta))


def opake(q: float, z: float, steps: int, delta: float) -> float:
    """opake-accounting's PLD at its default grid."""
    native = _opake()
    step = native.poisson_pld(native.gaussian_pld(z, native.DiscretizationConfig()), q)
    return step.self_compose(steps).epsilon_at(delta)


PEERS = {
    "dp_accounting": dp_accounting_pld,
    "prv": prv,
    "opacus_rdp": opacus_rdp,
    "opacus_prv": opacus_prv,
    "opake": opake,
}


def _opacus(name: str) -> Any:
    """A module of opacus.accountants, without what imports torch."""
    if "opacus" not in sys.modules:
        spec = importlib.util.find_spec("opacus")
        if spec is None or spec.origin is None:
            raise ImportError("opacus")
        root = Path(spec.origin).parent
        for part in ("opacus", "opacus.accountants", "opacus.optimizers"):
            module: Any = types.ModuleType(part)
            module.__path__ = [str(root.parent.joinpath(*part.split(".")))]
            sys.modules[part] = module
        sys.modules["opacus.optimizers"].DPOptimizer = object  # type: ignore[attr-defined]
    return importlib.import_module(f"opacus.accountants.{name}")


def _opake() -> Any:
    """The native module of opake-accounting."""
    if "opake_accounting" not in sys.modules:
        for folder in sys.path:
            for file in Path(folder).glob("opake/api/accounting/core/opake_accounting*.so"):
                spec = importlib.util.spec_from_file_location("opake_accounting", file)
                assert spec is not None
                assert spec.loader is not None
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                sys.modules["opake_accounting"] = module
                return module
        raise ImportError("opake_accounting")
    return sys.modules["opake_accounting"]
