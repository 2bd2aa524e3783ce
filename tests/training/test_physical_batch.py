"""The trainer's physical batch: chosen by work and memory, from public numbers alone."""

import dataclasses
import itertools
import math
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.clipping import augmented
from jaxdp.sampling import as_source
from jaxdp.sampling.rules import TruncatedPoisson
from jaxdp.training import physical_batch
from jaxdp.training.physical_batch import Work
from tests.compiling import compilations
from tests.ledger.small import trained
from tests.mechanisms import sgd_of
from tests.refusing import refused

N, WIDTH = 400, 256
WEIGHTS = {"w": np.full((8, WIDTH), 0.01, np.float32), "v": np.full((WIDTH, 8), 0.01, np.float32)}


def of_layers(count):
    def loss(params, x):
        for _ in range(count):
            x = jnp.tanh(x @ params["w"]) @ params["v"]
        return jnp.sum(x)

    return loss


deep = of_layers(60)  # its rows cost more than a pass does


def shallow(params, x):
    """A loss of which a pass costs more than its rows."""
    return jnp.sum(jnp.tanh(x @ params["w"]))


def mechanism(batch, records, sampling="poisson"):
    return sgd_of(1.0, 1.0, batch, records, sampling)


def trainer(batch=32, sampling="poisson", loss_fn=deep, rows=None, records=N, **options):
    data = np.random.default_rng(records).normal(size=(records, 8)).astype(np.float32)
    options |= {"physical_batch_size": rows}
    return jaxdp.Trainer(loss_fn, mechanism(batch, N, sampling), optax.sgd(1e-3), data, **options)


def chosen(**options):
    """The physical batch of a trainer that was begun."""
    train = trainer(**options)
    train.init(WEIGHTS)
    return train.physical_batch_size


def binomial(count, records, rate):
    return math.comb(records, count) * rate**count * (1.0 - rate) ** (records - count)


def mean_passes(batch, records, rows):
    """Of draws by a binomial law, rows at a time."""
    laws = (binomial(k, records, batch / records) for k in range(records + 1))
    return math.fsum(max(1, -(-k // rows)) * law for k, law in enumerate(laws))


def test_expected_passes_are_those_of_the_binomial_law():
    for batch, records in ((1, 40), (32, 400), (90, 100), (40, 40)):
        rows = [1, 3, 8, 40, records]
        found = physical_batch.expected_physical_batches(mechanism(batch, records), np.array(rows))
        law = [mean_passes(batch, records, count) for count in rows]
        np.testing.assert_allclose(found, law, rtol=1e-9, err_msg=f"{batch} of {records}")
    # Of many records they agree with the normal law.
    found = physical_batch.expected_physical_batches(
        mechanism(100_000, 10**9), np.array([100_000, 100_948])
    )
    np.testing.assert_allclose(found, [1.5, 1.00135], atol=1e-3)


def test_the_rows_are_those_of_least_expected_work():
    source = as_source(np.ones((N, 8), np.float32))
    for batch, operations in itertools.product((16, 32, 64, 100), (1e5, 1e6, 1e7, 1e9)):
        mech = mechanism(batch, N)
        fixed = 2.0**22 + 64 * 2 * 8 * WIDTH
        whole, most = (
            physical_batch.rows_for_most_draws(mech, any_number=True),
            physical_batch.rows_for_most_draws(mech),
        )
        by_passes = {
            rows: mean_passes(batch, N, rows) * (rows * operations + fixed) - fixed
            for rows in range(8, min(most, 2 * min(batch, 64)) + 1, 8)
        }
        best = min(by_passes, key=by_passes.get)
        expected = whole if whole * operations <= by_passes[best] + 2.0**20 else best
        found = physical_batch.rows_of_least_work(mech, source, Work(operations), WEIGHTS)
        assert found == expected, (batch, operations)
    # Devices that share rows make a pass dearer beside them.
    given = mechanism(32, N), source, Work(5e6), WEIGHTS
    one, few, many = (physical_batch.rows_of_least_work(*given, devices) for devices in (1, 8, 512))
    assert one < few < many == 120
    # Candidates are never more than allowed.
    for batch, sampling in itertools.product((1, 5, 36, 100), ("poisson", "fixed_size")):
        found = physical_batch._candidates(mechanism(batch, N, sampling), 20)
        assert found.max() == 20
        assert found.min() >= 1
        assert (np.diff(found) > 0).all()


def test_the_choice_of_a_trainer():
    """A pass costs more than the rows of a small network; what the user chose stays."""
    cut, mesh = TruncatedPoisson(32 / N, 50), jax.make_mesh((1,), ("data",))
    whole = physical_batch.rows_for_most_draws(mechanism(32, N), any_number=True)
    assert chosen(loss_fn=shallow) == 120 == whole
    assert chosen(sampling=cut) == 50  # truncated draws keep their one shape
    assert chosen(rows=11) == 11
    assert chosen(mesh=mesh) == chosen() < 72
    # It does not depend on the records or their number.
    assert {chosen(records=records) for records in (N - 1, N + 1)} == {chosen()}
    # Padding costs no longer as much as the records. Before: 72 rows for 32, so 2.25 for one.
    train = trainer()
    train.init(WEIGHTS)
    masks = [batch.draw.mask for batch in train.batches(100)]
    drawn = sum(int(mask.sum()) for mask in masks)
    assert drawn > 2_500
    assert sum(mask.size for mask in masks) / drawn < 1.45
    # Draws of one size are one pass without padding, or cut evenly.
    for sampling in ("fixed_size", "shuffle"):
        train = trainer(36, sampling)
        train.init(WEIGHTS)
        for batch in train.batches(2):
            assert batch.draw.mask.shape == (1, 36) == (1, train.physical_batch_size), sampling
            assert batch.draw.mask.all(), sampling
    # A full batch has room for a record more: one more or less is the same program, which rounds
    # the others' gradients alike.
    assert physical_batch.rows_for_most_draws(mechanism(N, N, "full_batch")) == N + 8
    large = as_source(np.ones((2_000, 2**14), np.float32))  # too large for one pass
    fixed = mechanism(100, 2_000, "fixed_size")
    assert physical_batch.rows_of_least_work(fixed, large, Work(1e4), WEIGHTS) == 50
    for work in (Work(1.0), Work(1e5), Work(1e9)):
        assert physical_batch.rows_of_least_work(mechanism(32, N), large, work, WEIGHTS) <= 32


def test_the_rows_of_an_accelerator_fit_and_hold_most_draws(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(physical_batch, "memory_budget", lambda: 2**30)
    monkeypatch.setattr(physical_batch, "device_memory", lambda: 2**30)
    source, mech = as_source(np.ones((10**6, 8), np.float32)), mechanism(4_096, 10**6)

    def rows(operations, numbers):
        work = Work(operations, numbers)
        return physical_batch.rows_of_least_work(mech, source, work, WEIGHTS)

    # Of a small network all of nearly twice as many records, of a large one few more than expected.
    assert rows(1e3, 1e3) == physical_batch.rows_for_most_draws(mech, any_number=True)
    assert 4_096 < rows(1e8, 1e3) < 4_600
    # As many as fit: a number and its cotangent take eight bytes.
    assert 4_096 // 5 <= rows(1e8, 2**17) <= 1_024


def test_process_0_chooses_the_rows_for_all(monkeypatch):
    monkeypatch.setattr("jaxdp.devices.processes.from_process_0", lambda make: "23")
    train = trainer()
    train.init(WEIGHTS)
    assert train.physical_batch_size == 23


def test_numbers_that_a_gradient_keeps():
    def loss(x, checkpoint):
        body = lambda c, _: (jnp.tanh(jnp.sin(c)), None)  # noqa: E731
        return jax.lax.scan(jax.checkpoint(body) if checkpoint else body, x, None, 9)[0].sum()

    for checkpoint, expected in ((False, (9 * 2 * 5 + 1, 0)), (True, (9 * 5 + 1, 2 * 5))):
        traced = jax.make_jaxpr(lambda x, c=checkpoint: loss(x, c))(jnp.zeros(5))
        assert physical_batch.numbers_of(traced) == expected


def test_operations_are_counted_where_they_are():
    convolved = lambda x, w: jax.lax.conv(x, w, (1, 1), "VALID")  # noqa: E731
    scanned = lambda x: jax.lax.scan(lambda c, _: (jnp.tanh(c), None), x, None, 9)[0]  # noqa: E731
    for name, function, shapes, count in (
        ("matrices", jnp.matmul, [(3, 5), (5, 7)], 3 * 5 * 7),
        ("batched", jnp.matmul, [(2, 3, 5), (2, 5, 7)], 2 * 3 * 5 * 7),
        ("elementwise", jnp.tanh, [(6,)], 6),
        ("convolution", convolved, [(1, 2, 6, 6), (4, 2, 3, 3)], 4 * 4 * 4 * 2 * 9),
        ("scan", scanned, [(5,)], 45),
        ("jit", jax.jit(lambda x: jnp.tanh(x)), [(4,)], 4),
    ):
        traced = jax.make_jaxpr(function)(*(jnp.zeros(shape) for shape in shapes))
        assert physical_batch.operations_of(traced) == count, name


def test_what_all_rows_share_counts_for_none():
    def loss(w, x):
        def layer(carry, w):
            w, carry = jax.lax.optimization_barrier((w, carry))
            return jnp.tanh(carry @ (2 * w)), None

        return jax.lax.cond(x[0] > 0, jnp.sum, jnp.max, jax.lax.scan(layer, x, w)[0])

    traced = jax.make_jaxpr(loss)(jnp.zeros((9, 5, 5)), jnp.zeros(5))
    # An iteration: a carry handed on, 25 products, 5 results; outside: x[0] > 0, and the branches.
    around = [eqn.primitive.name for eqn in traced.jaxpr.eqns if eqn.primitive.name != "scan"]
    own = [False, True]
    assert physical_batch.operations_of(traced, own) == 9 * (5 + 25 + 5) + len(around) - 1 + 2
    assert physical_batch.operations_of(traced) == 9 * (30 + 25 + 25 + 5) + len(around) - 1 + 2
    assert physical_batch.started_of(traced, own) == 9 * 3 + len(around) - 1 + 2


# Draws of one pass and of two; of nearly twice as many records as were declared.
@pytest.mark.parametrize(
    ("size", "rows", "records"),
    [(32, 36, N), *((100, rows, 2 * N - 50) for rows in (None, 176, 200))],
)
def test_one_program_takes_every_step(size, rows, records):
    chex.clear_trace_counter()
    loss_fn = chex.assert_max_traces(shallow, n=2)  # for the plan, and for the compiled pass
    options = {"rows": rows, "records": records, "secret": jaxdp.Secret.from_seed(1)}
    train = trainer(size, loss_fn=loss_fn, **options)
    state, passes = train.init(WEIGHTS), set()
    with compilations(train._step.compiled.jitted.__name__) as programs:
        for batch in train.batches(20):
            passes.add(len(batch.draw.indices))
            state, _ = train.step(state, batch)
    assert len(programs) == 1
    assert passes == ({1} if rows is None else {1, 2})


MECH = mechanism(64, N)


def cost(grad_fn, rows):
    example = jax.ShapeDtypeStruct((8,), jnp.float32)
    return physical_batch.bytes_of_physical_batch(grad_fn, WEIGHTS, example, rows, N, {})


def few_rows():
    """Bytes for 20 rows of a draw."""
    return cost(MECH.clipped_grad(shallow), 20)


def limited(monkeypatch, limit):
    monkeypatch.setattr(physical_batch, "memory_budget", lambda: limit)


def test_rows_of_auto_wait_for_init_and_must_fit_before_a_charge(monkeypatch):
    refused('got "auto": call trainer.init(params)', trainer(64, rows="auto").batches, 2)
    refused("for a sampler, which knows no mode", MECH.sampler, N, physical_batch_size="auto")
    refused("physical_batch_size must be a whole number", trainer, rows="all")
    # An accelerator tells its memory, or a number is asked for.
    device = SimpleNamespace(platform="gpu", device_kind="a card")
    with monkeypatch.context() as patch:
        patch.setattr(jax, "local_devices", lambda: [device])
        device.memory_stats = lambda: {"bytes_limit": 1000}
        assert 0 < physical_batch.memory_budget() < 1000
        for told in ({}, None):
            device.memory_stats = lambda told=told: told
            refused(
                "physical_batch_size must be a number where .* a card", physical_batch.memory_budget
            )
    limited(monkeypatch, 1_000)
    train = trainer(rows="auto", loss_fn=of_layers(4))
    refused(r"a step of one row needs \S+ GB where the device has", train.init, WEIGHTS)
    assert train.ledger.steps == 0


def test_steps_of_unlike_physical_batches_agree(monkeypatch):
    """As chosen by work, by memory for a whole draw and for few rows, and by the user."""
    found = []
    for rows, limit in ((None, 1e9), ("auto", 1e9), ("auto", few_rows()), (11, 1e9)):
        limited(monkeypatch, int(limit))
        secret = jaxdp.Secret.from_seed(3)
        train = trainer(64, loss_fn=shallow, rows=rows, secret=secret)
        params = trained(train, params=WEIGHTS).params
        found.append((train.physical_batch_size, params))
    assert [rows for rows, _ in found] == [200, 120, 16, 11]
    chex.assert_trees_all_close(*(params for _, params in found), rtol=1e-5, atol=1e-6)


def test_memory_of_views_counts_and_the_most_rows_that_fit_are_a_power_of_two_or_a_whole_draw():
    """K views of a record cost like K records: fewer rows at a time bound them."""
    some = of_layers(4)
    many = augmented(some, lambda x, key: x + jax.random.normal(key, x.shape), 16)
    plain, viewed = MECH.clipped_grad(some), MECH.clipped_grad(many)
    assert cost(viewed, 64) > 3 * cost(plain, 64)
    fixed = cost(viewed, 1)
    assert cost(viewed, 4) - fixed < (cost(viewed, 64) - fixed) / 8
    apart = dataclasses.replace(viewed, microbatch_size=4)
    assert cost(apart, 64) < cost(viewed, 64) / 4
    for limit, most in ((99, 8), (100, 8), (130, 32), (10**6, 100)):
        asked = []
        rows = physical_batch.largest_rows(
            lambda rows, to=asked: to.append(rows) or 90 + rows, 100, limit
        )
        assert rows == most, limit
        assert len(asked) <= 3, limit
    # A cost that is not linear is asked for until it fits.
    assert (
        physical_batch.largest_rows(lambda rows: 10 + (rows >= 8) * 100 + rows // 50, 100, 60) == 4
    )


def test_a_run_goes_on_with_the_rows_it_began_with(tmp_path, monkeypatch):
    options = {"params": WEIGHTS, "every": 1, "report": False}
    data, options["physical_batch_size"] = np.ones((N, 8), np.float32), "auto"
    for steps, limit in ((1, few_rows()), (2, 10**9)):
        limited(monkeypatch, limit)
        run = jaxdp.Run(tmp_path / "run", shallow, MECH, optax.sgd(0.1), data, **options)
        run.fit(steps)
        assert run.directory.load_state().physical_batch_size == 16, steps
