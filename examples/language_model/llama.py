"""Llama and its kind (SmolLM2, TinyLlama, Qwen 2 and 3) in plain JAX, for one text at a time.

Parameters are named as in Hugging Face's files, and the layers are stacked: one array of
``layers.self_attn.q_proj.weight`` is [layers, outputs, inputs]. A text is int32 [T]; there is no
batch axis, for a private loss sees one example.

The network is that of Touvron et al. 2023 (arXiv:2302.13971, 2.2), with grouped queries (Ainslie et
al. 2023, arXiv:2305.13245); Qwen 3 normalises queries and keys (arXiv:2505.09388, 2).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of a network; ``weights.config_of`` reads it from a config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    rope_scaling: tuple = ()  # Llama 3.1's: factor, low and high frequency factor, old length
    biases: tuple = ()  # of ADAPTED, those with a bias: in Qwen 2 q_proj, k_proj and v_proj
    tie_word_embeddings: bool = True  # the output layer is the table of tokens
    model_type: str = "llama"


def init(key, config):
    """Random float32 parameters: a small network to try things on, and the shapes of any."""
    width, inside, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    draws = iter(jax.random.split(key, 9))

    def matrix(*shape):
        return {"weight": jax.random.normal(next(draws), shape) / math.sqrt(shape[-1])}

    def projection(name, outputs, inputs):
        depth = config.num_hidden_layers
        bias = {"bias": jnp.zeros((depth, outputs))} if name in config.biases else {}
        return matrix(depth, outputs, inputs) | bias

    def norm(*shape):
        return {"weight": jnp.ones(shape)}

    layers = {
        "input_layernorm": norm(config.num_hidden_layers, width),
        "self_attn": {
            "q_proj": projection("q_proj", queries, width),
            "k_proj": projection("k_proj", keys, width),
            "v_proj": projection("v_proj", keys, width),
            "o_proj": projection("o_proj", width, queries),
        },
        "post_attention_layernorm": norm(config.num_hidden_layers, width),
        "mlp": {
            "gate_proj": projection("gate_proj", inside, width),
            "up_proj": projection("up_proj", inside, width),
            "down_proj": projection("down_proj", width, inside),
        },
    }
    if config.model_type == "qwen3":
        layers["self_attn"] |= {
            n: norm(config.num_hidden_layers, head) for n in ("q_norm", "k_norm")
        }
    params = {"embed_tokens": matrix(config.vocab_size, width), "layers": layers}
    if not config.tie_word_embeddings:
        params["lm_head"] = matrix(config.vocab_size, width)
    return params | {"norm": norm(width)}


def rms_norm(p, x, eps):
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps) * p["weight"]


@jax.custom_vjp
def product(x, weight):
    """``x @ weight.T``: in the weight's precision, added up in float32, forwards and backwards."""
    x = x.astype(weight.dtype)
    return jnp.einsum("ti,oi->to", x, weight, preferred_element_type=jnp.float32)


def _product_forwards(x, weight):
    if weight.perturbed:  # else it would stay as it is, in silence
        raise ValueError(f"weights that are trained must be float32, got {weight.value.dtype}")
    return product(x.value, weight.value), weight.value


def _product_backwards(weight, ct):
    ct = ct.astype(weight.dtype)
    return jnp.einsum("to,oi->ti", ct, weight, preferred_element_type=jnp.float32), None


product.defvjp(_product_forwards, _product_backwards, symbolic_zeros=True)


def linear(p, x):
    weight = p["weight"]
    out = x @ weight.T if weight.dtype == jnp.float32 else product(x, weight)
    if "bias" in p:
        out = out + p["bias"]
    # Two products, not a changed weight: so no gradient of an adapter is held for each example.
    return out + (x @ p["lora_A"].T) @ p["lora_B"].T if "lora_A" in p else out


def rotary(config, length):
    """Cosines and sines [T, head_dim] of the places (Su et al. 2021, arXiv:2104.09864, 3.2.2)."""
    half = config.head_dim // 2
    frequencies = config.rope_theta ** (-jnp.arange(half) / half)
    if config.rope_scaling:  # long waves are stretched, short ones kept, a ramp between: as
        # `apply_scaling` of github.com/meta-llama/llama-models, models/llama3/model.py, does
        factor, low, high, old = config.rope_scaling
        turns = old * frequencies / (2 * math.pi)
        keep = jnp.clip((turns - low) / (high - low), 0, 1)
        frequencies = frequencies * (keep + (1 - keep) / factor)
    angles = jnp.arange(length)[:, None] * jnp.concatenate([frequencies] * 2)
    return jnp.cos(angles), jnp.sin(angles)


def rotated(x, cos, sin):
    """``x`` [T, heads, head_dim], its two halves turned against one another by the place."""
    first, second = jnp.split(x, 2, -1)
    return x * cos[:, None] + jnp.concatenate([-second, first], -1) * sin[:, None]


def attention(p, x, config, turn):
    length = len(x)
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    query = linear(p["q_proj"], x).reshape(length, heads, -1)
    key = linear(p["k_proj"], x).reshape(length, shared, -1)
    value = linear(p["v_proj"], x).reshape(length, shared, -1)
    if "q_norm" in p:  # Qwen 3
        query = rms_norm(p["q_norm"], query, config.rms_norm_eps)
        key = rms_norm(p["k_norm"], key, config.rms_norm_eps)
    # Padding stands at the end, so that what comes before a place is never padding.
    mixed = jax.nn.dot_product_attention(
        rotated(query, *turn), rotated(key, *turn), value, is_causal=True
    )
    return linear(p["o_proj"], mixed.reshape(length, -1))


def hidden(params, tokens, config):
    """What the last layer says of every place [T, hidden_size], from tokens [T]."""
    turn = rotary(config, len(tokens))
    x = params["embed_tokens"]["weight"][tokens].astype(jnp.float32)
    short = jax.tree.map(lambda w: w if w.dtype == jnp.bfloat16 else None, params["layers"])
    others = jax.tree.map(lambda w: None if w.dtype == jnp.bfloat16 else w, params["layers"])

    @jax.checkpoint  # a layer's inside is computed again in the backward pass, not kept
    def layer(x, given):
        # A layer of bfloat16 is taken here: XLA's CPU backend would make float32 copies of all that
        # a loop takes apart, once before it, but not where a barrier depends on the loop.
        place, p = given
        stacks, _ = jax.lax.optimization_barrier((short, place))
        taken = lambda w, stack: stack[place] if w is None else w  # noqa: E731
        p = jax.tree.map(taken, p, stacks, is_leaf=lambda w: w is None)
        x = x + attention(
            p["self_attn"], rms_norm(p["input_layernorm"], x, config.rms_norm_eps), config, turn
        )
        y = rms_norm(p["post_attention_layernorm"], x, config.rms_norm_eps)
        up = jax.nn.silu(linear(p["mlp"]["gate_proj"], y)) * linear(p["mlp"]["up_proj"], y)
        return x + linear(p["mlp"]["down_proj"], up), None

    x, _ = jax.lax.scan(layer, x, (jnp.arange(config.num_hidden_layers), others))
    return rms_norm(params["norm"], x, config.rms_norm_eps)


def head(params):
    """The output layer: its own, or the table of tokens."""
    return params.get("lm_head", params["embed_tokens"])


def logits(params, tokens, config):
    """Logits [T, vocab_size] of the next token at every place."""
    return linear(head(params), hidden(params, tokens, config))


def losses(params, tokens, config, chunk=16):
    """Cross-entropies [T - 1] of the next tokens; logits of ``chunk`` places at a time."""
    if len(tokens) < 2:
        raise ValueError(f"tokens must be two or more, got {len(tokens)}")
    x, targets = hidden(params, tokens[:-1], config), tokens[1:]
    chunk = min(chunk, len(x))
    missing = -len(x) % chunk
    x = jnp.pad(x, ((0, missing), (0, 0))).reshape(-1, chunk, x.shape[-1])
    targets = jnp.pad(targets, (0, missing)).reshape(-1, chunk)

    @jax.checkpoint
    def places(_, given):
        x, targets = given
        scores = linear(head(params), x)
        right = jnp.take_along_axis(scores, targets[:, None], -1)[:, 0]
        return None, jax.nn.logsumexp(scores, -1) - right

    return jax.lax.scan(places, None, (x, targets))[1].reshape(-1)[: len(tokens) - 1]


def with_lora(key, params, rank=8, adapted=ADAPTED):
    """The same parameters with float32 adapters beside the matrices that ``adapted`` names.

    The output of a matrix gains ``x @ lora_A.T @ lora_B.T``; lora_B is zero at first (Hu et al.
    2021, arXiv:2106.09685, 4.1).
    """
    if rank < 1 or not set(adapted) <= set(ADAPTED):
        raise ValueError(f"rank must be 1 or more, adapted of {ADAPTED}, got {rank} and {adapted}")
    layers = params["layers"]
    for part in ("self_attn", "mlp"):
        for name in sorted(layers[part].keys() & set(adapted)):
            p = layers[part][name]
            key, one = jax.random.split(key)
            depth, outputs, inputs = p["weight"].shape
            a = jax.random.uniform(one, (depth, rank, inputs), minval=-1, maxval=1)
            lora = {"lora_A": a / math.sqrt(inputs), "lora_B": jnp.zeros((depth, outputs, rank))}
            layers = {**layers, part: {**layers[part], name: {**p, **lora}}}
    return {**params, "layers": layers}


def without_lora(params):
    """The same parameters without adapters."""
    if not isinstance(params, dict):
        return params
    return {name: without_lora(part) for name, part in params.items() if "lora" not in name}
