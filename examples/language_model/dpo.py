"""DPO: a language model learns privately which of two answers people prefer; a pair is a record.

`python dpo.py model pairs.jsonl held_out_pairs.jsonl run`; keys prompt, chosen, rejected.
"""

import sys

import jax
import jax.numpy as jnp
import llama
import optax
import texts
import weights

import jaxdp

STEPS, BATCH, LENGTH, BETA, RATE = 40, 64, 64, 0.1, 2e-3


def pairs(file, tokenizer):
    return {
        key: texts.source(texts.read(file, tokenizer, LENGTH, [key], "prompt", key), LENGTH)
        for key in ("chosen", "rejected")
    }


def loss_of(config):
    """The loss of a pair (Rafailov et al. 2023, arXiv:2305.18290v3, equation 7)."""

    def log_prob(params, text):
        return -jnp.sum(llama.losses(params, text["tokens"], config), where=texts.answered(text))

    def loss(params, pair):
        reference = llama.without_lora(params)
        gain = {key: log_prob(params, t) - log_prob(reference, t) for key, t in pair.items()}
        return jax.nn.softplus(BETA * (gain["rejected"] - gain["chosen"]))

    return loss


def main(model, private, held_out, folder, epsilon=4.0):
    config, params, tokenizer = weights.load(model)
    params = llama.with_lora(jax.random.key(0), params, adapted=("q_proj", "v_proj"))
    loss, private, held_out = loss_of(config), pairs(private, tokenizer), pairs(held_out, tokenizer)
    budget = {"epsilon": float(epsilon), "delta": 1e-5, "steps": STEPS, "l2_clip_norm": 0.1}
    size, lora = len(private["chosen"]["tokens"]), lambda path: "lora" in path
    mechanism = jaxdp.dp_sgd(batch_size=BATCH, dataset_size=size, **budget)
    optimizer = optax.adam(RATE)
    run = jaxdp.Run(folder, loss, mechanism, optimizer, private, params=params, trainable=lora)
    tuned = run.fit()
    losses = jax.jit(lambda p: jax.lax.map(lambda r: loss(p, r), held_out, batch_size=32))
    for when, found in (("before", losses(params)), ("after", losses(tuned))):
        print(f"{when}: loss {found.mean():.4f}, ranked right {(found < jnp.log(2)).mean():.3f}")
    print(f"epsilon {run.epsilon().upper:.3f}", *run.unverified(), sep="\n")
    weights.save_adapters(f"{folder}/adapters", tuned, f"{model}")


if __name__ == "__main__":
    main(*sys.argv[1:])
