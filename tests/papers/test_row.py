"""A row of the papers, by itself."""

import subprocess
import sys

from tests.compiling import with_flags

ALONE = """
from jaxdp.papers.row import Row
given = {"algorithm": "piadam-as-published", "noise_multiplier": 2.0, "steps": 3}
print(Row("name", "mnist", given).config().model)
"""


def test_a_row_knows_the_networks_and_algorithms_that_it_names():
    told = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, env=with_flags()
    )
    assert told.stdout == "mnist-cnn\n", told.stderr
