"""``jaxdp algorithms``."""

import click

_ENERGIES = {
    "public": "judged by public test examples",
    "private": "judged by a noisy loss, charged too",
    "test": "judged by the whole test set",
    "train": "judged by un-noised training records: no guarantee",
}


@click.command()
def algorithms() -> None:
    """List the algorithms of `jaxdp train --algorithm`, with the settings that `--set` takes."""
    from jaxdp.cli.options import papers
    from jaxdp.optimizers import registry

    papers()
    from jaxdp.papers.block_coordinate.settings import ALGORITHMS, setting_names

    for name, entry in registry.ALGORITHMS.items():
        click.echo(f"{name:31}{', '.join(registry.settings_of(name)) or '-'}")
        if entry.energy:
            click.echo(f"{'':31}({_ENERGIES[entry.energy]})")
    for name in ALGORITHMS:
        click.echo(f"{name:31}{', '.join(setting_names(name))}")
        click.echo(f"{'':31}(block coordinate descent: other options, and no canaries)")
