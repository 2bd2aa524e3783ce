"""The Llama of examples/language_model: transformers' logits, the files it reads and writes, the engines.

The models of tests/language_model are random and were written by transformers and PEFT, with their
logits: by `python -m benchmarks.peers_of_language_models --tests`, whose versions stand in
benchmarks/results/peers_of_language_models.json.
"""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import chex
import gguf
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

import jaxdp
from tests.clipping.architectures import opened
from tests.refusing import all_refused, refused

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "language_model"))

import llama
import weights

STORED = Path(__file__).parent / "language_model"
CONFIG = llama.Config(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
)
SMOLLM2 = llama.Config(49_152, 576, 1_536, 30, 9, 3, 64)


@pytest.fixture(autouse=True)
def as_users_run_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


logits = jax.jit(jax.vmap(llama.logits, (None, 0, None)), static_argnums=2)


def filled(make):
    """Random numbers of the right shapes: each draw of JAX's would be compiled."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) / 4, jnp.float32), jax.eval_shape(make)
    )


def network(lora=0):
    """Random parameters of CONFIG, with adapters of a rank that do something."""
    init = lambda: llama.init(jax.random.key(0), CONFIG)  # noqa: E731
    adapted = lambda: llama.with_lora(jax.random.key(0), init(), lora)  # noqa: E731
    return filled(adapted if lora else init)


@pytest.mark.parametrize("name", ["llama32", "qwen2", "qwen3"])
def test_what_transformers_and_peft_wrote_gives_their_logits_and_goes_back(name, tmp_path):
    expected = load_file(STORED / name / "expected.safetensors")
    config, params, tokenizer = weights.load(STORED / name, jnp.float32)
    found = logits(params, expected["tokens"], config)
    np.testing.assert_allclose(found, expected["logits"], atol=1e-5)
    assert tokenizer.decode(tokenizer.encode("a private text").ids) == "a private text"
    lora = weights.load_adapters(STORED / name / "adapters", params)
    np.testing.assert_allclose(
        logits(lora, expected["tokens"], config), expected["adapted"], atol=1e-5
    )
    assert np.abs(expected["adapted"] - expected["logits"]).max() > 0.1
    # What we write is read again, and an export of adapters holds adapters alone.
    weights.save_adapters(tmp_path, lora, "base")
    exported = load_file(tmp_path / "adapter_model.safetensors")
    theirs = load_file(STORED / name / "adapters" / "adapter_model.safetensors")
    assert {name: part.shape for name, part in exported.items()} == {
        name: part.shape for name, part in theirs.items()
    }
    chosen = json.loads((tmp_path / "adapter_config.json").read_text("utf-8"))
    assert chosen["lora_alpha"] == chosen["r"] == 4
    chex.assert_trees_all_equal(weights.load_adapters(tmp_path, params), lora)
    weights.save_merged(tmp_path / "merged", config, lora, tokenizer)
    again, merged, same = weights.load(tmp_path / "merged", jnp.float32)
    assert (again, same.to_str()) == (config, tokenizer.to_str())
    np.testing.assert_allclose(
        logits(merged, expected["tokens"], config), expected["adapted"], atol=1e-5
    )


def test_matrices_are_in_the_precision_asked_for_and_bfloat16_is_not_trained():
    config, params, _ = weights.load(STORED / "qwen2")
    for name, leaf in flatten_dict(params, sep=".").items():
        small = "norm" in name or "bias" in name
        assert leaf.dtype == (jnp.float32 if small else jnp.bfloat16), name
    expected = load_file(STORED / "qwen2" / "expected.safetensors")
    found = logits(params, expected["tokens"], config)
    assert found.dtype == jnp.float32
    assert 1e-4 < np.abs(found - expected["logits"]).mean() < 0.02
    loss = lambda params, tokens: llama.losses(params, tokens, config).mean()  # noqa: E731
    words = "weights that are trained must be float32, got bfloat16"
    refused(words, jax.grad(loss), params, expected["tokens"][0])
    # Adapters of bfloat16 matrices are trained.
    lora = llama.with_lora(jax.random.key(0), params, 2, ("q_proj",))
    grad_fn = jaxdp.clipped_grad(loss, jaxdp.clip(1.0), trainable=lambda path: "lora" in path)
    value, _ = opened(grad_fn)(lora, expected["tokens"])
    q = value["layers"]["self_attn"]["q_proj"]
    assert q["lora_B"].dtype == jnp.float32
    assert jnp.abs(q["lora_B"]).max() > 0


def test_other_weights_and_networks_are_refused_in_words(tmp_path):
    state = weights.weights_of(network())
    given = json.loads((STORED / "llama32" / "config.json").read_text("utf-8"))
    up = "model.layers.1.mlp.up_proj.weight"

    def changed(name, array):
        others = {other: kept for other, kept in state.items() if other != name}
        new = {} if array is None else {name: array}
        return lambda: weights.params_of({**others, **new}, CONFIG)

    def config(**names):
        return lambda: weights.config_of({**given, **names})

    all_refused(
        [
            ("lack 1 names: layers.1.mlp.up_proj.weight", changed(up, None)),
            ("have unknown 1 names: layers.0.moe", changed("layers.0.moe", np.ones(2))),
            (r"must be of shape \(24, 16\), got \(24, 8\)", changed(up, np.ones((24, 8)))),
            ("must be embed_tokens.weight", changed("lm_head.weight", np.ones((64, 16)))),
            ("model_type must be of .* got 'gemma'", config(model_type="gemma")),
            ("rope_type must be of .* got 'yarn'", config(rope_scaling={"rope_type": "yarn"})),
            ("use_sliding_window must be", config(use_sliding_window=True)),
            ("quantization_config must be", config(quantization_config={"bits": 4})),
            ("hidden_act must be", config(hidden_act="gelu")),
            (
                r"must hold \['vocab_size'\]",
                lambda: weights.config_of(_without(given, "vocab_size")),
            ),
            ("path must be a folder", lambda: weights.load(tmp_path / "none")),
            ("path must be a folder", lambda: weights.load(tmp_path / "none.gguf")),
            ("adapters of one rank", lambda: weights.save_adapters(tmp_path, network())),
        ]
    )


def _without(given, name):
    return {other: value for other, value in given.items() if other != name}


def test_folders_that_are_not_whole_are_refused_in_words(tmp_path):
    def less(name):
        return lambda path: (path / name).unlink()

    def less_tokens(path):
        config = json.loads((path / "config.json").read_text("utf-8"))
        (path / "config.json").write_text(json.dumps({**config, "vocab_size": 20}), "utf-8")

    def dora(path):
        (path / "adapter_config.json").write_text(
            '{"peft_type": "LORA", "use_dora": true}', "utf-8"
        )

    def one_layer(path):
        arrays = load_file(path / "adapter_model.safetensors")
        kept = {name: array for name, array in arrays.items() if "layers.0" in name}
        save_file(kept, path / "adapter_model.safetensors")

    def of_the_head(path):
        arrays = {"base_model.model.lm_head.lora_A.weight": np.ones((4, 16), np.float32)}
        save_file(arrays, path / "adapter_model.safetensors")

    model, adapters = STORED / "qwen3", STORED / "llama32" / "adapters"
    rows = [
        ("must hold config.json, and holds adapters, expected", model, less("config.json")),
        ("must hold tokenizer.json", model, less("tokenizer.json")),
        ("must hold model-00002-of", model, less("model-00002-of-00002.safetensors")),
        ("must hold model.safetensors", model, less("model.safetensors.index.json")),
        ("vocab_size must be over .*, a token, got 20", model, less_tokens),
        ("use_dora in adapter_config.json must be False", adapters, dora),
        (r"lora_A must be of shape \(4, ..\) in each of 2", adapters, one_layer),
        ("hold adapters of layers, got base_model.model.lm_head", adapters, of_the_head),
    ]
    for n, (words, folder, change) in enumerate(rows):
        path = shutil.copytree(folder, tmp_path / f"{n}")
        change(path)
        if folder == model:
            refused(words, weights.load, path)
        else:
            refused(words, weights.load_adapters, path, network())


def test_the_factors_of_long_waves_and_of_adapters_are_as_published(tmp_path):
    # Llama 3.1: a wave that turns over 4 times in 8,192 places is kept, under once stretched by 32.
    config = dataclasses.replace(SMOLLM2, rope_theta=5e5, rope_scaling=(32.0, 1.0, 4.0, 8192))
    wanted = []
    for frequency in 5e5 ** (-np.arange(32) / 32):
        turns = 8192 * frequency / (2 * np.pi)
        smooth = (turns - 1) / 3
        ramp = (1 - smooth) * frequency / 32 + smooth * frequency
        wanted.append(frequency if turns > 4 else frequency / 32 if turns < 1 else ramp)
    sin = llama.rotary(config, 2)[1]
    np.testing.assert_allclose(sin[1], np.sin(wanted * 2), rtol=1e-5)
    # PEFT: alpha over the rank, 12 / 4, or over its root.
    path = shutil.copytree(STORED / "llama32" / "adapters", tmp_path / "adapters")
    _, params, _ = weights.load(STORED / "llama32")
    plain = weights.load_adapters(path, params)
    chosen = json.loads((path / "adapter_config.json").read_text("utf-8"))
    (path / "adapter_config.json").write_text(json.dumps(chosen | {"use_rslora": True}), "utf-8")
    rooted = weights.load_adapters(path, params)
    q, r = (found["layers"]["self_attn"]["q_proj"] for found in (plain, rooted))
    np.testing.assert_allclose(r["lora_B"], 2 * q["lora_B"], rtol=1e-6)
    np.testing.assert_array_equal(r["lora_A"], q["lora_A"])


def test_padding_and_chunks_change_nothing():
    params, text = network(lora=2), jnp.asarray([3, 1, 4, 1, 5, 9, 2, 6], jnp.int32)
    alone = logits(params, text[None], CONFIG)[0]
    padded = jnp.stack([jnp.pad(text, (0, 5), constant_values=token) for token in (0, 7)])
    for found in logits(params, padded, CONFIG)[:, :8]:
        np.testing.assert_allclose(found, alone, atol=2e-6)
    plain = optax.softmax_cross_entropy_with_integer_labels(alone[:-1], text[1:])

    losses = jax.jit(llama.losses, static_argnums=(2, 3))
    for chunk in (3, 16):
        np.testing.assert_allclose(losses(params, text, CONFIG, chunk), plain, atol=2e-6)
    refused("tokens must be two or more, got 1", llama.losses, params, text[:1], CONFIG)
    refused("rank must be 1 or more", llama.with_lora, jax.random.key(0), params, 0)
    refused("adapted of", llama.with_lora, jax.random.key(0), params, 2, ("query",))


def loss(params, tokens):
    return llama.losses(params, tokens, CONFIG).mean()


@pytest.mark.parametrize("lora", [0, 3])
def test_no_matrix_is_left_to_vmap_and_the_sum_is_that_of_vmap(lora):
    params, sums = network(lora), []
    batch = jnp.asarray(np.random.default_rng(0).integers(0, 64, (5, 12)), jnp.int32)
    trainable = (lambda path: "lora" in path) if lora else None
    for engine in ("vmap", "auto"):
        grad_fn = jaxdp.clipped_grad(loss, jaxdp.clip(0.3), engine=engine, trainable=trainable)
        sums.append(opened(grad_fn)(params, batch)[0])
    chex.assert_trees_all_close(*sums, atol=1e-5)
    held = {row.path for row in grad_fn.plan(params, batch) if row.engine == "vmap"}
    assert all("norm" in path for path in held), held
    assert len(held) == (0 if lora else 3)


def test_of_smollm2_less_than_a_thousandth_is_held_for_each_example():
    params = jax.eval_shape(lambda: llama.init(jax.random.key(0), SMOLLM2))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    sizes = {jax.tree_util.keystr(path): leaf.size for path, leaf in leaves}
    assert sum(sizes.values()) == 134_515_008
    of_one = lambda params, tokens: llama.losses(params, tokens, SMOLLM2).mean()  # noqa: E731
    plan = jaxdp.clipped_grad(of_one, jaxdp.clip(1.0)).plan(
        params, jax.ShapeDtypeStruct((4, 64), np.int32)
    )
    held = sum(sizes[row.path] for row in plan if row.engine == "vmap")
    assert held < 1e-3 * sum(sizes.values())


def test_a_few_private_steps_train_the_adapters_alone():
    records = np.random.default_rng(0).integers(0, 64, (64, 12)).astype(np.int32)
    mechanism = jaxdp.dp_sgd(
        epsilon=8.0, delta=1e-5, steps=2, l2_clip_norm=1.0, batch_size=16, dataset_size=64
    )
    trained = lambda path: "lora" in path  # noqa: E731
    trainer = jaxdp.Trainer(loss, mechanism, optax.adam(1e-2), records, trainable=trained)
    start = network(lora=2)
    state = trainer.init(start)
    for batch in trainer.batches(2):
        state, _ = trainer.step(state, batch)
    assert 7.9 < trainer.epsilon(delta=1e-5).upper <= 8.0
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), start, state.params)
    for path, changed in jax.tree_util.tree_leaves_with_path(moved):
        assert changed == ("lora" in jax.tree_util.keystr(path)), path


def test_a_gguf_file_gives_the_weights_and_the_tokens_that_it_was_made_of(tmp_path):
    """GGUF is written here as llama.cpp's converter does: neighbours are rotated, not halves."""
    params = network()
    path = tmp_path / "small.gguf"
    tokens = ["<|im_start|>", *"ab12Ġ", "ab", "12"] + [f"<{i}>" for i in range(56)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(16)
    writer.add_feed_forward_length(24)
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * 63)
    writer.add_token_merges(["a b", "1 2"])
    back = {ours: theirs for theirs, ours in weights.GGUF.items()}
    for name, array in weights.weights_of(params).items():
        *place, part = name.removeprefix("model.").removesuffix(".weight").split(".", 2)
        part = back[part if place else name.split(".")[1]]
        if part in ("attn_q", "attn_k"):
            array = array.reshape(-1, 2, 2, 16).swapaxes(1, 2).reshape(-1, 16)
        writer.add_tensor((f"blk.{place[1]}." if place else "") + f"{part}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config, found, tokenizer = weights.load(path, jnp.float32)
    assert dataclasses.replace(config, rms_norm_eps=1e-5) == CONFIG  # it was float32
    chex.assert_trees_all_equal(found, params)
    assert tokenizer.encode("<|im_start|>ab 12").ids == [0, 6, 5, 3, 4]  # digits stay alone
    assert tokenizer.decode([0, 6, 5, 3, 4], skip_special_tokens=False) == "<|im_start|>ab 12"
