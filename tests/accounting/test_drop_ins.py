"""The accountants of examples/accountants in stand-ins for Opacus, Flower and pfl.

benchmarks/peers_of_accountants.py runs them in the real packages.
"""

import collections
import dataclasses
import enum
import json
import math
import runpy
import sys
import types
from pathlib import Path

import pytest

from jaxdp import accounting as acc
from tests.refusing import refused

FOLDER = Path(__file__).parents[2] / "examples" / "accountants"
RUN = {"num_compositions": 300, "sampling_probability": 0.02, "mechanism": "Gaussian"}


def event(noise, steps=300, sampling_prob=0.02):
    return acc.Repeated(acc.PoissonSampled(acc.Gaussian(noise), sampling_prob), steps)


def loaded(monkeypatch, file, **modules):
    """The accountant of a file, where the modules hold what is given of them."""
    for name, held in modules.items():
        name = name.replace("_", ".")
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**held))
    return runpy.run_path(str(FOLDER / file))["JaxdpAccountant"]


def test_opacus_gets_the_epsilon_of_its_own_history(monkeypatch):
    known = {}
    accountant = loaded(
        monkeypatch,
        "for_opacus.py",
        opacus={},
        opacus_accountants={"IAccountant": object},
        opacus_accountants_registry={"register_accountant": known.__setitem__},
    )
    assert known == {"jaxdp": accountant}
    one = accountant()
    assert (len(one), one.get_epsilon(1e-5)) == (0, 0)
    for noise, sample_rate in [(1.0, 0.02)] * 200 + [(1.5, 0.02)] * 100 + [(1.5, 0.04)]:
        one.step(noise_multiplier=noise, sample_rate=sample_rate)
    assert one.history == [(1.0, 0.02, 200), (1.5, 0.02, 100), (1.5, 0.04, 1)]
    assert len(one) == 301
    run = acc.Composed([event(1.0, 200), event(1.5, 100), event(1.5, 1, 0.04)])
    assert one.get_epsilon(1e-5) == acc.epsilon(run, 1e-5).upper
    one.history = [[1.0, 0.02, 200]]  # as a file may give it back
    one.step(noise_multiplier=1.0, sample_rate=0.02)
    assert one.history == [(1.0, 0.02, 201)]
    one.step(noise_multiplier=0.0, sample_rate=0.02)
    assert one.get_epsilon(1e-5) == math.inf


def test_flower_gets_epsilon_for_two_clip_norms_and_ends_before_its_budget(monkeypatch):
    spent = collections.namedtuple("PrivacySpent", "epsilon delta num_releases accounting_method")
    sampling = enum.Enum("SamplingMethod", "NO_AMPLIFICATION POISSON")
    theirs = {"PrivacySpent": spent, "SamplingMethod": sampling}
    kind = loaded(monkeypatch, "for_flower.py", flwr={}, flwr_serverapp=theirs)
    given = {"target_delta": 1e-5, "max_epsilon": 2.0}
    config = types.SimpleNamespace(sampling_method=sampling.NO_AMPLIFICATION, **given)
    one, event = kind(config), types.SimpleNamespace(noise_multiplier=20.0)
    assert one.get_privacy_spent() == (0, 1e-5, 0, "jaxdp")
    while not one.would_exceed(event):
        one.compose(event)
    found = one.get_privacy_spent()
    twice = [acc.Repeated(acc.Gaussian(10.0), found.num_releases + more) for more in (0, 1)]
    now, then = (acc.epsilon(run, 1e-5).upper for run in twice)
    assert found.epsilon == pytest.approx(now, rel=1e-9)
    assert now <= 2 < then
    assert not one.would_exceed(event, max_epsilon=then * (1 + 1e-9))
    assert one.get_delta(found.epsilon) == pytest.approx(1e-5, rel=1e-6)
    again = kind(config)
    again.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert again.get_privacy_spent() == found
    refused("count must be", one.compose, event, -1)
    assert one.num_releases == found.num_releases
    config.sampling_method = sampling.POISSON
    refused("expected NO_AMPLIFICATION", kind, config)


def test_pfl_gets_the_third_of_epsilon_delta_and_noise_proven(monkeypatch):
    @dataclasses.dataclass
    class PrivacyAccountant:
        num_compositions: int
        sampling_probability: float
        mechanism: str
        epsilon: float | None = None
        delta: float | None = None
        noise_parameter: float | None = None
        noise_scale: float = 1.0

        def __post_init__(self):
            self.mechanism = self.mechanism.lower()

    theirs = {"PrivacyAccountant": PrivacyAccountant}
    accountant = loaded(monkeypatch, "for_pfl.py", pfl={}, pfl_privacy=theirs)
    noise = accountant(**RUN, epsilon=2.0, delta=1e-5).noise_parameter
    assert 2 - 1e-4 < acc.epsilon(event(noise), 1e-5).upper <= 2
    found = accountant(**RUN, delta=1e-5, noise_parameter=1.0)
    assert found.epsilon == acc.epsilon(event(1.0), 1e-5).upper
    found = accountant(**RUN, epsilon=2.0, noise_parameter=1.0)
    assert found.delta == acc.delta(event(1.0), 2.0).upper
    three = {"epsilon": 2.0, "delta": 1e-5}
    accountant(**RUN, **three, noise_parameter=noise)
    refused("is not proven", accountant, **RUN, **three, noise_parameter=0.999 * noise)
    refused("noise_scale=1", accountant, **RUN, **three, noise_scale=0.5)
    refused("mechanism='gaussian'", accountant, **{**RUN, "mechanism": "laplace"}, **three)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_they_are_short_and_need_the_accountant_alone(path):
    text = path.read_text(encoding="utf-8")
    code = text.split('"""', 2)[2].splitlines()
    assert sum(bool(line.strip()) for line in code) <= 30
    assert [line for line in code if "jaxdp import" in line] == [
        "from jaxdp import accounting as acc"
    ]
