"""Fine-tunes a language model on private texts at a proven epsilon, by LoRA or in full.

`python examples/language_model/fine_tune.py model reviews.jsonl held_out.jsonl run`: the model a
folder of Hugging Face's (SmolLM2, Llama, Qwen) or a .gguf file; texts.py says what the others are.
"""

import argparse
import math
from pathlib import Path

import jax
import llama
import optax
import texts
import weights

import jaxdp

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("model", type=Path, help="a folder of Hugging Face's, or a .gguf file")
parser.add_argument("private", type=Path, help="private texts, JSON Lines")
parser.add_argument("held_out", type=Path, help="public texts of the kind, to judge by")
parser.add_argument("folder", type=Path, help="of the run, where one of this name goes on")
parser.add_argument("--epsilon", type=float, default=8.0, help="inf trains without privacy")
parser.add_argument("--delta", type=float, default=1e-5)
parser.add_argument("--full", action="store_true", help="trains all parameters, not LoRA's")
parser.add_argument("--user", type=int, default=0, metavar="K", help="protects a user's K texts")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch", type=int, default=64, help="the expected number of records a step")
parser.add_argument("--rate", type=float, default=None)
parser.add_argument("--length", type=int, default=64, help="tokens of the longest text; public")
parser.add_argument("--rank", type=int, default=8)
parser.add_argument("--rows", default="auto", help="records of a physical batch")
parser.add_argument("--prompt", default="Review:", help="what new texts begin with")


def main(args):
    config, params, tokenizer = weights.load(args.model)
    if args.full:
        params = jax.tree.map(lambda leaf: leaf.astype("float32"), params)
    else:
        params = llama.with_lora(jax.random.key(0), params, args.rank, ("q_proj", "v_proj"))
    records = texts.read(args.private, tokenizer, args.length)
    source = texts.source(records, args.length, texts_per_user=args.user)
    judge = texts.Judge(config, tokenizer, texts.read(args.held_out, tokenizer, args.length), args.length)
    loss = texts.loss_of(config)

    private = args.epsilon < math.inf
    noise = (
        {"epsilon": args.epsilon, "delta": args.delta, "l2_clip_norm": 1.0}
        if private
        else {"noise_multiplier": 0.0, "l2_clip_norm": 1e6}
    )
    mechanism = jaxdp.dp_sgd(
        steps=args.steps,
        batch_size=args.batch,
        dataset_size=len(jaxdp.sampling.as_source(source)),
        **noise,
    )
    rate = args.rate or (1e-4 if args.full else 1e-3)
    run = jaxdp.Run(
        args.folder,
        loss,
        mechanism,
        optax.adam(optax.linear_schedule(rate, rate / 10, args.steps)),
        source,
        params=params,
        trainable=None if args.full else lambda path: "lora" in path,
        delta=args.delta,
        evaluate=judge,
        every=25,
        physical_batch_size=args.rows if args.rows == "auto" else int(args.rows),
    )
    before, tuned = judge(params), run.fit()
    for when, found, shown in (("before", params, before), ("after", tuned, judge(tuned))):
        print(when, *(f"{name} {value:.3f}" for name, value in shown.items()))
        print(" ", texts.written(found, config, tokenizer, args.prompt, jax.random.key(1)))
    print(f"epsilon {run.epsilon().upper:.3f} at delta {args.delta}")
    print(*run.unverified(), sep="\n")
    if not args.full:
        weights.save_adapters(args.folder / "adapters", tuned, f"{args.model}")
    weights.save_merged(args.folder / "merged", config, tuned, tokenizer)


if __name__ == "__main__":
    main(parser.parse_args())
