"""Sequences brought to one length, or to a few in short passes that only their records decide."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.clipping.passes import add_pass
from jaxdp.sources import Source, as_source, bucketed_text, padded_text
from tests.sources.fakes import HuggingFace, Tensor

TEXTS = [[], [1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]


def ask(source, *indices):
    return source.gather(np.array(indices, np.int32), np.ones(len(indices), bool))


MAKERS = {
    "list": list,
    "array": np.array,
    "int64": lambda ids: np.array(ids, np.int64),
    "tuple": tuple,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_longer_texts_are_cut_and_shorter_ones_padded(make):
    texts = [make(ids) if ids else [] for ids in TEXTS]
    source = as_source(padded_text(texts, 3, pad_id=-1))
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in source.example.items()} == {
        "tokens": ((3,), np.int32),
        "mask": ((3,), bool),
    }
    found = ask(source, 1, 0, 2, 3)
    np.testing.assert_array_equal(
        found["tokens"], [[1, 2, 3], [-1, -1, -1], [6, 7, -1], [8, 9, 10]]
    )
    np.testing.assert_array_equal(
        found["mask"], [[True] * 3, [False] * 3, [True, True, False], [True] * 3]
    )


def test_a_field_of_a_record_is_padded_and_the_others_stay():
    data = HuggingFace({"ids": TEXTS, "label": [0, 1, 2, 3], "other": TEXTS})
    source = as_source(padded_text(padded_text(data, 4, field="ids"), 2, field="other"))
    found = ask(source, 2, 1)
    np.testing.assert_array_equal(found["ids"], [[6, 7, 0, 0], [1, 2, 3, 4]])
    np.testing.assert_array_equal(found["ids_mask"].sum(1), [2, 4])
    np.testing.assert_array_equal(found["other"], [[6, 7], [1, 2]])
    np.testing.assert_array_equal(found["label"], [2, 1])
    assert data.batches == [[1, 2]]


def test_rows_that_are_padding_are_masked_whole():
    found = as_source(padded_text(TEXTS, 3)).gather(np.array([1, 0]), np.array([True, False]))
    assert not found["mask"][1].any()


def test_tensors_and_the_limits_of_int32():
    texts = [Tensor(np.array([2**31 - 1, -(2**31)]))]
    np.testing.assert_array_equal(
        ask(as_source(padded_text(texts, 2)), 0)["tokens"][0], texts[0].numpy()
    )


def test_other_sequences_and_arguments_are_refused_without_showing_them(subtests):
    for record, words in (
        ([1.5, 2.0], "integers"),
        ([[1, 2], [3, 4]], "integers"),
        ([True, False], "integers"),
        (5, "integers"),
        ("secret", "token ids"),
        (["secret"], "token ids"),
        ([2**31], "fit int32"),
        ([[1], [2, 3]], "unlike lengths"),
        (None, "Python objects"),
    ):
        with subtests.test(record=record):
            with pytest.raises(ValueError, match=words) as caught:
                ask(as_source(padded_text([[1, 2], record], 3)), 0, 1)
            assert "secret" not in str(caught.value)
            assert str(2**31) not in str(caught.value)
    # A field that is not there, or a mask that is.
    for record in ({"other": [1]}, [1, 2], {"ids": [1], "ids_mask": [1]}):
        with subtests.test(record=record), pytest.raises(ValueError, match="field must be a key"):
            as_source(padded_text([record], 3, field="ids"))
    for arguments, words in (
        ({"max_length": 0}, "max_length"),
        ({"max_length": 2.5}, "max_length"),
        ({"max_length": True}, "max_length"),
        ({"max_length": 3, "pad_id": 2**31}, "pad_id"),
        ({"max_length": 3, "pad_id": -(2**31) - 1}, "pad_id"),
        ({"max_length": 3, "pad_id": 0.5}, "pad_id"),
        ({"max_length": 3, "data": iter(TEXTS)}, "stream"),
    ):
        with subtests.test(arguments=arguments), pytest.raises(ValueError, match=words):
            padded_text(**{"data": TEXTS, **arguments})


BUCKETS = {8: 6, 2: 9, 4: 1}
RNG = np.random.default_rng(0)
RANDOM = [RNG.integers(1, 20, size).tolist() for size in RNG.integers(0, 12, 60)]
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
    found = [here[kept].tolist() for here, kept in zip(indices, mask, strict=True)]
    assert found == [[4, 2, 1], [], [], [6, 3], [7, 5, 0], []]
    np.testing.assert_array_equal(rows[0]["tokens"], [[4, 4], [0, 0], [2, 0], [0, 0]])
    np.testing.assert_array_equal(rows[0]["mask"].sum(1), [2, 0, 1, 0])
    np.testing.assert_array_equal(rows[4]["tokens"][1], [5] * 8)
    assert not indices[~mask].any()


def test_the_passes_are_the_same_whatever_is_drawn_that_has_room():
    texts = 50 * [[1]] + 10 * [[1] * 8]
    for drawn in ([], range(9), range(50, 59)):
        _, _, rows = passes(texts, drawn, buckets={2: 9, 8: 9})
        assert [leaf["mask"].shape for leaf in rows] == [(4, 2)] * 3 + [(4, 8)] * 3, drawn


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
    for text in (bucketed_text([[23]], {7: 1, 8: 1}), padded_text([[23]], 3)):
        assert "23" not in repr(text)


def trained(source, loss=loss_fn, rows=4):
    mechanism = jaxdp.dp_sgd(1.0, 0.5, 20, 60)
    secret = jaxdp.Secret.from_seed(1)
    trainer = jaxdp.Trainer(
        loss, mechanism, optax.sgd(0.5), source, secret=secret, physical_batch_size=rows
    )
    state, lengths = trainer.init(PARAMS), []
    for batch in trainer.batches(4):
        lengths.append([leaf["mask"].shape[1] for leaf in batch.rows])
        state, _ = trainer.step(state, batch)
    return state.params, trainer.ledger, lengths


def test_the_step_is_the_one_at_a_single_length_to_rounding():
    """The same secret: the same draws and the same noise, so the sums alone can differ."""
    (single, ledger, _), (parted, others, lengths) = (
        trained(source) for source in (padded_text(RANDOM, 8), bucketed_text(RANDOM, BUCKETS))
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), single, parted)
    assert [e.event for e in ledger.entries] == [e.event for e in others.entries]
    assert {2, 4, 8} == {length for step in lengths for length in step}


def test_a_record_of_any_length_adds_one_clipped_gradient():
    grad_fn = jaxdp.clipped_grad(lambda p, record: 1e3 * loss_fn(p, record), jaxdp.clip(0.1))
    for size in (0, 1, 3, 8, 50):
        indices, mask, rows = passes([RANDOM[1], (RANDOM[0] * 50)[:size]], [1])
        draw = jaxdp.types.Draw(indices, mask, 0, 2)
        summed, _ = grad_fn.sum_passes(PARAMS, rows, draw, gathered=True)
        norm = float(optax.tree.norm(summed.value))
        assert norm <= 0.1, size
        assert norm == pytest.approx(0.1 if size else 0.0, rel=1e-2), size


def test_every_length_is_compiled_once():
    def mine(params, record):
        return loss_fn(params, record)

    before = add_pass._cache_size()
    _, _, lengths = trained(bucketed_text(RANDOM, BUCKETS), mine)
    assert sum(map(len, lengths)) > 3 * 4
    assert add_pass._cache_size() == before + 3


def test_a_pass_is_small_where_nobody_says():
    source = bucketed_text(RANDOM * 10, BUCKETS)
    mechanism = jaxdp.dp_sgd(1.0, 0.5, 240, 600)
    train = jaxdp.Trainer(loss_fn, mechanism, optax.sgd(0.5), source)
    assert train._sampler.physical_batch_size == 30


def test_buckets_are_two_or_more_lengths_with_room(subtests):
    for buckets in ({8: 1}, {}, (2, 8), 8, {2: 0, 8: 1}, {0: 1, 8: 1}, {2: 1.5, 8: 1}):
        with subtests.test(buckets=buckets), pytest.raises(ValueError, match="buckets"):
            bucketed_text(RANDOM, buckets)
