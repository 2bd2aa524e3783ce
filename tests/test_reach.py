"""What is reachable after ``import jaxdp``."""

import pkgutil
import subprocess
import sys

import jaxdp

# Command line and what is not for users.
HIDDEN = {"cli", "normals", "tickets"}


def test_every_submodule_is_reachable_without_importing_it_first():
    names = {
        module.name
        for module in pkgutil.iter_modules(jaxdp.__path__)
        if not module.name.startswith("_") and module.name not in HIDDEN
    }
    assert names <= set(dir(jaxdp))
    program = "\n".join(["import jaxdp", *(f"jaxdp.{name}" for name in dir(jaxdp))])
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
