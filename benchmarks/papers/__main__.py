"""``python -m benchmarks.papers``: the same as ``jaxdp reproduce``."""

import sys

from jaxdp.__main__ import main

if __name__ == "__main__":
    sys.argv.insert(1, "reproduce")
    main()
