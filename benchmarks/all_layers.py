"""All layers trained privately, from filters that are nobody's: the later phases of DP-RandP.

    python -m benchmarks.all_layers --weights ENCODER.npz --data DIR --out FOLDER --epsilon 3

For a GPU (``--small`` tries it anywhere). Tang et al. 2023 (arXiv:2306.06076) make an encoder from
images of a random process, train a linear head on it privately, then all layers from there. The
encoder is a file: two layers of filters, ``first.kernel``, ``first.bias``, ``first.contrast`` and
those of ``second``. Here, on CIFAR-10:

1. features are whitened by one noisy release (``jaxdp.recipes.preprocess``);
2. a head is trained, the layers frozen; views of a record, shifted and mirrored at random, are
   averaged before its gradient is clipped;
3. all is trained, from what phase 2 released, with views likewise.

One ledger holds all three, and the noise is calibrated to them together: that ledger's epsilon is
at most ``--epsilon``. A fixed share of the steps is the head's (``--head-share``; the authors'
script has 96 of 875). Steps and noise are fixed before anything is released: by ``--steps``, or
fewer by ``--minutes``, for which steps are timed beforehand on random images in place of records.
The test images are looked at once, after the last step. Run again with the same ``--out``, the
program goes on where it was.

What it prints of time follows from the sizes of the draws: it is for the owner of the records.
"""

import argparse
import dataclasses
import json
import math
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
from jaxdp import data
from jaxdp.recipes.features import mapped
from jaxdp.recipes.preprocess import Whitening, dp_whitening

DELTA, CLASSES = 1e-5, 10
# Above and below which a response counts; cells a side in which the two layers are averaged.
THRESHOLD, CELLS = 0.5, {"first": 4, "second": 2}
GROUPS = 16
# The norm of a record's features, about: that of the head's gradient is like the other layers'.
NORM = 8.0
SHIFT = 4
_WIDE, _EXACT = jnp.float32, jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class Network:
    """Two layers and a linear head, of images of bytes.

    Attributes:
        stride: of the second layer.
        dtype: of the products with filters; all else is float32.
    """

    stride: int = 2
    dtype: Any = jnp.float32

    def responses(
        self, layer: dict[str, jax.Array], contrast: jax.Array, x: jax.Array, stride: int = 1
    ) -> jax.Array:
        """[h, w, 2 count] of one [h, w, channels]: above the threshold, then below minus it.

        A patch is centred and divided by its own deviation (Coates and Ng 2011): nothing of other
        records enters. Done to the filters' input and not to their sum, so that a filter which has
        moved does not see how bright a patch is.
        """
        side = layer["kernel"].shape[0]
        kernel = layer["kernel"].reshape(-1, layer["kernel"].shape[-1])
        patches = _patches(x, side, stride)
        patches = patches - patches.mean(-1, keepdims=True)
        variance = jnp.square(patches).mean(-1, keepdims=True)
        patches = patches * jax.lax.rsqrt(variance + contrast**2)
        y = (patches.astype(self.dtype) @ kernel.astype(self.dtype)).astype(_WIDE)
        y = y + layer["bias"].reshape(1, 1, -1)
        return jnp.concatenate([jax.nn.relu(y - THRESHOLD), jax.nn.relu(-y - THRESHOLD)], -1)

    def features(self, params: dict[str, Any], image: jax.Array) -> dict[str, jax.Array]:
        """[cells, cells, channels] of each layer, normalised in groups of one image's channels."""
        contrast, x = params["fixed"]["contrast"], image.astype(_WIDE) / 255
        low = _averaged(self.responses(params["first"], contrast["first"], x), 2)
        high = self.responses(params["second"], contrast["second"], low, self.stride)
        return {
            name: _normalised(_averaged(y, y.shape[0] // CELLS[name]))
            for name, y in (("first", low), ("second", high))
        }

    def logits(self, params: dict[str, Any], image: jax.Array) -> jax.Array:
        """[CLASSES] of one image, bytes [h, w, channels]."""
        whitened = []
        for name, x in self.features(params, image).items():
            mean, matrix = params["fixed"][name]
            centred = x.reshape(mean.shape) - mean
            whitened.append(jnp.matmul(centred, matrix, precision=_EXACT).reshape(-1))
        x = jnp.concatenate(whitened)
        return x * (NORM / x.size**0.5) @ params["head"]["kernel"] + params["head"]["bias"]

    def loss(self, params: dict[str, Any], image: jax.Array, label: jax.Array) -> jax.Array:
        """The cross-entropy of one example."""
        logits = self.logits(params, image)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label)


def _patches(x: jax.Array, side: int, stride: int) -> jax.Array:
    """[h, w, side² channels] about every ``stride``-th place; edges are continued."""
    x = jnp.pad(x, [((side - 1) // 2, side // 2)] * 2 + [(0, 0)], mode="edge")
    height, width = (length - side + 1 for length in x.shape[:2])
    shifts = [(i, j) for i in range(side) for j in range(side)]
    return jnp.concatenate(
        [x[i : i + height : stride, j : j + width : stride] for i, j in shifts], -1
    )


def _averaged(x: jax.Array, side: int) -> jax.Array:
    """Means of squares of side × side places."""
    height, width, channels = x.shape
    return x.reshape(height // side, side, width // side, side, channels).mean((1, 3))


def _normalised(x: jax.Array) -> jax.Array:
    """As ``jaxdp.features.group_normalised``, of one image."""
    grouped = x.reshape(-1, GROUPS, x.shape[-1] // GROUPS)
    centred = grouped - grouped.mean((0, 2), keepdims=True)
    variance = jnp.square(centred).mean((0, 2), keepdims=True)
    return (centred * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape)


def view(example: tuple[jax.Array, jax.Array], key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The image shifted by up to ``SHIFT`` pixels, continued by reflection, and maybe mirrored."""
    image, label = example
    mirror, shift = jax.random.split(key)
    padded = jnp.pad(image, [(SHIFT, SHIFT)] * 2 + [(0, 0)], mode="reflect")
    row, column = jax.random.randint(shift, (2,), 0, 2 * SHIFT + 1)
    image = jax.lax.dynamic_slice(padded, (row, column, 0), image.shape)
    return jnp.where(jax.random.bernoulli(mirror), image[:, ::-1], image), label


def first_params(weights: dict[str, np.ndarray], network: Network) -> dict[str, Any]:
    """The parameters before phase 2: the encoder's, a head of zeros, and what stays as it is."""
    layers = {
        name: {part: np.float32(weights[f"{name}.{part}"]) for part in ("kernel", "bias")}
        for name in ("first", "second")
    }
    fixed = {"contrast": {name: np.float32(weights[f"{name}.contrast"]) for name in layers}}
    params = jax.tree.map(jnp.asarray, layers | {"fixed": fixed})
    image = jax.ShapeDtypeStruct((32, 32, 3), jnp.uint8)
    shapes = jax.eval_shape(network.features, params, image)
    width = sum(x.size for x in shapes.values())
    head = {"kernel": jnp.zeros((width, CLASSES)), "bias": jnp.zeros(CLASSES)}
    for name, x in shapes.items():  # until they are released: nothing subtracted, no whitening
        channels = x.shape[-1]
        params["fixed"][name] = jnp.zeros((x.size // channels, channels)), jnp.eye(channels)
    return params | {"head": head}


def whiten(
    network: Network, params: dict[str, Any], images: np.ndarray, noise: float, ledger: jaxdp.Ledger
) -> dict[str, Whitening]:
    """What ``jaxdp.recipes.preprocess.dp_whitening`` releases of each layer's features.

    Formal guarantee: a full-batch ``Gaussian(noise)`` for either layer, charged to the ledger.
    Features are computed one image after the other, by one program however many there are, so that
    no record rounds another.
    """

    def flat(image: jax.Array) -> jax.Array:
        found = network.features(params, image)
        return jnp.concatenate([found[name].reshape(-1) for name in CELLS])

    x = mapped(jax.jit(lambda part: jax.lax.map(flat, part)), images, 1_000)
    found, start = {}, 0
    for name in CELLS:
        shape = params["fixed"][name][0].shape
        part, start = x[:, start : start + math.prod(shape)], start + math.prod(shape)
        part = part.reshape(len(x), *shape)
        found[name] = dp_whitening(part, noise, size=len(images), ledger=ledger)
    return found


@dataclasses.dataclass(frozen=True)
class Phase:
    """One phase of the training.

    Attributes:
        rate: the learning rate at first; it falls by a cosine to 0.
        steps: how many.
        trainable: from a parameter's path to True if it is trained.
    """

    rate: float
    steps: int
    trainable: Callable[[str], bool]

    def optimizer(self, momentum: float) -> optax.GradientTransformation:
        """SGD, by a public schedule."""
        return optax.sgd(optax.cosine_decay_schedule(self.rate, self.steps), momentum=momentum)


def phases(given: argparse.Namespace, steps: int) -> dict[str, Phase]:
    """The phases of ``steps`` steps together."""
    head = min(max(1, round(given.head_share * steps)), steps - 1)
    return {
        "head": Phase(given.head_rate, head, lambda path: "head" in path),
        "all layers": Phase(given.rate, steps - head, lambda path: "fixed" not in path),
    }


def mechanism_of(given: argparse.Namespace, records: int, noise: float) -> jaxdp.Mechanism:
    """DP-SGD by Poisson draws, the same for both phases."""
    return jaxdp.dp_sgd(
        noise_multiplier=noise,
        l2_clip_norm=given.clip,
        batch_size=given.batch,
        dataset_size=records,
    )


def calibrated(given: argparse.Namespace, records: int, steps: int) -> float:
    """The least noise multiplier with which whitening and all steps keep to the budget."""
    release = acc.Gaussian(given.whitening)

    def event(noise: float) -> acc.Event:
        trained = mechanism_of(given, records, noise).total(steps)
        return acc.Composed((*[release] * len(CELLS), trained))

    return acc.calibrate(event, given.epsilon, DELTA)


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
    for name, phase in phases(given, given.steps).items():
        trainer = trainer_of(given, network, mechanism, phase, source)
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
    # Less a share for a device that gets slower, and half a minute for whitening and test images.
    count = int((0.85 * (60 * given.minutes - elapsed) - 30) / mean)
    if count < 2:
        raise SystemExit(f"minutes must be enough for 2 steps of {mean:.1f} s, got {given.minutes}")
    return min(given.steps, count)


def trainer_of(
    given: argparse.Namespace,
    network: Network,
    mechanism: jaxdp.Mechanism,
    phase: Phase,
    source: tuple[np.ndarray, np.ndarray],
) -> jaxdp.Trainer:
    """What takes the steps of a phase, on a ledger of its own."""
    loss = jaxdp.augmented(network.loss, view, given.views)
    return jaxdp.Trainer(
        loss,
        mechanism,
        phase.optimizer(given.momentum),
        source,
        trainable=phase.trainable,
        physical_batch_size=given.rows,
    )


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
    train_x, train_y, test_x, test_y = loaded(given.data)
    if given.records:
        train_x, train_y, test_x, test_y = (
            x[: given.records] for x in (train_x, train_y, test_x, test_y)
        )
    records = len(train_x)
    network = Network(given.stride, jnp.dtype(given.dtype))
    with np.load(given.weights) as file:
        weights = cut(dict(file)) if given.small else dict(file)
    params = first_params(weights, network)

    # What is public is fixed, and written down, before anything is released.
    plan = out / "plan.json"
    if not plan.exists():
        steps = given.steps
        if given.minutes is not None:
            # Programs that were compiled to be timed are then run.
            jax.config.update("jax_compilation_cache_dir", str(out / "programs"))
            seconds = seconds_a_step(given, network, params, records)
            steps = affordable(given, seconds, time.monotonic() - began)
        noise = calibrated(given, records, steps)
        plan.write_text(json.dumps({"steps": steps, "noise_multiplier": noise}) + "\n")
    fixed = json.loads(plan.read_text())
    mechanism = mechanism_of(given, records, fixed["noise_multiplier"])
    print(f"{fixed['steps']} steps, noise multiplier {fixed['noise_multiplier']:.3f}", flush=True)

    # Phase 1 is the encoder's file. Whitening is released once, and then read; lost in a crash, it
    # is charged again, and the ledger's epsilon is above the one that was asked for.
    ledger, release = jaxdp.Ledger(out / "ledger.jsonl"), out / "whitening.npz"
    if not release.exists():
        found = whiten(network, params, train_x, given.whitening, ledger)
        np.savez(
            release, **{f"{n}.{k}": v for n, x in found.items() for k, v in x._asdict().items()}
        )
    with np.load(release) as file:
        for name in CELLS:
            both = file[f"{name}.mean"], file[f"{name}.matrix"]
            params["fixed"][name] = tuple(map(jnp.asarray, both))

    # Phases 2 and 3 are a run and its further stage, which begins with what the run has released.
    device = str(jax.devices()[0].device_kind)
    told: dict[str, Any] = {"epsilon asked": given.epsilon, **fixed, "device": device}
    for name, phase in phases(given, fixed["steps"]).items():
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
            jaxdp.augmented(network.loss, view, given.views),
            mechanism,
            phase.optimizer(given.momentum),
            (train_x, train_y),
            params=params,
            trainable=phase.trainable,
            physical_batch_size=given.rows,
            delta=DELTA,
            every=max(1, fixed["steps"] // 12),
            progress=progress,
            report=False,
            ledger=ledger,
            extend=None if name == "head" else name,
        )
        told[name] = run.fit(phase.steps)
    epsilon = run.epsilon().upper
    for name in phases(given, fixed["steps"]):
        told[name] = accuracy(network, told[name], test_x, test_y)
    told |= {"epsilon": epsilon, "delta": DELTA, "unverified": run.unverified()}
    (out / "told.json").write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps(told), f"{(time.monotonic() - began) / 60:.1f} minutes", flush=True)
    return told


SMALL = {"records": 400, "batch": 64, "rows": 32, "steps": 8, "views": 2, "dtype": "float32"}


def cut(weights: dict[str, np.ndarray], first: int = 8, second: int = 16) -> dict[str, np.ndarray]:
    """The encoder's first filters of each layer."""
    count = weights["first.kernel"].shape[-1]
    inputs = np.r_[:first, count : count + first]  # above the threshold, and below
    kept = {f"first.{part}": weights[f"first.{part}"][..., :first] for part in ("kernel", "bias")}
    kernel, bias = weights["second.kernel"][:, :, inputs, :second], weights["second.bias"][:second]
    return {**weights, **kept, "second.kernel": kernel, "second.bias": bias}


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """The arguments; ``--small`` changes what is not given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=Path, required=True, help="the encoder, an .npz file")
    parser.add_argument(
        "--data", type=Path, required=True, help="a folder for jaxdp.data.load, or an .npz file"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder; secret but for told.json")
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--minutes", type=float, help="fewer steps, if they would take longer")
    parser.add_argument("--small", action="store_true", help="a few images and filters")
    for name, default, words in (
        ("steps", 400, "of both phases"),
        ("batch", 4_096, "expected records of a step"),
        ("rows", 256, "records of a physical batch; their views are worked on together"),
        ("views", 4, "of a record, averaged before its gradient is clipped"),
        ("stride", 2, "of the second layer"),
        ("records", 0, "train (and test) on the first of them alone; 0 for all"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=words)
    for name, real, words in (
        ("head-share", 0.11, "of the steps"),
        ("head-rate", 8.0, "learning rate of the head at first"),
        ("rate", 0.2, "learning rate of all layers at first"),
        ("momentum", 0.9, "of both"),
        ("clip", 1.0, "norm to which a record's gradient is clipped"),
        ("whitening", 22.6, "noise multiplier of either layer's release"),
    ):
        parser.add_argument(f"--{name}", type=float, default=real, help=words)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    if parser.parse_known_args(arguments)[0].small:
        parser.set_defaults(**SMALL)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    trained(parsed())
