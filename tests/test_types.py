import copy
import dataclasses
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from tests.mechanisms import sgd_of
from tests.refusing import all_refused, refused

WORDS = "Put privatize .* first in the optax chain"
PARAMS = {"w": jnp.zeros((2,))}
SUMMED = jaxdp.Summed({"w": jnp.ones((2,))}, 1.0)
MECH = sgd_of(1.0, 1.0, 30, 30, "full_batch")
DATA = np.random.default_rng(0).normal(size=(30, 2)).astype(np.float32)
GRAD_FN = MECH.clipped_grad(lambda params, x: jnp.vdot(params["w"], x))


def test_repr_shows_no_value_and_summed_is_never_flattened():
    """Each value is a number that nothing else in the words could hold."""
    ticket = MECH.sampler(30).draw().ticket
    secret = {"w": jnp.full(2, 71.0)}
    summed = jaxdp.Summed(secret, 0.5, unscale={"w": jnp.ones(2)}, votes=jnp.float32(71.0))
    shown = repr(summed.carrying(ticket))
    assert shown == "Summed(value=<sensitive>, l2=0.5, unscale=True)"
    batch = jaxdp.Batch({"x": np.full((3, 1), 71.0)}, np.ones(3, bool))
    draw = jaxdp.types.Draw(np.full((1, 71), 71, np.int32), np.ones((1, 71), bool), 0, 71)
    assert not any(word in repr(value) for value in (batch, draw) for word in ("71", "True"))
    same = lambda summed: summed  # noqa: E731
    for through in (jax.jit(same), jax.vmap(same), jax.tree.leaves, jax.block_until_ready):
        refused(WORDS, through, SUMMED, error=TypeError)


def drawn():
    return MECH.sampler(30, physical_batch_size=10).draw()


def parts(draw, **options):
    """The sums of the batches of one draw."""
    return [GRAD_FN(PARAMS, batch, **options) for batch in draw.batches(DATA)]


def test_parts_of_a_draw_add_up_to_its_sum_and_keep_the_sensitivity():
    draw = drawn()
    one, two, three = parts(draw)
    total, whole = one + two + three, GRAD_FN(PARAMS, DATA, draw)
    total = one + two + three
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), total.value, whole.value)
    assert float(total.l2) == float(one.l2) == float(whole.l2)
    assert total.ticket is whole.ticket
    assert total.passes == whole.passes == {0, 1, 2}
    one, two, none = (
        jaxdp.Summed(SUMMED.value, 1.0, votes=votes).carrying(whole.ticket, passes={n})
        for n, votes in enumerate((jnp.float32(1.5), jnp.float32(-4.0), None))
    )
    assert float((one + two).votes) == -2.5
    assert (one + none).votes is None


def test_only_disjoint_parts_of_one_draw_are_added():
    draw = drawn()
    one, two, _ = parts(draw)
    _, scaled, _ = parts(draw, scale=jax.tree.map(jnp.ones_like, PARAMS))
    _, bounded, _ = parts(draw, bound=0.5)
    # In other data a record could be in two batches; copies (copy.copy) have one ticket.
    *_, moved = copy.copy(draw).batches(np.roll(DATA, 1, axis=0))
    other, elsewhere = parts(drawn())[1], GRAD_FN(PARAMS, moved)
    all_refused(
        [
            ("got batch 0 of the draw twice", lambda: one + one),
            ("got batch 0 of the draw twice", lambda: one + (two + one), "after another"),
            ("sums of two draws", lambda: one + other),
            ("made by hand", lambda: SUMMED + SUMMED),
            ("gathered from other data", lambda: one + elsewhere),
            ("sums must have one l2", lambda: one + bounded),
            ("sums must have one l2", lambda: bounded + one, "the larger last"),
            ("sums must have one scale", lambda: one + scaled),
        ]
    )
    refused("added to a Summed only, got int", lambda: one + 1, error=TypeError)


def batch_of_a_trainer():
    """Its rows were gathered on the host."""
    source = [{"x": row} for row in DATA]
    return next(jaxdp.Trainer(lambda p, e: 0.0, MECH, optax.sgd(1.0), source).batches(1))


# Before: a draw, batch or sum that was rebuilt kept the ticket, and was told in unverified() alone.
def test_what_is_rebuilt_or_made_by_hand_has_no_ticket_and_a_copy_has_the_same():
    draw = drawn()
    batch, *_ = draw.batches(DATA)
    summed = GRAD_FN(PARAMS, batch)
    charged = batch_of_a_trainer()
    for made, tickets in (
        (draw, lambda draw: (draw.ticket, next(draw.batches(DATA)).ticket)),
        (batch, lambda batch: (batch.ticket, GRAD_FN(PARAMS, batch).ticket)),
        (summed, lambda summed: (summed.ticket,)),
        (charged, lambda charged: (charged.ticket,)),
    ):
        assert None not in tickets(made)
        assert tickets(copy.copy(made)) == tickets(made)
        for field in dataclasses.fields(made):
            if field.init:  # with the very same value, even
                again = dataclasses.replace(made, **{field.name: getattr(made, field.name)})
                assert set(tickets(again)) == {None}, field.name
            else:
                refused("init=False", dataclasses.replace, made, **{field.name: None})
    assert (batch.ticket, batch.number) == (draw.ticket, 0)
    assert jax.jit(lambda b: b)(batch).ticket is None
    assert GRAD_FN(PARAMS, DATA, dataclasses.replace(draw)).ticket is None
    own = [DATA[rows] for rows in draw.indices]
    assert GRAD_FN.sum_draw(PARAMS, own, draw, gathered=True)[0].ticket is None
    refused("must come from a sampler", dataclasses.replace(draw).key)
    made = (jaxdp.Summed, PARAMS, 1.0), (jaxdp.Batch, DATA, np.ones(30, bool))
    for cls, *args in (*made, (jaxdp.types.Draw, draw.indices, draw.mask, 0, 30)):
        assert cls(*args).__dict__.get("ticket") is None
        refused("unexpected keyword", cls, *args, ticket=draw.ticket, error=TypeError)


def test_rows_cannot_be_written_to_nor_exchanged():
    draw = MECH.sampler(30).draw()
    (batch,) = draw.batches({"x": DATA})
    charged = batch_of_a_trainer()
    for array in (draw.indices, draw.mask, batch.data["x"], batch.mask, charged.rows[0]["x"]):
        refused("read-only", array.fill, 1)
    for one in (draw, batch, charged):
        name = dataclasses.fields(one)[0].name
        refused("cannot assign", setattr, one, name, None, error=dataclasses.FrozenInstanceError)
    refused("item assignment", operator.setitem, charged.rows, 0, 1, error=TypeError)
    # Before: of a sum that was multiplied so nobody said a word.
    total = GRAD_FN(PARAMS, DATA, draw)
    for one, tree in ((batch, batch.data), (charged, charged.rows[0]), (total, total.value)):
        ((name, kept),) = tree.items()
        tree[name] = kept - kept.mean(0)
        assert one.ticket is None
        tree[name] = kept
        assert one.ticket is not None


def test_a_sum_of_rows_that_nobody_declared_says_so_until_it_is_rebuilt():
    clip = jaxdp.clip_and_sum(jaxdp.clip(0.5))
    summed, _ = clip.update({"w": jnp.ones((7, 2))}, clip.init(PARAMS), PARAMS, mask="all")
    assert copy.copy(summed).undeclared == summed.undeclared == (0.5, 7)  # the same sum
    assert dataclasses.replace(summed, l2=2.0).undeclared is None
