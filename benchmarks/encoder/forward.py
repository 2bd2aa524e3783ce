"""The encoder in JAX: convolutions with the normalisation folded in, as they would be shipped.

python -m benchmarks.encoder.forward WEIGHTS.npz  (its time, of one thread)
"""

import functools
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

Weights = dict[str, jax.Array | np.ndarray]


def folded(state: dict[str, np.ndarray]) -> Weights:
    """float16 kernels [3, 3, before, after] and biases, of an encoder's state in PyTorch."""
    found: Weights = {}
    for name in (n.removesuffix(".0.weight") for n in state if n.endswith(".0.weight")):
        scale, shift, mean, variance = (
            state[f"{name}.1.{part}"] for part in ("weight", "bias", "running_mean", "running_var")
        )
        scale = scale / np.sqrt(variance + 1e-5)
        kernel = state[f"{name}.0.weight"].transpose(2, 3, 1, 0) * scale
        found[f"{name}.kernel"] = kernel.astype(np.float16)
        found[f"{name}.bias"] = (shift - mean * scale).astype(np.float16)
    return found


def encoded(weights: Weights, images: jax.Array) -> list[jax.Array]:
    """[n, 16, 16, ..], [n, 8, 8, ..] and [n, 4, 4, ..] of images [n, 32, 32, 3] in [0, 1]."""

    def convolved(x: jax.Array, name: str, stride: int = 1) -> jax.Array:
        kernel, bias = (
            weights[f"{name}.{part}"].astype(jnp.float32) for part in ("kernel", "bias")
        )
        layout = ("NHWC", "HWIO", "NHWC")
        padding = [(1, 1), (1, 1)]
        y = jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), padding, dimension_numbers=layout
        )
        return y + bias.reshape(1, 1, 1, -1)

    x, found = jax.nn.relu(convolved((images - 0.5) * 4, "stem")), []
    for i in range(sum(name.startswith("down.") for name in weights) // 2):
        x = jax.nn.relu(convolved(x, f"down.{i}", 2))
        y = jax.nn.relu(convolved(x, f"block.{i}.one"))
        x = jax.nn.relu(x + convolved(y, f"block.{i}.two"))
        found.append(x)
    return found


def main() -> None:
    """Prints the milliseconds of an image."""
    with np.load(sys.argv[1]) as file:
        weights = {name: jnp.asarray(file[name]) for name in file.files}
    run = jax.jit(functools.partial(encoded, weights))
    images = jnp.full((250, 32, 32, 3), 0.5)
    jax.block_until_ready(run(images))
    began = time.process_time()
    for _ in range(8):
        jax.block_until_ready(run(images))
    print(f"{(time.process_time() - began) / 2:.2f} ms of one thread an image")


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    main()
