"""The private step: what is refused spends nothing, and what fails later is released once at most."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.clipping import engine
from jaxdp.optimizers.algorithm import StepHook
from jaxdp.sampling.sampler import pad
from jaxdp.training.step import PrivateStep
from jaxdp.types import ExtraArgument
from tests.compiling import compilations
from tests.ledger.small import trained
from tests.mechanisms import sgd_of
from tests.refusing import refused

DATA = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
MECH = sgd_of(1.0, 1.0, 20, 60)
PARAMS = jnp.zeros(3)


class Broken(Exception):
    """What a part of a step raises while ``BREAKS`` names it."""


BREAKS = set()


def breaking(name):
    if name in BREAKS:
        raise Broken(name)


def loss_fn(w, example):
    breaking("loss")
    return jnp.vdot(w, example)


def update(updates, state, params=None, **extra):
    breaking("optimizer")
    if "late" in extra:
        jax.debug.callback(breaking, "late")
    return jax.tree.map(lambda leaf: -0.1 * leaf, updates), state


OPTIMIZER = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def trainer(rows=None, **options):
    given = {"secret": jaxdp.Secret.from_seed(3), "physical_batch_size": rows, **options}
    fresh = lambda w, example: loss_fn(w, example)  # noqa: E731, compiled for this trainer
    return jaxdp.Trainer(fresh, MECH, OPTIMIZER, DATA, **given)


def second_batch(monkeypatch):
    """The second physical batch of the draw fails."""
    whole, count = engine.sum_physical_batch, []

    def failing(*args):
        count.append(1)
        if len(count) == 2:
            raise Broken("second batch")
        return whole(*args)

    monkeypatch.setattr(engine, "sum_physical_batch", failing)


TRACED = [("loss", None), ("loss", 8), ("optimizer", None), ("optimizer", 8), ("second batch", 8)]


@pytest.mark.parametrize(("name", "rows"), TRACED, ids=[f"{n}, {r}" for n, r in TRACED])
def test_a_step_that_is_refused_halfway_spends_nothing_and_can_be_taken_again(
    name, rows, monkeypatch
):
    """It then releases what it would have released at first, and once."""
    expected = trainer(rows)
    wanted = expected.step(expected.init(PARAMS), next(expected.batches(1)))[0].params
    one = trainer(rows)
    state, batch = one.init(PARAMS), next(one.batches(1))
    with monkeypatch.context() as patch:
        if name == "second batch":
            second_batch(patch)
        BREAKS.add(name)
        try:
            refused(name, one.step, state, batch, error=Broken)
        finally:
            BREAKS.clear()
    assert not batch.draw.ticket.spent
    assert not state.params.is_deleted()
    moved, _ = one.step(state, batch)
    np.testing.assert_array_equal(moved.params, wanted)
    refused("that a step used before", one.step, moved, batch)
    assert one.ledger.steps == 1


def test_what_another_draw_summed_is_no_sum_of_the_step():
    """A gradient of one's own that returns the sum of a draw that it has kept."""
    grad_fn, sampler = MECH.clipped_grad(loss_fn), MECH.sampler(60)
    kept = grad_fn(PARAMS, jnp.asarray(DATA), sampler.draw())

    @dataclasses.dataclass(frozen=True)
    class Elsewhere:
        def trained(self, params):
            return params

        def sum_draw(self, *args, **options):
            return kept, []

    algorithm = jaxdp.Algorithm(MECH, OPTIMIZER, gradient=lambda loss_fn: Elsewhere())
    one = jaxdp.Trainer(loss_fn, algorithm, source=DATA)
    state, batch = one.init(PARAMS), next(one.batches(1))
    refused("gradient must return the sum of the draw", one.step, state, batch)
    assert not kept.ticket.spent
    assert not batch.draw.ticket.spent


def test_an_update_reuses_memory_unless_it_is_told_not_to_and_names_the_remedy():
    tx, sampler = optax.chain(MECH.privatize(), optax.sgd(0.1, momentum=0.9)), MECH.sampler(60)
    grad_fn, data = MECH.clipped_grad(loss_fn), jnp.asarray(DATA)
    params = jnp.zeros(3)
    opt_state, reusing = tx.init(params), jaxdp.compile_update(tx)
    keeping = jaxdp.compile_update(tx, donate=False)
    keeping(params, opt_state, grad_fn(params, data, sampler.draw()))
    assert not params.is_deleted()
    draw = sampler.draw()
    summed = grad_fn(params, data, draw)
    # Of one array that is also the sum XLA cannot reuse the memory.
    own = jaxdp.Summed(params, 1.0)
    reusing(params, jax.tree.map(jnp.copy, opt_state), own, key=draw.ticket.blank())
    assert not params.is_deleted()
    moved, state, _ = reusing(params, opt_state, summed)
    assert params.is_deleted()
    summed = grad_fn(moved, data, sampler.draw())
    remedy = r"copy them first, .* or take jaxdp.compile_update\(tx, donate=False\)"
    refused(remedy, reusing, params, state, summed)
    assert not summed.ticket.spent
    reusing(moved, state, summed)
    assert sampler.ledger.unverified() == []


def test_arrays_that_are_there_twice_are_copied_and_none_is_an_extra_argument_once_reused():
    """Before: refused at the first update, and later by XLA alone, once the ticket was spent."""

    def pull(updates, state, params=None, *, anchor=None, **extra):
        return jax.tree.map(lambda u, a, p: u + 0.1 * (a - p), updates, anchor, params), state

    link = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), pull)
    tx = optax.chain(MECH.privatize(), link, optax.contrib.dog(0.1))
    grad_fn = MECH.clipped_grad(lambda p, x: jnp.vdot(p["w"] + p["b"], x))
    data, moved = jnp.asarray(DATA), []
    for donate in (True, False):
        sampler = MECH.sampler(60, secret=jaxdp.Secret.from_seed(1))
        update, params = jaxdp.compile_update(tx, donate=donate), {"w": PARAMS, "b": PARAMS}
        for _ in range(3):  # also where the program is known
            params = {"w": params["w"], "b": params["w"]}
            summed = grad_fn(params, data, sampler.draw())
            params, _, _ = update(params, tx.init(params), summed, anchor=params)
        moved.append(params)
    jax.tree.map(np.testing.assert_array_equal, *moved)
    update, (gone, kept), state = jaxdp.compile_update(tx), moved, tx.init(moved[1])
    update(gone, tx.init(gone), grad_fn(gone, data, sampler.draw()), anchor=kept)
    summed = grad_fn(kept, data, sampler.draw())
    refused("anchor must hold arrays that are there", update, kept, state, summed, anchor=gone)
    assert not summed.ticket.spent


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Own(ExtraArgument):
    """An extra argument of the caller's, which says nothing of what it costs."""

    value: jax.Array


class Hook(StepHook):
    """A hook of the caller's, which charges nothing."""

    def prepare_step(self):
        return {"means": Own(jnp.asarray(DATA).mean(0))}


def test_an_extra_argument_or_a_hook_of_the_caller_s_is_named_by_the_ledger():
    """Before: each released the mean of all records, and ``unverified`` was []."""

    def follow(updates, state, params=None, *, means=None, leaked=None, **extra):
        given = leaked if means is None else means.value
        return jax.tree.map(lambda u: given + 0.0 * u, updates), state

    link = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), follow)
    tx, grad_fn, data = optax.chain(MECH.privatize(), link), MECH.clipped_grad(loss_fn), DATA
    (given,) = Hook().prepare_step().values()
    for update in (
        jaxdp.compile_update(tx, donate=False),
        lambda p, s, u, **k: tx.update(u, s, p, **k),
    ):
        for extra, words in (
            ({"means": given}, "of a class"),
            ({"leaked": given.value}, "leaked="),
        ):
            sampler = MECH.sampler(60)
            update(PARAMS, tx.init(PARAMS), grad_fn(PARAMS, data, sampler.draw()), **extra)
            (said,) = sampler.ledger.unverified()
            assert words in said
    one = jaxdp.Trainer(loss_fn, MECH, link, DATA, energy=Hook())
    one.step(one.init(PARAMS), next(one.batches(1)))
    assert [s for s in one.unverified() if "a hook of the caller's" in s]
    assert [s for s in one.unverified() if "of a class of the caller's" in s]


def test_several_physical_batches_are_the_step_of_one():
    """Of one ticket: the same noise, and the same sum to rounding."""
    moved = []
    for rows in (None, 8):
        moved.append(trained(trainer(rows), 3, params=jnp.ones(3)).params)
    np.testing.assert_allclose(*moved, rtol=1e-5)
    step = PrivateStep.of(jaxdp.Algorithm(MECH, OPTIMIZER), loss_fn)
    assert step.context is None


def test_a_draw_of_several_physical_batches_is_the_compensated_sum_of_one_program():
    """Bit for bit, and a draw of one, or of nobody, is that program's sum."""
    x = np.random.default_rng(5).normal(size=(40, 3)).astype(np.float32)
    grad_fn = MECH.clipped_grad(lambda w, x: jnp.sum((x @ w - 1.0) ** 2))
    params = jnp.full(3, 0.1)
    with compilations("sum_physical_batch") as programs:
        for count in (0, 1, 8, 9, 24, 29):
            draw = pad(np.arange(count), 8, 0, 40)
            summed, infos = grad_fn.sum_draw(params, x, draw)
            assert infos == []
            parts = [
                engine.sum_physical_batch(
                    grad_fn, False, False, params, x, *each, None, None, None, 1.0
                )[0][0]
                for each in zip(draw.indices, draw.mask, strict=True)
            ]
            assert len(parts) == max(1, -(-count // 8))
            total, lost = np.asarray(parts[0]), np.zeros(3, np.float32)
            for part in parts[1:]:
                wanted = np.asarray(part) - lost
                larger = total + wanted
                total, lost = larger, (larger - total) - wanted
            np.testing.assert_array_equal(summed.value, total - lost)
            assert bool(jnp.any(summed.value != 0)) == (count > 0)
            assert len(programs) == (1 if count == 0 else 2)  # without infos, and with
            _, infos = grad_fn.with_info(params, x, draw)
            assert sum(int(info.mask.sum()) for info in infos) == count
    draw = pad(np.arange(29), 8, 0, 40)
    refused("most_records must be", dataclasses.replace(grad_fn, most_records=28), params, x, draw)


def test_updates_of_ones_own_leave_what_is_frozen():
    params = {"w": jnp.ones(2), "frozen": jnp.full(2, 3)}
    moved = jaxdp.apply_updates(params, {"w": jnp.ones(2), "frozen": None})
    assert moved["frozen"] is params["frozen"]
    np.testing.assert_array_equal(moved["w"], np.full(2, 2.0))


def test_no_noise_and_no_clipping_is_plain_optax():
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    loss = lambda w, x: jnp.sum((x @ w - 1.0) ** 2)  # noqa: E731
    given = {"l2_clip_norm": 1e6, "batch_size": 40, "dataset_size": 40, "sampling": "full_batch"}
    mechanism, tx = jaxdp.dp_sgd(noise_multiplier=0, **given), optax.sgd(0.1, 0.9)
    train = jaxdp.Trainer(loss, mechanism, tx, x)
    state, params = train.init(jnp.zeros(3)), jnp.zeros(3)
    plain = tx.init(params)
    for batch in train.batches(20):
        state, _ = train.step(state, batch)
        grads = jax.grad(lambda w: jnp.mean(jax.vmap(loss, (None, 0))(w, x)))(params)
        updates, plain = tx.update(grads, plain)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(state.params, params, rtol=5e-6, atol=5e-7)
    assert train.epsilon(1e-5).upper == np.inf
