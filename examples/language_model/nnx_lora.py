"""LoRA of a Flax nnx language model: what is nnx.LoRAParam is trained, all else is frozen."""

import jax
import optax
from flax import nnx

import jaxdp

texts = jax.random.randint(jax.random.key(0), (11_000, 9), 1, 4).cumsum(axis=1) % 32  # 3 5 6 9 ...


class Model(nnx.Module):  # yours: with public weights
    def __init__(self, rngs):
        self.embed, self.norm = nnx.Embed(32, 64, rngs=rngs), nnx.LayerNorm(64, rngs=rngs)
        self.attend = nnx.LoRALinear(64, 3 * 64, lora_rank=4, rngs=rngs)
        self.out = nnx.LoRALinear(64, 64, lora_rank=4, rngs=rngs)

    def loss(self, text):  # of one, int [T]: there is no batch axis
        x = self.embed(text[:-1])
        q, k, v = self.attend(self.norm(x)).reshape(-1, 3, 4, 16).swapaxes(0, 1)
        x += jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        logits = self.embed.attend(self.norm(x + self.out(nnx.gelu(self.norm(x)))))
        return optax.softmax_cross_entropy_with_integer_labels(logits, text[1:]).mean()


def loss_fn(params, text):
    return nnx.merge(graph, params["lora"], params["base"], copy=True).loss(text)


graph, lora, base = nnx.split(Model(nnx.Rngs(0)), nnx.LoRAParam, ...)
budget = {"epsilon": 3, "delta": 1e-5, "steps": 40, "l2_clip_norm": 1.0}
mechanism = jaxdp.dp_sgd(batch_size=512, dataset_size=10_000, **budget)
train, trainable = texts[:10_000], {"lora": True, "base": False}
trainer = jaxdp.Trainer(loss_fn, mechanism, optax.adam(0.03), train, trainable=trainable)
state = trainer.init({"lora": lora, "base": base})
for batch in trainer.batches():
    state, _ = trainer.step(state, batch)
for adapters in (lora, state.params["lora"]):  # before and after; the least is log 3, 1.10
    print(f"loss {jax.vmap(nnx.merge(graph, adapters, base).loss)(texts[10_000:]).mean():.2f}")
print(f"epsilon {trainer.epsilon().upper:.2f};", "; ".join(trainer.unverified()))
