"""Mistakes that newcomers make, and the words that they get."""

import copy
import functools
import gc
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from tests.ledger.small import trained
from tests.refusing import all_refused, refused

X = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
Y = np.arange(60, dtype=np.int32) % 2
PARAMS = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}
BUDGET = {"epsilon": 3.0, "delta": 1e-3, "steps": 4}
MECH = jaxdp.dp_sgd(l2_clip_norm=1.0, batch_size=20, dataset_size=60, **BUDGET)


def loss_fn(params, x, y):
    logits = x @ params["w"] + params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def trainer(loss=loss_fn, data=(X, Y), **options):
    return jaxdp.Trainer(loss, MECH, optax.sgd(0.1), data, **options)


stepped = functools.partial(trained, params=PARAMS)


def run(folder, optimizer=None, **options):
    options = {"params": PARAMS, "report": False, **options}
    return jaxdp.Run(folder, loss_fn, MECH, optimizer or optax.sgd(0.1), (X, Y), **options)


def test_what_is_frozen_is_on_the_list_however_a_step_is_computed(tmp_path):
    frozen = "frozen parameter ['b']"
    for rows in (8, None):  # in passes, and in one
        one = trainer(trainable=lambda path: "w" in path, physical_batch_size=rows)
        stepped(one, 1)
        assert frozen in "\n".join(one.unverified()), rows
    options = {"trainable": {"w": True, "b": False}, "ledger": tmp_path / "ledger"}
    first = trainer(**options)
    state = first.init(PARAMS)
    refused("in use by another writer: .* not closed, close\\(\\)", trainer, **options)
    first.close()
    second = trainer(**options)  # no init: the state comes from elsewhere
    second.step(state, next(second.batches()))
    assert frozen in "\n".join(second.unverified())
    second.close()


def test_a_loop_says_how_long_it_is_epsilon_what_was_spent_and_an_earlier_state_is_refused():
    one = trainer()
    state, batches = one.init(PARAMS), one.batches()
    old, kept = state, copy.deepcopy(state)
    refused("no step was taken yet", one.epsilon)  # nothing is reserved before the first batch
    assert len(batches) == 4  # as a progress bar asks
    state, _ = one.step(state, next(batches))
    batch = next(batches)
    refused("memory (a|that) step has reused", one.step, old, batch)
    assert one.step(kept, batch)[0].step == 1
    for left, batch in zip((1, 0), batches, strict=True):
        assert len(batches) == left
        state, _ = one.step(state, batch)
    assert one.epsilon().upper > 0.5
    with pytest.warns(UserWarning, match=r"no step is left: .* all 4 .*batches\(4, beyond=True\)"):
        assert list(one.batches()) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stepped(one, 4, beyond=True)
    assert one.epsilon().upper > 3.1


def test_what_was_forgotten_or_misplaced_is_named_without_a_record():
    one = trainer()
    no_state = r"state must be a TrainState, from trainer.init"
    no_optimizer = "optimizer must be an optax optimizer.*"
    made = lambda *args: jaxdp.Trainer(loss_fn, MECH, *args)  # noqa: E731
    nothing, last = trainer(lambda params, x, y: None), trainer(trainable=lambda path: "u" in path)
    all_refused(
        [
            (no_state, lambda: one.step(PARAMS, next(one.batches()))),
            (no_state, lambda: one.step((PARAMS, None), next(one.batches()))),
            (f"{no_optimizer}got a tuple$", lambda: made((X, Y))),
            (f"{no_optimizer}got 'adam'$", lambda: made("adam", (X, Y))),
            (r"data must be given: .* got None", lambda: trainer(data=None)),
            ("got None: a return is missing", lambda: nothing.init(PARAMS)),
            (r"trainable must .*got none of \['b'\], \['w'\]", lambda: last.init(PARAMS)),
            ("params must hold at least one array, got {}", lambda: trainer().init({})),
            ("no step was taken yet", trainer().epsilon),
        ]
    )


def test_an_error_of_the_users_loss_comes_with_the_shapes_of_an_example():
    for labels, shapes in ((Y.astype(np.float32), "float32[]"), (Y[:, None], "int32[1]")):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            trainer(data=(X, labels)).init(PARAMS)
        assert f"one example: (float32[3], {shapes})" in "".join(caught.value.__notes__)


def test_mistakes_with_a_run_are_named_and_none_is_called_a_damaged_folder(tmp_path):
    run(tmp_path / "run").fit(2)
    other = jax.tree.map(jnp.zeros_like, {"w": jnp.zeros((3, 5)), "b": jnp.zeros(5)})
    numbers, three = "evaluate must return numbers by name", np.ones(3)

    def evaluated(name, found):
        run(tmp_path / name, evaluate=lambda params: found).fit()

    all_refused(
        [
            (f"{numbers}.* got 0.5", lambda: evaluated("a", 0.5)),
            (rf"{numbers}.* array float32 \[3\]$", lambda: evaluated("d", jnp.ones(3))),
            (
                rf"{numbers}.* array float64 \[3\] as 'each': .* No step is lost",
                lambda: evaluated(
                    "b", {"loss": np.float32(1), "mean": jnp.ones(()), "each": three}
                ),
            ),
            (f"{numbers}.* got 'high' as 'loss'", lambda: evaluated("b", {"loss": "high"})),
            (f"{numbers}.* got a dict as 'of'", lambda: evaluated("b", {"of": {"loss": 1.0}})),
            (
                "progress must be a function .* log= .* got 'tqdm'",
                lambda: run("e", progress="tqdm"),
            ),
            ("evaluate must be a function from", lambda: run("e", evaluate={"accuracy": 1.0})),
            (r"run must have begun .* call fit\(\)", lambda: run(tmp_path / "c").epsilon()),
            (
                "the program that it was begun with, .* the optimizer: 2 operations then",
                lambda: run(tmp_path / "run", optax.adam(0.1)).fit(),
                "optimizer",
            ),
            (
                r"the parameters: \['b'\] float32\[2\] then, float32\[5\] now",
                lambda: run(tmp_path / "run", params=other).fit(),
                "shapes",
            ),
        ]
    )
    assert run(tmp_path / "run").fit()["w"].shape == (3, 2)
    gc.collect()  # what orbax would leave behind had it begun to read is a warning, an error here


ASKING = {
    "plateau": (optax.contrib.reduce_on_plateau, r"asks for value besides .* pass it on"),
    "polyak": (optax.polyak_sgd, r"asks for value besides .* pass it on"),
    "lbfgs": (optax.lbfgs, "asks for value, grad, value_fn besides .* line search"),
    "lookahead": (lambda: optax.lookahead(optax.sgd(0.1), 5, 0.5), "average=0.99"),
}


def own_loop(optimizer):
    sampler, tx = MECH.sampler(60), optax.chain(MECH.privatize(), optimizer)
    draw = sampler.draw()
    summed = MECH.clipped_grad(loss_fn)(PARAMS, (X, Y), draw)
    return sampler, draw, summed, tx


def test_an_optimizer_that_asks_for_more_is_refused_before_a_charge(tmp_path):
    """Before: a raw TypeError or AttributeError of optax at the first step, whose charge stayed."""
    for name, (make, words) in ASKING.items():
        train = jaxdp.Trainer(loss_fn, MECH, make(), (X, Y))
        one = run(tmp_path / name, make())
        _, draw, summed, tx = own_loop(make())
        update = functools.partial(
            jaxdp.compile_update(tx, donate=False), PARAMS, tx.init(PARAMS), summed
        )
        ways = (functools.partial(train.init, PARAMS), one.fit, update)
        all_refused((words, way, (name, n)) for n, way in enumerate(ways))
        assert train.ledger.steps == 0, name
        assert jaxdp.Ledger(tmp_path / name / "ledger.jsonl").steps == 0, name
        assert not draw.ticket.spent, name


@jax.numpy_dtype_promotion("standard")  # optax mixes its counter with the value
def test_what_an_own_loop_hands_its_optimizer_is_on_the_list():
    for compiled in (True, False):
        sampler, _, summed, tx = own_loop(optax.contrib.reduce_on_plateau())
        if compiled:
            jaxdp.compile_update(tx, donate=False)(PARAMS, tx.init(PARAMS), summed, value=0.5)
        else:
            tx.update(summed, tx.init(PARAMS), PARAMS, value=0.5)
        (said,) = sampler.ledger.unverified()
        assert said.startswith("the optimizer was handed value=: assumed public"), compiled
