"""``python -m jaxdp``."""

from jaxdp.cli import main

main()
