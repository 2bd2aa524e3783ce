"""``jaxdp export``: the trained parameters alone, the one thing that may be published."""

from pathlib import Path
from typing import Literal

import click

from jaxdp.cli.options import Filled, papers


@click.command()
@click.argument("run", type=Filled())
@click.option(
    "--to",
    "target",
    type=Filled(),
    help="File (.msgpack, .safetensors) or new folder of Orbax (.orbax, or no ending) to write "
    "[default: RUN/params.msgpack].",
)
@click.option("--only", type=click.Choice(["trained"]), help="Leave out what was frozen.")
def export(run: Path, target: Path | None, only: Literal["trained"] | None) -> None:
    """Write the parameters that RUN showed last, without key, state or curves.

    jaxdp.load("params.msgpack", like=params) reads them, in the structure of a model's own.

    \b
      jaxdp export runs/digits-1 --to params.safetensors
    """
    if not (run / "secret" / "run.json").exists():  # said before JAX is imported
        raise ValueError(f"folder must hold a run, with its secret/, got {run}")
    from jaxdp.runs import RunDirectory
    from jaxdp.runs.export import export_params

    papers()  # whose events the ledger may hold
    target = target or run / "params.msgpack"
    step = export_params(RunDirectory(run), target, only=only)
    click.echo(f"parameters after {step:,} steps: {target}")
