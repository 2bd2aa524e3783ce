"""Short records in short passes: the same sum, and lengths that only their own records decide."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.clipping.passes import add_pass
from jaxdp.sources import Source, as_source, bucketed_text, padded_text
from tests.sources.fakes import HuggingFace

BUCKETS = {8: 6, 2: 9, 4: 1}
RNG = np.random.default_rng(0)
TEXTS = [RNG.integers(1, 20, size).tolist() for size in RNG.integers(0, 12, 60)]
PARAMS = {"table": jnp.asarray(RNG.normal(size=(20, 3)), jnp.float32), "out": jnp.ones(3)}


def loss_fn(params, record):
    mask = record["mask"].astype(jnp.float32)
    hidden = jnp.tanh(params["table"][record["tokens"]]) * mask[:, None]
    return jnp.square(hidden.sum(0) @ params["out"] / jnp.maximum(mask.sum(), 1) - 1.0)


def passes(texts, chosen=None, size=4, buckets=BUCKETS):
    chosen = np.arange(len(texts)) if chosen is None else np.array(chosen, np.int64)
    return bucketed_text(texts, buckets).passes(chosen, size)


def test_a_record_goes_to_the_smallest_length_that_holds_it_and_a_longer_one_is_cut():
    texts = [[1] * 8, [2], [], [3] * 3, [4] * 2, [5] * 9, [6] * 4, [7] * 5]
    indices, mask, rows = passes(texts, [7, 6, 5, 4, 3, 2, 1, 0])
    assert [leaf["tokens"].shape for leaf in rows] == 3 * [(4, 2)] + [(4, 4)] + 2 * [(4, 8)]
    assert [found[kept].tolist() for found, kept in zip(indices, mask, strict=True)] == [
        [4, 2, 1],
        [],
        [],
        [6, 3],
        [7, 5, 0],
        [],
    ]
    np.testing.assert_array_equal(rows[0]["tokens"], [[4, 4], [0, 0], [2, 0], [0, 0]])
    np.testing.assert_array_equal(rows[0]["mask"].sum(1), [2, 0, 1, 0])
    np.testing.assert_array_equal(rows[4]["tokens"][1], [5] * 8)
    assert not indices[~mask].any()


@pytest.mark.parametrize("drawn", [[], range(9), range(50, 59)])
def test_the_passes_are_the_same_whatever_is_drawn_that_has_room(drawn):
    texts = 50 * [[1]] + 10 * [[1] * 8]
    _, _, rows = passes(texts, drawn, buckets={2: 9, 8: 9})
    assert [leaf["mask"].shape for leaf in rows] == [(4, 2)] * 3 + [(4, 8)] * 3


def test_who_else_is_drawn_never_changes_the_length_of_a_record():
    texts = 50 * [[1]] + [[2] * 3]
    indices, mask, rows = passes(texts)
    lengths = [leaf["tokens"].shape[1] for leaf in rows]
    assert lengths == [2] * 13 + [4] + [8] * 2  # more passes, and nobody is sent on
    assert indices[13][mask[13]].tolist() == [50]
    assert sorted(indices[mask]) == list(range(51))


def test_other_fields_stay():
    data = HuggingFace({"ids": [[1], [2, 3, 4]], "label": [5, 6]})
    source = bucketed_text(data, {2: 1, 4: 1}, pad_id=-1, field="ids")
    assert isinstance(source, Source)
    assert as_source(source) is source
    _, _, rows = source.passes(np.array([1, 0]), 1)
    np.testing.assert_array_equal(rows[0]["ids"], [[1, -1]])
    np.testing.assert_array_equal(rows[1]["ids_mask"], [[True, True, True, False]])
    assert [leaf["label"].tolist() for leaf in rows] == [[5], [6]]
    assert source.gather(np.array([0]), np.ones(1, bool))["ids"].shape == (1, 4)
    assert "23" not in repr(bucketed_text([[23]], {7: 1, 8: 1}))


def trained(source, loss=loss_fn, rows=4):
    mechanism = jaxdp.dp_sgd(1.0, 0.5, 20, 60)
    trainer = jaxdp.Trainer(
        loss,
        mechanism,
        optax.sgd(0.5),
        source,
        secret=jaxdp.Secret.from_seed(1),
        physical_batch_size=rows,
    )
    state, lengths = trainer.init(PARAMS), []
    for batch in trainer.batches(4):
        lengths.append([leaf["mask"].shape[1] for leaf in batch.rows])
        state, _ = trainer.step(state, batch)
    return state.params, trainer.ledger, lengths


def test_the_step_is_the_one_at_a_single_length_to_rounding():
    """The same secret: the same draws and the same noise, so the sums alone can differ."""
    (single, ledger, _), (parted, others, lengths) = (
        trained(source) for source in (padded_text(TEXTS, 8), bucketed_text(TEXTS, BUCKETS))
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), single, parted)
    assert [e.event for e in ledger.entries] == [e.event for e in others.entries]
    assert {2, 4, 8} == {length for step in lengths for length in step}


@pytest.mark.parametrize("size", [0, 1, 3, 8, 50])
def test_a_record_of_any_length_adds_one_clipped_gradient(size):
    grad_fn = jaxdp.clipped_grad(lambda p, record: 1e3 * loss_fn(p, record), jaxdp.clip(0.1))
    indices, mask, rows = passes([TEXTS[1], (TEXTS[0] * 50)[:size]], [1])
    draw = jaxdp.types.Draw(indices, mask, 0, 2)
    summed, _ = grad_fn.sum_passes(PARAMS, rows, draw, gathered=True)
    norm = float(optax.tree.norm(summed.value))
    assert norm <= 0.1
    assert norm == pytest.approx(0.1 if size else 0.0, rel=1e-2)


def test_every_length_is_compiled_once():
    def mine(params, record):
        return loss_fn(params, record)

    before = add_pass._cache_size()
    _, _, lengths = trained(bucketed_text(TEXTS, BUCKETS), mine)
    assert sum(map(len, lengths)) > 3 * 4
    assert add_pass._cache_size() == before + 3


def test_a_pass_is_small_where_nobody_says():
    source = bucketed_text(TEXTS * 10, BUCKETS)
    mechanism = jaxdp.dp_sgd(1.0, 0.5, 240, 600)
    train = jaxdp.Trainer(loss_fn, mechanism, optax.sgd(0.5), source)
    assert train._sampler.physical_batch_size == 30


@pytest.mark.parametrize(
    "buckets", [{8: 1}, {}, (2, 8), 8, {2: 0, 8: 1}, {0: 1, 8: 1}, {2: 1.5, 8: 1}]
)
def test_buckets_are_two_or_more_lengths_with_room(buckets):
    with pytest.raises(ValueError, match="buckets"):
        bucketed_text(TEXTS, buckets)
