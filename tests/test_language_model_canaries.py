"""The canaries of examples/language_model, and what is extracted of them, on a tiny random model."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tokenizers
from tokenizers import models

from jaxdp.runs import RunDirectory
from jaxdp.runs.canaries import write_coins

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "language_model"))

import canaries
import llama
import texts

CONFIG = llama.Config(64, 16, 32, 2, 2, 1, 8)
LENGTH = 12


@pytest.fixture(autouse=True, scope="module")
def as_users_run_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def made(as_users_run_it):
    """Parameters, and two kinds of canaries."""
    rng = np.random.default_rng(0)
    of = lambda *shape: {"weight": jnp.asarray(0.3 * rng.normal(size=shape), jnp.float32)}  # noqa: E731
    ones = lambda *shape: {"weight": jnp.ones(shape)}  # noqa: E731
    shapes = {"q_proj": (2, 16, 16), "k_proj": (2, 8, 16), "v_proj": (2, 8, 16)}
    mlp = {"gate_proj": of(2, 32, 16), "up_proj": of(2, 32, 16), "down_proj": of(2, 16, 32)}
    layers = {
        "input_layernorm": ones(2, 16),
        "post_attention_layernorm": ones(2, 16),
        "self_attn": {name: of(*shape) for name, shape in shapes.items()}
        | {"o_proj": of(2, 16, 16)},
        "mlp": mlp,
    }
    params = {"embed_tokens": of(64, 16), "norm": ones(16), "layers": layers}
    tokenizer = tokenizers.Tokenizer(models.BPE({chr(33 + i): i for i in range(64)}, []))
    kinds = {
        "new tokens": canaries.new_tokens(tokenizer, 16, prefix=2),
        "synthetic": canaries.synthetic(params, CONFIG, tokenizer, 16, "!", LENGTH, secret=2),
    }
    again = canaries.synthetic(params, CONFIG, tokenizer, 16, "!", LENGTH, secret=2)
    assert str(again) == str(kinds["synthetic"])
    return params, kinds


def test_canaries_are_like_the_texts_and_a_rare_token_is_in_no_other(made):
    _, kinds = made
    new, written = kinds.values()
    rare = [token for record in new for token in record["tokens"][:-1]]
    assert sorted(rare) == list(range(32, 64))
    assert {4, 5, 6, 7} >= {record["tokens"][-1] for record in new}
    assert {record["tokens"][0] for record in written} == {0}
    assert len({tuple(record["tokens"]) for record in written}) == 16
    rows = texts.source(new + written, LENGTH)
    assert (rows["tokens"].shape, rows["tokens_mask"].sum()) == ((32, LENGTH), 16 * 3 + 16 * LENGTH)
    np.testing.assert_array_equal(rows["answer"][[0, -1]], [[2, 3], [10, 12]])


def test_what_was_learnt_is_written_out_and_nothing_else(made, tmp_path):
    params, kinds = made
    records = [record for kind in kinds.values() for record in kind]
    coins = np.arange(32) % 2 == 0
    rows = jax.tree.map(lambda leaf: leaf[coins], texts.source(records, LENGTH))

    def loss(params, row):
        losses = llama.losses(params, row["tokens"], CONFIG)
        return jnp.mean(losses, where=row["tokens_mask"][1:])

    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(carry, _):
        params, state = carry
        slope = jax.grad(lambda p: jax.vmap(loss, (None, 0))(p, rows).mean())(params)
        updates, state = optimizer.update(slope, state)
        return (optax.apply_updates(params, updates), state), None

    (tuned, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), length=150)
    whole, ranks, losses = canaries.ranked(tuned, CONFIG, records, LENGTH)
    assert whole[coins].mean() > 0.8 > 0.2 > whole[~coins].mean()
    assert losses[coins].mean() < 1 < losses[~coins].mean()
    np.testing.assert_array_equal(whole, ranks == 1)
    likeliest = jax.jit(lambda tokens: llama.logits(tuned, tokens, CONFIG).argmax(-1))
    for i in (0, 1, 16, 17, 31):  # against greedy writing, token by token; what follows is not seen
        tokens, (place, end) = records[i]["tokens"], records[i]["answer"]
        ids = np.array(tokens[:place] + [0] * (LENGTH - place))
        for at in range(place, end):
            ids[at] = likeliest(ids)[at - 1]
        assert (ids[:end].tolist() == tokens) == whole[i]
    run = SimpleNamespace(directory=RunDirectory(tmp_path / "run"))
    run.directory.create()
    write_coins(run.directory, json.dumps({"included": coins.astype(int).tolist()}))
    rows = canaries.extracted(run, kinds, CONFIG, LENGTH, before=params, tuned=tuned)
    assert [row["kind"] for row in rows] == ["new tokens"] * 2 + ["synthetic"] * 2
    assert rows[1]["put in"] == f"{whole[:16][coins[:16]].sum()} of 8"
    assert rows[1]["put in, bits"] == 6.0  # of 64 words the likeliest
    assert canaries.table(rows).splitlines()[3].startswith("| new tokens | tuned | ")
