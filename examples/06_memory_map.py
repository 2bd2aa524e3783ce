"""Two gigabytes of records in a file: only the rows that are drawn are read."""

import re
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax

import jaxdp

N = 700_000
folder = tempfile.TemporaryDirectory()
path = f"{folder.name}/x.npy"
np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(N, 784))[:1000] = 1
x = np.load(path, mmap_mode="r")  # in your own folder: this is all
y = np.arange(N) % 10
params = {"w": jnp.zeros((784, 10)), "b": jnp.zeros(10)}


def loss_fn(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["w"] + params["b"], y)


mechanism = jaxdp.dp_sgd(
    epsilon=1, delta=1e-7, steps=10, batch_size=512, dataset_size=N, l2_clip_norm=1.0
)
trainer = jaxdp.Trainer(loss_fn, mechanism, optax.sgd(0.1), (x, y))
state = trainer.init(params)
for batch in trainer.batches():
    state, _ = trainer.step(state, batch)
print(f"{x.nbytes / 1e9:.1f} GB at epsilon {trainer.epsilon().upper:.2f}")
if (status := Path("/proc/self/status")).exists():  # Linux
    peak = re.search(r"VmHWM:\s+(\d+)", status.read_text(encoding="utf-8"))[1]
    print(f"peak memory {int(peak) / 1e3:.0f} MB")
