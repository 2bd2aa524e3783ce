"""Fine-tunes a language model on private texts at a proven epsilon, by LoRA or in full.

`python examples/language_model/fine_tune.py model reviews.jsonl held_out.jsonl run`: the model a
folder of Hugging Face's (SmolLM2, Llama, Qwen) or a .gguf file; texts.py says what the others are.
"""

import argparse
from itertools import chain
from pathlib import Path

import canaries
import jax
import llama
import optax
import texts
import weights

import jaxdp

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("model", type=Path, help="a folder of Hugging Face's, or a .gguf file")
parser.add_argument("private", type=Path, help="private texts")
parser.add_argument("held_out", type=Path, help="public texts of the kind, to judge by")
parser.add_argument("folder", type=Path, help="of the run, where one of this name goes on")
parser.add_argument("--epsilon", type=float, default=8, help="8; inf: no privacy")
parser.add_argument("--delta", type=float, default=1e-5, help="1e-5; below one over --size")
parser.add_argument("--full", action="store_true", help="trains all parameters, not LoRA's")
parser.add_argument("--forward", action="store_true", help="DP-ZO: forward passes alone")
parser.add_argument("--user", type=int, default=0, metavar="K", help="protects a user's K texts")
parser.add_argument("--size", type=int, help="of texts, or users; counted if not given; public")
parser.add_argument("--steps", type=int, default=100, help="100")
parser.add_argument("--batch", type=int, default=64, help="64, expected records a step")
parser.add_argument("--rate", type=float, help="at first; 2e-3, in full 1e-4, forward 4e-3")
parser.add_argument("--length", type=int, default=64, help="64, tokens of the longest; public")
parser.add_argument("--buckets", type=int, nargs="*", help="shorter lengths; public")
parser.add_argument("--rows", type=int, default=16, help="16, of a physical batch")
parser.add_argument("--canaries", type=int, default=128, help="128, of each of two kinds")
parser.add_argument("--prompt", default="Review:", help="what new texts begin with")


def main(args):
    config, params, tokenizer = weights.load(args.model, "float32" if args.full else "bfloat16")
    if not args.full:
        params = llama.with_lora(jax.random.key(0), params, 8, ("q_proj", "v_proj"))
    public = texts.read(args.held_out, tokenizer, args.length)
    judge = texts.Judge(config, tokenizer, public, args.length)
    rooms = args.buckets and texts.rooms(public, [*args.buckets, args.length], args.batch)
    records = texts.read(args.private, tokenizer, args.length, ["user"] if args.user else [])
    source, loss = texts.source(records, args.length, args.user, rooms), texts.loss_of(config)
    size = args.size or len({r["user"] for r in records} if args.user else records)
    if args.delta >= 1 / size:  # else publishing one of them at random would be private
        raise ValueError(f"--delta must be below 1 / {size}, got {args.delta}")
    noise = {"epsilon": args.epsilon, "delta": args.delta, "steps": args.steps, "l2_clip_norm": 1}
    if args.forward:  # a difference along a direction is as large as the whole gradient
        noise["l2_clip_norm"] = 5
    if args.epsilon == float("inf"):
        noise = {"noise_multiplier": 0, "l2_clip_norm": 1e6}
    per_user = {"records_per_user": args.user} if args.user else {}
    mechanism = jaxdp.dp_sgd(batch_size=args.batch, dataset_size=size, **per_user, **noise)

    kinds = {}  # of canaries, each of which is put in by a coin that the run tosses and keeps
    if args.user:
        loss = jaxdp.clipping.user_loss(loss)
    elif args.canaries:
        kinds["rare words"] = canaries.new_tokens(tokenizer, args.canaries)
        made = (params, config, tokenizer, args.canaries, args.prompt)
        kinds["written by the model"] = canaries.synthetic(*made)
    rate = args.rate or (4e-3 if args.forward else 1e-4 if args.full else 2e-3)
    schedule = optax.linear_schedule(rate, rate / 10, args.steps)
    optimizer = None if args.forward else optax.adam(schedule)
    if args.forward:
        mechanism = jaxdp.optimizers.dp_zo(mechanism, schedule, width=1e-2)
    run = jaxdp.Run(
        args.folder,
        loss,
        mechanism,
        optimizer,
        source,
        params=params,
        trainable=None if args.full else lambda path: "lora" in path,
        delta=args.delta,
        evaluate=judge,
        every=max(1, args.steps // 5),
        physical_batch_size=args.rows,
        canaries=texts.source([*chain(*kinds.values())], args.length) if kinds else 0,
        canary_scores="last" if kinds else "trajectory",
    )
    models = {"before": params, "after": run.fit(args.steps)}
    if not args.full:
        weights.save_adapters(args.folder / "adapters", models["after"], args.model.name)
    end = next(iter(texts.end_of(tokenizer)), None)
    weights.save_merged(args.folder / "merged", config, models["after"], tokenizer, end)
    shown = {when: judge(found) for when, found in models.items()}
    for when, found in models.items():
        print(f"{when}:", *(f"{name} {value:.3f}" for name, value in shown[when].items()))
        print("  ", texts.written(found, config, tokenizer, args.prompt, jax.random.key(1)))
    print(f"epsilon {run.epsilon().upper:.3f} at delta {args.delta}", *run.unverified(), sep="\n")
    if kinds:
        shown["audited"] = run.audit().audited.epsilon
        print(f"audited, with 95% confidence: at least {shown['audited']:.3f}")
        shown["extracted"] = canaries.extracted(run, kinds, config, args.length, **models)
        print(canaries.table(shown["extracted"]))
    return shown


if __name__ == "__main__":
    main(parser.parse_args())
