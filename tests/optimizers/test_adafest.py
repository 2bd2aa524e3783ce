"""DP-AdaFEST: against NumPy, what a record adds, which rows move, and what a release tells."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import jaxdp
from jaxdp import accounting as acc
from jaxdp import optimizers as opt
from jaxdp.clipping import rounding
from jaxdp.noise.normals import add_normals
from jaxdp.optimizers.adafest import Counted
from jaxdp.types import Summed
from tests.laws import are_uncorrelated, is_gaussian
from tests.refusing import all_refused

RNG = np.random.default_rng(0)
ROWS, WIDTH, MANY, C, C_COUNT = 50, 3, 24, 0.5, 1.2
IDS = RNG.integers(0, 12, (MANY, 4)).astype(np.int32)  # some rows twice in a record
IDS[0, 2:] = -1  # padding
Y = RNG.normal(size=MANY).astype(np.float32)
PARAMS = {
    "items": jnp.asarray(RNG.normal(size=(ROWS, WIDTH)), jnp.float32),
    "frozen": jnp.ones(2),
    "w": jnp.array([1.0, -1.0, 0.5]),
}


def loss(params, ids, y):
    found = jnp.where((ids >= 0)[:, None], params["items"][ids], 0.0)
    return (found.sum(0) @ params["w"] * params["frozen"][0] - y) ** 2


def touched(ids, y):
    return ids


def mechanism(noise=1.0, **given):
    sizes = {"batch_size": MANY, "dataset_size": MANY, "sampling": "full_batch", **given}
    return jaxdp.dp_sgd(noise_multiplier=noise, **{"l2_clip_norm": C, **sizes})


def adafest(noise=1.0, threshold=2.0, cap=5, rows=touched, made=None, **given):
    given = {"count_clip_norm": C_COUNT, "count_noise_multiplier": 3.0 * noise, **given}
    made = mechanism(noise) if made is None else made
    chain = optax.sgd(1.0)
    return opt.dp_adafest(
        made, chain, **{"table": "items", **given}, rows=rows, threshold=threshold, cap=cap
    )


def gradient_of(algorithm, loss_fn=loss):
    return algorithm.clipped_grad(loss_fn, trainable=lambda p: "frozen" not in p)


def in_numpy(algorithm, key, threshold, cap):
    """Algorithm 1 of arXiv:2311.08357 in float64, given the normals of a key: the mean gradient."""
    aim, w = 1 - rounding.MARGIN, np.float64(PARAMS["w"])
    table, counts = np.zeros((ROWS, WIDTH)), np.zeros(ROWS)
    other = np.zeros(WIDTH)
    for ids, y in zip(IDS, Y.astype(float), strict=True):
        own = ids[ids >= 0]
        found = np.float64(PARAMS["items"])[own].sum(0)
        pull = 2 * (found @ w - y)
        grad = np.zeros((ROWS, WIDTH))
        np.add.at(grad, own, pull * w)
        shorter = min(1, aim * C / np.sqrt(np.sum(grad**2) + np.sum((pull * found) ** 2)))
        table, other = table + shorter * grad, other + shorter * pull * found
        named = np.unique(own)
        counts[named] += min(1, aim * C_COUNT / np.sqrt(len(named)))
    charged = algorithm.mechanism.multipliers(0)
    more = 1 + rounding.error_of_sum(algorithm.mechanism.most_records)
    noise = {part: key.part(part)[0] for part in charged}
    counts += (
        charged["votes"]
        * C_COUNT
        * more
        * np.asarray(add_normals(jnp.zeros(ROWS), 1.0, noise["votes"]))
    )
    chosen = [r for r in np.argsort(-counts)[:cap] if counts[r] >= threshold]
    shapes = {"items": jnp.zeros((cap, WIDTH)), "w": jnp.zeros(WIDTH), "frozen": None}
    normals = add_normals(shapes, 1.0, noise["gradient"])
    std = charged["gradient"] * C * more
    moved = np.zeros((ROWS, WIDTH))
    for place, row in enumerate(chosen):
        moved[row] = (table[row] + std * np.float64(normals["items"][place])) / MANY
    return moved, (other + std * np.float64(normals["w"])) / MANY, chosen


@pytest.mark.parametrize(("threshold", "cap"), [(2.0, 5), (4.0, 40), (-100.0, 50), (100.0, 5)])
def test_a_release_is_that_of_the_papers_algorithm_given_the_noise(threshold, cap):
    algorithm = adafest(0.4, threshold, cap)
    key = algorithm.mechanism.simulated_key(jax.random.key(7))
    summed, _ = gradient_of(algorithm).with_info(PARAMS, (IDS, Y), "all")
    trained, link = {**PARAMS, "frozen": None}, algorithm.noise_link()
    found, _ = link.update(summed, link.init(trained), trained, key=key)
    moved, other, chosen = in_numpy(algorithm, key, threshold, cap)
    np.testing.assert_allclose(found["items"], moved, atol=1e-6)
    np.testing.assert_allclose(found["w"], other, atol=1e-6)
    assert len(chosen) == min(cap, {2.0: 5, -100.0: 50, 100.0: 0}.get(threshold, len(chosen)))
    np.testing.assert_array_equal(np.flatnonzero(np.any(found["items"] != 0, 1)), sorted(chosen))


def test_a_step_is_one_event_of_the_stated_multiplier_and_is_trained_by_a_trainer():
    made = mechanism(1.1, sampling="poisson", dataset_size=2 * MANY, batch_size=MANY)
    algorithm = adafest(made=made, count_noise_multiplier=4.0)
    assert algorithm.mechanism.event == acc.PoissonSampled(acc.Gaussian(1.1), 0.5)
    parts = algorithm.mechanism.multipliers(0)
    assert sum(z**-2 for z in parts.values()) ** -0.5 == pytest.approx(1.1, rel=1e-9)
    twice = np.r_[IDS, IDS], np.r_[Y, Y]
    for size in (64, 10):  # one program, and several physical batches
        trainer = jaxdp.Trainer(
            loss,
            algorithm,
            source=twice,
            physical_batch_size=size,
            trainable=lambda p: "frozen" not in p,
        )
        state = trainer.init(PARAMS)
        for batch in trainer.batches(3):
            before = np.asarray(state.params["items"])
            state, _ = trainer.step(state, batch)
            assert np.sum(np.any(state.params["items"] != before, axis=1)) <= 5
        assert trainer.ledger.event == acc.Composed((acc.Repeated(algorithm.mechanism.event, 3),))
        (line,) = trainer.unverified()
        assert line.endswith("the frozen parameter ['frozen']")
        np.testing.assert_array_equal(state.params["frozen"], PARAMS["frozen"])
        plan = trainer.clipped_grad.plan(PARAMS, (IDS, Y))
        assert [leaf.path for leaf in plan] == ["['frozen']", "['items']", "['w']", ".touched"]
        assert [leaf.engine for leaf in plan][1::2] == ["ghost", "ghost"]


def test_a_record_adds_at_most_both_clip_norms_whatever_rows_says():
    def wild(ids, y):  # rows that there are not, far too many, none
        return jnp.concatenate([jnp.arange(70) - jnp.int32(y < 0), ids])

    for rows in (
        touched,
        wild,
        lambda ids, y: -jnp.abs(ids) - 1,
        lambda ids, y: ids[:, None, None],
    ):
        algorithm = adafest(rows=rows)
        grad_fn, z = gradient_of(algorithm), algorithm.mechanism.multipliers(0)
        run = jax.jit(
            lambda y, mask, grad_fn=grad_fn: grad_fn.with_info(PARAMS, (IDS, y), mask)[0].value
        )
        for at in range(0, MANY, 4):
            for y in (Y, np.full_like(Y, 1e30), np.full_like(Y, np.nan)):
                value = run(y, np.arange(MANY) == at)
                grad = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(value.at)))
                count = np.linalg.norm(value.touched)
                assert grad <= C
                assert count <= C * z["gradient"] / z["votes"]
                assert not np.isnan(y[at]) or grad == count == 0


@functools.cache
def releases(alone, runs=40_000):
    """Updates [runs, ROWS, WIDTH] of a sum in which one record alone touches row 9, or without."""
    algorithm = adafest(1.0, threshold=1.0, cap=6, count_noise_multiplier=1.5, count_clip_norm=1.0)
    made, link = algorithm.mechanism, algorithm.noise_link()
    z, params = made.multipliers(0), {"items": jnp.zeros((10, 2))}
    value = np.zeros((10, 2), np.float32), np.zeros(10, np.float32)
    value[0][:2], value[1][:2] = 1.0, 3.0
    if alone:  # at both of its bounds
        value[0][9, 0], value[1][9] = C, C * z["gradient"] / z["votes"]
    l2 = np.hypot(C, C * z["gradient"] / z["votes"])
    summed = Summed(Counted({"items": jnp.asarray(value[0])}, jnp.asarray(value[1])), float(l2))

    def one(key):
        return link.update(summed, link.init(params), params, key=key)[0]["items"]

    keys = jax.vmap(made.simulated_key)(jax.random.split(jax.random.key(int(alone)), runs))
    return np.asarray(jax.jit(jax.vmap(one))(keys), np.float64) * made.batch_size, z


def test_noise_is_in_the_chosen_rows_alone_and_no_choice_depends_on_it():
    found, z = releases(False)
    chosen = np.any(found != 0, axis=2)
    assert chosen.sum(1).max() == 6
    for row in (0, 4, 9):
        noise = found[chosen[:, row], row] - (row < 2)
        assert is_gaussian(noise, z["gradient"] * C)
        assert are_uncorrelated(noise[:, 0], noise[:, 1])
    both = chosen[:, 4] & chosen[:, 9]
    assert are_uncorrelated(found[both, 4, 0], found[both, 9, 0])
    # Whether another row was chosen tells nothing of this one's noise.
    own = chosen[:, 0]
    assert are_uncorrelated(found[own, 0, 0], chosen[own, 9])


def test_a_canary_that_alone_touches_a_row_is_told_as_well_as_the_event_allows_and_no_better():
    """The best test of a release: whether the row was chosen, and if so its noisy gradient."""
    (inside, z), (outside, _) = releases(True), releases(False)
    odds, scores, std = [], [], z["gradient"] * C
    for found in (inside, outside):
        odds.append(np.mean(np.any(found[:, 9] != 0, axis=1)))
    chosen, missed = np.log(odds[0] / odds[1]), np.log((1 - odds[0]) / (1 - odds[1]))
    for found in (inside, outside):
        value = found[:, 9, 0]
        told = (C * value - C**2 / 2) / std**2 + chosen
        scores.append(np.where(value != 0, told, missed))
    delta = 1e-3
    proven = acc.epsilon(acc.Gaussian(1.0), delta).upper
    audited = jaxdp.audit.audit_scores(*scores, delta).epsilon
    assert 0.6 * proven < audited <= proven
    # The profile itself: of the likelihood ratio, at several epsilons.
    for epsilon in (0.5, 1.0, 2.0):
        most = stats.norm.cdf(0.5 - epsilon) - np.exp(epsilon) * stats.norm.cdf(-0.5 - epsilon)
        mine = np.mean(np.maximum(0, 1 - np.exp(epsilon - scores[0])))
        assert mine <= most * 1.03


def test_a_key_that_is_used_twice_tells_nothing():
    algorithm = adafest()
    link, trained = algorithm.noise_link(), {**PARAMS, "frozen": None}
    key = algorithm.mechanism.simulated_key(jax.random.key(0))
    summed, _ = gradient_of(algorithm).with_info(PARAMS, (IDS, Y), "all")
    _, state = link.update(summed, link.init(trained), trained, key=key)
    again, _ = link.update(summed, state, trained, key=key)
    assert np.isnan(again["w"]).all()
    assert not np.any(again["items"])


def test_a_map_is_as_exact_for_a_table_as_long_as_a_language_has_words():
    """Sums of few rows of a long table are those of a short one, bit for bit."""
    found = []
    for rows in (ROWS, 4 * IDS.size + 1):
        params = {**PARAMS, "items": jnp.zeros((rows, WIDTH)).at[:ROWS].set(PARAMS["items"])}
        value = gradient_of(adafest()).with_info(params, (IDS, Y), "all")[0].value
        assert not np.any(value.touched[ROWS:])
        assert not np.any(value.at["items"][ROWS:])
        found.append((value.touched[:ROWS], value.at["items"][:ROWS]))
    for short, long in zip(*found, strict=True):
        np.testing.assert_array_equal(short, long)


def with_key(params, key, ids, y):
    return loss(params, ids, y) + 0.0 * jax.random.normal(key)


def of_record(params, record):
    return loss(params, *record)


def test_rows_is_given_no_key_and_padding_of_a_user_touches_no_row_more():
    def with_key(params, key, ids, y):
        return loss(params, ids, y) + 0.0 * jax.random.normal(key)

    augmented = jaxdp.augmented(of_record, lambda record, key: record, 2)
    of_user = jaxdp.clipping.user_loss(loss, "sum")
    users = jaxdp.sampling.users((IDS, Y), np.arange(MANY), 3)  # two of three are padding
    users, key = users.gather(np.arange(MANY), np.ones(MANY, bool)), jax.random.key(0)
    plain = gradient_of(adafest()).with_info(PARAMS, (IDS, Y), "all")[0].value
    for loss_fn, rows, *given in (
        (with_key, touched, (IDS, Y), "all", key),
        (augmented, lambda record: record[0], (IDS, Y), "all", key),
        (of_user, lambda user: user.records[0], users, "all"),
    ):
        found, _ = gradient_of(adafest(rows=rows), loss_fn).with_info(PARAMS, *given)
        for mine, other in zip(*map(jax.tree.leaves, (found.value, plain)), strict=True):
            np.testing.assert_allclose(mine, other, atol=1e-6)


def test_norms_are_of_gradient_and_map_together():
    algorithm = adafest()
    _, info = gradient_of(algorithm).with_info(PARAMS, (IDS, Y), "all")
    made = jaxdp.clipped_grad(loss, jaxdp.clip(C), trainable=lambda p: "frozen" not in p)
    alone = made.with_info(PARAMS, (IDS, Y), "all")[1]
    z = algorithm.mechanism.multipliers(0)
    each = C * z["gradient"] / z["votes"] / C_COUNT
    count = np.array([len(np.unique(ids[ids >= 0])) for ids in IDS])
    np.testing.assert_allclose(info.norms, np.sqrt(alone.norms**2 + each**2 * count), rtol=1e-5)
    np.testing.assert_array_equal(info.clipped, alone.clipped | (np.sqrt(count) > C_COUNT))


def test_audits_that_add_records_of_their_own_are_refused_and_records_scored_at_the_end_work(
    tmp_path,
):
    algorithm, worlds = adafest(), jaxdp.audit.Worlds(of_record, PARAMS, (IDS, Y))
    run = functools.partial(
        jaxdp.Run, tmp_path / "r", loss, algorithm, source=(IDS, Y), params=PARAMS, delta=1e-3
    )
    sampler, tx = algorithm.mechanism.sampler(MANY), algorithm.chain()
    params = {key: PARAMS[key] for key in ("items", "w")}
    grad_fn = algorithm.clipped_grad(lambda p, ids, y: loss({**p, "frozen": jnp.ones(2)}, ids, y))
    summed = grad_fn(params, (IDS, Y), draw := sampler.draw())
    update = functools.partial(jaxdp.compile_update(tx), params, tx.init(params), summed)
    own = "a sum of its own .*dp_adafest"
    all_refused(
        [
            ("canaries must be records scored at the end .* got 5", lambda: run(canaries=5)),
            ("scored at the end .* got records", lambda: run(canaries=(IDS, Y))),
            (own, lambda: jaxdp.audit.audit_algorithm(algorithm, 1, 1e-3)),
            (own, lambda: jaxdp.audit.audit_noise(algorithm, worlds, 1)),
            (f"{own}.* take jaxdp.Trainer or jaxdp.Run", update),
        ]
    )
    assert not draw.ticket.spent
    assert not (tmp_path / "r").exists()
    last = run(canaries=(IDS[:4], Y[:4]), canary_scores="last")
    last.fit(1)
    assert not last.audit().broken
    said = str(jaxdp.audit.diagnose(loss, PARAMS, (IDS, Y), algorithm, public=(IDS, Y)))
    assert "no rehearsal: the algorithm has a sum of its own" in said


def test_what_it_does_not_take_is_refused():
    made = functools.partial(functools.partial, adafest)
    schedule = jaxdp.schedules.from_multipliers([1.0, 2.0])
    sums = jaxdp.dp_sgd(noise_multiplier=1.0, rule=jaxdp.normalize(), batch_size=4, dataset_size=40)
    link = adafest().noise_link()
    plain = Summed(PARAMS, 0.5)
    all_refused(
        [
            ("jaxdp.clip", made(made=sums)),
            ("no count of its own", made(made=adafest().mechanism)),
            ("noise_multiplier", made(made=mechanism(schedule))),
            ("noise_multiplier", made(0.0)),
            ("count_noise_multiplier must be above", made(count_noise_multiplier=0.9)),
            ("count_clip_norm", made(count_clip_norm=0.0)),
            ("cap", made(cap=0)),
            ("threshold", made(threshold=np.nan)),
            ("rows", made(rows=3)),
            ("rows must take", lambda: gradient_of(adafest(rows=lambda ids, y, other: ids))),
            ("table must be a string", made(table=None)),
            ("of no other", lambda: gradient_of(adafest(table="")).plan(PARAMS, (IDS, Y))),
            ("clipped_grad", lambda: link.update(plain, link.init(PARAMS), PARAMS)),
        ]
    )


LONG = 200  # many times as many rows as are looked up
EDGES = np.array(
    [[0, 3, 3, 0], [-1, LONG - 1, -LONG, 0], [LONG, LONG + 5, -LONG - 3, -1]], np.int32
)
EDGES = np.r_[EDGES, [[2, 2, 2, 2]], EDGES[:1]].astype(np.int32)


@pytest.mark.parametrize(
    "read",
    [
        lambda table, ids: table[ids],
        lambda table, ids: table.at[ids].get(mode="clip"),
        lambda table, ids: jnp.concatenate([table[ids], 2 * table[ids[::-1] + 3]]),
        lambda table, ids: jax.lax.map(lambda one: table[one], ids),
        lambda table, ids: jax.lax.cond(ids[0] > 1, lambda: table[ids], lambda: 2 * table[ids]),
        lambda table, ids: jnp.concatenate([table[20:][ids], table[:190][ids]]),
        lambda table, ids: table.T[:, ids].T,
    ],
    ids=["plain", "clip", "tied", "loop", "cond", "slices", "columns"],
)
def test_lookups_summed_by_the_rows_looked_up_are_those_of_one_gradient_a_record(read):
    """Rows from the end, out of range, at both edges, several times; a record that is masked."""
    params = {"table": jax.random.normal(jax.random.key(0), (LONG, 2)), "w": jnp.array([1.0, -2.0])}

    def of_one(params, ids, y):
        return (jnp.tanh(read(params["table"], ids)).sum(0) @ params["w"] - y) ** 2

    found, mask = [], np.arange(5) != 4
    for engine in ("auto", "vmap"):
        grad_fn = jaxdp.clipped_grad(of_one, jaxdp.clip(0.3), engine=engine)
        run = jax.jit(
            lambda y, grad_fn=grad_fn: grad_fn.with_info(params, (EDGES, y), mask)[0].value
        )
        found.append(run(np.arange(5, dtype=np.float32)))
    chex.assert_trees_all_close(*found, rtol=1e-7, atol=3e-7)


def test_counts_and_gradient_have_the_noise_of_the_sums_own_l2_and_of_the_tickets_multipliers():
    """Whatever sum of that kind comes, and with the ticket of another count."""
    algorithm, other = adafest(), adafest(count_noise_multiplier=7.0)
    z, rows = algorithm.mechanism.multipliers(0), 20_000
    params = {"items": jnp.zeros((rows, 1))}
    summed = Summed(Counted(params, jnp.zeros(rows)), 3.0)
    own = adafest(threshold=-1e30, cap=rows)
    key = own.mechanism.simulated_key(jax.random.key(1))
    found, _ = own.noise_link().update(summed, own.noise_link().init(params), params, key=key)
    assert np.std(found["items"]) * MANY == pytest.approx(3.0, rel=0.02)  # of the whole multiplier
    # A row is chosen where its noise is above the threshold: that of a count is z_c * C / L * l2.
    bounds = C, C * z["gradient"] / z["votes"]
    unit = z["votes"] * 3.0 * bounds[1] / np.hypot(*bounds) / (bounds[1] / C_COUNT)
    one = adafest(threshold=unit, cap=rows)
    found, _ = one.noise_link().update(summed, one.noise_link().init(params), params, key=key)
    assert np.mean(found["items"] != 0) == pytest.approx(stats.norm.sf(1), abs=0.01)
    wrong = other.mechanism.simulated_key(jax.random.key(1))
    with pytest.raises(ValueError, match="was charged for"):
        one.noise_link().update(summed, one.noise_link().init(params), params, key=wrong)


def test_models_of_a_vmap_do_not_share_the_noise_of_their_counts():
    link, trained = adafest().noise_link(), {"items": PARAMS["items"]}
    key = adafest().mechanism.simulated_key(jax.random.key(0))

    def one(scale):
        counted = Counted(jax.tree.map(lambda p: scale * p, trained), scale * jnp.ones(ROWS))
        return link.update(Summed(counted, 1.0), link.init(trained), trained, key=key)[0]

    with pytest.raises(ValueError, match="another one for every member of a vmap"):
        jax.vmap(one)(jnp.arange(2.0))
