"""GPT-2 in plain JAX. Parameters are named as in the released weights; layers are stacked.

A text is int32 [T] with a mask bool [T] that is False where it is padded; there is no batch axis,
for a private loss sees one example.
"""

import math

import jax
import jax.numpy as jnp


def init(key, vocabulary=50_257, places=1_024, width=768, layers=12):
    """Random parameters as GPT-2 begins with; the defaults make GPT-2 small, 124 million."""
    keys = iter(jax.random.split(key, 6))

    def norm(*stack):
        return {"weight": jnp.ones((*stack, width)), "bias": jnp.zeros((*stack, width))}

    def table(rows):
        return {"weight": 0.02 * jax.random.normal(next(keys), (rows, width))}

    def linear(inputs, outputs, std=0.02):
        weight = std * jax.random.normal(next(keys), (layers, inputs, outputs))
        return {"weight": weight, "bias": jnp.zeros((layers, outputs))}

    last = 0.02 / math.sqrt(2 * layers)  # smaller where layers add to the stream
    attn = {"c_attn": linear(width, 3 * width), "c_proj": linear(width, width, last)}
    mlp = {"c_fc": linear(width, 4 * width), "c_proj": linear(4 * width, width, last)}
    h = {"ln_1": norm(layers), "attn": attn, "ln_2": norm(layers), "mlp": mlp}
    return {"wte": table(vocabulary), "wpe": table(places), "h": h, "ln_f": norm()}


def with_lora(key, params, rank=8):
    """The same parameters with `lora_a @ lora_b`, zero at first, beside every matrix of a layer."""
    h = dict(params["h"])
    for i, (part, name) in enumerate(
        [("attn", "c_attn"), ("attn", "c_proj"), ("mlp", "c_fc"), ("mlp", "c_proj")]
    ):
        layers, inputs, outputs = h[part][name]["weight"].shape
        a = jax.random.normal(jax.random.fold_in(key, i), (layers, inputs, rank))
        lora = {"lora_a": a / math.sqrt(inputs), "lora_b": jnp.zeros((layers, rank, outputs))}
        h[part] = {**h[part], name: {**h[part][name], **lora}}
    return {**params, "h": h}


def layer_norm(p, x):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * p["weight"] + p["bias"]


def linear(p, x):
    out = x @ p["weight"] + p["bias"]
    # Two products, not a changed weight: so no gradient of an adapter is held for each example.
    return out + x @ p["lora_a"] @ p["lora_b"] if "lora_a" in p else out


def block(p, x, mask, heads):
    places, width = x.shape
    qkv = linear(p["attn"]["c_attn"], layer_norm(p["ln_1"], x))
    query, key, value = qkv.reshape(places, 3, heads, width // heads).swapaxes(0, 1)
    seen = jnp.tril(jnp.broadcast_to(mask, (places, places)))  # what came before, and no padding
    mixed = jax.nn.dot_product_attention(query, key, value, mask=seen)
    x = x + linear(p["attn"]["c_proj"], mixed.reshape(places, width))
    up = jax.nn.gelu(linear(p["mlp"]["c_fc"], layer_norm(p["ln_2"], x)), approximate=True)
    return x + linear(p["mlp"]["c_proj"], up)


def logits(params, tokens, mask, heads):
    """Logits [T, vocabulary] of the next token at every place of a text [T]."""
    places = jnp.maximum(jnp.cumsum(mask) - 1, 0)  # padding is not counted, on either side
    x = params["wte"]["weight"][tokens] + params["wpe"]["weight"][places]

    @jax.checkpoint  # a layer's inside is computed again in the backward pass, not kept
    def layer(x, p):
        return block(p, x, mask, heads), None

    x, _ = jax.lax.scan(layer, x, params["h"])
    return layer_norm(params["ln_f"], x) @ params["wte"]["weight"].T
