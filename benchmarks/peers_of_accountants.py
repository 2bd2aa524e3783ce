"""jaxdp's accountant in Opacus, Flower and pfl: `python -m benchmarks.peers_of_accountants`.

Needs `pip install opacus flwr pfl` and no JAX. Opacus trains a tiny model to a budget, changes its
noise, stores and loads; Flower runs rounds until its budget ends; pfl takes its noise. Beside each
answer, those of their own accountants, and what is proven of them; CPU time, the median of at most
five calls.
"""

import importlib.metadata
import json
import math
import runpy
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jaxdp import accounting as acc

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "peers_of_accountants.json"
PACKAGES = "numpy scipy opacus torch flwr pfl dp-accounting prv-accountant".split()
DELTA = 1e-5
# (noise multiplier, sampling rate, steps), as Opacus stores them.
HISTORIES = {
    "MNIST, 5,000 steps": [(1.23, 512 / 60_000, 5_000)],
    "100,000 steps at noise 0.6": [(0.6, 2.56e-4, 100_000)],
    "noise falls ten times": [(2.0 - 0.1 * i, 0.01, 300) for i in range(10)],
}
# (epsilon, delta, probability, rounds) of a federated run.
BUDGETS = [(2.0, 1e-6, 1e-3, 1_500), (8.0, 1e-6, 0.01, 2_000), (0.5, 1e-8, 1e-3, 1_000)]


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """What a call returns, and its milliseconds on the CPU."""
    times: list[float] = []
    while len(times) < 5 and sum(times) < 3_000:
        start = time.process_time()
        found = call()
        times.append(1e3 * (time.process_time() - start))
    return found, round(statistics.median(times), 1)


def trained() -> dict[str, Any]:
    """A private training by Opacus that is accounted by jaxdp, in every way that Opacus asks."""
    import torch
    from opacus import PrivacyEngine

    def model() -> tuple[Any, Any]:
        module = torch.nn.Linear(8, 2)
        return module, torch.optim.SGD(module.parameters(), lr=0.1)

    torch.manual_seed(0)
    x = torch.randn(1_024, 8)
    data = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
    loader = torch.utils.data.DataLoader(data, batch_size=64)
    engine, (module, optimizer) = PrivacyEngine(accountant="jaxdp"), model()
    module, optimizer, loader = engine.make_private_with_epsilon(
        module=module, optimizer=optimizer, data_loader=loader, max_grad_norm=1.0,
        target_epsilon=3.0, target_delta=DELTA, epochs=3,
    )  # fmt: skip
    for _ in range(3):
        for inputs, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(inputs), labels).backward()
            optimizer.step()
    spent, noise = engine.get_epsilon(DELTA), optimizer.noise_multiplier
    ((z, q, steps),) = engine.accountant.history
    step = acc.PoissonSampled(acc.Gaussian(noise), 1 / 16)
    assert (z, q, steps) == (noise, 1 / 16, 48)
    assert spent == acc.epsilon(acc.Repeated(step, 48), DELTA).upper
    assert 2.98 < spent <= 3.0
    optimizer.noise_multiplier = 2 * noise
    engine.accountant.step(noise_multiplier=2 * noise, sample_rate=q)
    assert engine.get_epsilon(DELTA) > spent
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/checkpoint"
        engine.save_checkpoint(path=path, module=module, optimizer=optimizer)
        other = PrivacyEngine(accountant="jaxdp")
        other.load_checkpoint(path=path, module=module, optimizer=optimizer)
        assert other.get_epsilon(DELTA) == engine.get_epsilon(DELTA)
        assert len(other.accountant) == 49
        try:
            PrivacyEngine(accountant="prv").load_checkpoint(path=path, module=module)
            raise AssertionError("Opacus' own accountant took the history of another")
        except ValueError as error:
            refused = str(error)
    return {"noise": noise, "steps": steps, "epsilon": spent, "refused": refused}


def histories() -> list[dict[str, Any]]:
    """Epsilon of each history by every accountant that Opacus has, through its registry."""
    from opacus.accountants import create_accountant

    rows = []
    for name, history in HISTORIES.items():
        steps = (acc.Repeated(acc.PoissonSampled(acc.Gaussian(z), q), n) for z, q, n in history)
        bound = acc.epsilon(acc.Composed(list(steps)), DELTA)
        row: dict[str, Any] = {"run": name, "proven": [bound.lower, bound.upper]}
        for mechanism in ("jaxdp", "prv", "rdp", "gdp"):
            accountant = create_accountant(mechanism)
            try:
                for z, q, n in history:
                    for _ in range(n):
                        accountant.step(noise_multiplier=z, sample_rate=q)
                found, taken = timed(lambda by=accountant: float(by.get_epsilon(delta=DELTA)))
                row[mechanism] = {"epsilon": found, "ms": taken}
            except Exception as error:
                row[mechanism] = {"error": f"{type(error).__name__}: {error}"}
        assert row["jaxdp"]["epsilon"] == bound.upper
        rows.append(row)
    return rows


def rounds() -> dict[str, Any]:
    """Rounds of Flower's FedAvg with central noise, of clients that all push, until it refuses."""
    import numpy as np
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
    from flwr.serverapp import NeighboringRelation, PrivacyConfig, SamplingMethod
    from flwr.serverapp.exception import PrivacyBudgetExhausted
    from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1  # as its server does
    kind = runpy.run_path(str(ROOT / "examples/accountants/for_flower.py"))["JaxdpAccountant"]
    relation, sampling = NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION
    config = PrivacyConfig(DELTA, 10, relation, sampling, max_epsilon=8.0)
    accountant, grid = kind(config), SimpleNamespace(get_node_ids=lambda: range(2, 12))
    strategy = DifferentialPrivacyServerSideFixedClipping(
        FedAvg(fraction_evaluate=0.0), 10.0, 1.0, 10, accountant=accountant
    )
    arrays = ArrayRecord({"w": Array(np.zeros(3))})
    metrics = MetricRecord({"num-examples": 1})
    done = 0
    while True:
        try:
            sent = strategy.configure_train(done + 1, arrays, ConfigRecord(), grid)
        except PrivacyBudgetExhausted as error:
            refused = str(error)
            break
        update = {"arrays": ArrayRecord({"w": Array(np.ones(3))}), "metrics": metrics}
        replies = [Message(RecordDict(dict(update)), reply_to=message) for message in sent]
        arrays, _ = strategy.aggregate_train(done + 1, replies)
        done += 1
    spent, relation = strategy.privacy_spent(), acc.Relation.REPLACE_ONE
    most = acc.calibrate(
        lambda n: acc.Repeated(acc.Gaussian(10.0), int(n)),
        8.0, DELTA, relation, most=True, whole=True, between=(1, 10**6),
    )  # fmt: skip
    assert (done, spent.num_releases) == (most, most)
    assert (
        spent.epsilon == acc.epsilon(acc.Repeated(acc.Gaussian(10.0), done), DELTA, relation).upper
    )
    again = kind(config)
    again.load_state_dict(json.loads(json.dumps(accountant.state_dict())))
    assert again.get_privacy_spent() == spent
    # All others push against a new client, which is drawn 10 times of 11: two clip norms, exactly.
    round_of_eleven = acc.PoissonSampled(acc.Gaussian(10.0 / 2), 10 / 11)
    return {
        "rounds": done,
        "epsilon": spent.epsilon,
        "true of 10 of 11 clients, at least": acc.epsilon(
            acc.Repeated(round_of_eleven, done), DELTA
        ).lower,
        "counting one clip norm": acc.epsilon(
            acc.Repeated(acc.Gaussian(10.0), done), DELTA
        ).estimate,
        "refused": refused,
    }


def budgets() -> list[dict[str, Any]]:
    """pfl's noise for each budget by its accountants and by ours, and the epsilon proven of it."""
    from pfl import privacy

    kinds = {
        "jaxdp": runpy.run_path(str(ROOT / "examples/accountants/for_pfl.py"))["JaxdpAccountant"],
        "pld": privacy.PLDPrivacyAccountant,
        "prv": privacy.PRVPrivacyAccountant,
        "rdp": privacy.RDPPrivacyAccountant,
    }
    rows = []
    for epsilon, delta, probability, rounds in BUDGETS:
        run = {"num_compositions": rounds, "sampling_probability": probability}
        run |= {"mechanism": "gaussian", "delta": delta}
        row: dict[str, Any] = {"epsilon": epsilon, **run}
        for name, kind in kinds.items():
            try:
                found, taken = timed(lambda kind=kind, e=epsilon, r=run: kind(**r, epsilon=e))
            except Exception as error:
                row[name] = {"error": f"{type(error).__name__}: {error}"}
                continue
            noise = found.cohort_noise_parameter
            mechanism = privacy.GaussianMechanism.from_privacy_accountant(found, 0.5)
            assert mechanism.relative_noise_stddev == noise
            step = acc.PoissonSampled(acc.Gaussian(noise), probability)
            bound = acc.epsilon(acc.Repeated(step, rounds), delta)
            row[name] = {"noise": noise, "ms": taken, "proven": [bound.lower, bound.upper]}
        ours = kinds["jaxdp"](**run, noise_parameter=row["jaxdp"]["noise"])
        assert ours.epsilon == row["jaxdp"]["proven"][1] <= epsilon
        assert math.isclose(ours.epsilon, epsilon, rel_tol=1e-4)
        rows.append(row)
    return rows


def main() -> None:
    """Prints what each answers, and stores it with the versions."""
    warnings.simplefilter("ignore")  # of Opacus: hooks, secure mode, its alphas
    runpy.run_path(str(ROOT / "examples" / "accountants" / "for_opacus.py"))
    found = {
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "opacus, trained": trained(),
        "opacus, histories": histories(),
        "flower": rounds(),
        "pfl": budgets(),
    }
    assert "jax" not in sys.modules
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
