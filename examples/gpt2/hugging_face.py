"""Weights by the names of Hugging Face's GPT-2 files, to the parameters of gpt2.py and back."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

LAYERS = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
NAMES = {"wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias"}
NAMES |= {f"h.{part}.{kind}" for part in LAYERS for kind in ("weight", "bias")}
MASKS = r"h\.\d+\.attn\.(masked_)?bias"  # no parameters, but older files hold them


def params_of(weights):
    """The parameters in a state dict, name -> array or tensor, of GPT2Model or GPT2LMHeadModel.

    The number of heads is not among the weights: it is `n_head` in config.json, and width / 64 in
    all that were released.

    Raises:
        ValueError: a name is missing or unknown, or the output layer is not tied.
    """
    flat, stacks = {}, {}
    for name, given in weights.items():
        name, array = name.removeprefix("transformer."), np.asarray(given, np.float32)
        if layer := re.match(r"h\.(\d+)\.", name):
            if not re.fullmatch(MASKS, name):
                stacks.setdefault(f"h.{name[layer.end() :]}", {})[int(layer[1])] = array
        else:
            flat[name] = array
    head = flat.pop("lm_head.weight", None)
    flat |= {name: np.stack([part[i] for i in range(len(part))]) for name, part in stacks.items()}
    if wrong := sorted(NAMES ^ set(flat)):
        raise ValueError(f"weights must be a GPT-2's, but {wrong} are missing or unknown")
    if head is not None and not np.array_equal(head, flat["wte.weight"]):
        raise ValueError("lm_head.weight must be wte.weight, to which GPT-2 ties it, got another")
    return jax.tree.map(jnp.asarray, unflatten_dict(flat, sep="."))


def weights_of(params):
    """The state dict of a GPT2LMHeadModel, in NumPy; adapters are added to their matrices."""
    flat = {name: np.asarray(leaf) for name, leaf in flatten_dict(params, sep=".").items()}
    weights = {"lm_head.weight": flat["wte.weight"]}
    for name in NAMES:
        array, lora = flat[name], name.replace("weight", "lora_")
        if f"{lora}a" in flat:
            array = array + flat[f"{lora}a"] @ flat[f"{lora}b"]
        if name.startswith("h."):
            weights |= {f"transformer.h.{i}.{name[2:]}": part for i, part in enumerate(array)}
        else:
            weights[f"transformer.{name}"] = array
    return weights
