"""Our accountant beside its peers: values, times and ratios, in one run on this machine.

    python -m benchmarks.accounting [--repeats 5] [--out benchmarks/results/accounting.json]

Times are medians over the repeats, seconds: of ours as a user's first such call in a warm process,
with nothing kept from the call before. The first call of all is timed too, in a new process.
A peer that is not installed is left out.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.accounting_peers import PEERS
from jaxdp import accounting as acc

ROWS = (
    (512 / 60_000, 1.23, 5_000),
    (0.01, 2.0, 40_000),
    (0.01, 0.9, 1_800),
    (0.001, 0.7, 10_000),
    (0.000256, 0.6, 100_000),
    (0.001, 1.0, 1_000_000),
    (0.00001, 0.8, 1_000_000),
)
DELTA = 1e-5


def forget() -> None:
    """Clears all that the accountant keeps from one call for the next."""
    for name, module in list(sys.modules.items()):
        if name.startswith("jaxdp.accounting"):
            for kept in vars(module).values():
                getattr(kept, "cache_clear", lambda: None)()


def ours(q: float, z: float, steps: int) -> float:
    """Upper epsilon by the default accountant, as of a first call."""
    forget()
    event = acc.Repeated(acc.PoissonSampled(acc.Gaussian(z), q), steps)
    return acc.epsilon(event, DELTA).upper


def many_noise_multipliers() -> float:
    """100 distinct noise multipliers, 50 steps each."""
    steps = [
        acc.Repeated(acc.PoissonSampled(acc.Gaussian(1.0 + 0.01 * i), 0.01), 50) for i in range(100)
    ]
    return acc.epsilon(acc.Composed(steps), DELTA).upper


def many_by_dp_accounting() -> float:
    """The same by dp_accounting."""
    import dp_accounting as dpa
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant()
    for i in range(100):
        step = dpa.PoissonSampledDpEvent(0.01, dpa.GaussianDpEvent(1.0 + 0.01 * i))
        accountant.compose(dpa.SelfComposedDpEvent(step, 50))
    return accountant.get_epsilon(DELTA)


def clock(function: Callable[..., Any], arguments: tuple, repeats: int) -> tuple[Any, float]:
    """(value, median seconds)."""
    times = []
    value = None
    for _ in range(repeats):
        start = time.perf_counter()
        value = function(*arguments)
        times.append(time.perf_counter() - start)
    return value, statistics.median(times)


def first_call() -> dict[str, float]:
    """Seconds of the import and of the first answer in a new process, and its peak memory."""
    code = (
        "import time; a = time.perf_counter()\n"
        "from benchmarks.accounting import ours, ROWS, resource\n"
        "b = time.perf_counter(); ours(*ROWS[0]); c = time.perf_counter()\n"
        "print(b - a, c - b, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    imported, answered, megabytes = (float(v) for v in out.stdout.split())
    return {"import_s": imported, "first_answer_s": answered, "peak_mb": megabytes}


def main() -> None:
    """Print a table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", default="benchmarks/results/accounting.json")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    result: dict[str, Any] = {"rows": [], "first_call": first_call()}
    for row in ROWS:
        q, z, steps = row
        entry: dict[str, Any] = {"q": q, "z": z, "steps": steps}
        ours(*row)
        entry["ours"], entry["ours_s"] = clock(ours, row, 4 * args.repeats + 1)
        for name, peer in PEERS.items():
            try:
                peer(*row, DELTA)  # imports and caches are not what is compared
                entry[name], entry[name + "_s"] = clock(peer, (*row, DELTA), args.repeats)
                entry[name + "_ratio"] = entry[name + "_s"] / entry["ours_s"]
            except ImportError:
                continue
        _, entry["calibrate_s"] = clock(
            acc.calibrate_noise_multiplier, (3.0, DELTA, q, steps), args.repeats
        )
        result["rows"].append(entry)
        print({k: round(v, 5) for k, v in entry.items()}, flush=True)
    _, short = clock(ours, (0.01, 2.0, 100), 21)
    _, long = clock(ours, (0.01, 2.0, 10_000_000), 21)
    result["steps_1e7_over_1e2"] = long / short
    result["many"], result["many_s"] = clock(many_noise_multipliers, (), 3)
    try:
        result["many_dp_accounting"], result["many_dp_accounting_s"] = clock(
            many_by_dp_accounting, (), 1
        )
    except ImportError:
        pass
    result["peak_mb_with_peers"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({k: v for k, v in result.items() if k != "rows"}, indent=1))
    Path(args.out).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
