"""The command line: ``jaxdp train | tune | plan | export | audit | reproduce | epsilon | ...``."""

import importlib
import os
import sys
from typing import Any

from jaxdp._extras import MissingExtra, needed
from jaxdp._version import __version__
from jaxdp.ledger.durable import StorageError

with needed("the command jaxdp", "cli", "click", "rich"):
    import click

    from jaxdp.cli.failures import Stopped, interrupt_message, silence_late_messages
    from jaxdp.ledger.interrupts import guarded, status_of

_COMMANDS = {
    "train": "jaxdp.cli.train:train",
    "tune": "jaxdp.cli.tune:tune",
    "export": "jaxdp.cli.export:export",
    "epsilon": "jaxdp.cli.accounting:epsilon",
    "calibrate": "jaxdp.cli.accounting:calibrate",
    "plan": "jaxdp.cli.plan:plan",
    "algorithms": "jaxdp.cli.algorithms:algorithms",
    "audit": "jaxdp.cli.audit:audit",
    "reproduce": "jaxdp.cli.reproduce:reproduce",
    "data": "jaxdp.cli.data:data",
}


class _Lazy(click.Group):
    """Imports a command when it is asked for: `jaxdp epsilon` need not wait for JAX."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, name = _COMMANDS[cmd_name].split(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="jaxdp")
def app() -> None:
    """Differentially private deep learning in JAX, honest by construction.

    \b
    Try:  jaxdp train --dataset digits
          jaxdp epsilon --sampling-prob 0.01 --noise-multiplier 1.1 --steps 1000 --delta 1e-5
    """


def main(args: list[str] | None = None) -> Any:
    """Runs the command line; wrong arguments get one line on stderr and exit status 2.

    What could not be written or read, or is not installed, has status 1, an interrupt 130, SIGTERM
    143.

    Args:
        args: None is the command line of this process, which then ends here.
    """
    with guarded(interrupt_message), silence_late_messages():
        status = _status(args)
        if args is None and status not in (0, 2):
            # Not by the usual way: threads that still write would crash the interpreter.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    if status:
        sys.exit(status)


def _status(args: list[str] | None) -> int:
    try:
        app.main(args=args, prog_name="jaxdp", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else str(error))
        return 2
    except (click.exceptions.Abort, KeyboardInterrupt) as error:
        # click raises Abort from what interrupted it.
        cause = error if isinstance(error, KeyboardInterrupt) else error.__cause__
        stopped = cause if isinstance(cause, KeyboardInterrupt) else KeyboardInterrupt()
        return _fail(interrupt_message(), status_of(stopped))
    except Stopped as error:
        return _fail(error.message, error.status)
    except click.ClickException as error:
        return _fail(error.format_message(), 2)
    except (StorageError, MissingExtra) as error:
        return _fail(str(error), 1)
    except ValueError as error:
        return _fail(str(error), 2)
    return 0


def _fail(message: str, status: int) -> int:
    click.echo(f"jaxdp: error: {' '.join(message.split())}", err=True)
    return status
