"""LoRA of Tunix's Gemma 3, by qwix: `pip install google-tunix==0.1.7 qwix==0.1.8`."""

import jax
import jax.numpy as jnp
import optax
import qwix
from flax import nnx
from tunix.models.gemma3 import model as gemma

import jaxdp

texts = jax.random.randint(jax.random.key(0), (11_000, 9), 1, 4).cumsum(axis=1) % 32  # 3 5 6 9 ...
size = {"num_layers": 2, "num_embed": 32, "embed_dim": 64, "hidden_dim": 128, "num_heads": 4}
config = gemma.ModelConfig(**size, num_kv_heads=2, head_dim=16, sliding_window_size=8)
model, rngs = gemma.Gemma3(config, rngs=nnx.Rngs(0)), nnx.Rngs(1)  # yours: with public weights
nnx.update(model, jax.tree.map(lambda x: rngs.normal(x.shape, x.dtype) / 8, nnx.state(model)))
provider = qwix.LoraProvider(module_path=".*(attn|mlp).*", rank=4, alpha=8.0)
model = qwix.apply_lora_to_model(model, provider, rngs=rngs, **model.get_model_input())
graph, lora, base = nnx.split(model, nnx.LoRAParam, ...)
lora = jax.tree.map(lambda x: x.astype("float32"), lora)  # bfloat16 would lose small updates


def loss_fn(params, text):  # of one, int [T]: the batch axis is Gemma's
    model, place = nnx.merge(graph, *params.values(), copy=True), jnp.arange(len(text) - 1)
    logits, _ = model(text[None, :-1], place[None], None, place <= place[None, :, None])
    logits = logits[0].astype("float32")
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[1:]).mean()


budget = {"epsilon": 3, "delta": 1e-5, "steps": 40, "l2_clip_norm": 1.0}
mechanism = jaxdp.dp_sgd(batch_size=512, dataset_size=10_000, **budget)
train, trainable = texts[:10_000], {"lora": True, "base": False}
trainer = jaxdp.Trainer(loss_fn, mechanism, optax.adam(0.01), train, trainable=trainable)
state = trainer.init({"lora": lora, "base": base})
for batch in trainer.batches():
    state, _ = trainer.step(state, batch)
for params in ({"lora": lora, "base": base}, state.params):  # before and after
    print(f"loss {jax.vmap(loss_fn, (None, 0))(params, texts[10_000:]).mean():.2f}")
print(f"epsilon {trainer.epsilon().upper:.2f};", "; ".join(trainer.unverified()))
