"""The command ``jaxdp``, also by ``python -m jaxdp``."""

import sys

from jaxdp._extras import MissingExtra


def main() -> None:
    """Runs the command line; without its packages, says which to install and has status 1."""
    try:
        from jaxdp.cli import main as run
    except MissingExtra as error:
        sys.exit(f"jaxdp: error: {error}")
    run()


if __name__ == "__main__":
    main()
