"""Public canaries for the audit of a language model, and what a stranger extracts of them.

A canary is a record like those of texts.py: ``tokens``, of which those of the ``answer`` are its
secret. ``jaxdp.Run(canaries=texts.source(records, length))`` puts each in by a coin of its own. All
are made by a seed, from a public model and its tokenizer alone: of no private text.
"""

import jax
import jax.numpy as jnp
import llama
import numpy as np
import texts

from jaxdp.runs.canaries import coins_of


def new_tokens(tokenizer, count, prefix=4, seed=0):
    """Canaries of rare tokens that no other canary has, and of a frequent one, the secret.

    Panda et al. (2025, arXiv:2503.06808) add tokens to the vocabulary. LoRA leaves the table of
    tokens as it is, and hardly learns to write one that the model hardly ever wrote; but it learns
    what follows one. So the prefix is rare: tokens that were merged last, where the tokenizer was
    made.
    """
    rng, size = np.random.default_rng(seed), tokenizer.get_vocab_size()
    rare = rng.permutation(np.arange(size - count * prefix, size)).reshape(count, prefix)
    secrets = rng.integers(size // 16, size // 8, (count, 1))
    return [canary(tokens, 1) for tokens in np.hstack([rare, secrets]).tolist()]


def canary(tokens, secret):
    """A record whose last ``secret`` tokens are the secret, in the place of an answer."""
    return {"tokens": tokens, "answer": np.array([len(tokens) - secret, len(tokens)], np.int32)}


def synthetic(
    params, config, tokenizer, count, prompt, length=12, secret=4, temperature=1.5, seed=0
):
    """Canaries that the model wrote before it saw a private text; the last tokens are the secret.

    At a high temperature, so that each is unlike all others (Mitchell et al. 2026,
    arXiv:2606.10481).
    """
    prompt = tokenizer.encode(prompt).ids
    rows = np.zeros((count, length), np.int32)
    rows[:, : len(prompt)] = prompt

    @jax.jit
    def drawn(params, rows, place, key):
        def scores(tokens):
            x = llama.hidden(params, tokens, config)
            return llama.linear(llama.head(params), x[place - 1][None])[0]

        found = jax.lax.map(scores, rows, batch_size=32)
        return jax.random.categorical(key, found / temperature)

    for place in range(len(prompt), length):
        key = jax.random.fold_in(jax.random.key(seed), place)
        rows[:, place] = drawn(params, rows, place, key)
    return [canary(row.tolist(), secret) for row in rows]


def ranked(params, config, records, length):
    """What prompting with the canaries' prefixes gives, each [m]: written out, ranks, losses.

    Written out is True where greedy writing continues the prefix by the very secret: where each of
    its tokens is the likeliest behind those before it, which one look at the canary tells. The rank
    is that of the secret's least likely token among the vocabulary, 1 the likeliest: how many
    guesses a stranger needs there. Losses are mean nats a token of the secret.
    """

    def one(params, record):
        targets, place = record["tokens"][1:], jnp.arange(1, length)
        x = llama.hidden(params, record["tokens"][:-1], config)
        scores = llama.linear(llama.head(params), x)
        right = jnp.take_along_axis(scores, targets[:, None], -1)
        secret = (record["answer"][0] <= place) & (place < record["answer"][1])
        ranks = jnp.max(1 + jnp.sum(scores > right, -1), where=secret, initial=1)
        each = jax.nn.logsumexp(scores, -1) - right[:, 0]
        return ranks == 1, ranks, jnp.mean(each, where=secret)

    @jax.jit
    def every(params, rows):
        return jax.lax.map(lambda record: one(params, record), rows, batch_size=8)

    return jax.device_get(every(params, texts.source(records, length)))


def extracted(run, kinds, config, length, **models):
    """A dict for each kind of canary and each model: how many secrets are written out, exposure.

    Exposure is log2 of the vocabulary's size less log2 of the rank, the median (Carlini et al.
    2019, arXiv:1802.08232), of the secret's least likely token: about 1 bit where nothing is
    known. Beside those put in stand those left out: what is found without a leak.

    Args:
        run: that was audited: which canaries took part is the auditor's secret before.
        kinds: records by the name of their kind, in the order in which the run had them.
        config: of the models.
        length: of the longest record.
        models: parameters by name.
    """
    ends, found = np.cumsum([len(records) for records in kinds.values()]), []
    coins = coins_of(run.directory, int(ends[-1]))
    for (kind, records), put in zip(kinds.items(), np.split(coins, ends[:-1]), strict=True):
        for model, params in models.items():
            whole, ranks, _ = ranked(params, config, records, length)
            bits = np.log2(config.vocab_size) - np.log2(ranks)
            row = {"kind": kind, "model": model}
            for name, side in (("put in", put), ("left out", ~put)):
                row[name] = f"{whole[side].sum()} of {side.sum()}"
                row[f"{name}, bits"] = float(np.median(bits[side])) if side.any() else None
            found.append(row)
    return found


def table(rows):
    """Rows of ``extracted`` as text."""
    lines = [
        "| canaries | model | put in: written out | exposure, bits | left out: written out "
        "| exposure, bits |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [f"{cell:.1f}" if isinstance(cell, float) else f"{cell}" for cell in row.values()]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
