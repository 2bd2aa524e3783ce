"""The trainer's physical batch: what it costs, and that it is chosen by public numbers alone."""

import itertools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import _passes
from jaxdp.sampling.rules import TruncatedPoisson
from jaxdp.sources import as_source

N, WIDTH = 400, 256
WEIGHTS = {"w": np.full((8, WIDTH), 0.01, np.float32), "v": np.full((WIDTH, 8), 0.01, np.float32)}


def deep(params, x):
    """A loss whose rows cost more than a pass does."""
    for _ in range(60):
        x = jnp.tanh(x @ params["w"]) @ params["v"]
    return jnp.sum(x)


def trainer(batch=32, sampling="poisson", loss_fn=deep, rows=None, **options):
    mechanism = jaxdp.dp_sgd(1.0, 1.0, batch, N, sampling)
    data = np.ones((N, 8), np.float32)
    return jaxdp.Trainer(
        loss_fn, mechanism, optax.sgd(1e-3), data, physical_batch_size=rows, **options
    )


def mechanism(batch, records, sampling="poisson"):
    return jaxdp.dp_sgd(1.0, 1.0, batch, records, sampling)


def binomial(count, records, rate):
    return math.comb(records, count) * rate**count * (1.0 - rate) ** (records - count)


@pytest.mark.parametrize(("batch", "records"), [(1, 40), (32, 400), (90, 100), (40, 40)])
def test_expected_passes_are_those_of_the_binomial_law(batch, records):
    rows = np.array([1, 3, 8, 40, records])
    found = _passes.expected_passes(mechanism(batch, records), rows)
    for count, passes in zip(rows, found, strict=True):
        sizes = range(records + 1)
        law = (max(1, -(-k // int(count))) * binomial(k, records, batch / records) for k in sizes)
        assert passes == pytest.approx(math.fsum(law), rel=1e-9)


def test_expected_passes_of_many_records_agree_with_the_normal_law():
    found = _passes.expected_passes(mechanism(100_000, 10**9), np.array([100_000, 100_948]))
    np.testing.assert_allclose(found, [1.5, 1.00135], atol=1e-3)


@pytest.mark.parametrize("operations", [1e5, 1e6, 1e7, 1e9])
@pytest.mark.parametrize("batch", [16, 32, 64, 100])
def test_the_rows_are_those_of_least_expected_work(batch, operations):
    mech, source = mechanism(batch, N), as_source(np.ones((N, 8), np.float32))
    fixed = 2.0**22 + 64 * 2 * 8 * WIDTH
    sizes = {k: binomial(k, N, batch / N) for k in range(N + 1)}

    def work(rows):
        passes = math.fsum(max(1, -(-k // rows)) * p for k, p in sizes.items())
        return passes * (rows * operations + fixed)

    whole, most = _passes.rows_of_any_draw(mech), _passes.rows_of_a_draw(mech)
    by_passes = {rows: work(rows) for rows in range(8, min(most, 2 * min(batch, 64)) + 1, 8)}
    best = min(by_passes, key=by_passes.get)
    expected = whole if whole * operations <= by_passes[best] else best
    assert _passes.rows_of_least_work(mech, source, operations, WEIGHTS) == expected


def test_padding_costs_no_longer_as_much_as_the_records():
    """The default computed 72 rows for an expected 32: 2.25 for one."""
    train = trainer()
    state, rows, drawn = train.init(WEIGHTS), 0, 0
    for batch in train.batches(100):
        rows, drawn = rows + batch.draw.mask.size, drawn + int(batch.draw.mask.sum())
    assert state.step == 0
    assert drawn > 2_500
    assert rows / drawn < 1.45


def test_a_small_network_takes_a_whole_draw_at_once():
    """A pass costs more than its rows there: one compiled call takes the step."""
    train = trainer(loss_fn=lambda params, x: jnp.sum(x @ params["w"]))
    train.init(WEIGHTS)
    assert train.physical_batch_size == 120
    assert _passes.rows_of_any_draw(train.mechanism) == 120


@pytest.mark.parametrize("sampling", ["fixed_size", "shuffle"])
def test_draws_of_one_size_are_one_pass_without_padding(sampling):
    train = trainer(36, sampling)
    state = train.init(WEIGHTS)
    for batch in train.batches(2):
        assert batch.draw.mask.shape == (1, 36)
        assert batch.draw.mask.all()
        state, _ = train.step(state, batch)
    assert train.physical_batch_size == 36


def test_draws_of_one_size_that_are_cut_are_cut_evenly():
    source = as_source(np.ones((2_000, 2**14), np.float32))  # too large for one pass
    rows = _passes.rows_of_least_work(mechanism(100, 2_000, "fixed_size"), source, 1e4, WEIGHTS)
    assert rows == 50


def test_a_full_batch_has_room_for_a_record_more():
    """One record more or less is the same program, which rounds the others' gradients alike."""
    assert _passes.rows_of_a_draw(mechanism(N, N, "full_batch")) == N + 8


def test_truncated_draws_keep_their_one_shape():
    train = trainer(32, TruncatedPoisson(32 / N, 50))
    train.init(WEIGHTS)
    assert train.physical_batch_size == 50


def test_a_number_of_the_users_own_and_buckets_stay():
    train = trainer(rows=11)
    train.init(WEIGHTS)
    assert train.physical_batch_size == 11


def test_large_records_take_no_more_rows_than_before():
    source = as_source(np.ones((N, 2**14), np.float32))
    for operations in (1.0, 1e5, 1e9):
        rows = _passes.rows_of_least_work(mechanism(32, N), source, operations, WEIGHTS)
        assert rows <= 32


def test_the_choice_does_not_depend_on_the_records_or_their_number():
    rows = set()
    for records in (N - 1, N, N + 1):
        data = np.random.default_rng(records).normal(size=(records, 8)).astype(np.float32)
        train = jaxdp.Trainer(deep, mechanism(32, N), optax.sgd(1e-3), data)
        train.init(WEIGHTS)
        rows.add(train.physical_batch_size)
    assert len(rows) == 1


def test_one_program_takes_draws_of_one_pass_and_of_several():
    chex.clear_trace_counter()
    loss_fn = chex.assert_max_traces(deep, n=2)  # for the plan, and for the compiled pass
    train = trainer(loss_fn=loss_fn, rows=36)
    state, passes = train.init(WEIGHTS), set()
    for batch in train.batches(30):
        passes.add(len(batch.draw.indices))
        state, _ = train.step(state, batch)
    assert passes == {1, 2}


def test_steps_of_unlike_physical_batches_agree():
    found = {}
    for rows in (None, 72):
        train = trainer(rows=rows, secret=jaxdp.Secret.from_seed(3))
        state = train.init(WEIGHTS)
        for batch in train.batches(3):
            state, _ = train.step(state, batch)
        found[train.physical_batch_size] = state.params
    assert 72 in found
    assert len(found) == 2
    for one, two in zip(*map(jax.tree.leaves, found.values()), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


def test_rows_on_a_mesh_are_shared_evenly():
    mesh = jax.make_mesh((1,), ("data",))
    train = trainer(mesh=mesh)
    train.init(WEIGHTS)
    alone = trainer()
    alone.init(WEIGHTS)
    assert train.physical_batch_size == alone.physical_batch_size


def test_devices_that_share_rows_make_a_pass_dearer_beside_them():
    source = as_source(np.ones((N, 8), np.float32))
    each = [
        _passes.rows_of_least_work(mechanism(32, N), source, 5e6, WEIGHTS, devices)
        for devices in (1, 8, 512)
    ]
    assert each[0] < each[1] < each[2] == 120


@pytest.mark.parametrize(
    ("function", "shapes", "count"),
    [
        (lambda x, w: x @ w, [(3, 5), (5, 7)], 3 * 5 * 7),
        (lambda x, w: jnp.einsum("bij,bjk->bik", x, w), [(2, 3, 5), (2, 5, 7)], 2 * 3 * 5 * 7),
        (jnp.tanh, [(6,)], 6),
        (
            lambda x, w: jax.lax.conv(x, w, (1, 1), "VALID"),
            [(1, 2, 6, 6), (4, 2, 3, 3)],
            4 * 4 * 4 * 2 * 9,
        ),
        (lambda x: jax.lax.scan(lambda c, _: (jnp.tanh(c), None), x, None, 9)[0], [(5,)], 45),
        (jax.jit(lambda x: jnp.tanh(x)), [(4,)], 4),
    ],
    ids=["matrices", "batched", "elementwise", "convolution", "scan", "jit"],
)
def test_operations_are_counted_where_they_are(function, shapes, count):
    traced = jax.make_jaxpr(function)(*(jnp.zeros(shape) for shape in shapes))
    assert _passes.operations_of(traced) == count


def test_candidates_are_never_more_than_allowed():
    for batch, sampling in itertools.product((1, 5, 36, 100), ("poisson", "fixed_size")):
        found = _passes._candidates(mechanism(batch, N, sampling), 20)
        assert found.max() == 20
        assert found.min() >= 1
        assert (np.diff(found) > 0).all()


@pytest.mark.parametrize("rows", [None, 176, 200])
def test_one_program_takes_every_step_where_the_declared_number_is_half_the_records(rows):
    chex.clear_trace_counter()
    loss_fn = chex.assert_max_traces(lambda params, x: jnp.sum(x @ params["w"]), n=2)
    declared = mechanism(100, N)
    data = np.random.default_rng(0).normal(size=(2 * N - 50, 8)).astype(np.float32)
    train = jaxdp.Trainer(loss_fn, declared, optax.sgd(1e-3), data, physical_batch_size=rows)
    state, passes, taken = train.init(WEIGHTS), set(), set()
    for name in ("_at_once", "_by_passes"):
        setattr(train, name, noted(getattr(train, name), name, taken))
    for batch in train.batches(20):
        passes.add(len(batch.draw.indices))
        state, _ = train.step(state, batch)
    assert len(taken) == 1
    assert passes == ({1} if rows is None else {1, 2})


def noted(step, name, taken):
    def take(*args):
        taken.add(name)
        return step(*args)

    return take
