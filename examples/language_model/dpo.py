"""DPO: a language model learns privately which of two answers people prefer; a pair is a record.

`python examples/language_model/dpo.py model pairs.jsonl held_out_pairs.jsonl run`, lines of
{"prompt": ..., "chosen": ..., "rejected": ...}.
"""

import argparse

import jax
import jax.numpy as jnp
import llama
import optax
import texts
import weights

import jaxdp

BETA = 0.1
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
for name in ("model", "private", "held_out", "folder"):
    parser.add_argument(name)
parser.add_argument("--size", type=int, help="the number of pairs; public, also if counted")
DEFAULTS = {"epsilon": 4.0, "delta": 1e-5, "steps": 40, "batch": 64, "length": 64, "rate": 2e-3}
for name, value in DEFAULTS.items():
    parser.add_argument(f"--{name}", type=type(value), default=value)


def pairs(file, tokenizer, length):
    return {
        key: texts.source(texts.read(file, tokenizer, length, [key], "prompt", key), length)
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


def main(args):
    config, params, tokenizer = weights.load(args.model)
    params = llama.with_lora(jax.random.key(0), params, adapted=("q_proj", "v_proj"))
    loss, optimizer = loss_of(config), optax.adam(args.rate)
    private, public = (pairs(f, tokenizer, args.length) for f in (args.private, args.held_out))
    size = args.size or len(private["chosen"]["tokens"])
    if args.delta >= 1 / size:
        raise ValueError(f"--delta must be below 1 / {size}, got {args.delta}")
    mechanism = jaxdp.dp_sgd(
        epsilon=args.epsilon,
        delta=args.delta,
        steps=args.steps,
        l2_clip_norm=0.1,
        batch_size=args.batch,
        dataset_size=size,
    )
    lora = lambda path: "lora" in path  # noqa: E731
    run = jaxdp.Run(args.folder, loss, mechanism, optimizer, private, params=params, trainable=lora)
    tuned = run.fit()
    weights.save_adapters(f"{args.folder}/adapters", tuned, args.model)
    losses = jax.jit(lambda p: jax.lax.map(lambda r: loss(p, r), public, batch_size=32))
    print(f"loss of held-out pairs: before {losses(params).mean():.4f}")
    found = losses(tuned)
    print(f"after {found.mean():.4f}, ranked right {(found < jnp.log(2)).mean():.3f}")
    print(f"epsilon {run.epsilon().upper:.3f}", *run.unverified(), sep="\n")


if __name__ == "__main__":
    main(parser.parse_args())
