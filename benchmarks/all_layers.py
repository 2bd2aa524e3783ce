"""All layers trained privately, from filters that are nobody's: the later phases of DP-RandP.

    python -m benchmarks.all_layers --data DIR --out FOLDER --epsilon 3

For a GPU (``--small`` tries it anywhere). Tang et al. 2023 (arXiv:2306.06076) make an encoder from
images of a random process, train a linear head on it privately, then all layers from there. Here
the encoder is that of ``jaxdp.features.two_layers``, and on CIFAR-10:

1. a head is trained, the layers frozen; views of a record, shifted and mirrored at random, are
   averaged before its gradient is clipped;
2. all is trained, from what phase 1 released, with views likewise.

One ledger holds both, and the noise is calibrated to them together: that ledger's epsilon is at
most ``--epsilon``. A fixed share of the steps is the head's (``--head-share``; the authors' script
has 96 of 875). Steps and noise are fixed before anything is released: by ``--steps``, or fewer by
``--minutes``, for which steps are timed beforehand on random images in place of records. The test
images are looked at once, after the last step. Run again with the same ``--out``, the program goes
on where it was.

What it prints of time follows from the sizes of the draws: it is for the owner of the records.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from jaxdp import accounting as acc
from jaxdp import data, linear
from jaxdp.recipes import features, two_layers
from jaxdp.recipes.two_layers import CELLS, THRESHOLD, TwoLayers

DELTA, CLASSES = 1e-5, 10
# The norm of a record's features, about: that of the head's gradient is like the other layers'.
NORM = 8
SHIFT = 4
_WIDE = jnp.float32


@dataclasses.dataclass(frozen=True)
class Network:
    """The layers of ``jaxdp.features.two_layers`` and a linear head, of images of bytes.

    Attributes:
        dtype: of the products with filters; all else is float32.
    """

    dtype: Any = jnp.float32

    def responses(self, layer: dict[str, jax.Array], contrast: jax.Array, x: jax.Array) -> Any:
        """[h, w, 2 count] of one [h, w, channels]: above the threshold, then below minus it.

        Patches are centred, and not only their deviation taken: a filter that has moved need not
        have sum 0, and should not see how bright a patch is.
        """
        side, (height, width) = len(layer["kernel"]), x.shape[:2]
        x = jnp.pad(x, [((side - 1) // 2, side // 2)] * 2 + [(0, 0)], mode="edge")
        under = [x[i : i + height, j : j + width] for i in range(side) for j in range(side)]
        patches = jnp.concatenate(under, -1)
        patches = patches - patches.mean(-1, keepdims=True)
        variance = jnp.square(patches).mean(-1, keepdims=True)
        patches = patches * jax.lax.rsqrt(variance + contrast**2)
        kernel = layer["kernel"].reshape(patches.shape[-1], -1)
        y = (patches.astype(self.dtype) @ kernel.astype(self.dtype)).astype(_WIDE)
        y = y + layer["bias"].reshape(1, 1, -1)
        return jnp.concatenate([jax.nn.relu(y - THRESHOLD), jax.nn.relu(-y - THRESHOLD)], -1)

    def features(self, params: dict[str, Any], image: jax.Array) -> jax.Array:
        """[numbers] of one image: by the first parameters those of ``jaxdp.features.two_layers``.

        But for filters' sums: in 16 bits they are not quite 0, and centred patches do not see them.
        """
        fixed, x = params["fixed"], image.astype(_WIDE) / 255
        low = _in_cells(self.responses(params["first"], fixed["contrast"][0], x), len(x) // 2)
        high, found = self.responses(params["second"], fixed["contrast"][1], low), []
        for y, cells, numbers in zip((high, low), CELLS[3], fixed["parts"], strict=True):
            part = _in_cells(y, cells).reshape(cells**2, -1).T
            part = two_layers.whitened(two_layers.normalised(part), numbers)
            found.append(part.reshape(-1))
        return jnp.concatenate(found)

    def logits(self, params: dict[str, Any], image: jax.Array) -> jax.Array:
        """[CLASSES] of one image, bytes [h, w, channels]."""
        x = self.features(params, image)
        return x * (NORM / x.size**0.5) @ params["head"]["kernel"] + params["head"]["bias"]

    def loss(self, params: dict[str, Any], image: jax.Array, label: jax.Array) -> jax.Array:
        """The cross-entropy of one example."""
        logits = self.logits(params, image)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label)


def _in_cells(x: jax.Array, cells: int) -> jax.Array:
    """[cells, cells, channels]: means of x [h, w, channels]."""
    height, width, channels = x.shape
    return x.reshape(cells, height // cells, cells, width // cells, channels).mean((1, 3))


def view(example: tuple[jax.Array, jax.Array], key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The image shifted by up to ``SHIFT`` pixels, continued by reflection, and maybe mirrored."""
    image, label = example
    mirror, shift = jax.random.split(key)
    padded = jnp.pad(image, [(SHIFT, SHIFT)] * 2 + [(0, 0)], mode="reflect")
    row, column = jax.random.randint(shift, (2,), 0, 2 * SHIFT + 1)
    image = jax.lax.dynamic_slice(padded, (row, column, 0), image.shape)
    return jnp.where(jax.random.bernoulli(mirror), image[:, ::-1], image), label


def first_params(small: bool = False) -> dict[str, Any]:
    """The shipped layers, a head of zeros and what stays as it is; of few filters if ``small``."""
    weights = two_layers.of_stored(features.arrays_of("scenes_3"))
    if small:
        weights = _cut(weights, (8, 16))
    layers = {
        name: {"kernel": layer.kernel.transpose(2, 3, 1, 0), "bias": layer.bias}
        for name, layer in zip(("first", "second"), weights.layers, strict=True)
    }
    width = sum(part.mean.size for part in weights.parts)
    head = {"kernel": jnp.zeros((width, CLASSES)), "bias": jnp.zeros(CLASSES)}
    fixed = {"contrast": [layer.contrast for layer in weights.layers], "parts": weights.parts}
    return layers | {"head": head, "fixed": fixed}


def _cut(weights: TwoLayers, counts: tuple[int, int]) -> TwoLayers:
    """So many filters of either layer, the first of them."""
    layers, parts, inputs = [], [], np.arange(3)
    for layer, part, count in zip(weights.layers, weights.parts[::-1], counts, strict=True):
        kernel, bias = layer.kernel[:count, inputs], layer.bias[:count]
        layers.append(layer._replace(kernel=kernel, bias=bias))
        # Above the threshold, and below.
        inputs = np.r_[:count, len(layer.bias) : len(layer.bias) + count]
        mean, directions = part.mean[inputs], part.directions[inputs]
        parts.append(part._replace(mean=mean, directions=directions))
    return TwoLayers((layers[0], layers[1]), (parts[1], parts[0]))


@dataclasses.dataclass(frozen=True)
class Phase:
    """One phase of the training.

    Attributes:
        rate: the learning rate, by step.
        steps: how many.
        trainable: from a parameter's path to True if it is trained.
    """

    rate: optax.Schedule
    steps: int
    trainable: Callable[[str], bool]


def phases(given: argparse.Namespace, steps: int, noise: float) -> dict[str, Phase]:
    """The phases of ``steps`` steps together: the head at a fixed rate, then a cosine to 0."""
    head = min(max(1, round(given.head_share * steps)), steps - 1)
    rate = linear.rate(
        noise,
        l2_clip_norm=given.clip,
        batch_size=given.batch,
        steps=head,
        numbers=NORM**2,  # the square of an example's norm
        momentum=given.momentum,
    )
    later = optax.cosine_decay_schedule(given.rate, steps - head)
    return {
        "head": Phase(optax.constant_schedule(rate), head, lambda path: "head" in path),
        "all layers": Phase(later, steps - head, lambda path: "fixed" not in path),
    }


def mechanism_of(given: argparse.Namespace, records: int, noise: float) -> jaxdp.Mechanism:
    """DP-SGD by Poisson draws, the same for both phases."""
    return jaxdp.dp_sgd(
        noise_multiplier=noise,
        l2_clip_norm=given.clip,
        batch_size=given.batch,
        dataset_size=records,
    )


def training(given: argparse.Namespace, network: Network, phase: Phase) -> dict[str, Any]:
    """What the steps of a phase are made with, timed or real."""
    return {
        "loss_fn": jaxdp.augmented(network.loss, view, given.views),
        "optimizer": optax.sgd(phase.rate, momentum=given.momentum),
        "trainable": phase.trainable,
        "physical_batch_size": given.rows,
    }


def seconds_a_step(
    given: argparse.Namespace, network: Network, params: dict[str, Any], records: int
) -> dict[str, float]:
    """Of each phase, by steps on as many random images in place of the records.

    How many steps there are is a release: no record, and no draw of records, may have a part in it.
    """
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (records, 32, 32, 3), np.uint8)
    source = images, rng.integers(0, CLASSES, records, np.int32)
    mechanism, seconds = mechanism_of(given, records, 1.0), {}
    for name, phase in phases(given, given.steps, 1.0).items():
        trainer = jaxdp.Trainer(
            mechanism=mechanism, source=source, **training(given, network, phase)
        )
        state = trainer.init(params)
        for number, batch in enumerate(trainer.batches(min(4, phase.steps))):
            if number <= 1:  # the first one compiles
                jax.block_until_ready(state.params)
                start = time.monotonic()
            state, _ = trainer.step(state, batch)
        jax.block_until_ready(state.params)
        seconds[name] = (time.monotonic() - start) / max(1, number)
        rate = given.batch * given.views / seconds[name]
        print(f"{name}: {seconds[name]:.3f} s a step, {rate:,.0f} views a second", flush=True)
    return seconds


def affordable(given: argparse.Namespace, seconds: dict[str, float], elapsed: float) -> int:
    """How many steps end within ``--minutes``, of which so many seconds are over."""
    share = given.head_share
    mean = share * seconds["head"] + (1 - share) * seconds["all layers"]
    # Less a share for a device that gets slower, and half a minute for the test images.
    count = int((0.85 * (60 * given.minutes - elapsed) - 30) / mean)
    if count < 2:
        raise SystemExit(f"minutes must be enough for 2 steps of {mean:.1f} s, got {given.minutes}")
    return min(given.steps, count)


def accuracy(
    network: Network, params: dict[str, Any], images: np.ndarray, labels: np.ndarray
) -> float:
    """In percent, by the mean of an image's and its mirror image's logits."""

    @jax.jit
    def guess(part: jax.Array) -> jax.Array:
        both = [jax.vmap(lambda x: network.logits(params, x))(x) for x in (part, part[:, :, ::-1])]
        return jnp.argmax(both[0] + both[1], -1)

    parts = [np.asarray(guess(images[i : i + 500])) for i in range(0, len(images), 500)]
    return round(100 * float(np.mean(np.concatenate(parts) == labels)), 2)


def loaded(path: Path) -> tuple[np.ndarray, ...]:
    """CIFAR-10: images as bytes and labels, to train and to test.

    Args:
        path: a folder for ``jaxdp.data.load``, or an .npz file of ``train_x``, ``train_y``,
            ``test_x`` and ``test_y``.
    """
    names = "train_x", "train_y", "test_x", "test_y"
    if path.is_file():
        with np.load(path) as file:
            arrays = [file[name] for name in names]
    else:
        found = data.load("cifar10", path)
        arrays = [getattr(found, name) for name in names]
    scaled = [np.uint8(np.round(255 * x)) if x.dtype.kind == "f" else x for x in arrays]
    return tuple(x if x.ndim > 1 else np.int32(x) for x in scaled)


def trained(given: argparse.Namespace) -> dict[str, Any]:
    """Trains, or goes on; returns what there is to tell, which is written to ``told.json`` too."""
    began, out = time.monotonic(), given.out
    out.mkdir(parents=True, exist_ok=True)
    train_x, train_y, test_x, test_y = (x[: given.records or None] for x in loaded(given.data))
    records = len(train_x)
    network, params = Network(jnp.dtype(given.dtype)), first_params(given.small)

    # What is public is fixed, and written down, before anything is released.
    plan = out / "plan.json"
    if not plan.exists():
        steps = given.steps
        if given.minutes is not None:
            # Programs that were compiled to be timed are then run.
            jax.config.update("jax_compilation_cache_dir", str(out / "programs"))
            seconds = seconds_a_step(given, network, params, records)
            steps = affordable(given, seconds, time.monotonic() - began)
        noise = acc.calibrate(
            lambda noise: mechanism_of(given, records, noise).total(steps), given.epsilon, DELTA
        )
        plan.write_text(json.dumps({"steps": steps, "noise_multiplier": noise}) + "\n")
    fixed = json.loads(plan.read_text())
    steps, noise = fixed["steps"], fixed["noise_multiplier"]
    planned = phases(given, steps, noise)
    print(f"{steps} steps, noise multiplier {noise:.3f}", flush=True)

    # The phases are a run and its further stage, which begins with what the run has released.
    ledger, device = jaxdp.Ledger(out / "ledger.jsonl"), str(jax.devices()[0].device_kind)
    told: dict[str, Any] = {"epsilon asked": given.epsilon, **fixed, "device": device}
    for name, phase in planned.items():
        last = [time.monotonic(), 0.0]

        def progress(step: int, row: dict[str, Any] | None, name=name, last=last) -> None:
            if row is not None:
                now, images = time.monotonic(), given.batch * (row["step"] - last[1])
                print(
                    f"{name}: step {row['step']}, epsilon {row['epsilon']:.3f}, "
                    f"{images / (now - last[0]):,.0f} images a second",
                    flush=True,
                )
                last[:] = now, row["step"]

        run = jaxdp.Run(
            out / "run",
            mechanism=mechanism_of(given, records, noise),
            source=(train_x, train_y),
            params=params,
            delta=DELTA,
            every=max(1, steps // 12),
            progress=progress,
            report=False,
            ledger=ledger,
            extend=None if name == "head" else name,
            **training(given, network, phase),
        )
        told[name] = run.fit(phase.steps)
    for name in planned:
        told[name] = accuracy(network, told[name], test_x, test_y)
    told |= {"epsilon": run.epsilon().upper, "delta": DELTA, "unverified": run.unverified()}
    (out / "told.json").write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps(told), f"{(time.monotonic() - began) / 60:.1f} minutes", flush=True)
    return told


SMALL = {"records": 400, "batch": 64, "rows": 32, "steps": 8, "views": 2, "dtype": "float32"}


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """The arguments; ``--small`` changes what is not given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="a folder for jaxdp.data.load, or an .npz file"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder; secret but for told.json")
    parser.add_argument("--minutes", type=float, help="fewer steps, if they would take longer")
    parser.add_argument("--small", action="store_true", help="a few images and filters")
    for name, default, words in (
        ("steps", 400, "of both phases"),
        ("batch", 4_096, "expected records of a step"),
        ("rows", 256, "records of a physical batch; their views are worked on together"),
        ("views", 4, "of a record, averaged before its gradient is clipped"),
        ("records", 0, "train (and test) on the first of them alone; 0 for all"),
        ("epsilon", 3.0, "of both phases together"),
        ("head-share", 0.11, "of the steps"),
        ("rate", 0.2, "learning rate of all layers at first"),
        ("momentum", 0.9, "of both"),
        ("clip", 1.0, "norm to which a record's gradient is clipped"),
    ):
        parser.add_argument(f"--{name}", type=type(default), default=default, help=words)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    if parser.parse_known_args(arguments)[0].small:
        parser.set_defaults(**SMALL)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    trained(parsed())
