"""The program of a run: the same in every process, and another one where a number is changed."""

import json
import os
import re
import subprocess
import sys

import jax.numpy as jnp
import optax
import pytest

import jaxdp
from jaxdp.runs import program
from tests.refusing import refused
from tests.runs.own import SIZES, loss_fn, run
from tests.runs.programs import PROGRAMS, by_hand, form, linen, nnx_model
from tests.runs.small import undrawn
from tests.runs.test_opened import contents


def test_the_same_program_has_one_form_in_every_process():
    """Other addresses, order of sets, devices, mesh, and traces that were made before."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    others = {"PYTHONHASHSEED": "77", "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    called = [sys.executable, "-m", "tests.runs.programs"]
    done = subprocess.run(called, capture_output=True, env=os.environ | others, check=True)
    found = {name: program.ProgramForm.from_dict(f) for name, f in json.loads(done.stdout).items()}
    for name, make in PROGRAMS.items():
        here = form(*make())
        assert program.differences(here, found[name]) == [], name
        assert here.environment != found[name].environment  # two devices
        assert len(here.loss) > 10, name


CHANGES = {
    "rate": (by_hand, {"rate": 0.2}, r"^the optimizer's number 0.1 is now 0.2$"),
    "schedule": (nnx_model, {"steps": 50}, r"^the optimizer's number 90.0 is now 40.0"),
    "momentum": (nnx_model, {"momentum": 0.8}, r"^the optimizer's number 0.9 is now 0.8$"),
    "weight decay": (linen, {"decay": 0.02}, r"^the optimizer's number 0.01 is now 0.02$"),
    "dropout": (linen, {"rate": 0.4}, r"^the loss's number 0.7 is now 0.6"),
    "constant": (linen, {"constant": 3.0}, r"^the loss's captured array has other numbers$"),
    "gradient": (by_hand, {"slope": 2.5}, r"^the loss's number 1.5 is now 2.5$"),
    "branch": (by_hand, {"factor": 1.02}, r"^the loss's number 1.01 is now 1.02$"),
    "frozen": (by_hand, {"frozen": 2.0}, r"^the initial parameters \['frozen'\] have other num"),
    "width": (linen, {"width": 17}, r"\['params'\].*\[16\] then, float32\[17\] now"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_of_a_program_is_named(name):
    make, options, words = CHANGES[name]
    before, now = form(*make()), form(*make(**options))
    assert any(re.search(words, found) for found in program.differences(before, now))
    loss, optimizer, params = make()
    other = form(loss, optax.chain(optimizer, optax.clip(1.0)), params)
    assert "operations then" in program.differences(before, other)[0]


def other(folder, steps=None, **options):
    one = run(folder, **{"optimizer": optax.sgd(50.0), **options})
    one.fit(steps)
    return one


def test_a_run_goes_on_with_the_program_that_it_was_begun_with(tmp_path):
    """Before: another loss and rate went on without a word, or silently got the old model."""
    folder, zeros = tmp_path / "r", {"w": jnp.zeros((20, 3))}
    run(folder, report=True).fit(6)
    before = contents(folder, secret=False)
    for steps in (None, 6):  # in the middle, and of a run that took its steps
        refused(
            r"the optimizer's number 0.1 is now 50.0\. .*Run\.open\('.*/r'\).*beyond=True.*extend="
            r".*ledger= or after=.*same_program=True",
            lambda steps=steps: other(folder, steps),
        )
    for options, words in (
        ({"loss": lambda params, x, y: 2.0 * loss_fn(params, x, y)}, r"the loss: \d+ operations"),
        ({"params": {"w": jnp.ones((20, 3))}}, r"initial parameters \['w'\] have other numbers"),
        ({"params": {**zeros, "b": jnp.zeros(3)}}, r"\['b'\] none then, float32\[3\] now"),
    ):
        refused(words, lambda o=options: run(folder, **o).fit())
    assert contents(folder, secret=False) == before

    # Its owner goes on all the same: the page says so, and both are now the run's. A start that is
    # refused later changes nothing.
    momentum = optax.sgd(0.1, momentum=0.9)
    refused("this optimizer", run(folder, optimizer=momentum, same_program=True).fit)
    assert run(folder).unverified() == []
    refused("the optimizer: .* operations", run(folder, optimizer=momentum).fit)
    one = other(folder, 9, same_program=True, report=True)
    said = f"{program.SAME_PROGRAM}the optimizer's number 0.1 is now 50.0"
    assert one.unverified() == [said]
    assert said in (folder / "report.md").read_text()
    refused("number 50.0 is now 7.0", lambda: other(folder, optimizer=optax.sgd(7.0)))
    run(folder).fit(11)
    assert other(folder).unverified() == [said]
    with undrawn():
        run(folder).report()
    assert said in (folder / "report.md").read_text()


def test_a_further_stage_has_a_program_of_its_own(tmp_path):
    """Its parameters are those of the stage before, whatever numbers are given for their shapes."""
    folder = tmp_path / "r"
    run(folder).fit()
    mechanism, ones = jaxdp.dp_sgd(noise_multiplier=4.0, **SIZES), {"w": jnp.ones((20, 3))}
    further = {"mechanism": mechanism, "delta": 1e-3, "extend": "more"}
    other(folder, 3, **further)
    one = other(folder, 6, **further, params=ones)
    assert not [said for said in one.unverified() if program.SAME_PROGRAM in said]
    refused("number 50.0 is now 0.1", run(folder, **further).fit, 9)
    assert run(folder).fit()["w"].shape == (20, 3)


def test_a_program_that_took_no_step_is_not_held_against_another(tmp_path):
    vector = lambda params, x, y: params["w"] * x[0]  # noqa: E731
    refused("must return a scalar", run(tmp_path / "r", loss=vector).fit)
    assert run(tmp_path / "r").fit(3)["w"].shape == (20, 3)


def test_other_versions_are_no_refusal(tmp_path, monkeypatch):
    """Days of training are worth more than the comparison."""
    folder = tmp_path / "r"
    run(folder).fit(3)
    here = program.environment()
    with monkeypatch.context() as patched:
        patched.setattr(program, "environment", lambda: {**here, "optax": "9.9"})
        assert run(folder).fit(6)  # the same form needs no word
        patched.setattr(program, "environment", lambda: {**here, "jax": "9.9"})
        with pytest.warns(UserWarning, match=r"jax .* then, 9\.9 now.* number 0\.1 is now 50\.0"):
            one = other(folder, 9)
        assert "other versions" in one.unverified()[0]
        refused("number 50.0 is now 0.1", lambda: run(folder).fit())  # compared again from then on
    refused("number 0.1 is now 50.0", lambda: other(folder))


def test_a_run_of_before_says_that_it_could_not_be_compared(tmp_path):
    folder = tmp_path / "r"
    run(folder).fit(3)
    kept = folder / "secret/program.json"
    assert kept.stat().st_mode & 0o777 == 0o600
    kept.unlink()
    assert other(folder, 6).unverified() == [program.UNCOMPARED]
    refused("number 50.0 is now 0.1", lambda: run(folder).fit())
    kept.write_text("[" * 9)
    assert run(folder).fit(9)["w"].shape == (20, 3)


def test_a_mechanism_of_another_kind_is_told_apart():
    """Before: no canaries then, no canaries now."""
    assert program.changed_values("A(x=1)", "B(x=1)") == "A(x=1) then, B(x=1) now"
    assert program.changed_values("A(x=1)", "A(x=1) 5") == "no canaries then, 5 now"
