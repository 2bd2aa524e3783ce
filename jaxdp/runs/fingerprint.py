"""What must be equal for a resumed run to replay the very same releases."""

import os
import platform
from importlib import metadata
from typing import Any

import jax

from jaxdp import __version__
from jaxdp.data import Dataset
from jaxdp.seeds import Secret

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


def fingerprint(dataset: Dataset, secret: Secret) -> dict[str, Any]:
    """Data (a hash keyed by the run's secret), versions and device; JSON-ready.

    **Secret**, like the key: it belongs beside the checkpoint.
    """
    versions = {name: metadata.version(name) for name in _PACKAGES}
    return {
        "data": dataset.fingerprint(secret.stream("data hash")),
        "versions": {"jaxdp": __version__, "python": platform.python_version(), **versions},
        "device": device(),
    }


def device() -> dict[str, Any]:
    """What the arithmetic runs on: on a CPU its model and core count decide the rounding."""
    first = jax.devices()[0]
    return {
        "platform": first.platform,
        "kind": first.device_kind if first.platform != "cpu" else _cpu_model(),
        "count": jax.device_count(),
        "cores": os.cpu_count(),
        "x64": bool(jax.config.read("jax_enable_x64")),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The names of the parts that changed, with their values where those are public."""
    changed = []
    if old["data"] != new["data"]:
        changed.append("data")
    for part in ("versions", "device"):
        for name in sorted({*old[part], *new[part]}):
            before, after = old[part].get(name), new[part].get(name)
            if before != after:
                changed.append(f"{part}.{name} ({before!r} then, {after!r} now)")
    return changed


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1] for line in file if line.startswith("model name")]
        return names[0].strip() if names else platform.machine()
    except OSError:
        return f"{platform.machine()} {platform.processor()}".strip()
