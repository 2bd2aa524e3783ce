"""The command line in this process."""

from click.testing import CliRunner

from jaxdp.cli import app


def called(*arguments):
    """What comes of ``jaxdp`` with these: its output and exception."""
    return CliRunner().invoke(app, [*map(str, arguments)])


def ran(*arguments):
    """The output of a command that ends well."""
    found = called(*arguments)
    assert found.exception is None, found.output
    return found.output
