"""Parts by a public rule: a function of one unit, charged apart, and never known by their size."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import accounting as acc
from jaxdp.audit.bounds import ErrorCounts, gaussian_dp, p_value
from jaxdp.sampling import as_source, parts, users
from tests.mechanisms import mf_of, sgd_of
from tests.refusing import all_refused, refused
from tests.runs.small import undrawn
from tests.sampling.fakes import ask

ADD, REPLACE, SPECIAL = acc.Relation
X = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
SIGN = ["below", "above"]
MECHANISM = sgd_of(1.0, 1.0, 20, 100)


def sign(row):
    return row[0] > 0


def loss_fn(params, row):
    return jnp.sum((row - params) ** 2)


def whole(source):
    return ask(source, *range(len(source)))


def steps_on(source, ledger, steps=3, mechanism=MECHANISM):
    trainer = jaxdp.Trainer(loss_fn, mechanism, optax.sgd(0.1), source, ledger=ledger)
    state = trainer.init(jnp.zeros(3))
    for batch in trainer.batches(steps):
        state, _ = trainer.step(state, batch)
    return trainer


def cost(count, relation=ADD):
    return acc.epsilon(acc.Repeated(MECHANISM.event, count), 1e-5, relation).upper


# Who is in which part.


def test_the_part_of_a_record_follows_from_it_alone(tmp_path, monkeypatch):
    found = parts(X, sign, SIGN)
    np.testing.assert_array_equal(whole(found["above"]), X[X[:, 0] > 0])
    np.testing.assert_array_equal(whole(found["below"]), X[X[:, 0] <= 0])
    assert [type(part.part).__name__ for part in found.values()] == ["Part", "Part"]
    # Whatever the others are, and wherever it stands.
    rest, shuffled = parts(X[1:], sign, SIGN), parts(X[::-1], sign, SIGN)
    own = SIGN[int(X[0, 0] > 0)]
    for name in SIGN:
        np.testing.assert_array_equal(whole(rest[name]), whole(found[name])[name == own :])
        np.testing.assert_array_equal(whole(shuffled[name])[::-1], whole(found[name]))
    monkeypatch.setitem(parts.__globals__, "_AT_ONCE", 7)
    np.testing.assert_array_equal(whole(parts(X, sign, SIGN)["above"]), whole(found["above"]))
    # Sources of all kinds; a memory map is not copied.
    path = tmp_path / "x.npy"
    np.save(path, X)
    kinds = [jnp.asarray(X), np.load(path, mmap_mode="r"), list(X.tolist())]
    for data in kinds:
        np.testing.assert_array_equal(
            whole(parts(data, sign, SIGN)["below"]), whole(found["below"])
        )
    lazy = parts(kinds[1], sign, SIGN)["below"]
    assert lazy.source.arrays is kinds[1]
    # Numbers that name no part, and values that change afterwards.
    three = parts(X, lambda row: jnp.floor(row[1]).astype(int), ["0", "1"])
    assert len(three["0"]) == ((X[:, 1] >= 0) & (X[:, 1] < 1)).sum()
    assert len(three["0"]) + len(three["1"]) < (X[:, 1] >= 0).sum() + 1 < len(X)
    changed = X.copy()
    before = parts(changed, sign, SIGN)
    changed *= -1
    np.testing.assert_array_equal(whole(before["above"]), whole(found["above"]))


def test_users_and_parts_of_parts():
    ids = np.arange(200) // 4
    people = users({"x": X}, ids, records_per_user=4)
    rule = lambda user: jnp.sum(user.records["x"][:, 0], where=user.present) > 0  # noqa: E731
    found = parts(people, rule, SIGN)
    sums = X[:, 0].reshape(50, 4).sum(1)
    assert len(found["above"]) == (sums > 0).sum()
    assert found["above"].records_per_user == 4
    own = sgd_of(1.0, 1.0, 5, 25, records_per_user=4).on(found["above"])
    own.check_source(found["above"])
    assert "PerUser" in repr(own.event)
    # A source that is made of a part is none, and costs the sum.
    above = parts(X, sign, SIGN)["above"]
    assert getattr(users(above, np.arange(len(above)), 1), "part", None) is None
    # Of a part a further rule: a unit is in one leaf of the tree.
    halves = parts(above, lambda row: row[1] > 0, ["left", "right"])
    ledger, small = jaxdp.Ledger(), sgd_of(1.0, 1.0, 15, 75)
    for source in (*halves.values(), parts(X, sign, SIGN)["below"]):
        steps_on(source, ledger, 3, small)
    assert halves["left"].part.within == above.part
    twice = acc.Repeated(small.event, 6)  # the last is of another partition
    assert ledger.epsilon(1e-5).upper == pytest.approx(acc.epsilon(twice, 1e-5).upper, rel=1e-6)
    np.testing.assert_array_equal(whole(halves["right"]), X[(X[:, 0] > 0) & (X[:, 1] > 0)])


def test_a_rule_that_is_none_is_refused():
    captured, on_device, seen = X.copy(), jnp.asarray(X), []

    def told(value):
        seen.append(value)
        return np.int32(len(seen))

    def of(rule, names=SIGN, **options):
        return lambda: parts(X, rule, names, **options)

    by_place = "positions and lists of indices make no parts"
    called_back = lambda row: jax.pure_callback(told, jax.ShapeDtypeStruct((), jnp.int32), row)  # noqa: E731
    looked_up = lambda row: jnp.argmax(jnp.sum(captured == row[None], 1)) // 100  # noqa: E731
    all_refused(
        [
            (by_place, of(np.arange(200) // 100)),
            (by_place, of([list(range(100)), list(range(100, 200))])),
            ("one record alone", of(looked_up)),
            ("one record alone", of(jax.jit(lambda row: row[0] > on_device.mean()))),
            ("one record alone", of(called_back)),
            ("one bool or whole number", of(lambda row: row[0])),
            ("one bool or whole number", of(lambda row: row > 0)),
            ("distinct names", of(sign, "ab")),
            ("distinct names", of(sign, ["a", "a"])),
            ("distinct names", of(sign, [])),
            ("must be text", of(sign, ["a", 1])),
            ("must be text", of(sign, partition="")),
        ]
    )
    # Traced once: what it counts itself is no place.
    count = iter(range(999))
    assert {len(part) for part in parts(X, lambda row: next(count) % 2, SIGN).values()} == {0, 200}


# What it costs.


def test_parts_cost_the_worst_and_all_else_adds_up():
    ledger, found = jaxdp.Ledger(), parts(X, sign, SIGN)
    first = steps_on(found["above"], ledger, 3)
    steps_on(found["below"], ledger, 5)
    assert first.epsilon(1e-5).upper == pytest.approx(cost(5), rel=1e-6)
    assert first.mechanism.part == found["above"].part
    assert ledger.epsilon(1e-5, SPECIAL).upper == pytest.approx(cost(5, SPECIAL), rel=1e-6)
    refused("may change its part", ledger.epsilon, 1e-5, REPLACE)
    assert jaxdp.Ledger.from_json(ledger.to_json()).epsilon(1e-5) == ledger.epsilon(1e-5)
    assert "on part 'above' alone" in ledger.event.describe()
    assert ledger.unverified() == []
    # All see the next; the parts of another call are other parts.
    steps_on(X, ledger, 2, sgd_of(1.0, 1.0, 40, 200))
    assert ledger.epsilon(1e-5).upper == pytest.approx(cost(7), rel=1e-6)
    steps_on(parts(X, sign, SIGN)["above"], ledger, 3)
    assert ledger.epsilon(1e-5).upper == pytest.approx(cost(10), rel=1e-6)
    # By position jaxdp sees unlike arrays, and adds.
    ledger = jaxdp.Ledger()
    for half in np.split(X, 2):
        trainer = jaxdp.Trainer(
            loss_fn, MECHANISM, optax.sgd(0.1), half, ledger=ledger, another=bool(ledger.steps)
        )
        state = trainer.init(jnp.zeros(3))
        for batch in trainer.batches(3):
            state, _ = trainer.step(state, batch)
    assert ledger.epsilon(1e-5).upper == pytest.approx(cost(6), rel=1e-6)


def test_a_budget_a_sampler_and_what_is_refused():
    found = parts(X, sign, SIGN)
    own = [MECHANISM.on(part) for part in found.values()]
    plan = [each.total(9) for each in own]
    most = acc.Budget(3.0, 1e-5, plan=MECHANISM).admitted[MECHANISM.event]
    budget = acc.Budget(cost(9), 1e-5, plan=plan)
    assert most < 99 and sum(budget.admitted.values()) == 18  # noqa: PT018
    ledger = jaxdp.Ledger(budget=budget)
    sampler = own[1].sampler(len(found["above"]), ledger=ledger)
    for _ in range(9):
        sampler.draw()
    refused("fit the plan", sampler.draw)
    steps_on(found["below"], ledger, 9)
    assert ledger.epsilon(1e-5).upper <= cost(9) * (1 + 1e-6)
    with pytest.raises(acc.UnsupportedEventError, match="no other bound here"):
        steps_on(found["above"], jaxdp.Ledger(budget=acc.RenyiFilter(3.0, 1e-5)))

    assert own[0].on(as_source(X)) == MECHANISM
    assert repr(own[0]) == repr(MECHANISM)
    refused("the part that the mechanism charges", own[0].check_source, found["above"])
    refused("the part that the mechanism charges", own[0].check_source, as_source(X))
    MECHANISM.check_source(found["above"])  # what is charged as common costs the sum
    bound = "may not be public"
    kinds = [sgd_of(1.0, 1.0, 20, 100, sampling=name) for name in ("fixed_size", "shuffle")]
    kinds += [sgd_of(1.0, 1.0, 20, 100, relation="replace_one")]
    kinds += [sgd_of(1.0, 1.0, 20, 100, sampling="truncated_poisson")]
    kinds += [mf_of(1.0, 1.0, 20, 100, sampling="fixed_order", steps=10)]
    all_refused([(bound, lambda m=m: m.on(found["above"])) for m in kinds])
    for name in ("full_batch", "allocation"):
        size = 100 if name == "full_batch" else 20
        event = sgd_of(1.0, 1.0, size, 100, sampling=name).on(found["above"]).event
        assert event.block == (1 if name == "full_batch" else 5)
        assert acc.supports(event, SPECIAL)


def test_nothing_is_refused_for_the_number_of_units_in_a_part(tmp_path):
    """One unit more or less must not stop a run, also where it is the only one."""
    seventh, few = float(X[7, 0]), sgd_of(1.0, 1.0, 5, 50)
    np.save(tmp_path / "x.npy", X)
    for data in (X, jnp.asarray(X), np.load(tmp_path / "x.npy", mmap_mode="r")):
        empty, single, most = parts(
            data, lambda row: jnp.where(row[0] == seventh, 1, 2), ["empty", "single", "most"]
        ).values()
        assert [len(each) for each in (empty, single, most)] == [0, 1, 199]
        cyclic = mf_of(1.0, 1.0, 5, 50, sampling="cyclic_poisson", bands=2, steps=4)
        for source, own in itertools.product((empty, single, most), (few, cyclic)):
            assert steps_on(source, jaxdp.Ledger(), 2, own).ledger.steps
    few.on(empty).sampler(0).draw()
    few.on(empty).sampler(199).draw()
    refused("to a factor of 2", few.sampler, 199)


# A partition with a name.


def again(x, threshold=0.25, names=SIGN, partition="income"):
    return parts(x, lambda row: row[2] > threshold, names, partition=partition)


@pytest.fixture
def another_process(monkeypatch):
    """Forgets which partitions this process has made, when called."""
    known = parts.__globals__["_assigned"]
    yield known.clear
    known.clear()


def test_a_ledger_goes_on_with_parts_of_one_name_and_rule(tmp_path, another_process):
    def reopened(source, steps):
        with_file = jaxdp.Ledger(tmp_path / "ledger.jsonl")
        steps_on(source, with_file, steps).close()
        return jaxdp.Ledger(tmp_path / "ledger.jsonl")

    reopened(again(X)["above"], 4)
    another_process()
    ledger = reopened(again(X)["below"], 3)
    assert ledger.epsilon(1e-5).upper == pytest.approx(cost(4), rel=1e-6)
    (said,) = ledger.unverified()
    assert "that every unit was in the same part each time" in said
    # Another rule, other names, or another partition: another one.
    another_process()
    ledger = reopened(again(X, threshold=0.250001)["below"], 3)
    assert ledger.epsilon(1e-5).upper == pytest.approx(cost(7), rel=1e-6)
    rules = {again(X, names=["a", "b"])["a"].part.rule, again(X)["above"].part.rule}
    assert len(rules | {again(X, partition="other")["above"].part.rule}) == 3


def test_one_name_is_one_partition_in_a_process(another_process):
    assert again(X)["above"].part == again(X)["above"].part
    refused("a unit could be in two parts", again, -X)
    refused("a unit could be in two parts", again, X[1:])


def test_a_run_takes_parts_of_a_name(tmp_path, another_process):
    def run(name, source):
        return jaxdp.Run(
            tmp_path / name, loss_fn, MECHANISM, optax.sgd(0.1), source, params=jnp.zeros(3),
            delta=1e-5, ledger=tmp_path / "ledger.jsonl",
        )  # fmt: skip

    refused("partition with a name", run, "none", parts(X, sign, SIGN)["above"])
    with undrawn():
        for name, part in again(X).items():
            run(name, part).fit(2)
            another_process()
            run(name, again(X)[name]).fit(3)
    ledger = jaxdp.Ledger(tmp_path / "ledger.jsonl")
    assert ledger.epsilon(1e-5).upper == pytest.approx(cost(3), rel=1e-6)
    assert any("in the same part each time" in said for said in ledger.unverified())
    assert "on part 'above' alone" in (tmp_path / "above" / "report.md").read_text()


# Attacked in two worlds, who differ in record 0: all releases are seen, also of the other part.

STEPS, NOISE, RUNS = 4, 1.5, 20_000
FEW = np.array(
    [[2, 2], [-2, -1.5], [1.5, -2], [-1, -2], [3, 0.5], [-2, 2], [1, 1], [2.5, -3]], np.float32
)


def halves(x):
    """By position: one half, and the other."""
    return np.split(x, [-(-len(x) // 2)])


def signs(x):
    return [whole(part) for part in parts(x, sign, SIGN).values()]


def scores(split):
    """(log-likelihood ratios without record 0, with it) of runs that turn from part to part."""
    rng, worlds = np.random.default_rng(1), [split(FEW[1:]), split(FEW)]

    def summed(params, rows):  # clipped to 1
        grads = 2 * (params[:, None] - rows)
        return (grads / np.maximum(1, np.linalg.norm(grads, axis=-1, keepdims=True))).sum(1)

    found = []
    for world in worlds:
        params, ratio = np.zeros((RUNS, 2)), np.zeros(RUNS)
        for step in range(2 * STEPS):
            mean = [summed(params, each[step % 2]) for each in worlds]
            seen = summed(params, world[step % 2]) + NOISE * rng.normal(size=(RUNS, 2))
            without, present = (((seen - each) ** 2).sum(1) for each in mean)
            ratio += (without - present) / (2 * NOISE**2)
            params = params - 0.1 * seen  # the next part begins from it
        found.append(ratio)
    return found


def test_an_attack_finds_the_worst_part_and_no_more_but_for_a_split_by_position():
    mu = STEPS**0.5 / NOISE  # of one part; that of the sum is 2**.5 times as large
    event = acc.Repeated(acc.Gaussian(NOISE), STEPS)
    proven = acc.mu_gdp(acc.Parallel(acc.Composed(()), dict.fromkeys(SIGN, event)))
    assert proven.upper == pytest.approx(mu)

    def p_of(split, claimed):
        without, present = scores(split)
        cut = 0.0  # fixed beforehand: the likelier world
        counts = ErrorCounts(int((without > cut).sum()), RUNS, int((present <= cut).sum()), RUNS)
        return p_value(counts, gaussian_dp(claimed))

    assert p_of(signs, mu) > 0.01
    assert p_of(signs, 0.9 * mu) < 1e-3
    assert p_of(halves, mu) < 1e-6
