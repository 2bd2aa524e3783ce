"""Planted losses, pipelines and loops are found where they stand; their twins and right ones pass."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jaxdp
from benchmarks import planted_noise
from benchmarks import planted_pipelines as planted
from benchmarks.planted_pipelines import MECHANISM, PARAMS, X, Y, check, loss_fn
from jaxdp.optimizers import sgd
from jaxdp.training import lines
from tests.refusing import all_refused, refused

KINDS = {
    "statistics_of_the_records": "captured", "closure_over_a_batch": "captured",
    "cache_of_the_first_example": "state", "python_counter": "state",
    "shared_dropout_key": "independence", "batch_norm_under_vmap": "independence",
    "collective_in_the_loss": "refused", "divided_by_the_batch": "divisor",
    "table_outside_the_source": "captured", "callback_to_python": "refused",
    "fitted_preprocessing": "preprocess", "fitted_vocabulary": "preprocess",
    "duplicates_removed_by_their_neighbours": "preprocess",
    "a_rare_class_repeated": "copies", "windows_of_a_series": "copies",
    "class_weights_of_the_records": "captured", "shuffling_loader": "sampling",
    "source_with_a_memory": "source", "padding_to_the_longest": "collate",
    "clip_bound_of_the_records": "public", "schedule_of_the_records": "public",
}  # fmt: skip


@pytest.mark.parametrize("function", planted.PIPELINES, ids=lambda f: f.__name__)
def test_a_planted_mistake_is_found_where_it_stands(function):
    (first, *_) = function(False).findings
    # A table whose rows the records number: it may as well be a coincidence.
    assert first.certain == (function is not planted.table_outside_the_source)
    assert first.kind == KINDS[function.__name__]
    file, line = first.where.split(":")
    assert file == "benchmarks/planted_pipelines.py"
    home = planted.RunningMean if first.kind == "source" else function
    lines, start = inspect.getsourcelines(home)
    assert start <= int(line) < start + len(lines)
    assert function(True).findings == ()  # its twin


# Each fault by the finding that must name it; the others are in the benchmark, and take minutes.
NOISE = {
    "one key for all leaves": "shared", "one coordinate without noise": "noise",
    "noise without its mean": "shared", "no noise where nobody was drawn": "noise",
    "noise that falls with the steps": "sensitivity", "one leaf's noise comes again": "repeat",
    "a fifth of the noise in one layer": "sensitivity", "uniform noise": "noise",
    "momentum of un-noised sums": "sensitivity", "batches of one size": "sampling",
    "a batch that is not finite skipped": "sensitivity", "four drawn records kept": "sampling",
    "a draw repeated until it has two": "sampling",
}  # fmt: skip
RIGHT_NOISE = [
    "frozen leaves, a counter, a rate", "unlike noise by layer", "unlike noise by coordinate",
    "momentum of noisy sums, released", "dp_mf, banded", "steps that nobody was drawn for",
]  # fmt: skip


@pytest.mark.parametrize("name", NOISE)
def test_a_faulty_loop_is_accused(name):
    found = planted_noise.checked(name)
    assert NOISE[name] in {finding.kind for finding in found.broken}


@pytest.mark.parametrize("name", RIGHT_NOISE)
def test_a_right_loop_is_not_accused(name):
    assert planted_noise.checked(name).findings == ()


def test_a_right_loop_is_not_accused_on_few_runs_either():
    """It was told that "6 linear combinations of coordinates have no noise": 96 of 62 degrees."""
    assert planted_noise.checked("plain", first=64).findings == ()


# The words of ``jaxdp.check``, its arguments, and programs that it must not accuse. ----------------

X.flags.writeable = Y.flags.writeable = False


def test_a_finding_is_told_in_words():
    mean = X.mean(axis=0)
    found = check(lambda params, x, y: loss_fn(params, x - mean, y))
    said = str(found)
    assert said.startswith("1 broken, 0 suspicious")
    assert "BROKEN, captured (audit/test_pipelines.py:" in said
    assert "  why: every example's gradient then depends" in said
    assert "  do: use a public constant" in said
    assert "assumed to be public: a captured array float32 [6]" in said
    refused("the records' mean", found.raise_if_broken)


def test_a_right_program_says_what_was_tested():
    found = check()
    assert found.ok
    assert found.findings == ()
    assert str(found).startswith("nothing broken")
    assert len(found.tested) == 3
    found.raise_if_broken()
    assert jaxdp.check(loss_fn, PARAMS, (X, Y), sgd(MECHANISM, 0.1)).ok  # an algorithm


def test_a_captured_key_is_a_suspicion():
    key = jax.random.key(0)
    for own in (lambda: key, lambda: jax.random.key(0)):
        found = check(lambda p, x, y, o=own: loss_fn(p, x + jax.random.normal(o(), x.shape), y))
        assert found.ok
        assert "a key that it captured" in found.suspicions[0].what


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(nn.Dense(4)(x))
        return nn.Dense(2)(nn.Dropout(0.5, deterministic=False)(x))


def test_dropout_by_the_key_of_each_example_is_right():
    params = Net().init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X[0])

    def loss(params, x, y, rng):
        logits = Net().apply(params, x, rngs={"dropout": rng})
        return optax.softmax_cross_entropy_with_integer_labels(logits, y)

    assert check(loss, params=params).findings == ()


def test_a_frozen_part_and_declared_constants_are_right():
    back = jax.random.normal(jax.random.key(0), (6, 6))
    loss = lambda p, x, y: loss_fn(p, jnp.tanh(x @ back @ p["back"]), y)  # noqa: E731
    trainable = {"w": True, "b": True, "back": False}
    found = check(loss, params=PARAMS | {"back": back}, trainable=trainable, constants=back)
    assert found.findings == ()
    assert found.assumed == ("the frozen parameter ['back']",)


def test_a_loader_that_samples_as_charged_passes():
    for seed in range(3):
        sampler = MECHANISM.sampler(len(X), secret=jaxdp.Secret.from_seed(seed))
        draws = lambda _, sampler=sampler: (sampler.draw() for _ in range(10))  # noqa: E731
        loader = lambda seed, draws=draws: (d.indices[d.mask] for d in draws(seed))  # noqa: E731
        assert check(loader=loader).findings == ()


def test_a_loader_that_visits_every_record_once_is_seen_whatever_its_sizes():
    def by_records(seed):  # which are followed by their numbers
        order = np.random.default_rng(seed).permutation(len(X))
        for at in range(0, len(X), 12):
            yield X[order[at : at + 12]], Y[order[at : at + 12]]

    def of_any_size(seed):
        rng = np.random.default_rng(seed)
        ends = np.sort(rng.choice(np.arange(1, len(X)), 9, replace=False))
        yield from np.split(rng.permutation(len(X)), ends)

    assert [f.kind for f in check(loader=by_records).broken] == ["sampling"]
    (found,) = check(loader=of_any_size).broken
    assert (found.kind, found.certain) == ("sampling", True)
    assert found.what.startswith("no record comes twice in an epoch, a chance of")


def test_what_may_be_a_coincidence_is_a_suspicion():
    rng, largest = np.random.default_rng(0), float(X.max())
    number = check(lambda params, x, y: loss_fn(params, x / largest, y))
    other = check(preprocess=lambda data: (data[0] + rng.normal(size=data[0].shape), data[1]))
    assert number.ok
    assert "the records' largest number" in number.suspicions[0].what
    assert other.ok
    assert "another result when it is called again" in other.suspicions[0].what


def test_gradients_of_a_mean_are_refused():
    def gradients(params, rows):
        return jax.grad(lambda p: jnp.mean(jax.vmap(loss_fn, (None, 0, 0))(p, *rows)))(params)

    found = check(None, gradients=gradients)
    assert "not one row for each example" in found.broken[0].what


def test_what_is_no_argument_is_refused_by_name_and_errors_of_the_loss_are_its_own():
    right = {"loss_fn": loss_fn, "params": PARAMS, "source": (X, Y), "mechanism": MECHANISM}
    of_a_misspelt_path = lambda params, x, y: loss_fn(params, x, y) * params["none"]  # noqa: E731
    refused("none", check, of_a_misspelt_path, error=KeyError)
    rows = (
        ("give one of loss_fn and gradients, ", {"loss_fn": None}),
        ("params must be a pytree of arrays", {"params": "none"}),
        ("mechanism must ", {"mechanism": "dp"}), ("preprocess must ", {"preprocess": 3}),
        ("build must ", {"build": 3}), ("collate must ", {"collate": []}),
        ("loader must ", {"loader": [1]}), ("loss_fn must ", {"loss_fn": 1}),
        ("raw must ", {"raw": 5, "preprocess": lambda data: data}), ("foo must ", {"foo": 1}),
        ("public must ", {"public": lambda data: 1.0}),
        (r"public\['clip'\] must ", {"public": {"clip": 1.0}}),
    )  # fmt: skip
    wrong = lambda given: functools.partial(jaxdp.check, **right | given)  # noqa: E731
    all_refused((f"^{words}.*got ", wrong(given), str(given)) for words, given in rows)


class _Called:
    def __call__(self, params, x):
        return params @ x


def test_the_line_of_a_function_is_where_the_users_begins_and_libraries_have_none():
    line = f"audit/test_pipelines.py:{_Called.__call__.__code__.co_firstlineno}"
    for called in (_Called(), functools.partial(_Called()), jax.jit(_Called()), _Called().__call__):
        assert lines.line_of_function(called) == line
    for other in (optax.sgd, np.sum, None, dict):
        assert lines.line_of_function(other) == ""
