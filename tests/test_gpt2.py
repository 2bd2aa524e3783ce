"""The GPT-2 of examples/gpt2: Hugging Face's logits, padding, the engines, and that it learns."""

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

import jaxdp
from tests.clipping.architectures import opened
from tests.refusing import refused

FOLDER = Path(__file__).parent.parent / "examples" / "gpt2"
sys.path.insert(0, str(FOLDER))

import fine_tune  # noqa: E402
import gpt2  # noqa: E402
import hugging_face  # noqa: E402
import texts  # noqa: E402

HEADS = 2


@pytest.fixture(autouse=True)
def as_users_run_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def stored():
    """A GPT2LMHeadModel with random weights, and its logits for three texts.

    Of transformers 5.23.0 with torch 2.15.0: GPT2Config(vocab_size=11, n_positions=6, n_embd=8,
    n_layer=2, n_head=2), 0.2 · randn added to every weight; model(tokens, attention_mask=mask).
    """
    with np.load(Path(__file__).parent / "gpt2_hugging_face.npz") as file:
        arrays = dict(file)
    named = [name for name in arrays if name.startswith("weights/")]
    return {name.removeprefix("weights/"): arrays.pop(name) for name in named}, arrays


@jax.jit
def rows(params, tokens, mask):
    one = lambda tokens, mask: gpt2.logits(params, tokens, mask, HEADS)  # noqa: E731
    return jax.vmap(one)(jnp.asarray(tokens), jnp.asarray(mask))


def test_loaded_weights_give_hugging_faces_logits_and_go_back_as_they_came(stored):
    weights, found = stored
    masks = {"transformer.h.0.attn.bias": np.ones((1, 1, 6, 6)), "h.1.attn.masked_bias": -1e4}
    head = {name.removeprefix("transformer."): weights[name] for name in weights}
    older = {**weights, **masks, "lm_head.weight": weights["transformer.wte.weight"]}
    each = [hugging_face.params_of(form) for form in (weights, head, older)]
    each.append(gpt2.with_lora(jax.random.key(0), each[0]))  # new adapters change nothing
    want, seen = found["logits"], found["mask"]
    for n, params in enumerate(each):
        logits = rows(params, found["tokens"], seen)
        np.testing.assert_allclose(logits[seen], want[seen], atol=5e-6, err_msg=str(n))
    back = hugging_face.weights_of(hugging_face.params_of(weights))
    assert set(back) == {*weights, "lm_head.weight"}
    for name in weights:
        np.testing.assert_array_equal(back[name], weights[name])
    # Padding on either side, and whatever it holds, changes no logits.
    params = hugging_face.params_of(stored[0])
    text = np.array([3, 1, 4, 1])
    tokens = np.array([[3, 1, 4, 1, 0, 0], [3, 1, 4, 1, 9, 2], [5, 8, 3, 1, 4, 1]])
    mask = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]], bool)
    (alone,) = rows(params, text[None], np.ones((1, 4), bool))
    for found, here in zip(rows(params, tokens, mask), mask, strict=True):
        np.testing.assert_allclose(found[here], alone, atol=2e-6)


def filled(make):
    """Random numbers of the right shapes: each draw of JAX's would be compiled."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) / 4, jnp.float32), jax.eval_shape(make)
    )


def adapted(params):
    """With adapters that do something."""
    random = filled(lambda: gpt2.with_lora(jax.random.key(0), params, rank=3))
    flat = {**flatten_dict(random, sep="."), **flatten_dict(params, sep=".")}
    return unflatten_dict(flat, sep=".")


def test_adapters_go_into_the_weights_and_other_weights_are_refused(stored):
    weights, found = stored
    lora = adapted(hugging_face.params_of(weights))
    merged = hugging_face.params_of(hugging_face.weights_of(lora))
    ours, theirs = (rows(p, found["tokens"], found["mask"]) for p in (lora, merged))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert np.abs(ours - found["logits"])[found["mask"]].max() > 0.1
    # Other weights are refused.
    for change, message in (
        ({"lm_head.weight": np.ones((11, 8))}, "lm_head.weight must be wte.weight"),
        ({"transformer.h.0.crossattention.c_attn.bias": np.ones(8)}, "crossattention"),
        ({"transformer.ln_f.bias": None}, "ln_f.bias"),
    ):
        weights = {name: w for name, w in {**stored[0], **change}.items() if w is not None}
        refused(message, hugging_face.params_of, weights)


def test_no_matrix_is_left_to_vmap_and_the_sum_is_that_of_vmap():
    params = adapted(filled(lambda: gpt2.init(jax.random.key(0), 11, places=8, width=8, layers=2)))
    rng, sums = np.random.default_rng(0), []
    mask = np.arange(8) < rng.integers(3, 9, (5, 1))
    batch = {"tokens": jnp.asarray(rng.integers(0, 11, (5, 8))), "mask": jnp.asarray(mask)}
    for engine in ("vmap", "auto"):
        grad_fn = jaxdp.clipped_grad(fine_tune.loss, jaxdp.clip(0.3), engine=engine)
        sums.append(opened(grad_fn)(params, batch)[0])
    for reference, ours in zip(*map(jax.tree.leaves, sums), strict=True):
        np.testing.assert_allclose(ours, reference, atol=1e-5)
    held = {row.path for row in grad_fn.plan(params, batch) if row.engine == "vmap"}
    assert all("bias" in path or "ln_" in path for path in held), held
    # Of GPT-2 small less than a thousandth is held for each example.
    params = jax.eval_shape(lambda: gpt2.init(jax.random.key(0)))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    sizes = {jax.tree_util.keystr(path): leaf.size for path, leaf in leaves}
    assert sum(sizes.values()) == 124_439_808
    rows = jax.ShapeDtypeStruct((4, 128), np.int32), jax.ShapeDtypeStruct((4, 128), bool)
    batch = dict(zip(("tokens", "mask"), rows, strict=True))
    plan = jaxdp.clipped_grad(fine_tune.loss, jaxdp.clip(1.0)).plan(params, batch)
    held = sum(sizes[row.path] for row in plan if row.engine == "vmap")
    assert held < 1e-3 * sum(sizes.values())


def test_a_few_private_steps_go_to_the_proven_epsilon_and_train_the_adapters_alone():
    records = fine_tune.canaries(np.random.default_rng(0))
    settings = fine_tune.Settings(records=texts.RARE, batch_size=64, steps=3)
    make = lambda: gpt2.init(jax.random.key(0), texts.SIZE, texts.LENGTH, 8, 1)  # noqa: E731
    start = gpt2.with_lora(jax.random.key(1), filled(make), rank=2)
    trainer, params = fine_tune.privately_trained(start, records, "lora", 1e-2, settings)
    assert 7.9 < trainer.epsilon().upper <= 8.0
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), start, params)
    for path, changed in jax.tree_util.tree_leaves_with_path(moved):
        assert changed == ("lora" in jax.tree_util.keystr(path)), path


@pytest.mark.slow
def test_it_learns_at_a_proven_epsilon_and_the_audit_sees_what_no_noise_hides(capsys):
    fine_tune.main(fine_tune.QUICK)
    said = capsys.readouterr().out
    (before,) = map(float, re.findall(r"([\d.]+) before", said))
    row = r"(LoRA|in full) +(private|without privacy) +([\d.]+) +([\d.]+|inf) +([\d.]+)\n"
    # {(part, how): (perplexity, proven epsilon, audited)}
    table = {(part, how): tuple(map(float, n)) for part, how, *n in re.findall(row, said)}
    assert len(table) == 4
    for part, best in (("LoRA", 1.0), ("in full", 0.97)):
        perplexity, proven, audited = table[part, "private"]
        assert perplexity < best * before
        assert 7.9 < proven <= 8.0
        assert audited <= proven
    assert table["in full", "without privacy"][0] < table["in full", "private"][0]
    assert table["in full", "without privacy"][2] > 0.5
