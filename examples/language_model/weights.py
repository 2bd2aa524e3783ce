"""Reads Hugging Face's layout of Llama and its kind, or a GGUF file; writes it, and PEFT's."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import llama
import numpy as np
import tokenizers
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers

TYPES = ("llama", "qwen2", "qwen3")
GGUF = {  # its names of tensors, and ours
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{a}": f"self_attn.{b}_proj" for a, b in zip(("q", "k", "v", "output"), "qkvo")},
    **{f"attn_{a}_norm": f"self_attn.{a}_norm" for a in "qk"},
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}


def load(path, dtype=jnp.bfloat16):
    """The configuration, the parameters in ``dtype``, and the tokenizer.

    Args:
        path: a folder with config.json, .safetensors files and tokenizer.json, as Hugging Face's
            are; or a .gguf file.
        dtype: of the matrices; norms and biases stay in float32.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        config, weights, tokenizer = _of_gguf(path)
    else:
        config = config_of(json.loads((path / "config.json").read_text()))
        weights = {}
        for file in sorted(path.glob("*.safetensors")):
            weights |= load_file(file)
        tokenizer = tokenizers.Tokenizer.from_file(f"{path / 'tokenizer.json'}")
    return config, params_of(weights, dtype), tokenizer


def config_of(given):
    """The configuration in the content of a config.json, a dict."""
    if given["model_type"] not in TYPES:
        raise ValueError(f"model_type must be of {TYPES}, got {given['model_type']!r}")
    heads = given["num_attention_heads"]
    kept = {
        "num_key_value_heads": given.get("num_key_value_heads") or heads,
        "head_dim": given.get("head_dim") or given["hidden_size"] // heads,
        "rope_theta": given.get("rope_theta", 10_000.0),
    }
    # Newer files hold all of rotary embeddings in one place.
    rope = given.get("rope_scaling") or given.get("rope_parameters") or {}
    kept["rope_theta"] = rope.get("rope_theta", kept["rope_theta"])
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "llama3":
        names = "factor low_freq_factor high_freq_factor original_max_position_embeddings"
        kept["rope_scaling"] = tuple(rope[name] for name in names.split())
    elif kind != "default":
        raise ValueError(f"rope_type must be default or llama3, got {kind!r}")
    if given.get("use_sliding_window"):
        raise ValueError("use_sliding_window must be false, got true")
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "rms_norm_eps",
        "model_type",
    ):
        kept[name] = given[name]
    return llama.Config(num_attention_heads=heads, **kept)


def params_of(weights, dtype=jnp.float32):
    """The parameters in a state dict, name -> array; layers stacked, matrices in ``dtype``."""
    flat, stacks = {}, {}
    for name, array in weights.items():
        name = name.removeprefix("model.")
        if layer := re.match(r"layers\.(\d+)\.", name):
            stacks.setdefault(f"layers.{name[layer.end() :]}", {})[int(layer[1])] = array
        else:
            flat[name] = array
    flat |= {name: np.stack([part[i] for i in range(len(part))]) for name, part in stacks.items()}
    tied = "lm_head.weight" in flat and np.array_equal(
        flat["lm_head.weight"], flat["embed_tokens.weight"]
    )
    if tied:
        del flat["lm_head.weight"]
    matrix = re.compile(r"embed_tokens|lm_head|_proj\.weight")
    cast = {
        name: jnp.asarray(array, dtype if matrix.search(name) else jnp.float32)
        for name, array in flat.items()
    }
    return unflatten_dict(cast, sep=".")


def weights_of(params, scaling=1.0):
    """The state dict of a ...ForCausalLM in NumPy; adapters are added to their matrices."""
    flat = {name: np.asarray(leaf) for name, leaf in flatten_dict(params, sep=".").items()}
    weights = {}
    for name, array in flat.items():
        if ".lora_" in name:
            continue
        adapter = name.removesuffix("weight") + "lora_"
        if f"{adapter}A" in flat:
            change = flat[f"{adapter}B"] @ flat[f"{adapter}A"]
            array = (array.astype(np.float32) + change).astype(array.dtype)
        if name.startswith("layers."):
            weights |= {f"model.layers.{i}.{name[7:]}": part for i, part in enumerate(array)}
        else:
            weights[name if name.startswith("lm_head") else f"model.{name}"] = array
    return weights


def save_adapters(folder, params, base=""):
    """Writes the adapters as PEFT reads them: adapter_config.json, adapter_model.safetensors."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    arrays, adapted, rank = {}, set(), 0
    for name, leaf in flatten_dict(params, sep=".").items():
        if ".lora_" not in name:
            continue
        adapted.add(name.split(".")[-2])
        rank = leaf.shape[1] if name.endswith("A") else rank
        for i, part in enumerate(np.asarray(leaf)):
            arrays[f"base_model.model.model.layers.{i}.{name[7:]}.weight"] = part
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": rank,  # no factor beside the product
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(adapted),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(arrays, folder / "adapter_model.safetensors")


def save_merged(path, params):
    """Writes all weights, adapters added to their matrices, as one .safetensors file."""
    save_file(weights_of(params), path, metadata={"format": "pt"})


def _of_gguf(path):
    import gguf
    from gguf.quants import dequantize

    reader = gguf.GGUFReader(path)

    def fact(name, default=None):
        field = reader.fields.get(name)
        return default if field is None else field.contents()

    kind = fact("general.architecture")
    if kind not in TYPES:
        raise ValueError(f"{path.name} must be of a network of {TYPES}, got {kind!r}")
    width, heads = fact(f"{kind}.embedding_length"), fact(f"{kind}.attention.head_count")
    config = llama.Config(
        vocab_size=len(fact("tokenizer.ggml.tokens")),
        hidden_size=width,
        intermediate_size=fact(f"{kind}.feed_forward_length"),
        num_hidden_layers=fact(f"{kind}.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=fact(f"{kind}.attention.head_count_kv", heads),
        head_dim=fact(f"{kind}.attention.key_length", width // heads),
        rope_theta=fact(f"{kind}.rope.freq_base", 10_000.0),
        rms_norm_eps=fact(f"{kind}.attention.layer_norm_rms_epsilon"),
        model_type=kind,
    )
    weights = {}
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type)
        place, part, of = re.fullmatch(r"(blk\.\d+\.)?(\w+)\.(weight|bias)", tensor.name).groups()
        if kind == "llama" and part in (
            "attn_q",
            "attn_k",
        ):  # llama.cpp turns neighbours, not halves
            array = array.reshape(-1, config.head_dim // 2, 2, *array.shape[1:])
            array = array.swapaxes(1, 2).reshape(-1, *array.shape[3:])
        weights[(place or "").replace("blk", "layers") + f"{GGUF[part]}.{of}"] = array

    tokens = fact("tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in fact("tokenizer.ggml.merges")]
    known = {token: i for i, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(known, merges))
    digits = [pre_tokenizers.Digits(individual_digits=True)]
    bytes_ = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if fact("tokenizer.ggml.pre") != "smollm":
        raise ValueError(
            f"{path.name}: its tokenizer must be SmolLM's, got {fact('tokenizer.ggml.pre')!r}"
        )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(digits + bytes_)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fact("tokenizer.ggml.token_type")
    tokenizer.add_special_tokens([t for t, k in zip(tokens, kinds, strict=True) if k == 3])
    return config, weights, tokenizer
