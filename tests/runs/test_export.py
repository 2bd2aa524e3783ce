"""A model's parameters out of a run, in every form, and back into the model, bit for bit."""

import collections
import dataclasses
import errno
import pickle
import shutil

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxdp
from jaxdp._extras import installed
from jaxdp.ledger.durable import StorageError
from jaxdp.runs import RunDirectory, export
from tests.cli import calling
from tests.refusing import all_refused, refused
from tests.runs.own import PLAIN, run
from tests.runs.small import Stop, crash_at

FORMS = ["p.msgpack", "p.orbax"] + ["p.safetensors"] * installed("safetensors")
Pair = collections.namedtuple("Pair", "left right")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: jax.Array
    scale: jax.Array


def bare():
    """Lists, tuples, a NamedTuple, a dataclass, two dtypes, and numbers."""
    layer = Layer(jnp.ones((2, 3)), jnp.float32(0.5))
    return [{"a": (jnp.ones(1), Pair(jnp.ones(2, jnp.bfloat16), 0.25))}, layer, {7: jnp.zeros(2)}]


def of_nnx():
    return nnx.split(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.Param)


def of_equinox():
    return eqx.partition(eqx.nn.MLP(3, "scalar", 4, 1, key=jax.random.key(0)), eqx.is_inexact_array)


class Networks:
    """By framework: parameters, and from parameters and one x to an output."""

    def linen():
        model = nn.Dense(2)
        return model.init(jax.random.key(0), jnp.ones(3)), model.apply

    def nnx():
        graph, params = of_nnx()
        return params, lambda params, x: nnx.merge(graph, params, copy=True)(x)

    def equinox():
        params, static = of_equinox()
        return params, lambda params, x: eqx.combine(params, static)(x)

    def bare():
        first = bare()
        return (
            first,
            lambda params, x: x @ params[1].kernel.T * params[1].scale * params[0]["a"][1].right,
        )


def equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(*map(jax.tree.leaves, (left, right)), strict=True):
        assert isinstance(other, jax.Array)
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("make", ["linen", "nnx", "equinox", "bare"])
def test_parameters_come_back_from_every_form(tmp_path, make):
    params, apply = getattr(Networks, make)()
    loss = lambda p, x, y: jnp.square(jnp.sum(apply(p, x)) - y)  # noqa: E731
    one = run(tmp_path / "r", mechanism=PLAIN, loss=loss, params=params)
    with jax.numpy_dtype_promotion("standard"):  # bfloat16 beside float32
        trained = one.fit(2)
    shapes = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, params))
    for form in FORMS:
        one.export(tmp_path / form)
        equal(trained, jaxdp.load(tmp_path / form, like=params))
        equal(trained, jaxdp.load(tmp_path / form, like=shapes))
        # The folder alone has the same names.
        jaxdp.Run.open(tmp_path / "r").export(tmp_path / f"again-{form}")
        equal(trained, jaxdp.load(tmp_path / f"again-{form}", like=params))


def test_adapters_alone_go_out_and_come_back_into_the_whole(tmp_path):
    def loss(params, x, y):
        return jnp.square(jnp.vdot(params["base"] + params["lora"][0], x) - y)

    params = {"base": jnp.arange(3.0), "lora": [jnp.zeros(3)]}
    trainable = {"base": False, "lora": True}
    one = run(tmp_path / "r", mechanism=PLAIN, loss=loss, params=params, trainable=trainable)
    trained = one.fit(2)
    one.export(tmp_path / "a.msgpack", only="trained")
    jaxdp.Run.open(tmp_path / "r").export(tmp_path / "b.msgpack", only="trained")
    calling.ran("export", tmp_path / "r", "--to", tmp_path / "c.msgpack", "--only", "trained")
    for name in ("a", "b", "c"):
        path = tmp_path / f"{name}.msgpack"
        equal(trained, jaxdp.load(path, like=params, partial=True))
        equal(trained["lora"], jaxdp.load(path, like={"lora": params["lora"]})["lora"])
        refused("base is in like alone", jaxdp.load, path, like=params)
    shapes = jax.eval_shape(lambda: params)
    refused("base is in like alone", jaxdp.load, path, like=shapes, partial=True)


def test_what_cannot_be_written_is_refused_and_nothing_is_lost(tmp_path, monkeypatch):
    one = run(tmp_path / "r", mechanism=PLAIN)
    refused("must hold a run", one.export, tmp_path / "p.msgpack")
    with pytest.raises(Stop):
        run(tmp_path / "r", mechanism=PLAIN, progress=crash_at(8)).fit(9)
    # A run that is not finished, or that another process trains: what was shown last.
    one.directory.lock()
    said = calling.ran("export", tmp_path / "r", "--to", tmp_path / "p.orbax")
    assert "parameters after 6 steps" in said or "parameters after 3 steps" in said
    # How long training took is private: no time, and no folder of the machine, is in what is made.
    content = b"".join(file.read_bytes() for file in (tmp_path / "p.orbax").rglob("*.*"))
    described = (tmp_path / "p.orbax/_CHECKPOINT_METADATA").read_text()
    assert described.count('_timestamp_nsecs": null') == 2
    assert not list((tmp_path / "p.orbax").rglob("*ocdbt*"))
    assert b"/p" not in content
    with pytest.raises(Stop):  # and of this one, where nothing was shown
        run(tmp_path / "q", mechanism=PLAIN, progress=crash_at(2)).fit(9)
    before = sorted(tmp_path.rglob("*"))

    rows = [
        ("must end in .msgpack", tmp_path / "p.pt"),
        ("must end in .msgpack", tmp_path / "model-1.0"),
        ("must end in .msgpack", ""),
        ("must lie outside", tmp_path / "r/secret/p.msgpack"),
        ("must lie outside", tmp_path / "q/../r/secret"),
        ("must be a new folder", tmp_path / "p.orbax"),
        ("must be a new folder", tmp_path / "r"),
        ("cannot be written", tmp_path / "nowhere/p.msgpack"),
        ("cannot be written", tmp_path / "nowhere/p"),
        ("checkpoint that was shown", tmp_path / "q.msgpack"),
    ]
    (tmp_path / "folder.msgpack").mkdir()
    rows.append(("cannot be written", tmp_path / "folder.msgpack"))
    other = RunDirectory(tmp_path / "q")
    all_refused(
        [
            (
                words,
                lambda p=path, d=other if "q.ms" in str(path) else one.directory: to(d, p),
                path,
            )
            for words, path in rows
        ],
        (ValueError, StorageError),
    )
    refused('only must be "trained"', one.export, tmp_path / "p.msgpack", only="adapters")
    with monkeypatch.context() as patched:
        patched.setattr("jaxdp._extras.installed", lambda *names: False)
        refused("pip install", one.export, tmp_path / "p.safetensors", error=ImportError)

    # A full disk leaves what was there, and no half of a file.
    one.export(tmp_path / "p.msgpack")
    kept = (tmp_path / "p.msgpack").read_bytes()

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("jaxdp.runs.files.sync", full)
        refused("Make room", one.export, tmp_path / "p.msgpack", error=StorageError)
    assert (tmp_path / "p.msgpack").read_bytes() == kept
    left = set(tmp_path.rglob("*")) - {*before}
    assert left == {tmp_path / "p.msgpack", tmp_path / "folder.msgpack"}


def to(directory, path):
    return export.export_params(directory, path)


def test_what_cannot_be_loaded_is_refused_in_words(tmp_path):
    one = run(tmp_path / "r", mechanism=PLAIN)
    params = one.fit(1)
    for form in FORMS:
        one.export(path := tmp_path / form)
        wide = {"w": params["w"].astype(jnp.bfloat16)}
        all_refused(
            [
                (words, lambda like=like, path=path: jaxdp.load(path, like=like))
                for words, like in (
                    ("w is in the file alone", {}),
                    ("v is in like alone; w is in the file alone", {"v": jnp.ones(3)}),
                    (r"w is float32\[20, 3\], in like float32\[3\]", {"w": jnp.ones(3)}),
                    (r"w is float32\[20, 3\], in like bfloat16\[20, 3\]", wide),
                )
            ]
        )
        # A file of another kind, a torn one, one that is not there.
        torn = tmp_path / f"torn-{form}"
        if path.is_dir():
            shutil.copytree(path, torn)
            for file in torn.rglob("*"):
                if file.is_file():
                    file.write_bytes(file.read_bytes()[:-3])
        else:
            torn.write_bytes(path.read_bytes()[:-3])
            (tmp_path / f"pickle-{form}").write_bytes(pickle.dumps(Evil(tmp_path / "executed")))
            refused("must be whole", jaxdp.load, tmp_path / f"pickle-{form}", like=params)
        refused("must be whole", jaxdp.load, torn, like=params)
        nothing = tmp_path / f"no-{form}"
        refused("cannot be read", jaxdp.load, nothing, like=params, error=StorageError)
    assert not (tmp_path / "executed").exists()
    refused("must end in .msgpack", jaxdp.load, tmp_path / "p.pkl", like=params)
    refused("a random key at k", export._arrays, {"k": jax.random.key(0)})
    refused("a.b twice", export._arrays, {"a": {"b": 1.0}, "a.b": 2.0})


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return self.path.touch, ()
