"""A program for an environment with jax, optax, numpy and scipy alone; `make bare` makes one.

The README's code, a loop on arrays, the same by hand in optax, the accountant, an audit; every
module of jaxdp then imports or says which extra it needs.
"""

import importlib
import inspect
import pkgutil
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from jaxdp import __main__, _extras, audit, data
from jaxdp import accounting as acc

# Rooms, and modules of papers and data, that an extra brings.
OUTSIDE = ("cli", "data.models", "papers", "runs", "data.builders")


def loss_fn(params, example):
    x, y = example
    return (x @ params["w"] + params["b"] - y) ** 2


def readme():
    """The README's code, as it stands there: the quickstart and the accountant."""
    page = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    blocks, namespace = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL), {}
    assert len(blocks) >= 2
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)


def in_a_loop(train, params):
    budget = {"epsilon": 3.0, "delta": 1e-5, "steps": 20}
    mechanism = jaxdp.dp_sgd(l2_clip_norm=1.0, batch_size=32, dataset_size=512, **budget)
    trainer = jaxdp.Trainer(loss_fn, mechanism, optax.adam(1e-2), train)
    state = trainer.init(params)
    for batch in trainer.batches(20):
        state, _ = trainer.step(state, batch)
    assert 2.9 < trainer.epsilon(delta=1e-5).upper <= 3.0
    assert not trainer.unverified()
    assert np.isfinite(state.params["w"]).all()
    return mechanism


def by_hand(mechanism, train, params):
    ledger = jaxdp.Ledger()
    grad_fn = mechanism.clipped_grad(loss_fn)
    tx = optax.chain(mechanism.privatize(), optax.sgd(0.3, momentum=0.9))
    update, opt_state = jaxdp.compile_update(tx), tx.init(params)
    sampler = mechanism.sampler(512, ledger=ledger)
    device = jax.device_put(train)
    for _ in range(3):
        summed = grad_fn(params, device, sampler.draw())
        params, opt_state, _ = update(params, opt_state, summed)
    assert ledger.epsilon(1e-5).upper < 3


def accounted_and_audited():
    bound = acc.epsilon(acc.Repeated(acc.PoissonSampled(acc.Gaussian(1.0), 0.01), 1_000), 1e-5)
    assert bound.lower <= bound.upper < 3
    inside, outside = np.random.default_rng(0).normal([[1], [0]], size=(2, 4_000))
    found = audit.audit_scores(inside, outside, delta=1e-5)
    assert 0 < found.epsilon < acc.epsilon(acc.Gaussian(1.0), 1e-5).upper


def every_module():
    """The names of those that an extra brings; all others import."""
    refused = {}
    for module in pkgutil.walk_packages(jaxdp.__path__, "jaxdp.", onerror=lambda name: None):
        try:
            importlib.import_module(module.name)
        except _extras.MissingExtra as error:
            refused[module.name.removeprefix("jaxdp.")] = str(error)
    assert all("pip install 'jaxdp-privacy[" in words for words in refused.values())
    inside = [name for name in refused if not name.startswith(OUTSIDE)]
    assert not inside, f"of the core, but refused: {inside}"
    return refused


def said(ask):
    """The words of a missing extra."""
    try:
        ask()
    except (_extras.MissingExtra, SystemExit) as error:
        return str(error)
    raise AssertionError("nothing was missing")


def in_words():
    train, get, cli = (f"pip install 'jaxdp-privacy[{name}]'" for name in ("train", "data", "cli"))
    for ask, words in (
        (
            lambda: jaxdp.Run,
            f".Run needs orbax-checkpoint, flax, rich, jinja2, matplotlib: {train}",
        ),
        (lambda: jaxdp.models, f".models needs flax: {train}"),
        (lambda: data.load("digits"), f".data.load('digits') needs scikit-learn: {get}"),
        (__main__.main, f": error: the command jaxdp needs click, rich: {cli}"),
    ):
        assert said(ask) == f"jaxdp{words}"
    assert "jaxdp.data.load('mnist') needs tensorflow-datasets" in said(lambda: data.load("mnist"))
    assert said(lambda: data.prepare("mnist", ".", ".")).endswith(get)
    assert {"Run", "models"}.isdisjoint(dir(jaxdp))
    assert dict(inspect.getmembers(jaxdp))["Trainer"] is jaxdp.Trainer


def main():
    draws = np.random.default_rng(0)
    train = draws.normal(size=(512, 3)).astype(np.float32), draws.normal(size=512).astype("f4")
    params = {"w": jnp.zeros(3), "b": jnp.zeros(())}
    readme()
    mechanism = in_a_loop(train, params)
    by_hand(mechanism, train, params)
    accounted_and_audited()
    in_words()
    refused = every_module()
    assert "runs" in refused
    assert "flax" not in sys.modules
    print(f"bare: all done; {len(refused)} modules ask for an extra")


if __name__ == "__main__":
    main()
