"""Sequences brought to one length, or to a few in short passes that only their records decide."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.sampling import Source, as_source, bucketed_text, padded_text
from tests.compiling import compilations
from tests.mechanisms import sgd_of
from tests.refusing import refused
from tests.sampling.fakes import HuggingFace, Tensor, ask, refused_without

TEXTS = [[], [1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]


def test_longer_texts_are_cut_and_shorter_ones_padded():
    padded, mask = [[1, 2, 3], [-1, -1, -1], [6, 7, -1], [8, 9, 10]], [3, 0, 2, 3]
    for make in (list, np.array, lambda ids: np.array(ids, np.int64), tuple):
        texts = [make(ids) if ids else [] for ids in TEXTS]
        source = as_source(padded_text(texts, 3, pad_id=-1))
        form = {name: (leaf.shape, leaf.dtype) for name, leaf in source.example.items()}
        assert form == {"tokens": ((3,), np.int32), "mask": ((3,), bool)}
        found = ask(source, 1, 0, 2, 3)
        np.testing.assert_array_equal(found["tokens"], padded, str(make))
        np.testing.assert_array_equal(found["mask"], np.arange(3) < np.c_[mask], str(make))
    # Rows that are padding are masked whole.
    found = as_source(padded_text(TEXTS, 3)).gather(np.array([1, 0]), np.array([True, False]))
    assert not found["mask"][1].any()
    texts = [Tensor(np.array([2**31 - 1, -(2**31)]))]  # the limits of int32
    found = ask(as_source(padded_text(texts, 2)), 0)["tokens"][0]
    np.testing.assert_array_equal(found, texts[0].numpy())


def test_other_sequences_and_arguments_are_refused_without_showing_them():
    for words, *others in (
        ("integers", [1.5, 2.0], [[1, 2], [3, 4]], [True, False], 5),
        ("token ids", "secret", ["secret"]),
        ("fit int32", [2**31]),
        ("unlike lengths", [[1], [2, 3]]),
        ("Python objects", None),
    ):
        for record in others:
            source = as_source(padded_text([[1, 2], record], 3))
            refused_without(f"secret|{2**31}", words, ask, source, 0, 1)
    # A field that is not there, or a mask that is.
    for record in ({"other": [1]}, [1, 2], {"ids": [1], "ids_mask": [1]}):
        text = padded_text([record], 3, field="ids")
        refused("field must be a key", as_source, text)
    for length in (0, 2.5, True):
        refused("max_length", padded_text, TEXTS, length)
    for pad_id in (2**31, -(2**31) - 1, 0.5):
        refused("pad_id", padded_text, TEXTS, 3, pad_id=pad_id)
    refused("stream", padded_text, iter(TEXTS), 3)
    for buckets in ({8: 1}, {}, (2, 8), 8, {2: 0, 8: 1}, {0: 1, 8: 1}, {2: 1.5, 8: 1}):
        refused("buckets", bucketed_text, TEXTS, buckets)


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


def test_the_passes_are_the_same_whatever_is_drawn_and_so_is_the_length_of_a_record():
    texts = 50 * [[1]] + 10 * [[1] * 8]
    for drawn in ([], range(9), range(50, 59)):
        _, _, rows = passes(texts, drawn, buckets={2: 9, 8: 9})
        assert [leaf["mask"].shape for leaf in rows] == [(4, 2)] * 3 + [(4, 8)] * 3, drawn
    # Nobody is sent on where there is no room: there are more passes.
    texts = 50 * [[1]] + [[2] * 3]
    indices, mask, rows = passes(texts)
    lengths = [leaf["tokens"].shape[1] for leaf in rows]
    assert lengths == [2] * 13 + [4] + [8] * 2
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
    # One field after another, at one length.
    data = HuggingFace({"ids": TEXTS, "label": [0, 1, 2, 3], "other": TEXTS})
    source = as_source(padded_text(padded_text(data, 4, field="ids"), 2, field="other"))
    found = ask(source, 2, 1)
    np.testing.assert_array_equal(found["ids"], [[6, 7, 0, 0], [1, 2, 3, 4]])
    np.testing.assert_array_equal(found["ids_mask"].sum(1), [2, 4])
    np.testing.assert_array_equal(found["other"], [[6, 7], [1, 2]])
    np.testing.assert_array_equal(found["label"], [2, 1])
    assert data.batches == [[1, 2]]


def trained(source, loss=loss_fn, rows=4):
    given = (loss, sgd_of(1.0, 0.5, 20, 60), optax.sgd(0.5), source)
    options = {"secret": jaxdp.Secret.from_seed(1), "physical_batch_size": rows}
    trainer = jaxdp.Trainer(*given, **options)
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


def test_a_record_of_any_length_adds_one_clipped_gradient_and_is_compiled_once():
    grad_fn = jaxdp.clipped_grad(lambda p, record: 1e3 * loss_fn(p, record), jaxdp.clip(0.1))
    for size in (0, 1, 3, 8, 50):
        indices, mask, rows = passes([RANDOM[1], (RANDOM[0] * 50)[:size]], [1])
        draw = jaxdp.types.Draw(indices, mask, 0, 2)
        summed, _ = grad_fn.sum_draw(PARAMS, rows, draw, gathered=True)
        norm = float(optax.tree.norm(summed.value))
        assert norm <= 0.1, size
        assert norm == pytest.approx(0.1 if size else 0.0, rel=1e-2), size
    with compilations("sum_physical_batch") as programs:
        _, _, lengths = trained(bucketed_text(RANDOM, BUCKETS), lambda *given: loss_fn(*given))
    assert sum(map(len, lengths)) > 3 * 4
    assert len(programs) == 3
    # A pass is small where nobody says.
    source, mechanism = bucketed_text(RANDOM * 10, BUCKETS), sgd_of(1.0, 0.5, 240, 600)
    train = jaxdp.Trainer(loss_fn, mechanism, optax.sgd(0.5), source)
    assert train._sampler.physical_batch_size == 30
