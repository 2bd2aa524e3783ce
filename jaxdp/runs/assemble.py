"""A run of a configuration: its model, loss, records, energy and evaluation, and the ``Run``."""

import contextlib
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdp import accounting as acc
from jaxdp import data
from jaxdp.audit.canaries import Canaries
from jaxdp.data import models
from jaxdp.devices import processes
from jaxdp.devices.shards import hashed
from jaxdp.ledger import Ledger
from jaxdp.ledger.entries import SEEDED
from jaxdp.ledger.ledger import Shown
from jaxdp.ledger.seeds import Secret
from jaxdp.mechanism import Mechanism
from jaxdp.optimizers import registry
from jaxdp.optimizers.energy import PrivateEnergy, PublicEnergy
from jaxdp.recipes import encoders
from jaxdp.recipes.preprocess import Whitening, dp_pca, dp_whitening, project, whitened
from jaxdp.runs.config import RunConfig, rows_of_pass
from jaxdp.runs.directory import RunDirectory
from jaxdp.runs.files import reading, save_array, writing
from jaxdp.runs.run import (
    Parts,
    Prepared,
    Progress,
    Result,
    Row,
    Run,
    require_equal_config,
)
from jaxdp.runs.starts import INTERRUPTED, Start
from jaxdp.sampling import Sampler
from jaxdp.sampling.hashes import identities
from jaxdp.sampling.source import ArraySource, as_source
from jaxdp.training.trainer import Trainer
from jaxdp.types import LossFn, PyTree

Enough = Callable[[Row], bool]
_NO_COMPONENTS = (FileNotFoundError, ValueError, TypeError, EOFError)
_FINEST = 8  # pixels of a side, below which an image has no waves to speak of
_INPUTS = 9  # fixes the candidates, which are public
_REHEARSED = 5  # steps


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class RunResult(Result):
    """A finished run of a configuration.

    Attributes:
        config: the configuration.
    """

    config: RunConfig


def start(
    config: RunConfig,
    directory: RunDirectory,
    dataset: data.Dataset,
    secret: Secret,
    progress: Progress,
    mesh: jax.sharding.Mesh | None = None,
    enough: Enough | None = None,
) -> RunResult:
    """Starts a run in a new directory; the configuration must be resolved.

    Args:
        config: what is trained.
        directory: of the run.
        dataset: the data.
        secret: the randomness.
        progress: called after every step.
        mesh: whose devices share the records of every step; None for one device.
        enough: ends the run early, see ``jaxdp.runs.run.Parts``; the configuration's steps are
            charged all the same, at the start.

    Raises:
        ValueError: the directory holds a run already, or is in use.
    """

    def create() -> str:
        directory.create()
        return ""

    processes.from_process_0(create)
    return _train(config, directory, dataset, secret, progress, mesh, enough, is_new=True)


def resume(
    config: RunConfig,
    directory: RunDirectory,
    dataset: data.Dataset,
    progress: Progress,
    mesh: jax.sharding.Mesh | None = None,
    enough: Enough | None = None,
    set_aside_unreadable: bool = False,
) -> RunResult:
    """Continues a run from its last checkpoint.

    Steps since then, of which nobody saw anything, are done again on other draws and with other
    noise, within the charge that they had: a crash costs nothing and re-uses nothing, whatever
    version, flags or machine it is continued with.

    Args:
        config: must equal the configuration that the run was started with.
        directory: of the run.
        dataset: must be the same data.
        progress: called after every step.
        mesh: as for ``start``; it may be another one than before.
        enough: as for ``start``, and the same as there; without one the run takes all its steps,
            and its rows go on to tell the epsilon of all.
        set_aside_unreadable: as for ``jaxdp.Run``.

    Raises:
        ValueError: the data or the configuration differ.
    """
    state = directory.load_state()
    if state.config is not None:  # before what was changed is built, and refused in other words
        require_equal_config(RunConfig.from_dict(state.config), config)
    return _train(
        config,
        directory,
        dataset,
        state.secret.restored(),
        progress,
        mesh,
        enough,
        is_new=False,
        set_aside_unreadable=set_aside_unreadable,
    )


def _train(
    config: RunConfig,
    directory: RunDirectory,
    dataset: data.Dataset,
    secret: Secret,
    progress: Progress,
    mesh: jax.sharding.Mesh | None,
    enough: Enough | None,
    *,
    is_new: bool,
    set_aside_unreadable: bool = False,
) -> RunResult:
    """Makes the ``Run`` of a configuration and trains what is left of it."""
    check_several_processes(config)
    run = Run(
        directory,
        loss_of(config),
        config.private_algorithm(secret),
        source=(stand_in(config, dataset), dataset.train_y),
        params=fresh_params(config, secret),
        every=config.eval_every,
        progress=progress,
        secret=secret,
        delta=config.delta,
        physical_batch_size=config.physical_batch_size,
        relation=acc.Relation(config.relation),
        canaries=canary_records(config, dataset),
        features=None if config.encoder is None else config.encoder["words"],
        mesh=mesh,
        report=False,
        set_aside_unreadable=set_aside_unreadable,
        _parts=Parts(
            config=config,
            is_new=is_new,
            fingerprint=lambda secret: dataset.fingerprint(secret.stream("data hash")),
            prepare=functools.partial(prepared, config, dataset),
            enough=enough,
            sensitive=config.sensitive,
        ),
    )
    run.fit(config.steps)
    assert run.result is not None
    return RunResult(**vars(run.result), config=config)


def prepared(
    config: RunConfig, dataset: data.Dataset, start: Start, canaries: Canaries | None
) -> Prepared:
    """Releases what comes before the first step, and makes of it the parts of the run.

    Args:
        config: resolved.
        dataset: as loaded.
        start: of the run; a projection is charged to it.
        canaries: candidates of an audit.
    """
    raw = (dataset.train_x, dataset.train_y)
    dataset = featured(config, dataset)
    if config.encoder is not None:  # in its words of now: of others its probes may be alike
        assert config.features is not None
        start.ledger.trust(encoders.public(encoders.named(config.features)))
    dataset = _projected(config, dataset, start)
    if canaries is not None and canaries.leaf is None and config.whiten_noise_multiplier:
        # Candidate records are whitened as the others, by a release: so they stay public. They are
        # not among the records that it was released of, which no coin touches.
        x, y = canaries.rows
        released = np.load(start.directory.secret / start.directory.components.name)
        canaries = dataclasses.replace(canaries, rows=(whitened_by(released, x), y))
    source = ArraySource.of(jax.device_put((dataset.train_x, dataset.train_y)))
    if config.features is not None and config.sampling == "cyclic_poisson":
        # Groups by the record as it was loaded: the last digits of its features are another
        # machine's own, and a run that goes on there must keep its groups.
        source = dataclasses.replace(source, identities=identities(as_source(raw)))

    judging, held_out = test_split(config, dataset)
    return Prepared(
        source,
        canaries,
        evaluator(model_of(config), *held_out) if config.spec.test_size else None,
        lambda loss_fn, source, sampler: energy_of(
            config,
            (loss_of(config), judging),
            (loss_fn, getattr(source, "arrays", None)),  # on the device
            sampler,
        ),
    )


def check_several_processes(config: RunConfig) -> None:
    """Raises ValueError for what several processes would each do for themselves."""
    if processes.count() == 1:
        return
    if registry.ALGORITHMS[config.algorithm].energy:
        raise ValueError(
            f"algorithm must judge no candidates in several processes, got {config.algorithm}"
        )
    for name in ("features", "pca_dimensions", "whiten_noise_multiplier", "sensitive"):
        if getattr(config, name, None):
            raise ValueError(
                f"{name} must be left out in several processes, got {getattr(config, name)}"
            )


def _projected(config: RunConfig, dataset: data.Dataset, start: Start) -> data.Dataset:
    """The projected data; the components are charged, kept, written down and published in turn."""
    directory, events = start.directory, config.once()
    if not events:
        return dataset
    kind = "pca" if config.whiten_noise_multiplier is None else "whitening"
    stream, kept = f"{start.name}/{kind}", directory.secret / directory.components.name
    shown = start.ledger.shown(stream)
    if shown is not None:
        found = _as_shown(shown, (directory.components, kept))
        dataset, components = projected(config, dataset, start.secret, found)
    elif directory.components.exists():  # published once the line was on disk
        raise ValueError(
            f"{directory.ledger} must hold the release of {directory.components}, but it is "
            "missing: what was released can no longer be accounted for"
        )
    else:
        # Nobody saw what a start before made: it is made again, within its charge. The line is this
        # start's own: one that was read may never have reached the disk.
        if any(entry.stream == stream for entry in start.ledger.entries):
            start.ledger.trust(INTERRUPTED)
        note = SEEDED if start.secret.reproducible else ""
        for event in events:
            start.ledger.charge(event, stream=stream, source="mechanism", again=True, note=note)
        secret = start.secret.child(f"{stream} {start.incarnation}")
        dataset, components = projected(config, dataset, secret, None)
    with writing(kept):
        save_array(kept, components, mode=0o600)
    start.show_release(stream, bytes.fromhex(hashed(components)))
    with writing(directory.components):
        save_array(directory.components, components)
    return dataset


def _as_shown(shown: Shown, places: Sequence[Path]) -> np.ndarray:
    """The components that were shown, from the first place that holds them and no others."""
    for path in places:
        with reading(path), contextlib.suppress(*_NO_COMPONENTS):
            found: np.ndarray = np.load(path)
            if shown.past in (None, bytes.fromhex(hashed(found))):  # format 2 has no hash
                return found
    raise ValueError(
        f"{places[0]}, or its copy {places[1]}, must hold the components that were shown to go on "
        "with this run, but neither does: others are another release, which the budget does not "
        "hold. Put one of them back, or start a new run in another folder"
    )


def featured(config: RunConfig, dataset: data.Dataset) -> data.Dataset:
    """The data with each example's fixed features in its place: nothing is released or charged.

    Args:
        config: resolved.
        dataset: as loaded.
    """
    if config.features is None:
        return dataset
    train_x, test_x = (
        encoders.by_name(config.features, x, config.encoder)
        for x in (dataset.train_x, dataset.test_x)
    )
    return dataclasses.replace(dataset, train_x=train_x, test_x=test_x)


def stand_in(config: RunConfig, dataset: data.Dataset) -> np.ndarray:
    """The training examples; where others will be made of them, zeros of those' shape, unread."""
    shape = config.example_shape()
    if shape == dataset.train_x.shape[1:]:
        return dataset.train_x
    return np.broadcast_to(np.float32(0), (len(dataset.train_x), *shape))


def projected(
    config: RunConfig, dataset: data.Dataset, secret: Secret, components: np.ndarray | None
) -> tuple[data.Dataset, np.ndarray | None]:
    """The data projected by DP-PCA or whitened, and what was released for it.

    Args:
        config: resolved.
        dataset: as loaded.
        secret: of the run, where the components are still to be released: charge them first.
        components: released before, to be used again; of whitening the mean's rows, then the
            matrix's.
    """
    x = dataset.train_x
    if config.whiten_noise_multiplier is not None:
        if components is None:
            noise_multiplier, size = config.whiten_noise_multiplier, config.dataset_size
            components = np.concatenate(dp_whitening(x, noise_multiplier, secret, size=size))
        transform = functools.partial(whitened_by, components)
    elif config.pca_dimensions is not None:
        assert config.pca_noise_multiplier is not None
        if components is None:
            components = dp_pca(x, config.pca_dimensions, config.pca_noise_multiplier, secret)
        transform = functools.partial(project, components=components)
    else:
        return dataset, None
    train_x, test_x = map(transform, (dataset.train_x, dataset.test_x))
    return dataclasses.replace(dataset, train_x=train_x, test_x=test_x), components


def whitened_by(released: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Examples whitened by what a run released for it: the mean's rows, then the matrix's."""
    channels = released.shape[1]
    return whitened(x, Whitening(released[:-channels], released[-channels:]))


def canary_records(config: RunConfig, dataset: data.Dataset) -> int | tuple[np.ndarray, np.ndarray]:
    """The number of candidates, or the candidates (x [m, ...], y [m]) themselves.

    Args:
        config: resolved.
        dataset: as loaded; of mislabelled candidates its last test records are taken.
    """
    if not config.canaries or config.canary_kind == "gradient":
        return config.canaries
    x, y = _canary_examples(config, dataset)
    if config.features is not None:
        x = encoders.by_name(config.features, x, config.encoder)
    return x, y.astype(dataset.train_y.dtype)


def _canary_examples(config: RunConfig, dataset: data.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Examples (x [m, ...], y [m]) of a kind; the same in every run, so that they are public."""
    rng = np.random.Generator(np.random.Philox(key=_INPUTS))
    count, classes = config.canaries, config.spec.num_classes
    labels = rng.integers(0, classes, count)
    if config.canary_kind == "mislabelled":
        other = 1 + labels % (classes - 1) if classes > 1 else labels
        return dataset.test_x[-count:], (dataset.test_y[-count:] + other) % classes
    shape = (count, *dataset.train_x.shape[1:])
    # Both are unlike any image: what ordinary records do then hardly lies along them.
    if config.canary_kind == "noise":
        return _without_coarse_waves(rng.standard_normal(shape, np.float32)), labels
    size = math.prod(shape[1:])
    blank = np.zeros((count, size), np.float32)
    places = np.concatenate([rng.permutation(size) for _ in range(-(-count // size))])
    blank[np.arange(count), places[:count]] = math.sqrt(size)  # as long as noise
    return blank.reshape(shape), labels


def _without_coarse_waves(noise: np.ndarray) -> np.ndarray:
    """Noise [m, ...]; of images [m, height, width, channels] without its coarse waves.

    Images of anything are mostly those, so that less of what other records do lies along it.
    """
    if noise.ndim != 4 or min(noise.shape[1:3]) < _FINEST:
        return noise
    waves = np.fft.fft2(noise, axes=(1, 2))
    one, two = (np.abs(np.fft.fftfreq(size)) for size in noise.shape[1:3])
    waves *= (np.maximum(one[:, None], two[None]) > 0.25)[None, :, :, None]  # cycles a pixel
    found = np.fft.ifft2(waves, axes=(1, 2)).real
    return np.asarray(found / found.std(), np.float32)


def _tests_left(config: RunConfig, count: int) -> int:
    """The number of the ``count`` test records that are no candidates: the first ones."""
    taken = config.canaries if config.canary_kind == "mislabelled" else 0
    return count - taken


def loss_of(config: RunConfig) -> Callable[..., jax.Array]:
    """The loss of one example."""
    return models.cross_entropy(model_of(config))


def energy_of(
    config: RunConfig,
    public: tuple[LossFn, PyTree],
    trained: tuple[LossFn, PyTree],
    sampler: Callable[..., Sampler],
) -> PublicEnergy | PrivateEnergy | None:
    """The energy that judges the candidates of an annealed algorithm; None for another.

    Args:
        config: resolved.
        public: loss and test examples that may judge.
        trained: loss and training records, on the device.
        sampler: (mechanism, number of records, physical batch size) -> sampler on the run's ledger.
    """
    kind = registry.ALGORITHMS[config.algorithm].energy
    if not kind:
        return None
    if kind in ("public", "test"):
        return PublicEnergy(public[0], jax.device_put(public[1]))
    loss_fn, records = trained
    if kind == "train":
        return PublicEnergy(loss_fn, records)
    mechanism = config.private_algorithm().energy
    assert mechanism is not None
    count = len(jax.tree.leaves(records)[0])
    rows = config.physical_batch_size
    # Of "auto", what an update's memory leaves says nothing about an energy's.
    drawn = sampler(mechanism, count, rows if isinstance(rows, int) else rows_of_pass(config))
    return PrivateEnergy(loss_fn, records, mechanism, drawn)


def test_split(
    config: RunConfig, dataset: data.Dataset
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """(x, y) of the test examples that judge candidates, and of those that accuracy is measured on.

    A public energy takes the first half of the test set, at most 5,000, and accuracy the rest. As
    published all examples do both, so that the accuracy is not held out. Those that are candidates
    of an audit are in neither.
    """
    kind = registry.ALGORITHMS[config.algorithm].energy
    left = _tests_left(config, len(dataset.test_y))
    whole = (dataset.test_x[:left], dataset.test_y[:left])
    if kind != "public":
        return whole, whole
    cut = min(5_000, left // 2)
    return tuple(a[:cut] for a in whole), tuple(a[cut:] for a in whole)


def fresh_params(config: RunConfig, secret: Secret) -> PyTree:
    """The parameters before the first step, a function of the secret alone."""
    return models.init(model_of(config), secret.jax_key("init"), config.example_shape())


def model_of(config: RunConfig) -> nn.Module:
    """The model of a configuration."""
    return models.build(
        config.model,
        num_classes=config.spec.num_classes,
        example_shape=config.example_shape(),
        activation=config.activation,
        hidden=(config.hidden,),
    )


def evaluator(
    model: nn.Module, x: np.ndarray, y: np.ndarray
) -> Callable[[PyTree], dict[str, float]]:
    """Returns a function from parameters to ``test_accuracy`` and ``test_loss`` (cross-entropy).

    Args:
        model: the network.
        x: public test examples, which go to the device once.
        y: their labels.
    """
    size = 1_000
    x, y = jax.device_put((x, y))

    @jax.jit
    def sums(params: PyTree, xs: jax.Array, ys: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = jnp.asarray(model.apply(params, xs))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, ys)
        return jnp.sum(jnp.argmax(logits, axis=-1) == ys), jnp.sum(losses)

    def numbers(params: PyTree) -> dict[str, float]:
        parts = [sums(params, x[i : i + size], y[i : i + size]) for i in range(0, len(y), size)]
        correct, loss = (sum(float(part) for part in of) for of in zip(*parts, strict=True))
        return {"test_accuracy": correct / len(y), "test_loss": loss / len(y)}

    return numbers


@dataclasses.dataclass(frozen=True)
class Times:
    """The times that were measured.

    Attributes:
        compile: seconds of the first step, which compiles.
        step: seconds of a step, the median of a few.
        grid: the integer grid of the noise in words; None for ordinary noise.
    """

    compile: float
    step: float
    grid: str | None = None


def rehearse(config: RunConfig) -> Times:
    """Times steps of a resolved configuration; no record is read, nothing is charged or written."""
    config = dataclasses.replace(config, canaries=0)  # they come with the real data
    dataset, secret, ledger = _random(config), Secret.new(), Ledger()
    train = jax.device_put((dataset.train_x, dataset.train_y))
    loss_fn = loss_of(config)

    def sampler(mechanism: Mechanism, num_records: int, rows: int) -> Sampler:
        return mechanism.sampler(num_records, ledger=ledger, physical_batch_size=rows)

    algorithm = config.private_algorithm(secret)
    trainer = Trainer(
        loss_fn,
        algorithm,
        source=train,
        ledger=ledger,
        energy=energy_of(
            config, (loss_fn, test_split(config, dataset)[0]), (loss_fn, train), sampler
        ),
        physical_batch_size=config.physical_batch_size,
    )
    state, times = trainer.init(fresh_params(config, secret)), []
    began = time.perf_counter()
    limit = 1 + _REHEARSED if config.strategy is None else config.steps  # a strategy ends there
    for batch in trainer.batches(min(1 + _REHEARSED, limit or 1)):
        state, _ = trainer.step(state, batch)
        jax.block_until_ready(state.params)
        now = time.perf_counter()
        times.append(now - began)
        began = now
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    grid = algorithm.mechanism.noise_description(count) or None
    return Times(times[0], statistics.median(times[1:] or times), grid)


def _random(config: RunConfig) -> data.Dataset:
    """Random data in the shapes of the configured ones."""
    spec, rng = config.spec, np.random.default_rng(0)

    def records(count: int) -> tuple[np.ndarray, np.ndarray]:
        x = rng.random((count, *config.example_shape()), np.float32)
        return x, rng.integers(0, spec.num_classes, count).astype(np.int32)

    return data.Dataset(spec, *records(config.dataset_size), *records(spec.test_size))
