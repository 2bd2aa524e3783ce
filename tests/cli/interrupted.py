"""A run whose second checkpoint waits for the test; a program, to be interrupted while it writes."""

import sys
import time
from pathlib import Path

from jaxdp.cli import main
from jaxdp.runs.checkpoints import Checkpoints

folder = Path(sys.argv[1])
seal, count = Checkpoints._seal, []


def waiting(self):
    count.append(None)
    if len(count) == 2:
        (folder / "writing").touch()
        while not (folder / "go on").exists():
            time.sleep(0.01)
    seal(self)


Checkpoints._seal = waiting
options = "--dataset digits --model logistic --steps 6 --batch-size 200 --eval-every 2 --seed 3"
sys.argv = ["jaxdp", "train", *options.split(), "--out", str(folder / "run")]
main()
