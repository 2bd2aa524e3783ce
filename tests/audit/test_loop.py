"""Loops of a user: five well-known mistakes are caught, and what is right is left alone."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest

import jaxdp
from benchmarks import planted_loops as planted
from tests.mechanisms import sgd_of
from tests.refusing import all_refused

KINDS = {
    "noise_scaled_to_the_mean": "sensitivity",
    "clipped_by_batch": "sensitivity",
    "shuffled_epochs": "sampling",
    "noise_of_a_checkpoint": "repeat",
    "epochs_counted_for_steps": "steps",
}
BY_NAME = [pytest.param(m, id=m.loop.__name__) for m in planted.MISTAKES]


@pytest.mark.parametrize("mistake", BY_NAME)
def test_a_mistake_is_caught_and_its_line_named(mistake):
    found = mistake.check(right=False)
    assert [f.kind for f in found.broken] == [KINDS[mistake.loop.__name__]]
    assert found.broken[0].where.startswith("benchmarks/planted_loops.py:")
    assert mistake.check(right=True).findings == ()  # its twin


def test_the_ledger_says_what_the_loop_would_not():
    assert "epsilon 2.26 for 8 draws" in planted.counted_by_the_ledger()
    assert "spent once" in planted.one_draw_for_two_updates()


MECHANISM = sgd_of(1.0, 1.0, planted.BATCH, planted.RECORDS)
LINEAR = (np.random.default_rng(5).normal(size=(planted.RECORDS, 20)).astype(np.float32),)


def linear(data, seed, *, divide=False, centre=False, noise=1.0, key=None, stop=False):
    """One release a step, of records that are their own gradients."""
    rng = np.random.default_rng(seed)
    (x,) = data
    x = x - x.mean(0) if centre else x
    rows = planted.clipped(x)
    for step in range(3):
        drawn = planted.poisson(rng, len(x))
        own = rng.normal(size=20) if key is None else np.random.default_rng(key).normal(size=20)
        size = max(1, drawn.sum()) if divide else planted.BATCH
        yield (rows[drawn].sum(0) + noise * own) / size
        if stop and np.abs(x).max() > 5 and step == 1:
            return


def kinds(check):
    return {finding.kind for finding in check.broken}


def checked(loop, **more):
    return jaxdp.check_loop(loop, LINEAR, MECHANISM, **more)


def check(seeds=3, **options):
    return checked(functools.partial(linear, **options), seeds=seeds)


def test_a_right_loop_passes():
    assert check().findings == ()


def test_a_divisor_that_is_realised_is_seen():
    found = check(divide=True, seeds=4)
    assert "divisor" in kinds(found)
    assert "times fewer records were drawn with it" in str(found)


def test_noise_scaled_by_the_loss_of_all_records_is_seen():
    def loop(data, seed):
        rng, total = np.random.default_rng(seed), np.zeros(20)
        for _ in range(3):
            level = 0.5 + np.mean((data[0] @ total) ** 2)
            drawn = planted.clipped(data[0])[planted.poisson(rng, len(data[0]))].sum(0)
            total = drawn + max(1.0, level) * rng.normal(size=20)
            yield total

    assert "independence" in kinds(checked(loop))


def test_a_loop_that_gives_nothing_finite_on_copies_is_looked_at_on_the_records():
    def loop(data, seed):
        (x,) = data
        return linear(((x - x.mean(0)) / x.std(0),), seed)

    found = checked(loop)
    assert "independence" in kinds(found)
    assert any("not finite" in words for words in found.untested)


def test_of_a_large_release_some_coordinates_stand_for_all():
    """A record in 40,000 numbers, whose noise is its own in each, or one in all."""
    (x,) = LINEAR
    wide = (np.tile(x, 2_000),)

    def loop(data, seed, count):
        rng = np.random.default_rng(seed)
        for _ in range(2):
            drawn = planted.poisson(rng, len(data[0]))
            yield planted.clipped(data[0])[drawn].sum(0) + rng.normal(size=count)

    few = {"seeds": 1, "first": 48}
    own, one = (
        jaxdp.check_loop(functools.partial(loop, count=count), wide, MECHANISM, **few)
        for count in (40_000, 1)
    )
    assert own.findings == ()
    assert kinds(one) == {"shared"}


def test_what_moves_a_release_beside_the_clipped_records_is_seen():
    """Statistics of the whole data set, no noise, one noise for all runs, and a stop that looks."""
    assert "independence" in kinds(check(centre=True))
    assert "noise" in kinds(check(noise=0.0))
    assert kinds(check(key=0)) & {"noise", "repeat"}
    assert kinds(check(stop=True)) == {"steps"}


def test_batches_of_one_size_and_shuffled_ones_charged_as_poisson_are_seen_also_without_copies():
    def loop(data, seed, shuffled=False, copies=True):
        rng, (x,) = np.random.default_rng(seed), data
        if not copies and not x.std(0).any():
            x = x * np.nan
        order = rng.permutation(len(x))
        for step in range(-(-planted.RECORDS // planted.BATCH)):
            rows = order[step * planted.BATCH :] if shuffled else rng.permutation(len(x))
            yield planted.clipped(x)[rows[: planted.BATCH]].sum(0) + rng.normal(size=20)

    for given in ({}, {"copies": False}, {"shuffled": True}):
        found = checked(functools.partial(loop, **given))
        assert kinds(found) == {"sampling"}, given
        assert len(found.findings) == 1, given
    fixed = dataclasses.replace(MECHANISM, sampling=jaxdp.sampling.FixedSize(planted.BATCH))
    assert jaxdp.check_loop(loop, LINEAR, fixed).ok


def test_noise_that_comes_back_after_a_restart_is_seen():
    def lives(data, seed, *, fresh):
        for life, step in itertools.product(range(2), range(2)):
            draws = np.random.default_rng([seed, life, step, 1])
            entropy = [seed, step, life] if fresh else [seed, step]
            noise = np.random.default_rng(entropy).normal(size=20)
            yield planted.clipped(data[0])[planted.poisson(draws, len(data[0]))].sum(0) + noise

    fresh, same = (
        checked(linear, restart=functools.partial(lives, fresh=f)) for f in (True, False)
    )
    assert fresh.ok
    assert kinds(same) == {"repeat"}


def test_one_release_shown_twice_is_no_second_release_nor_proof_a_loop_that_differs():
    def shown_again(data, seed):
        first, *_ = linear(data, seed)
        yield from (first, first)

    assert checked(shown_again).ok
    found = checked(lambda data, seed: linear(data, np.random.SeedSequence().entropy))
    assert found.ok  # it cannot be repeated, which is a suspicion
    assert [f.kind for f in found.suspicions] == ["state"]


def test_bad_input_is_named_and_a_loop_that_reads_records_from_elsewhere():
    """The latter was told "nothing broken": nothing that it was given moved its releases."""
    right = {"loop": linear, "data": LINEAR, "mechanism": MECHANISM}
    larger = sgd_of(1.0, 1.0, 4, 2_000)
    noise = lambda d, seed: np.random.default_rng(seed).normal(size=(planted.STEPS, 30))  # noqa: E731
    rows = (
        (r"data must hold 4 to 64 records.* got 3", {"data": (LINEAR[0][:3],)}),
        ("of must be one of", {"of": "losses"}),
        ("loop must give a pytree", {"loop": lambda data, seed: []}),
        ("loop must be a function", {"loop": 3}),
        ("loop must give a pytree .* got NoneType", {"loop": lambda data, seed: None}),
        ("loop must train on the data .* none of its", {"loop": lambda d, s: linear(LINEAR, s)}),
        ("loop must train on the data .* none of its", {"loop": noise}),
        ("restart must be a function", {"restart": 4}),
        ("mechanism must come from", {"mechanism": None}),
        ("mechanism must be .* dataset_size 2000", {"mechanism": larger}),
    )
    wrong = lambda given: functools.partial(jaxdp.check_loop, **right | given)  # noqa: E731
    all_refused((f"^{words}", wrong(given), given) for words, given in rows)
