"""The options of `jaxdp train` that spread a run over devices and processes."""

from typing import Any

import click


def join_processes(spec: str | None) -> None:
    """Joins the processes of a run; nothing without a spec.

    Args:
        spec: "auto" for a cluster that JAX recognises, or HOST:PORT,PROCESSES,INDEX.

    Raises:
        click.UsageError: it is neither; the others cannot be reached.
    """
    if spec is None:
        return
    import jax

    given: dict[str, Any] = {}
    if spec != "auto":
        address, _, numbers = spec.partition(",")
        count, _, index = numbers.partition(",")
        if ":" not in address or not (count.isdecimal() and index.isdecimal()):
            raise click.UsageError(
                f"--distributed must be auto or HOST:PORT,PROCESSES,INDEX, got {spec!r}"
            )
        given = {
            "coordinator_address": address,
            "num_processes": int(count),
            "process_id": int(index),
        }
    try:
        jax.distributed.initialize(**given)
    except (ValueError, RuntimeError) as error:
        said = str(error).strip().splitlines() or [repr(error)]
        raise click.UsageError(f"--distributed {spec}: {said[0]}") from error


def mesh_of(devices: int | str | None) -> Any:
    """A mesh of so many devices; of all in several processes, None for one.

    Args:
        devices: a number, "all", or None for one (in several processes: for all).

    Raises:
        click.UsageError: there are not as many.
    """
    import jax
    import numpy as np

    from jaxdp.devices import processes

    several = processes.count() > 1
    if not several and devices is None:
        return None
    found = jax.devices()
    count = len(found) if devices in (None, "all") else int(devices)
    if not 1 <= count <= len(found) or (several and count < len(found)):
        most = f"{len(found)} or all" if several else f"at least 1 and at most {len(found)}"
        raise click.UsageError(f"--devices must be {most}, got {devices}")
    return jax.sharding.Mesh(np.array(found[:count]), ("data",)) if count > 1 else None
