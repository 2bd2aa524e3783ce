"""``jaxdp export``: the trained parameters alone, the one thing that may be published."""

from pathlib import Path

import click

from jaxdp.cli.options import Filled, papers


@click.command()
@click.argument("run", type=Filled())
@click.option(
    "--to",
    "target",
    type=Filled(),
    help="File to write [default: RUN/params.msgpack].",
)
def export(run: Path, target: Path | None) -> None:
    """Write the parameters of RUN's last checkpoint, without key, state or curves.

    The file is Flax's msgpack form: read it with flax.serialization.msgpack_restore.

    \b
      jaxdp export runs/digits-1 --to params.msgpack
    """
    from jaxdp.runs import RunDirectory
    from jaxdp.runs.export import export_params

    papers()  # whose events the ledger may hold
    target = target or run / "params.msgpack"
    step = export_params(RunDirectory(run), target)
    click.echo(f"parameters after {step:,} steps: {target}")
