"""A rehearsal names what keeps a program from learning, and nothing of one that learns."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import jaxdp
from jaxdp.audit.examined import Examined
from jaxdp.audit.rehearsal import Variant, _linear_gain, find_in_rehearsal, rehearse

_RECORDS, _COLUMNS = 400, 8


def _loss(params, example):
    x, y = example
    return optax.sigmoid_binary_cross_entropy(x @ params["w"] + params["b"], y.astype(jnp.float32))


def _program(
    *, loss=_loss, rate=0.5, clip=1.0, inputs=1.0, epsilon=3.0, rule=None, steps=100, batch=100,
    params=None, group=True, noisy=False, records=_RECORDS, optimizer=None, targets=None, **clipping,
):  # fmt: skip
    """A logistic regression on a made table of 2,000 records, with one thing changed."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(records, _COLUMNS))
    direction = np.linspace(1, 2, _COLUMNS) * (-1) ** np.arange(_COLUMNS)
    y = (rng.uniform(size=records) < 1 / (1 + np.exp(-2 * x @ direction))).astype(np.int32)
    if noisy:
        y = rng.integers(0, 2, records).astype(np.int32)
    if targets is not None:
        y = (targets * x @ direction).astype(np.float32)
    data = (x * np.asarray(inputs)).astype(np.float32), y
    budget = {"noise_multiplier": 1.0} if epsilon is None else {
        "epsilon": epsilon, "delta": 1e-5, "steps": steps
    }  # fmt: skip
    size = {"rule": rule} if rule is not None else {"l2_clip_norm": clip}
    mechanism = jaxdp.dp_sgd(**budget, **size, batch_size=batch, dataset_size=2_000)
    start = {"w": jnp.zeros(_COLUMNS), "b": jnp.zeros(())} if params is None else params
    grad_fn = mechanism.clipped_grad(loss, **clipping)
    optimizer = optax.sgd(rate) if optimizer is None else optimizer
    return Examined(grad_fn, start, mechanism, optimizer, data, y if group else None)


def _blind(params, example):
    x, y = example
    return _loss(params, (0 * x, y))


def _by_heart(params, example):  # learns which record it is, and nothing that holds for others
    x, y = example
    code = jnp.sign(jnp.sin(1e5 * x[:1] + jnp.arange(400.0)))
    return _loss({"w": params["w"], "b": params["b"]}, (code, y))


def _squared(params, example):
    x, y = example
    return (x @ params["w"] + params["b"] - y.astype(jnp.float32)) ** 2


def _with_dropout(params, example, rng):
    x, y = example
    return _loss(params, (x * jax.random.bernoulli(rng, 0.9, x.shape).astype(x.dtype), y))


def _autoencoder(params, example):
    return jnp.sum((example[0] @ params["w"] @ params["w"].T - example[0]) ** 2)


_BIG = np.where(np.arange(_COLUMNS) == 0, 1_000.0, 1.0)
_WIDE = {"w": jnp.zeros(400), "b": jnp.zeros(())}
_PROGRAMS = [
    # what is changed, the kind that is named first
    pytest.param({}, None, id="healthy"),
    pytest.param({"optimizer": optax.adam(0.05)}, None, id="healthy, Adam"),
    pytest.param({"loss": _with_dropout}, None, id="healthy, a loss with a key"),
    pytest.param({"rule": jaxdp.auto_s()}, None, id="healthy, another rule"),
    pytest.param({"epsilon": None, "group": False}, None, id="healthy, steps unknown"),
    pytest.param({"loss": _autoencoder, "params": {"w": jnp.eye(_COLUMNS, 6) / 4}, "rate": 0.05},
                 None, id="healthy, the input is predicted"),
    pytest.param({"noisy": True, "loss": _loss}, "model", id="labels of chance"),
    pytest.param({"loss": _blind}, "model", id="a loss that does not look"),
    pytest.param({"loss": _by_heart, "params": _WIDE}, "model", id="a loss that looks elsewhere"),
    pytest.param({"loss": _squared, "rate": 20.0}, "rate", id="a rate too high"),
    pytest.param({"rate": 1e-3}, "rate", id="a rate too low"),
    pytest.param({"inputs": _BIG}, "clip", id="a large column"),
    pytest.param(
        {"loss": _squared, "targets": 1e5, "group": False}, "inputs", id="targets far from 1"
    ),
    pytest.param({"clip": 300.0}, "signal", id="a clip norm too large"),
    pytest.param({"epsilon": 0.01}, "signal", id="no budget"),
    pytest.param({"trainable": lambda path: "b" in path}, "frozen", id="weights frozen"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "kind"), _PROGRAMS)
def test_what_is_named_first(changed, kind):
    found = find_in_rehearsal(rehearse(_program(**changed), seconds=math.inf))
    assert [each.kind for each in found[:1]] == ([] if kind is None else [kind]), found
    assert not any(each.certain for each in found)  # advice
    assert all(0 < each.weight <= 1 for each in found)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"records": 20}, "at least"),
        ({"steps": 5}, "too few"),
        ({"optimizer": contrib.reduce_on_plateau()}, "TypeError"),
        ({"params": {"w": jnp.zeros(8), "b": jnp.zeros(()), "c": np.zeros(4_000_000, np.float32)}},
         "too many"),
    ],
)  # fmt: skip
def test_a_rehearsal_that_is_left_out_says_so(changed, words):
    rehearsal = rehearse(_program(**changed))
    assert words in rehearsal.left_out
    assert words in str(rehearsal)
    assert find_in_rehearsal(rehearsal) == []


def test_a_group_with_wrong_labels():
    # Four groups that stand apart; of the last one the labels were given to records at random.
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 4, _RECORDS)
    x = (rng.normal(size=(_RECORDS, 4)) + 5 * np.eye(4)[truth]).astype(np.float32)
    y = np.where(truth == 3, rng.integers(0, 3, _RECORDS), truth)
    y = np.where(rng.uniform(size=_RECORDS) < 0.25, 3, y).astype(np.int32)

    def loss(params, example):
        x, y = example
        return optax.softmax_cross_entropy_with_integer_labels(x @ params, y)

    mechanism = jaxdp.dp_sgd(
        epsilon=3.0, delta=1e-5, steps=100, l2_clip_norm=1.0, batch_size=100, dataset_size=2_000
    )
    program = Examined(
        mechanism.clipped_grad(loss), jnp.zeros((4, 4)), mechanism, optax.sgd(0.5), (x, y), y
    )
    rehearsal = rehearse(program, seconds=math.inf)
    found = find_in_rehearsal(rehearsal)
    assert [each.kind for each in found][:1] == ["labels"]
    assert "but 3: its" in found[0].what

    # Or all of one were given to another.
    rehearsal.sizes = {0: 60, 2: 60, 3: 130, 4: 60}
    assert "no record is of group 1" in find_in_rehearsal(rehearsal)[0].what


def test_longer_programs_are_not_told_to_hurry():
    # What a rehearsal is too short for is no fault: more steps may mend it.
    rehearsal = rehearse(_program(rate=0.01, steps=100), seconds=math.inf)
    assert "rate" in [each.kind for each in find_in_rehearsal(rehearsal)]
    rehearsal.of = 100_000
    assert "rate" not in [each.kind for each in find_in_rehearsal(rehearsal)]
    assert rehearsal.share(Variant()) < rehearsal.share(Variant(rate=8.0))
    assert "as it is" in str(rehearsal)


def test_whole_numbers_may_be_prices():
    prices = np.random.default_rng(0).integers(10**5, 10**6, _RECORDS)
    fitted, held = np.split(np.arange(_RECORDS), 2)
    assert _linear_gain([prices[:, None] / 1e6], prices, fitted, held) > 5
