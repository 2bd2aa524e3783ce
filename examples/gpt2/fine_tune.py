"""Fine-tunes a small GPT-2 on private text at a proven epsilon, by LoRA and in full; audits both.

`python examples/gpt2/fine_tune.py` takes some minutes on two CPU cores, `--quick` seconds. The
network is trained on public text first; weights of yours load by hugging_face.py.
"""

import argparse
import dataclasses

import gpt2
import jax
import jax.numpy as jnp
import numpy as np
import optax
import texts

import jaxdp
from jaxdp import audit

DELTA, HEADS, VALID, ROWS = 1e-5, 4, 1_024, texts.RARE


@dataclasses.dataclass(frozen=True)
class Settings:
    width: int = 64
    layers: int = 2
    pretraining: int = 500  # steps of 32 texts
    records: int = 10_000  # private ones
    batch_size: int = 512
    steps: int = 30
    epsilon: float = 8.0
    clip: float = 0.2  # well below the gradients' norms: then all records pull alike
    lora: tuple = (1e-2, 1e-2)  # rates: private, without privacy
    full: tuple = (3e-3, 5e-3)


QUICK = Settings(32, 2, 120, 2_000, 256, 16, lora=(3e-2, 3e-2), full=(5e-3, 1e-2))


def losses(params, record):
    """Cross-entropies [LENGTH - 1] of the next tokens, and which of them count."""
    tokens, mask = record["tokens"], record["mask"]
    logits = gpt2.logits(params, tokens[:-1], mask[:-1], HEADS)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[1:]), mask[1:]


def loss(params, record):
    """The mean over the record's own tokens: what padding holds is neither read nor counted."""
    each, mask = losses(params, record)
    return jnp.sum(each, where=mask) / jnp.maximum(jnp.sum(mask), 1)


@jax.jit
def losses_of_rows(params, records):
    return jax.vmap(losses, (None, 0))(params, records)


def all_losses(params, records):
    """Cross-entropies [N, LENGTH - 1], and which of them count; N a multiple of ROWS."""
    found = [
        losses_of_rows(params, {key: array[i : i + ROWS] for key, array in records.items()})
        for i in range(0, len(records["mask"]), ROWS)
    ]
    return [np.concatenate(part) for part in zip(*found, strict=True)]


def perplexity(params, records):
    each, mask = all_losses(params, records)
    return float(np.exp(np.mean(each, where=mask)))


def canaries(rng):
    """Public random records: three tokens and a rare one, another in each.

    Rare tokens tell most of whether a record took part (Panda et al. 2025, arXiv:2503.06808).
    """
    tokens = np.zeros((texts.RARE, texts.LENGTH), np.int32)
    tokens[:, 1:4] = rng.integers(1, texts.SIZE - texts.RARE, (texts.RARE, 3))
    tokens[:, 4] = np.arange(texts.SIZE - texts.RARE, texts.SIZE)
    return {"tokens": tokens, "mask": np.arange(texts.LENGTH) < np.full((texts.RARE, 1), 5)}


def audited(before, after, records, coins):
    """The lower bound on epsilon from how much better the rare tokens are foreseen than before.

    Valid whatever the scores, for each canary took part by its own fair coin (Steinke, Nasr and
    Jagielski 2023, arXiv:2305.08846).
    """
    told = [all_losses(params, records)[0][:, 3] for params in (before, after)]
    return audit.audit_one_run(told[0] - told[1], coins, DELTA)


def trained(params, records, steps, optimizer, rows=32):
    """Ordinary training, without privacy."""

    @jax.jit
    def step(params, opt_state, batch):
        def mean_loss(params):
            return jax.vmap(loss, (None, 0))(params, batch).mean()

        updates, opt_state = optimizer.update(jax.grad(mean_loss)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    opt_state, rng, size = optimizer.init(params), np.random.default_rng(0), len(records["mask"])
    epochs = np.concatenate([rng.permutation(size) for _ in range(steps * rows // size + 1)])
    for i in range(steps):
        chosen = epochs[i * rows : (i + 1) * rows]
        batch = {key: array[chosen] for key, array in records.items()}
        params, opt_state = step(params, opt_state, batch)
    return params


def privately_trained(params, records, part, rate, settings):
    """The trainer, and the parameters after all steps on those whose path has `part` in it."""
    mechanism = jaxdp.dp_sgd(
        epsilon=settings.epsilon,
        delta=DELTA,
        steps=settings.steps,
        l2_clip_norm=settings.clip,
        batch_size=settings.batch_size,
        dataset_size=settings.records,  # declared: canaries do not count, so no coin shows in it
    )
    optimizer = optax.adam(optax.linear_schedule(rate, rate / 5, settings.steps))
    trainer = jaxdp.Trainer(
        loss, mechanism, optimizer, records, trainable=lambda path: part in path
    )
    state = trainer.init(params)
    for batch in trainer.batches():
        state, _ = trainer.step(state, batch)
    return trainer, state.params


def openly_trained(params, records, part, rate, settings):
    """The same texts as often, in smaller batches: without noise nothing asks for large ones."""
    steps = settings.steps * settings.batch_size // 32
    frozen = jax.tree_util.tree_map_with_path(
        lambda path, _: part not in jax.tree_util.keystr(path), params
    )
    optimizer = optax.adam(optax.linear_schedule(rate, rate / 5, steps))
    optimizer = optax.selective_transform(optimizer, freeze_mask=frozen)
    return trained(params, records, steps, optimizer)


def pretrained(records, settings):
    shape = (texts.SIZE, texts.LENGTH, settings.width, settings.layers)
    rate = optax.warmup_cosine_decay_schedule(0, 5e-3, 20, settings.pretraining, 1e-4)
    params = gpt2.init(jax.random.key(0), *shape)
    return trained(params, records, settings.pretraining, optax.adamw(rate))


def main(settings):
    public, private = texts.collected()
    tokenizer = texts.Tokenizer(public)
    valid = tokenizer.records(private[:VALID])
    records = tokenizer.records(private[VALID : VALID + settings.records])
    assert len(records["mask"]) == settings.records
    inserted = canaries(np.random.default_rng(0))
    coins = np.random.default_rng().random(texts.RARE) < 0.5  # secret, and tossed once
    records = {key: np.append(array, inserted[key][coins], 0) for key, array in records.items()}

    base = pretrained(tokenizer.records(public), settings)
    print(f"{sum(leaf.size for leaf in jax.tree.leaves(base)):,} parameters, from public text")
    print(f"perplexity on private text: {perplexity(base, valid):.1f} before\n")
    print("trained  how              perplexity  epsilon: proven  audited, at least")
    lora = gpt2.with_lora(jax.random.key(1), base)
    for name, start, part, (rate, open_rate) in (
        ("LoRA", lora, "lora", settings.lora),
        ("in full", base, "", settings.full),
    ):
        trainer, params = privately_trained(start, records, part, rate, settings)
        openly = openly_trained(start, records, part, open_rate, settings)
        for how, found, proven in (
            ("private", params, trainer.epsilon().upper),
            ("without privacy", openly, np.inf),
        ):
            shown = audited(start, found, inserted, coins).epsilon
            told = f"{perplexity(found, valid):11.1f} {proven:16.3f} {shown:18.2f}"
            print(f"{name:8} {how:15} {told}")
        print(*(f"    {line}" for line in trainer.unverified() or ["nothing on trust"]), sep="\n")
    most = audit.audit_one_run(coins.astype(float), coins, DELTA).epsilon
    print(f"delta {DELTA}; all {texts.RARE} coins guessed right would show {most:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less of everything, in seconds")
    main(QUICK if parser.parse_args().quick else Settings())
