"""The trainer: one noise and one charge a step, whatever is done to batches and states."""

import copy
import dataclasses
import itertools
import re
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.clipping import options, rounding
from jaxdp.papers.pigdo import pigdo_as_published
from tests.laws import are_uncorrelated
from tests.ledger.small import at_once
from tests.mechanisms import sgd_of
from tests.refusing import all_refused, refused

SGD = optax.sgd(0.1, momentum=0.9)
PARAMS = {"w": jnp.zeros((3, 2)), "b": jnp.zeros((2,))}
RNG = np.random.default_rng(0)
DATA = {name: RNG.normal(size=(60, *p.shape)).astype("f4") for name, p in PARAMS.items()}


def loss_fn(params, example):
    """An example's gradient is the example itself."""
    return sum(jnp.vdot(leaf, example[name]) for name, leaf in params.items())


def trainer(secret=None, loss_fn=loss_fn, data=DATA, optimizer=SGD, **options):
    mech = sgd_of(1.0, 1.0, 20, 60)
    return jaxdp.Trainer(loss_fn, mech, optimizer, data, secret=secret, **options)


def steps(train, count, params=PARAMS):
    state, norms = train.init(params), []
    for batch in train.batches(count):
        state, info = train.step(state, batch)
        norms.append(float(info.update_norm))
    return state, norms


def one_step(train, state):
    return train.step(state, next(train.batches(1)))[0]


in_passes_and_in_one = pytest.mark.parametrize("rows", [8, None])


@in_passes_and_in_one
def test_a_run_is_a_function_of_its_chosen_seed(rows):
    runs = [
        steps(trainer(secret, physical_batch_size=rows), 5)[0].params
        for secret in (*map(jaxdp.Secret.from_seed, (1, 1, 2)), jaxdp.Secret.new())
    ]
    chex.assert_trees_all_equal(*runs[:2])
    for other in runs[2:]:
        assert not np.array_equal(runs[0]["w"], other["w"])
    assert not PARAMS["w"].any()  # the user's survive donation
    # One secret in two trainers of one ledger shares no draw.
    ledger, seeds = jaxdp.Ledger(), 2 * [jaxdp.Secret.new(), jaxdp.Secret.from_seed(3)]
    many = [trainer(seed, ledger=ledger) for seed in seeds]
    assert len({np.sort(t._sampler.draw().indices.ravel()).tobytes() for t in many}) == 4
    # The state may be made by a compiled init, onto whatever devices.
    train = trainer(jaxdp.Secret.from_seed(1), physical_batch_size=rows)
    state = jax.jit(train.init)(PARAMS)
    for batch in train.batches(5):
        state, _ = train.step(state, batch)
    chex.assert_trees_all_equal(runs[0], state.params)
    # A compiled init looks at no number: that it could not is on the list.
    assert any("a state that no step had returned" in line for line in train.unverified())


def by_hand(mech, grad_fn, draw):
    """The clipped sum of a draw, in NumPy."""
    share, rows = rounding.error_of_sum(grad_fn.most_records), draw.indices[draw.mask]
    grads = {name: x[rows].astype(np.float64) for name, x in DATA.items()}
    norms = np.sqrt(sum(np.sum(g**2, tuple(range(1, g.ndim))) for g in grads.values()))
    factors = np.minimum(1, (1.0 - rounding.MARGIN) / norms)
    total = {name: np.tensordot(factors, g, 1).astype("f4") for name, g in grads.items()}
    return jaxdp.Summed(jax.tree.map(jnp.asarray, total), mech.rule.l2(PARAMS) * (1.0 + share))


@in_passes_and_in_one
def test_a_step_is_the_sum_of_its_parts(rows):
    secret = jaxdp.Secret.from_seed(4)
    train = trainer(secret, physical_batch_size=rows)
    state, norms = steps(train, 1)
    mech = train.mechanism
    draw = mech.sampler(60, secret=secret).draw()  # the first stream of another ledger
    tx = optax.chain(mech.privatize(), SGD)
    summed = by_hand(mech, train.clipped_grad, draw)
    update, _ = tx.update(summed, tx.init(PARAMS), PARAMS, key=draw.key())
    chex.assert_trees_all_close(state.params, update, atol=1e-4)
    assert norms[0] == pytest.approx(float(optax.tree.norm(update)), rel=1e-3)
    # What leaks is never charged as private.
    leaky = pigdo_as_published(mech, 0.1)
    train = jaxdp.Trainer(loss_fn, leaky, source=DATA, physical_batch_size=rows)
    assert steps(train, 1)[0].step == 1
    assert train.epsilon(1e-5).upper == np.inf


def test_an_old_state_gets_new_noise_and_an_empty_draw_all_of_it():
    silent = lambda p, x: 0.0 * jnp.sum(p["w"]) * x  # noqa: E731
    train = trainer(None, silent, jnp.zeros(60), optax.sgd(1.0))
    state, noises = train.init({"w": jnp.zeros(4000)}), []
    again = [jax.tree.map(jnp.array, state)._replace(past=state.past) for _ in range(3)]
    for old, batch in zip(again, train.batches(3), strict=True):
        noises.append(np.asarray(train.step(old, batch)[0].params["w"]))
    assert all(are_uncorrelated(one, two) for one, two in itertools.combinations(noises, 2))
    train = trainer()
    train._sampler._sampling = jaxdp.sampling.Poisson(1e-12)
    state, norms = steps(train, 3)
    assert state.step == train.ledger.steps == 3
    assert min(norms) > 0.001


@in_passes_and_in_one
def test_nothing_recompiles(rows):
    chex.clear_trace_counter()
    # Once by init, which tries the optimizer before anything is charged.
    traced = chex.assert_max_traces(lambda updates, _: updates, n=2 if rows else 3)
    after = optax.chain(SGD, optax.stateless(traced))
    # Chosen, for a draw of up to 8 of the 60 records would need no passes: one in 3,000 draws.
    steps(trainer(jaxdp.Secret.from_seed(1), optimizer=after, physical_batch_size=rows), 8)


@in_passes_and_in_one
def test_randomness_of_the_loss_differs_between_steps(rows):
    def loss_fn(params, example, rng):
        return jnp.vdot(params["w"], jax.random.normal(rng, (3,))) + 0.0 * example

    # Everybody, no noise and no momentum: nothing else could differ.
    mech = sgd_of(0.0, 1.0, 60, 60, "full_batch")
    chosen = {"secret": jaxdp.Secret.from_seed(1), "physical_batch_size": rows}
    train = jaxdp.Trainer(loss_fn, mech, optax.sgd(1.0), jnp.zeros(60), **chosen)
    _, norms = steps(train, 4, {"w": jnp.zeros(3)})
    assert np.diff(np.sort(norms)).min() > 1e-4


@in_passes_and_in_one
def test_a_batch_is_used_once_whatever_the_state(rows):
    """The two releases would share their noise and differ by what is un-noised.

    Before, in words of another door: "ticket must be spent once ... call sampler.draw()".
    """
    train = trainer(physical_batch_size=rows)
    old = train.init(PARAMS)
    kept = jax.tree.map(jnp.array, old)._replace(step=0, past=old.past)
    (one,) = train.batches(1)
    train.step(old, one)
    used = r"batch must be .* one that a step used before\. .*for batch in trainer\.batches\(\)"
    for stale in (kept, train.init(PARAMS)):
        refused(f"^(?!.*sampler.draw){used}", train.step, stale, one)
    assert train.ledger.steps == 1
    (two,) = train.batches(1)
    assert train.step(kept, two)[0].step == 1  # an old state with a new batch is a new release
    (three,), states = train.batches(1), [train.init(PARAMS) for _ in range(4)]
    stepped = at_once(4, lambda: train.step(states.pop(), three))
    assert (len(stepped), stepped.count(None), train.ledger.steps) == (4, 3, 3)
    # A copy of one.
    (one,) = train.batches(1)
    ticket, words = one.draw.ticket, "draw or sum (its ticket) cannot be copied"
    for way, what in ((copy.deepcopy, ticket), (copy.copy, ticket), (copy.deepcopy, one)):
        refused(words, way, what, error=TypeError)
    refused("Take batches where the step is taken", copy.deepcopy, one, error=TypeError)


def test_a_state_stands_for_its_charges_and_a_batch_or_state_of_another_trainer_is_refused():
    train, other = trainer(reserve=1), trainer()
    states = [train.init(PARAMS)]
    for _ in range(2):  # one at a time, for batches are charged ahead
        params = jax.tree.map(jnp.array, states[-1].params)
        states.append(one_step(train, states[-1]._replace(params=params)))
    assert len({np.asarray(state.past).tobytes() for state in states}) == 3
    assert [int(state.step) for state in states] == [0, 1, 2]
    state, (one,), (its,) = states[-1], other.batches(1), train.batches(1)
    refused("state must be one whose past the ledger holds", other.step, state, one)
    halves = jax.tree.map(lambda leaf: (leaf * 3) // 2, state)  # of an average: without a past
    refused("past the ledger holds", train.step, halves, its)
    refused("batch must be of this trainer", train.step, state, one)
    refused("batch must be one that trainer.batches", train.step, state, DATA)
    assert not one.draw.ticket.spent
    assert not its.draw.ticket.spent
    train.step(state, its)


def test_a_trainer_goes_on_where_the_ledger_stopped(tmp_path):
    mech = dataclasses.replace(sgd_of(3.0, 1.0, 20, 60), steps=6, delta=1e-5)
    kept = {"ledger": tmp_path / "l", "secret": jaxdp.Secret.new()}
    first = jaxdp.Trainer(loss_fn, mech, SGD, DATA, **kept)
    state, _ = steps(first, 4)
    saved = jax.tree.map(np.asarray, state)
    first.close()
    second = jaxdp.Trainer(loss_fn, mech, SGD, DATA, **kept)
    refused("steps must be at most 2, what is left of the 6", second.batches, 3, state=saved)
    state = jax.tree.map(jnp.asarray, saved)._replace(past=saved.past)
    for one in second.batches(state=state):
        state, _ = second.step(state, one)
    assert state.step == 6
    assert second.ledger.steps == 6
    assert second.epsilon().upper == mech.epsilon(6, 1e-5).upper
    (said,) = second.unverified()  # nobody saw that the state came through the disk unchanged
    assert said.startswith("steps went on from a state that no step had returned (restored from")
    refused("what is left of the 6", second.batches, 1)
    assert len(list(second.batches(1, beyond=True))) == 1
    assert second.epsilon().upper > second.mechanism.epsilon(6, 1e-5).upper
    second.close()


def of_six(ledger, another=False, models=1, reserve=None, **changes):
    mech = jaxdp.dp_sgd(epsilon=3.0, delta=1e-5, steps=6, l2_clip_norm=1.0, batch_size=20,
                        dataset_size=60, models=models)  # fmt: skip
    mech = dataclasses.replace(mech, **changes)
    return jaxdp.Trainer(loss_fn, mech, SGD, DATA, ledger=ledger, another=another, reserve=reserve)


def on(train, count, state=None):
    """The state after so many more steps of a trainer."""
    batches = train.batches(count, state=state)
    state = train.init(PARAMS) if state is None else state
    for batch in batches:
        state, _ = train.step(state, batch)
    return jax.tree.map(np.asarray, state)  # as a checkpoint gives it back


@pytest.mark.parametrize("models", [1, 3])
def test_each_of_three_models_on_one_ledger_has_all_its_steps(models, capsys):
    ledger, said = jaxdp.Ledger(), []
    for number in range(3):
        train = of_six(ledger, number > 0, models)
        assert on(train, None).step == 6
        said.append(capsys.readouterr().err)
    total = ledger.epsilon(1e-5).upper
    assert (total <= 3.0) == (models == 3)
    assert said[0] == ""
    assert f"holds 18 steps in the end: epsilon {total:.2f} at delta 1e-05" in said[2]
    assert ("dp_sgd(..., models=3)" in said[2]) == (models == 1)
    assert train.mechanism.models == models
    assert "models" not in repr(train.mechanism)  # which names runs, and goes into keys
    fourth = of_six(ledger, True, models)
    assert on(fourth, None).step == 6
    assert "these are 4" in capsys.readouterr().err


def test_a_trainer_on_a_ledger_that_holds_steps_says_whose_they_are(tmp_path, capsys):
    """The first was killed after four of six steps, and its checkpoint is of two."""
    path = tmp_path / "ledger.jsonl"
    begun = of_six(path)
    fresh = jax.tree.map(np.asarray, begun.init(PARAMS))
    two = on(begun, 2, fresh)
    on(begun, 2, two)
    begun.close()

    def at_work(another=False, **changes):
        """A trainer of a copy of the file, where nothing was done since."""
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        shutil.copy(path, file)
        return of_six(file, another, **changes)

    # What goes on has what is left, also from before the first step.
    assert len(at_work().batches(state=two)) == len(at_work().batches(state=fresh)) == 2
    lost = jaxdp.Ledger()
    stranger = on(of_six(lost), 1)
    new = at_work(True)
    (batch, *_), other = new.batches(1), at_work(noise_multiplier=9.0)
    all_refused(
        [
            (r"trainer\.batches\(state=state\).* of 6 steps\..*another=True", at_work().batches),
            (r"state must be given", lambda: at_work().batches(2, beyond=True), "beyond"),
            ("whose past the ledger holds", lambda: at_work().batches(state=stranger)),
            ("must be a TrainState", lambda: at_work().batches(state=PARAMS)),
            ("one that trainer.init", lambda: at_work(True).batches(state=two), "another"),
            (r"take trainer\.batches\(state=state\)", lambda: new.step(two, batch), "in a step"),
            ("another must be True or False", lambda: at_work(1)),
            ("ledger must be that of the models before", lambda: of_six(None, another=True)),
        ]
    )
    assert not batch.draw.ticket.spent
    new.step(new.init(PARAMS), batch)
    # Other noise is another mechanism, of which the ledger holds nothing.
    capsys.readouterr()
    assert len(other.batches(state=two)) == 6
    words = (
        "another mechanism, whose steps are no steps of this one: on this ledger, which holds 10"
    )
    assert words in capsys.readouterr().err
    late = at_work()
    assert len(late.batches(state=late.init(PARAMS))) == 2
    assert "holds 4 steps of its model: 2 are taken" in capsys.readouterr().err
    # A new model after a crash of the first is charged as one.
    assert len(new.batches()) == 5
    assert new.ledger.steps == 5


def test_models_that_share_a_ledger_go_on_each_with_its_own_state(tmp_path):
    """Also where their steps took turns, and two of the three were killed."""
    path = tmp_path / "ledger.jsonl"
    ledger = jaxdp.Ledger(path)
    trains = [of_six(ledger, another) for another in (False, True, True)]
    states = [train.init(PARAMS) for train in trains]
    taken = [0, 0, 0]
    for which in (0, 1, 0, 2, 2, 0, 1, 2, 2):
        states[which] = jax.tree.map(jnp.array, on(trains[which], 1, states[which]))
        taken[which] += 1
    refused("state must be of the model", trains[0].batches, state=states[1])
    refused("state must be of the model", trains[2].batches, state=states[0])
    ledger.close()
    for which in (2, 0, 1):  # each in a process of its own
        ledger = jaxdp.Ledger(path)
        again = of_six(ledger)
        refused("holds 3 models of this mechanism", again.batches, state=again.init(PARAMS))
        left = 6 - taken[which]
        assert on(again, None, states[which]).step == 6
        assert again.ledger.steps == sum(taken) + left
        taken[which] = 6
        ledger.close()
    assert ledger.epsilon(1e-5).upper == trains[0].mechanism.epsilon(18, 1e-5).upper


def test_memory_that_a_step_has_reused_is_named_with_the_remedy():
    train = trainer()
    old = train.init(PARAMS)
    inside = jnp.ones(2)

    def captures(params, example):
        return loss_fn(params, example) + jnp.vdot(params["b"], inside)

    other = trainer(loss_fn=captures, constants=inside)
    its = other.init(PARAMS)
    state = one_step(train, old)
    (one,), (two,) = train.batches(1), other.batches(1)
    jax.jit(jnp.negative, donate_argnums=0)(inside)
    part = {**state.params, "b": old.params["b"]}
    gone = old.params["b"].is_deleted()  # JAX 0.11 keeps an array that was looked at
    all_refused(
        [
            *[(r"state\.params\['b'\] must .*copy from before", lambda: train.step(state._replace(params=part), one))][:gone],
            ("write state, info = trainer.step|memory a step has reused", lambda: train.step(old, one), "whole"),
            ("copied before a step", lambda: copy.deepcopy(old)),
            ("state must be the last one", lambda: train.released(old)),
            ("public_value must be", lambda: train.step(state, one, public_value=inside)),
            ("capture arrays that are there", lambda: trainer(loss_fn=captures).init(PARAMS), "traced"),
            ("capture arrays that are there", lambda: other.step(its, two), "compiled"),
        ]
    )  # fmt: skip
    train.step(state, one)


def test_two_loops_of_one_ledger_at_a_time_are_two_models(capsys):
    ledger = jaxdp.Ledger()
    one, two = of_six(ledger, reserve=4), of_six(ledger)
    first = one.batches()  # of which none was handed out yet
    refused("state must be given", two.batches)
    # Both on one state, which has six steps: with words alone.
    said = "6 steps of this model to come, besides these 6: .* holds 12 steps in the end: epsilon"
    for given in ({"state": two.init(PARAMS)}, {}):
        two.batches(**given)
        assert re.search(said, capsys.readouterr().err)
    next(first)  # three more are reserved
    two = of_six(ledger, True)
    second = two.batches()
    assert "which holds 12 steps in the end" in capsys.readouterr().err
    assert 1 + len(list(zip(first, second, strict=False))) == 6
    assert len(list(second)) <= 1
    assert ledger.steps == 12


@in_passes_and_in_one
def test_looking_changes_no_step_and_tells_what_clipping_saw(rows):
    one, two = (trainer(jaxdp.Secret.from_seed(5), physical_batch_size=rows) for _ in range(2))
    plain, (other,) = one_step(one, one.init(PARAMS)), two.batches(1)
    looked, _, infos = two.step_with_info(two.init(PARAMS), other)
    chex.assert_trees_all_equal(plain.params, looked.params)
    assert sum(int(info.mask.sum()) for info in infos) == int(other.draw.mask.sum())
    assert two.step_with_info(looked, next(two.batches(1)), return_info=False)[2] == []


def test_bad_input():
    train, too_large = trainer(), "public_value must be .* float32 .* got .* bits"
    mech = train.mechanism
    make = lambda *args: jaxdp.Trainer(loss_fn, *args, DATA)  # noqa: E731
    begun = lambda value: trainer().init(PARAMS, public_value=value)  # noqa: E731
    all_refused(
        [
            ("optimizer must be None for an Alg", lambda: make(jaxdp.Algorithm(mech, SGD), SGD)),
            ("optimizer must be an optax optimizer", lambda: make(mech, None)),
            ("mechanism must be a Mechanism", lambda: make(mech.privatize(), SGD)),
            ("physical_batch_size must be a whole", lambda: trainer(physical_batch_size=0)),
            ("steps or epochs must be given", lambda: train.batches()),
            ("steps must be a whole number of at least 0, got -1", lambda: train.batches(-1)),
            ("give one of steps and epochs", lambda: train.batches(1, epochs=1.0)),
            ("ledger must hold a charge", lambda: train.epsilon(1e-5)),
            (too_large, lambda: begun(10**400)),
            (too_large, lambda: begun(-(10**5000)), "longer than words may be"),
        ]
    )
    assert len(list(train.batches(epochs=2.0))) == 6
    refused("delta must be given", train.epsilon)


REPLACED = "were replaced between steps by the caller: assumed public, or computed from noisy"


def of_two(params, x):
    """Student and teacher, of which the teacher is frozen."""
    return jnp.sum((params["student"] - params["teacher"] - x) ** 2)


def taught():
    data = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    parts = {"student": True, "teacher": False}
    train = trainer(None, of_two, data, trainable=parts)
    return train, one_step(train, train.init({"student": jnp.ones(3), "teacher": jnp.zeros(3)}))


def told_after(change):
    """What is told of a step from a state that the caller changed, but for what is frozen."""
    train, state = taught()
    one_step(train, change(train, state))
    return [line for line in train.unverified() if not line.startswith("assumed to be public")]


def with_params(**params):
    return lambda _, s: s._replace(params={**s.params, **{k: f(s) for k, f in params.items()}})


def through_another_trainer(train, state):
    other = trainer(None, of_two, train.source.arrays, ledger=train.ledger)
    begun = other.init(doubled(None, state).params).params
    return with_params(student=lambda _: begun["student"])(None, state)


doubled = with_params(student=lambda s: s.params["student"] * 2)
swapped = with_params(student=lambda s: s.params["teacher"], teacher=lambda s: s.params["student"])
FROM_OUTSIDE = (
    (doubled, f"trained parameters {REPLACED}"),
    (lambda t, s: copy.deepcopy(doubled(t, s)), f"trained parameters {REPLACED}"),
    (
        lambda _, s: s._replace(opt_state=jax.tree.map(jnp.array, s.opt_state)),
        f"arrays of the optimizer's state {REPLACED}",
    ),
    (
        lambda _, s: jax.tree.map(jnp.array, s)._replace(past=s.past),
        "steps went on from a state that no step had returned",
    ),
    (
        lambda t, s: t.init(doubled(t, s).params),
        "parameters were given to init after steps had been taken: assumed public",
    ),
    (through_another_trainer, f"trained parameters {REPLACED}"),
)


def test_arrays_that_no_step_returned_are_on_the_list_and_those_of_steps_are_not():
    """Before: epsilon 2.4 and an empty list for a fine-tuning step on the raw records."""
    other, theirs = taught()  # with a ledger of its own
    of_another_ledger = with_params(student=lambda s: theirs.params["student"])
    rows = (*FROM_OUTSIDE, (of_another_ledger, f"trained parameters {REPLACED}"))
    for n, (change, said) in enumerate(rows):
        (found,) = told_after(change)
        assert found.startswith(said), n
    assert other.ledger.steps == 1
    same, copied = (lambda _, s: s), (lambda _, s: copy.deepcopy(s))  # as the words advise
    for n, change in enumerate((same, copied, swapped, lambda train, s: train.init(s.params))):
        assert told_after(change) == [], n
    # What init refused is told where it comes after steps, and what another trainer began with.
    train, mean = trainer(None, squared, positive()), jnp.asarray(positive().mean(0))
    refused("the records' mean", train.init, mean)
    state = one_step(train, train.init(jnp.zeros(3)))
    state = one_step(train, train.init(state.params))
    assert train.unverified() == []
    one_step(train, state._replace(params=jnp.array(mean)))
    (found,) = train.unverified()
    assert found.startswith(f"trained parameters {REPLACED}")
    begun = trainer(None, squared, positive(1)).init(mean * 1.01)
    one_step(train, train.init(begun.params))
    found = [line for line in train.unverified() if not line.startswith("trained")]
    words = "parameters were given to init after steps had been taken"
    assert [line[: len(words)] for line in found] == [words]


@in_passes_and_in_one
def test_frozen_arrays_that_this_ledger_released_are_not_on_the_list(rows):
    """Generators, target networks; a mean of releases, and what another ledger holds, are."""
    first = jaxdp.Trainer(squared, sgd_of(2.0, 1.0, 20, 60), SGD, source=positive())
    made = one_step(first, first.init(jnp.zeros(3))).params
    assumed = "assumed to be public, or made from what this ledger released: "
    said = [f"{assumed}the frozen parameter ['teacher']"]
    for n, (ledger, teacher, told) in enumerate(
        ((first.ledger, made, []), (first.ledger, made * 0.9, said), (None, made, said))
    ):
        parts = {"trainable": {"student": True, "teacher": False}, "physical_batch_size": rows}
        parts["another"] = ledger is not None
        train = trainer(None, of_two, positive(1), ledger=ledger, **parts)
        state = train.init({"student": jnp.ones(3), "teacher": jnp.asarray(teacher)})
        for batch in train.batches(2):
            state, _ = train.step(state, batch)
        assert train.unverified() == told, n
        # One that the caller puts in its place later is named too, once.
        one_step(train, with_params(teacher=lambda s: s.params["teacher"] * 0.5)(None, state))
        assert train.unverified() == said, n


def test_an_array_of_an_optimizer_is_no_release():
    """Before: private records in its state, handed to the next trainer, were on no list."""
    kept = optax.GradientTransformation(
        lambda params: jnp.mean(positive(), 0), lambda g, state, params=None: (g, state)
    )
    first = trainer(None, squared, positive(), optimizer=optax.chain(SGD, kept))
    state = one_step(first, first.init(jnp.zeros(3)))
    taken = next(x for x in jax.tree.leaves(state.opt_state) if x.shape == (3,))
    parts = {"trainable": {"student": True, "teacher": False}, "another": True}
    train = trainer(None, of_two, positive(1), ledger=first.ledger, **parts)
    one_step(train, train.init({"student": jnp.ones(3), "teacher": taken}))
    assert any("the frozen parameter ['teacher']" in line for line in train.unverified())


def test_a_subtree_that_is_frozen_has_one_line():
    """Before: 28 lines for LoRA in two layers, one for each array."""
    layers = [{"w": jnp.ones((3, 3)), "lora": {"a": jnp.ones((3, 1)), "b": jnp.zeros((1, 3))}}] * 2
    params = {"params": {"embed": jnp.ones(3), "layers": layers, "ln": {"s": jnp.ones(3)}}}
    flat = {f"h.{n}": jnp.ones((2, n)) for n in range(9)} | {"lora": jnp.ones(3)}
    lora = lambda path: "lora" in path  # noqa: E731
    for tree, words in (
        (
            params,
            [
                "the frozen parameter ['params']['embed']",
                "the frozen parameter ['params']['ln']['s']",
                "the frozen parameters under ['params']['layers'] (2 arrays, 18 numbers)",
            ],
        ),
        (flat, ["the frozen parameters (9 arrays, 72 numbers)"]),
    ):
        flags = [lora(path) for path in options.paths(tree)]
        said = options.describe_frozen(tree, flags)
        assert sorted(set(said) - {""}) == words
        assert [not each for each in said] == flags


@jax.numpy_dtype_promotion("standard")  # optax mixes its counter with the value
@in_passes_and_in_one
def test_a_public_value_reaches_the_optimizer_and_is_on_the_list(rows):
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=0)
    optimizer = optax.chain(optax.sgd(0.1), plateau)
    train = trainer(optimizer=optimizer, physical_batch_size=rows)
    state = train.init(PARAMS, public_value=1.0)
    for one, value in zip(train.batches(4), (1.0, np.float32(1), jnp.float32(1), 1), strict=True):
        state, _ = train.step(state, one, public_value=value)
    assert float(state.opt_state[1][-1].scale) < 1.0
    assert train.unverified() == [
        "the optimizer was handed public_value=: assumed public, computed from released parameters "
        "and public examples alone"
    ]
    (one,) = train.batches(1)
    for wrong, words in ((None, "asks for value"), ("low", "a number"), (jnp.ones(2), "a number")):
        refused(words, train.step, state, one, public_value=wrong)
    assert not one.draw.ticket.spent
    assert train.step(state, one, public_value=0.5)[0].step == 5


def squared(params, x):
    return jnp.sum((params - x) ** 2)


def positive(seed=0, records=60):
    return np.random.default_rng(seed).gamma(2.0, 3.0, (records, 3)).astype(np.float32)


@pytest.mark.parametrize(("rows", "told"), [(8, True), (None, False)])
def test_what_is_captured_after_init_is_compared_before_anything_is_spent(rows, told):
    data, box = positive(), {"centre": 0.0}
    loss = lambda w, x: squared(w, x - box["centre"])  # noqa: E731
    train = trainer(None, loss, data, physical_batch_size=rows)
    state = train.init(jnp.zeros(3))
    box["centre"] = jnp.asarray(data.mean(0))
    (batch,) = train.batches(1)
    words = "loss_fn must not capture .* is the records' mean"
    refused(words, train.step_with_info, state, batch, told)
    assert not batch.draw.ticket.spent
    box["centre"] = jnp.asarray([0.217, 1.3, -5.2])
    state = train.step_with_info(state, batch, told)[0]
    assumed = "assumed to be public, or made from what this ledger released: "
    said = [f"{assumed}a captured array float32 [3]"]
    assert train.unverified() == said
    if rows is None:  # a second program, compiled anew for its info, is compared too
        box["centre"] = jnp.asarray(data.mean(0))
        (batch,) = train.batches(1)
        refused("the records' mean", train.step_with_info, state, batch)
        assert not batch.draw.ticket.spent
        assert train.step(state, batch)[0].step == 2  # compiled before
        assert train.unverified() == said
