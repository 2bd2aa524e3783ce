"""``jaxdp reproduce``: taken from ``benchmarks/papers`` of a checkout; the wheel does not hold it.

The one place of the package that imports ``benchmarks``.
"""

import sys
from pathlib import Path

import click

import jaxdp
from jaxdp.cli.failures import Stopped

ROOT = Path(jaxdp.__file__).parent.parent

if (ROOT / "benchmarks" / "papers").is_dir():
    # An editable install finds jaxdp alone; and another distribution's "benchmarks" is not ours.
    sys.path.insert(0, str(ROOT))
    from benchmarks.papers.command import reproduce
else:

    @click.command(
        add_help_option=False,  # so that --help too says where the tables are
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    def reproduce() -> None:
        """Make the papers' tables and figures; in a checkout of the repository alone."""
        raise Stopped(
            "the papers' tables and figures are experiments in benchmarks/papers of the "
            "repository, which is not part of the wheel: clone it, run pip install -e '.[all]' in "
            "it, and give this command again",
            1,
        )


__all__ = ["reproduce"]
