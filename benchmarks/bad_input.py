"""What wrong input gets: `python -m benchmarks.bad_input` prints the table; the tests check it."""

import contextlib
import io
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxdp
from jaxdp import accounting as acc
from jaxdp import data, models
from jaxdp.cli import main

TRAIN = ["train", "--dataset", "digits", "--out", "{tmp}/run"]

# Arguments of `jaxdp`, and a part of the one line that they get.
COMMANDS = [
    (["trian"], "No such command 'trian'"),
    (["train", "--dataset", "imagenet"], "'imagenet' is not one of 'digits'"),
    ([*TRAIN, "--epsilon", "-1"], "epsilon must be a finite number above 0, got -1.0"),
    ([*TRAIN, "--epsilon", "nan"], "epsilon must be a finite number above 0, got nan"),
    ([*TRAIN, "--epsilon", "three"], "'three' is not a valid float"),
    ([*TRAIN, "--delta", "0"], "delta must be a finite number above 0, got 0.0"),
    ([*TRAIN, "--delta", "2"], "delta must be above 0 and below 1, got 2.0"),
    ([*TRAIN, "--noise-multiplier", "-0.5"], "noise_multiplier must be a finite number above 0"),
    ([*TRAIN, "--steps", "0"], "steps must be a whole number of at least 1, got 0"),
    ([*TRAIN, "--steps", "1.5"], "'1.5' is not a valid integer"),
    (
        [*TRAIN, "--steps", "9", "--epsilon", "1", "--noise-multiplier", "1"],
        "two of epsilon, noise_multiplier and steps must be given, got all three",
    ),
    ([*TRAIN, "--batch-size", "2000"], "batch_size must be at most dataset_size (1437), got 2000"),
    ([*TRAIN, "--model", "mnist-cnn"], "model mnist-cnn must be given examples (28, 28, 1)"),
    ([*TRAIN, "--activation", "gelu"], "'gelu' is not one of 'tanh', 'relu'"),
    ([*TRAIN, "--l2-clip-norm", "0"], "l2_clip_norm must be a finite number above 0, got 0.0"),
    ([*TRAIN, "--learning-rate", "-1"], "learning_rate must be a finite number above 0, got -1.0"),
    ([*TRAIN, "--learning-rate", "1e30"], "learning_rate must be at most 1e+06, got 1e+30"),
    ([*TRAIN, "--learning-rate", "0"], "learning_rate must be a finite number above 0, got 0.0"),
    ([*TRAIN, "--learning-rate", "inf"], "learning_rate must be a finite number above 0, got inf"),
    ([*TRAIN, "--learning-rate", "nan"], "learning_rate must be a finite number above 0, got nan"),
    ([*TRAIN, "--delta", "0.5"], "delta must be at least 1e-30 and at most 0.1, well below 1 over"),
    ([*TRAIN, "--delta", "1e-300"], "delta must be at least 1e-30 and at most 0.1"),
    (["train", "--out", ""], "expected a path, got ''"),
    ([*TRAIN, "--data-dir", ""], "expected a path, got ''"),
    ([*TRAIN, "--algorithm", ""], "algorithm must be one of"),
    ([*TRAIN, "--noise-schedule", ""], "noise_schedule must be kind:number:every"),
    (["export", ""], "expected a path, got ''"),
    ([*TRAIN, "--resume", "--dry-run"], "--dry-run must not come with --resume"),
    ([*TRAIN, "--momentum", "1"], "momentum must be at least 0 and below 1, got 1.0"),
    ([*TRAIN, "--sampling", "shuffled"], "sampling must be one of poisson"),
    ([*TRAIN, "--sampling", "full_batch"], "batch_size must be 1437 with sampling full_batch"),
    ([*TRAIN, "--seed", "-4"], "seed must be a whole number of at least 0, got -4"),
    ([*TRAIN, "--resume", "--seed", "4"], "--seed must not come with --resume"),
    (["train", "--resume"], "--out must name the run to resume"),
    ([*TRAIN, "--resume"], "out must hold a run to resume"),
    (["train", "--dataset", "pums", "--data-dir", "{tmp}", "--out", "{tmp}/run"], "write it with"),
    (["train", "--out", "{tmp}/file"], "out must be a folder to write to"),
    (["export", "{tmp}"], "folder must hold a run, with its secret/"),
    (["data", "prepare", "mnist", "--source", "{tmp}/no", "--data-dir", "{tmp}"], "source must be"),
    (["data", "prepare", "pums", "--source", "{tmp}", "--data-dir", "{tmp}"], "is missing"),
    (["data", "prepare", "digits", "--source", "{tmp}", "--data-dir", "{tmp}"], "is embedded"),
    (["epsilon", "--steps", "10"], "Missing option"),
    (
        [
            "epsilon",
            "--sampling-prob",
            "1.5",
            "--noise-multiplier",
            "1",
            "--steps",
            "1",
            "--delta",
            "1e-5",
        ],
        "sampling_prob",
    ),
    (["calibrate", "--epsilon", "3", "--delta", "1e-5", "--steps", "9"], "exactly two of"),
]

PARAMS = {"w": jnp.zeros(2)}
RECORDS = jnp.ones((3, 2))
OWN = jnp.asarray([[0.31415927, 1.2345678], [2.7182818, 0.57721566], [1.618034, 0.69314718]])
KEY = jax.random.key(0)


def mechanism(**changes):
    good = {"noise_multiplier": 1.0, "l2_clip_norm": 1.0, "batch_size": 5, "dataset_size": 50}
    return jaxdp.dp_sgd(**{**good, **changes})


def summed(loss_fn):
    return jaxdp.clipped_grad(loss_fn, jaxdp.clip(1.0))(PARAMS, jnp.zeros((3, 2)), "all")


def chained(*before):
    import optax

    tx = optax.chain(*before, jaxdp.privatize(1.0, 5.0))
    return tx.update(jaxdp.Summed(PARAMS, 1.0), tx.init(PARAMS), PARAMS, key=simulated(1.0))


def simulated(noise):
    return mechanism(noise_multiplier=noise).simulated_key(KEY)


def noised(**given):
    """An update of privatize(1.0, 5.0), outside jit."""
    tx = jaxdp.privatize(1.0, 5.0)
    return tx.update(jaxdp.Summed(PARAMS, 1.0), tx.init(PARAMS), PARAMS, **given)


def twice(again):
    """One draw in two updates, or in a compiled function."""
    mech = mechanism()
    grad_fn = mech.clipped_grad(lambda p, e: jnp.vdot(p["w"], e))
    tx, draw = mech.privatize(), mech.sampler(50).draw()
    total = grad_fn(PARAMS, jnp.zeros((50, 2)), draw)
    state = tx.init(PARAMS)
    return again(lambda: tx.update(total, state, PARAMS), draw)


def trained(use):
    import optax

    trainer = jaxdp.Trainer(
        lambda p, e: jnp.vdot(p["w"], e), mechanism(), optax.sgd(0.1), np.zeros((50, 2), np.float32)
    )
    return use(trainer, trainer.init(PARAMS))


def optax_clip():
    import optax

    return optax.clip(1.0)


# Python as a user would write it, and a part of the message.
CALLS = {
    "jaxdp.clip(0)": (lambda: jaxdp.clip(0), "l2_clip_norm must be a finite number above 0, got 0"),
    "jaxdp.clip('0.1')": (lambda: jaxdp.clip("0.1"), "l2_clip_norm must be a number, got '0.1'"),
    "clipped_grad(loss, optax.clip(1.0))": (
        lambda: jaxdp.clipped_grad(lambda p, e: 0.0, optax_clip()),
        "rule must be a clipping rule",
    ),
    "clipped_grad(lambda params: ...)": (
        lambda: jaxdp.clipped_grad(lambda params: 0.0, jaxdp.clip(1.0)),
        "loss_fn must take",
    ),
    "a loss with a batch axis": (
        lambda: summed(lambda p, e: p["w"] * e),
        "loss_fn must return a scalar for one example",
    ),
    "an integer mask": (
        lambda: jaxdp.clipped_grad(lambda p, e: jnp.vdot(p["w"], e), jaxdp.clip(1.0))(
            PARAMS, jnp.zeros((3, 2)), jnp.ones(3, jnp.int32)
        ),
        "mask must be bool [3], got int32 [3]",
    ),
    "a batch without a mask": (
        lambda: jaxdp.clipped_grad(lambda p, e: jnp.vdot(p["w"], e), jaxdp.clip(1.0))(
            PARAMS, jnp.zeros((3, 2))
        ),
        "draw must be a Draw where data are all records, a mask where they are the rows of one",
    ),
    "a loss that closes over its batch": (
        lambda: jaxdp.clipped_grad(lambda p, e: jnp.vdot(p["w"], e - OWN.mean(0)), jaxdp.clip(1.0))(
            PARAMS, OWN, "all"
        ),
        "got: a constant [N, 2] in the loss is several of the records",
    ),
    "optax.clip before privatize": (lambda: chained(optax_clip()), ""),
    "privatize fed a plain gradient": (
        lambda: jaxdp.privatize(1.0, 5.0).update(PARAMS, jaxdp.privatize(1.0, 5.0).init(PARAMS)),
        "privatize must come first in the chain",
    ),
    "update without a ticket or a key": (noised, "key must be given to an update that you compile"),
    "update(key=0)": (lambda: noised(key=0), "key must be the noise key of a draw"),
    "update(key of another noise)": (
        lambda: noised(key=simulated(0.5)),
        "noise_multiplier must be the one that the step was",
    ),
    "one Summed in two updates": (
        lambda: twice(lambda update, draw: (update(), update())),
        "ticket must be spent once",
    ),
    "draw.key() twice": (
        lambda: twice(lambda update, draw: (draw.key(), draw.key())),
        "ticket must be spent once",
    ),
    "a Summed inside jit": (
        lambda: twice(lambda update, draw: jax.jit(lambda s: s)(jaxdp.Summed(PARAMS, 1.0))),
        "un-noised sum",
    ),
    "sum + sum of two draws": (
        lambda: jaxdp.Summed(PARAMS, 1.0) + jaxdp.Summed(PARAMS, 1.0),
        "parts of one draw",
    ),
    "Trainer(loss, mechanism, source=...)": (
        lambda: jaxdp.Trainer(lambda p, e: jnp.vdot(p["w"], e), mechanism(), source=RECORDS),
        "optimizer must be an optax optimizer",
    ),
    "trainer.step(state, data)": (
        lambda: trained(lambda trainer, state: trainer.step(state, RECORDS)),
        "batch must be one that trainer.batches() hands out",
    ),
    "a batch in two steps": (
        lambda: trained(
            lambda trainer, state: [
                trainer.step(trainer.init(PARAMS), batch)
                for batch in [next(trainer.batches(1))] * 2
            ]
        ),
        "batch must be one that trainer.batches() just handed out, for one step",
    ),
    "Ledger().epsilon(1e-5)": (
        lambda: jaxdp.Ledger().epsilon(1e-5),
        "ledger must hold a charge to have an epsilon",
    ),
    "dp_sgd(batch_size=51 of 50)": (
        lambda: mechanism(batch_size=51),
        "batch_size must be at most dataset_size (50), got 51",
    ),
    "dp_sgd(sampling='cyclic')": (
        lambda: mechanism(sampling="cyclic"),
        "sampling must be one of poisson",
    ),
    "Poisson(1.5)": (
        lambda: jaxdp.sampling.Poisson(1.5),
        "sampling_prob must be above 0 and at most 1",
    ),
    "FixedSize sampler, other size": (
        lambda: mechanism(sampling="fixed_size").sampler(49),
        "dataset_size must be the number of",
    ),
    "Secret.from_seed(-1)": (lambda: jaxdp.Secret.from_seed(-1), "seed must be a whole number"),
    "Ledger().charge('gaussian')": (
        lambda: jaxdp.Ledger().charge("gaussian"),
        "event must be an accounting event",
    ),
    "acc.Gaussian(-1)": (lambda: acc.Gaussian(-1), "noise_multiplier"),
    "acc.epsilon(shuffled epoch)": (
        lambda: acc.epsilon(acc.ShuffledEpoch(acc.Gaussian(1.0), 10), 1e-5),
        "huffle",
    ),
    "models.build('resnet')": (
        lambda: models.build("resnet", num_classes=2, example_shape=(5,)),
        "model must be one of",
    ),
    "data.load('imagenet')": (lambda: data.load("imagenet"), "dataset must be one of digits"),
}


def run_command(args: list[str]) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of `jaxdp` with these arguments, in a fresh folder."""
    out, err = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as tmp:
        (Path(tmp) / "file").write_text("not a folder")
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main([arg.replace("{tmp}", tmp) for arg in args])
                status = 0
            except SystemExit as end:
                status = int(end.code or 0)
        left = [p for p in Path(tmp).rglob("*") if p.name != "file"]
        assert not left, f"{args} left {left}"
    return status, out.getvalue(), err.getvalue().replace(tmp, "TMP")


def run_call(name: str) -> str:
    """The error that a call gets."""
    try:
        CALLS[name][0]()
    except (ValueError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"{name} was accepted")


def print_table() -> None:
    print("| input | gets |\n|---|---|")
    for args, _ in COMMANDS:
        status, _, err = run_command(args)
        print(f"| `jaxdp {' '.join(args)}` | {status}: {err.strip()} |")
    for name in CALLS:
        print(f"| `{name}` | {' '.join(run_call(name).split())[:160]} |")


if __name__ == "__main__":
    print_table()
