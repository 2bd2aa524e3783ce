import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import jaxdp
from tests.refusing import all_refused, refused

WORDS = "Put privatize .* first in the optax chain"
PARAMS = {"w": jnp.zeros((2,))}
SUMMED = jaxdp.Summed({"w": jnp.ones((2,))}, 1.0)
MECH = jaxdp.dp_sgd(1.0, 1.0, 30, 30, "full_batch")
DATA = np.random.default_rng(0).normal(size=(30, 2)).astype(np.float32)
GRAD_FN = MECH.clipped_grad(lambda params, x: jnp.vdot(params["w"], x))


def test_repr_shows_no_value_and_summed_is_never_flattened():
    """Each value is a number that nothing else in the words could hold."""
    ticket = MECH.sampler(30).draw().ticket
    secret = {"w": jnp.full(2, 71.0)}
    summed = jaxdp.Summed(secret, 0.5, unscale={"w": jnp.ones(2)}, votes=jnp.float32(71.0))
    shown = repr(summed.of_draw(ticket, [0], known=True))
    assert shown == "Summed(value=<sensitive>, l2=0.5, unscale=True)"
    batch = jaxdp.Batch({"x": np.full((3, 1), 71.0)}, np.ones(3, bool))
    draw = jaxdp.types.Draw(np.full((1, 71), 71, np.int32), np.ones((1, 71), bool), 0, 71)
    assert not any(word in repr(value) for value in (batch, draw) for word in ("71", "True"))
    same = lambda summed: summed  # noqa: E731
    for through in (jax.jit(same), jax.vmap(same), jax.tree.leaves, jax.block_until_ready):
        refused(WORDS, through, SUMMED, error=TypeError)


def parts():
    """The sums of the batches of one draw, and of all of them at once."""
    draw = MECH.sampler(30, physical_batch_size=10).draw()
    each = [GRAD_FN(PARAMS, batch)[0] for batch in draw.batches(DATA)]
    return each, GRAD_FN.sum(PARAMS, DATA, draw)[0]


def test_parts_of_a_draw_add_up_to_its_sum_and_keep_the_sensitivity():
    (one, two, three), whole = parts()
    total = one + two + three
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), total.value, whole.value)
    assert float(total.l2) == float(one.l2) == float(whole.l2)
    assert total.ticket is whole.ticket
    assert total.passes == whole.passes == {0, 1, 2}
    one, two, none = (
        jaxdp.Summed(SUMMED.value, 1.0, votes=votes).of_draw(whole.ticket, [n], known=True)
        for n, votes in enumerate((jnp.float32(1.5), jnp.float32(-4.0), None))
    )
    assert float((one + two).votes) == -2.5
    assert (one + none).votes is None


def test_only_disjoint_parts_of_one_draw_are_added():
    (one, two, _), _ = parts()
    (other, *_), _ = parts()
    scaled = dataclasses.replace(two, unscale=jax.tree.map(jnp.ones_like, one.value))
    all_refused(
        [
            ("got batch 0 of the draw twice", lambda: one + one),
            ("got batch 0 of the draw twice", lambda: one + (two + one), "after another"),
            ("sums of two draws", lambda: one + other),
            ("batches made by hand", lambda: SUMMED + SUMMED),
            ("sums must have one l2", lambda: one + dataclasses.replace(two, l2=2 * float(two.l2))),
            ("sums must have one scale", lambda: one + scaled),
        ]
    )
    refused("added to a Summed only, got int", lambda: one + 1, error=TypeError)


def test_a_batch_inside_jit_has_no_origin_a_draw_by_hand_no_key_a_changed_copy_no_note():
    draw = MECH.sampler(30).draw()
    (one,) = draw.batches(DATA)
    assert one.origin == (draw.ticket, 0)
    assert jax.jit(lambda b: b)(one).origin is None
    by_hand = jaxdp.types.Draw(np.zeros((1, 2), np.int32), np.ones((1, 2), bool), 0, 5)
    refused("must come from a sampler", by_hand.key)
    summed = jaxdp.Summed(jnp.zeros(3), 1.0).of_undeclared(0.5, 7)
    assert copy.copy(summed).undeclared == summed.undeclared == (0.5, 7)  # the same sum
    assert dataclasses.replace(summed, l2=2.0).undeclared is None
