"""Reads Hugging Face's layout of Llama and its kind, or a GGUF file; writes it, and PEFT's."""

import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import llama
import numpy as np

from jaxdp._extras import needed

with needed("examples/language_model", "language-models", "flax", "safetensors", "tokenizers"):
    import tokenizers
    from flax.traverse_util import flatten_dict, unflatten_dict
    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file
    from tokenizers import decoders, models, pre_tokenizers

CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
GGUF = {  # its names of tensors, and ours
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}


def load(path, dtype=jnp.bfloat16):
    """The configuration, the parameters in ``dtype``, and the tokenizer.

    Args:
        path: a folder with config.json, tokenizer.json and .safetensors, as Hugging Face's are; or
            a .gguf file of SmolLM's.
        dtype: of the matrices; norms and biases stay in float32. To train them all: float32.
    """
    path = Path(path)
    config, weights, tokenizer = (_of_gguf if path.suffix == ".gguf" else _of_folder)(path)
    last = max(tokenizer.get_vocab().values())
    if last >= config.vocab_size:
        raise ValueError(
            f"{path}: vocab_size must be over {last}, a token, got {config.vocab_size}"
        )
    return config, params_of(weights, config, dtype), tokenizer


def config_of(given):
    """The configuration in the content of a config.json, a dict."""
    names = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"}
    names |= {"num_attention_heads", "rms_norm_eps", "model_type"}
    if missing := sorted(names - set(given)):
        raise ValueError(f"config.json must hold {missing}")
    kind, heads = given["model_type"], given["num_attention_heads"]
    # Newer files hold all of rotary embeddings in one place.
    rope = given.get("rope_scaling") or given.get("rope_parameters") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    for name, value, known in (
        ("model_type", kind, tuple(CLASSES)),
        ("rope_type", rope_type, ("default", "llama3")),
        ("hidden_act", given.get("hidden_act", "silu"), ("silu",)),
        ("use_sliding_window", given.get("use_sliding_window") or False, (False,)),
        ("quantization_config", given.get("quantization_config"), (None,)),
    ):
        if value not in known:
            raise ValueError(f"{name} must be of {known}, got {value!r}")
    qkv = ("q_proj", "k_proj", "v_proj")
    biases = qkv if kind == "qwen2" else (*qkv, "o_proj") * bool(given.get("attention_bias"))
    if given.get("mlp_bias"):
        biases += ("gate_proj", "up_proj", "down_proj")
    return llama.Config(
        **{name: given[name] for name in names},
        num_key_value_heads=given.get("num_key_value_heads") or heads,
        head_dim=given.get("head_dim") or given["hidden_size"] // heads,
        rope_theta=rope.get("rope_theta", given.get("rope_theta", 10_000.0)),
        rope_scaling=tuple(rope[name] for name in LLAMA3) if rope_type == "llama3" else (),
        biases=biases,
        tie_word_embeddings=given.get("tie_word_embeddings", False),
    )


def params_of(weights, config, dtype=jnp.float32):
    """The parameters in a state dict: layers stacked, matrices in ``dtype``.

    Args:
        weights: Hugging Face's names to arrays, or to functions that read an array: so one
            at a time is in memory beside the parameters.
        config: that of the weights; names and shapes must be the network's.
        dtype: of the matrices; norms and biases are float32.
    """
    given = {name.removeprefix("model."): w for name, w in weights.items()}
    given = {name: w for name, w in given.items() if "rotary_emb" not in name}  # none, but written

    def read(name):
        return given[name]() if callable(given[name]) else np.asarray(given[name])

    shapes = jax.eval_shape(lambda: llama.init(jax.random.key(0), config))
    shapes = {name: leaf.shape for name, leaf in flatten_dict(shapes, sep=".").items()}
    parts = {name: (name,) for name in shapes if not name.startswith("layers.")}
    for name in shapes.keys() - parts.keys():
        parts[name] = [f"layers.{i}.{name[7:]}" for i in range(config.num_hidden_layers)]
    wanted = {part for each in parts.values() for part in each}
    if config.tie_word_embeddings and "lm_head.weight" in given:
        if not np.array_equal(read("lm_head.weight"), read("embed_tokens.weight")):
            raise ValueError("lm_head.weight must be embed_tokens.weight, for tie_word_embeddings")
        del given["lm_head.weight"]
    for words, names in (("lack", wanted - set(given)), ("have unknown", set(given) - wanted)):
        if names:
            raise ValueError(f"weights {words} {len(names)} names: {', '.join(sorted(names)[:5])}")

    flat = {}
    for name, shape in shapes.items():
        matrix = re.search(r"embed_tokens|lm_head|_proj\.weight", name)
        array = np.empty(shape, dtype if matrix else np.float32)
        layers = array if name.startswith("layers.") else array[None]
        for part, layer in zip(parts[name], layers, strict=True):
            found = read(part)
            if found.shape != layer.shape:
                raise ValueError(f"{part} must be of shape {layer.shape}, got {found.shape}")
            layer[...] = found
        flat[name] = jnp.asarray(array)
    return unflatten_dict(flat, sep=".")


def weights_of(params):
    """The state dict of a ...ForCausalLM in NumPy; adapters are added to their matrices."""
    flat, weights = flatten_dict(params, sep="."), {}
    for name, leaf in flat.items():
        if ".lora_" in name:
            continue
        array, adapter = np.asarray(leaf), name.removesuffix("weight") + "lora_"
        if f"{adapter}A" in flat:
            change = np.asarray(flat[f"{adapter}B"]) @ np.asarray(flat[f"{adapter}A"])
            array = (array.astype(np.float32) + change).astype(array.dtype)
        array = np.ascontiguousarray(array)
        if name.startswith("layers."):
            weights |= {f"model.layers.{i}.{name[7:]}": part for i, part in enumerate(array)}
        else:
            weights[name if name.startswith("lm_head") else f"model.{name}"] = array
    return weights


def save_merged(folder, config, params, tokenizer, end=None):
    """Writes a folder that ``load`` and transformers read; adapters are added to their matrices.

    ``end`` is the id of the token with which a text ends, where writing shall stop.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    given = {name: value for name, value in vars(config).items() if value != ()}
    given["rope_scaling"] = None
    if config.rope_scaling:
        named = zip(LLAMA3, config.rope_scaling, strict=True)
        given["rope_scaling"] = {"rope_type": "llama3", **dict(named)}
    given |= {
        "architectures": [CLASSES[config.model_type]],
        "attention_bias": "o_proj" in given.pop("biases", ()),
        "mlp_bias": "down_proj" in config.biases,
        "dtype": str(params["embed_tokens"]["weight"].dtype),
        "bos_token_id": None,
        "eos_token_id": end,
    }
    (folder / "config.json").write_text(json.dumps(given, indent=2) + "\n", "utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file(weights_of(params), folder / "model.safetensors", metadata={"format": "pt"})


def save_adapters(folder, params, base=""):
    """Writes the adapters alone, as PEFT reads them: two files.

    Args:
        folder: where adapter_config.json and adapter_model.safetensors go.
        params: with adapters of one rank, of ``llama.with_lora``.
        base: name of the model that they belong to.
    """
    arrays, adapted, ranks = {}, set(), set()
    for name, leaf in flatten_dict(params, sep=".").items():
        if ".lora_" in name:
            adapted.add(name.split(".")[-2])
            ranks.add(leaf.shape[1] if name.endswith("A") else leaf.shape[2])
            for i, part in enumerate(np.ascontiguousarray(leaf)):
                arrays[f"base_model.model.model.layers.{i}.{name[7:]}.weight"] = part
    if len(ranks) != 1:
        raise ValueError(f"params must have adapters of one rank, got ranks {sorted(ranks)}")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": ranks.pop(),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(adapted),
    }
    config["lora_alpha"] = config["r"]  # no factor beside the product
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    save_file(arrays, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def load_adapters(folder, params):
    """The parameters with the adapters that PEFT or ``save_adapters`` wrote.

    PEFT's factor beside the product, lora_alpha / r, goes into lora_B.
    """
    folder = Path(folder)
    given = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    for name, want in (("peft_type", "LORA"), ("bias", "none"), ("use_dora", False)):
        if given.get(name, want) != want:
            raise ValueError(f"{name} in adapter_config.json must be {want}, got {given[name]!r}")
    rank = given["r"]
    factor = given["lora_alpha"] / (rank**0.5 if given.get("use_rslora") else rank)
    arrays, flat = load_file(folder / "adapter_model.safetensors"), flatten_dict(params, sep=".")
    named = re.compile(r"base_model\.model\.model\.layers\.(\d+)\.(.+\.)lora_([AB])\.weight")
    stacks = {}
    for name, array in arrays.items():
        found = named.fullmatch(name)
        if not found or f"layers.{found[2]}weight" not in flat:
            raise ValueError(f"adapter_model.safetensors must hold adapters of layers, got {name}")
        stack = stacks.setdefault(f"layers.{found[2]}lora_{found[3]}", {})
        stack[int(found[1])] = array * factor if found[3] == "B" else array
    for name, stack in stacks.items():
        depth, outputs, inputs = flat[f"{name[:-6]}weight"].shape
        want = (rank, inputs) if name.endswith("A") else (outputs, rank)
        if sorted(stack) != list(range(depth)) or {part.shape for part in stack.values()} != {want}:
            raise ValueError(f"{name} must be of shape {want} in each of {depth} layers")
        flat[name] = jnp.stack([jnp.asarray(stack[i], jnp.float32) for i in range(depth)])
    return unflatten_dict(flat, sep=".")


def _of_folder(path):
    if not path.is_dir():
        raise ValueError(f"path must be a folder of Hugging Face's or a .gguf file, got {path}")

    def file(name):
        if not (path / name).is_file():
            found = ", ".join(sorted(other.name for other in path.iterdir())) or "nothing"
            raise ValueError(f"{path} must hold {name}, and holds {found}")
        return path / name

    config = config_of(json.loads(file("config.json").read_text("utf-8")))
    tokenizer = tokenizers.Tokenizer.from_file(str(file("tokenizer.json")))
    index, shards = path / "model.safetensors.index.json", {"model.safetensors"}
    if index.is_file():
        shards = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    weights = {}
    for shard in map(file, sorted(shards)):
        with safe_open(shard, "np") as opened:
            names = list(opened.keys())
        weights |= {name: functools.partial(_tensor, shard, name) for name in names}
    return config, weights, tokenizer


def _tensor(file, name):
    """One array of a .safetensors file; bfloat16 is known to NumPy, since JAX is imported."""
    with safe_open(file, "np") as opened:
        return opened.get_tensor(name)


def _of_gguf(path):
    with needed(path.name, "language-models", "gguf"):
        import gguf
        from gguf.quants import dequantize
    if not path.is_file():
        raise ValueError(f"path must be a folder of Hugging Face's or a .gguf file, got {path}")
    reader = gguf.GGUFReader(path)

    def fact(name, default=None):
        field = reader.fields.get(name)
        return default if field is None else field.contents()

    kind = fact("general.architecture"), fact("tokenizer.ggml.pre")
    if kind != ("llama", "smollm"):
        raise ValueError(f"{path.name} must be of a llama with smollm's tokenizer, got {kind}")
    tokens, heads = fact("tokenizer.ggml.tokens"), fact("llama.attention.head_count")
    config = llama.Config(
        vocab_size=len(tokens),
        hidden_size=fact("llama.embedding_length"),
        intermediate_size=fact("llama.feed_forward_length"),
        num_hidden_layers=fact("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=fact("llama.attention.head_count_kv", heads),
        head_dim=fact("llama.attention.key_length", fact("llama.embedding_length") // heads),
        rope_theta=fact("llama.rope.freq_base", 10_000.0),
        rms_norm_eps=fact("llama.attention.layer_norm_rms_epsilon"),
        tie_word_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
    )

    def array(tensor):
        found = dequantize(tensor.data, tensor.tensor_type)
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            # llama.cpp turns neighbours against one another, Hugging Face's layout halves.
            found = found.reshape(-1, config.head_dim // 2, 2, found.shape[-1])
            found = found.swapaxes(1, 2).reshape(-1, found.shape[-1])
        return found

    weights = {}
    for tensor in reader.tensors:
        place, part, of = re.fullmatch(r"(blk\.\d+\.)?(\w+)\.(\w+)", tensor.name).groups()
        name = (place or "").replace("blk", "layers") + f"{GGUF.get(part, part)}.{of}"
        weights[name] = functools.partial(array, tensor)

    known = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(pair.split(" ")) for pair in fact("tokenizer.ggml.merges")]
    tokenizer = tokenizers.Tokenizer(models.BPE(known, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, in_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fact("tokenizer.ggml.token_type")
    control = gguf.TokenType.CONTROL
    tokenizer.add_special_tokens([t for t, k in zip(tokens, kinds, strict=True) if k == control])
    return config, weights, tokenizer
