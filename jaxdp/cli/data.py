"""``jaxdp data``: preparing data sets for use without a network."""

from pathlib import Path

import click

from jaxdp.cli.options import Filled
from jaxdp.data.specs import SPECS


@click.group()
def data() -> None:
    """List and prepare data sets."""


@data.command(name="list")
def list_() -> None:
    """The data sets that jaxdp knows."""
    for spec in SPECS.values():
        origin = "fetched, or prepared" if spec.fetchable else "prepared"
        origin = origin if spec.files else "embedded"
        click.echo(
            f"{spec.name:14} {spec.dataset_size:>6,} training, {spec.test_size:>6,} test records, "
            f"{spec.num_classes} classes ({origin})"
        )


@data.command()
@click.argument("names", nargs=-1, metavar="[DATASET]...")
@click.option(
    "--source",
    type=Filled(),
    required=True,
    help="Folder with the original files: mnist/, fashion-mnist/, cifar-10-webp/, pums/, madelon/.",
)
@click.option(
    "--data-dir",
    type=Filled(),
    required=True,
    help="Where to write; pass the same to `jaxdp train --data-dir`.",
)
def prepare(names: tuple[str, ...], source: Path, data_dir: Path) -> None:
    """Write data sets into tensorflow-datasets' form, every file checked by its checksum.

    Without a name, all of them. The original files must be in a folder of yours already, such as
    originals/mnist/train-images-idx3-ubyte.gz. Example:

    \b
      jaxdp data prepare mnist madelon --source originals --data-dir ~/tensorflow_datasets
    """
    from jaxdp import data as datasets

    source, data_dir = source.expanduser(), data_dir.expanduser()
    chosen = [datasets.specs.spec(name) for name in names] or [s for s in SPECS.values() if s.files]
    for spec in chosen:
        folder = datasets.prepare(spec.name, source, data_dir)
        click.echo(f"{spec.name}: {folder}")
