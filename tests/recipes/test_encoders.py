"""Encoders of one's own: a record alone makes its features; what mixes records is refused.

In a run they are named, cost nothing, and stay the same ones.
"""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp import runs
from jaxdp.recipes import encoders
from jaxdp.recipes.encoders import Encoder
from jaxdp.runs import assemble, tuned
from tests.cli.calling import ran
from tests.refusing import all_refused, refused
from tests.runs import own, small

W = np.random.default_rng(0).normal(size=(64, 6)).astype(np.float32)
X = np.random.default_rng(1).random((11, 8, 8, 1), np.float32)


def encode(images):
    return np.tanh(images.reshape(len(images), -1) @ W)


class Tensor:
    """As torch has them: NumPy reads it once its gradient is off and it is on the host."""

    def __init__(self, value):
        self.value = value

    def detach(self):
        return Tensor(self.value)

    def cpu(self):
        return self

    def float(self):
        return self

    def numpy(self):
        return self.value


@pytest.mark.parametrize("rows", [1, 4, 64])
@pytest.mark.parametrize(
    "kind", [np.asarray, np.ndarray.tolist, Tensor, lambda x: jnp.asarray(x, jnp.bfloat16)]
)
def test_features_are_those_of_each_record(rows, kind):
    sizes = []

    def counted(images):
        sizes.append(len(images))
        images -= 0.5  # in place, as torch may: of a copy
        return kind(encode(images + 0.5))

    given = X.copy()
    found = Encoder(counted, "tanh", rows)(given)
    np.testing.assert_array_equal(given, X)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, encode(X), atol=4e-3, rtol=0)
    assert set(sizes) <= {rows, 4}  # never a part of a batch; four where one is taken at a time


def test_no_other_record_moves_the_last_digit():
    encoder = Encoder(encode, "tanh")
    everybody, without = encoder(X), encoder(X[3:])
    np.testing.assert_array_equal(everybody[3:], without)
    # Records of any kind.
    texts = ["to be", "or not", "to", "be", "that"]
    counted = Encoder(lambda given: [[len(t), t.count("o")] for t in given], "letters", rows=3)
    assert counted(texts).tolist() == [[5, 1], [6, 2], [2, 1], [2, 0], [4, 0]]


class Moving:
    """Centred by a mean over what came before."""

    mean = 0.0

    def __call__(self, images):
        found = encode(images)
        self.mean = 0.9 * self.mean + 0.1 * found.mean(0)
        return found - self.mean


def standardised(images):
    found = encode(images)
    return (found - found.mean(0)) / (found.std(0) + 1e-3)


def dropped(images, rng=np.random.default_rng(0)):  # noqa: B008
    return encode(images) * (rng.random(6) < 0.5)


class Drifting:
    """Centred by a mean over what came before that hardly moves."""

    mean = 0.0

    def __call__(self, images):
        self.mean += 3e-5 * images.mean()
        return images.reshape(len(images), -1) - self.mean


def in_8_bits(images):
    """By the largest number of all, as networks do that were quantised as they go."""
    scale = np.abs(images).max() / 127
    return np.rint(images.reshape(len(images), -1) / scale) * scale


def test_what_shows_late_or_beside_large_numbers_is_refused():
    many = np.tile(X[:1], (600, 1, 1, 1)) + np.arange(600).reshape(-1, 1, 1, 1) // 64
    dates = np.column_stack([np.full(11, 1.7e9), X.reshape(11, -1)])
    all_refused(
        [
            ("after all others from mine", lambda: Encoder(Drifting(), "mine")(many)),
            ("beside larger ones from mine", lambda: Encoder(in_8_bits, "mine", 8)(np.rint(X))),
            # Of a first batch that is all alike, no neighbour would say anything.
            ("beside other records", lambda: Encoder(lambda x: x - x.mean(0), "mine", 64)(many)),
            (
                "beside other records",
                lambda: Encoder(
                    lambda x: np.column_stack([x[:, 0], x[:, 1:] - x[:, 1:].mean(0)]), "mine", 64
                )(dates),
            ),
        ]
    )


@pytest.mark.parametrize("rows", [1, 2, 32])
def test_what_mixes_records_is_refused(rows):
    said = r"alone, beside others and twice, got others {} from mine: .*model\.eval\(\)"
    ordered = lambda images: encode(images) + np.arange(len(images))[:, None]  # noqa: E731
    all_refused(
        [
            (said.format(when), lambda f=f: Encoder(f, "mine", rows)(X))
            for when, f in (
                ("beside other records", standardised),
                ("beside other records", ordered),
                ("the second time", Moving()),
                ("the second time", dropped),
            )
        ]
    )


def test_what_are_no_features_is_refused_without_a_record():
    def raises(images):
        raise KeyError("pixel")

    def fixed(images):  # exported for one image
        if len(images) != 1:
            raise RuntimeError("1")
        return encode(images)

    np.testing.assert_array_equal(Encoder(fixed, "of one")(X), Encoder(encode, "any")(X))
    broken = np.where(np.arange(11) == 9, np.nan, 1.0)
    rows = [
        ("must be a function from records to numbers, got", lambda: Encoder(W, "no")),
        ("name must be a line of words", lambda: Encoder(encode, "a\nb")),
        ("rows must be", lambda: Encoder(encode, "no", 0)),
        ("at least one, got none", lambda: Encoder(encode, "no")(X[:0])),
        (
            r"numbers \[4, ...\], a row for each of 4 records, got shape \[\] from s, given an "
            r"array float32 \[4, 8, 8, 1\]",
            lambda: Encoder(np.sum, "s", 4)(X),
        ),
        (r"got shape \[1, 4, 6\]", lambda: Encoder(lambda x: [encode(x)], "onnx", 4)(X)),
        (r"got shape \[1\]", lambda: Encoder(lambda x: x.sum((1, 2, 3)), "flat")(X)),
        ("numbers, got <U1", lambda: Encoder(lambda x: [["a"]] * len(x), "words")(X)),
        (
            "^encode must return finite numbers, got one that is not from mine$",
            lambda: Encoder(lambda x: encode(x) / x[:, 0, 0], "mine")(
                X * broken[:, None, None, None]
            ),
        ),
        ("an Encoder or a line of words for one, got", lambda: encoders.public(3)),
    ]
    all_refused(rows)
    with pytest.raises(KeyError) as found:
        Encoder(raises, "mine")(X)
    assert found.value.__notes__ == [
        "raised by the encoder mine, given an array float32 [1, 8, 8, 1]"
    ]


def test_words_name_the_weights_and_what_rounds(tmp_path):
    (tmp_path / "w").write_bytes(b"weights")
    of_file = Encoder(encode, "net", weights=tmp_path / "w")
    assert str(of_file) == "net (weights sha256 9a129038d9a00aed), one record at a time"
    one, other = ({"a": W, "b": Tensor(W[0] + change)} for change in (0.0, 1e-3))
    assert encoders.digest(one) == encoders.digest(dict(one))
    assert encoders.digest(one) != encoders.digest(other)
    # Not where a module lies in memory, which were other words in each process.
    refused("arrays, such as model.state_dict.., got a Encoder", encoders.digest, [of_file])
    assert "64 records at a time, which may round" in str(Encoder(encode, "net", 64))


# In a run.
FILE = """
import numpy as np
from jaxdp.recipes.encoders import Encoder
W = np.random.default_rng({seed}).normal(size=(64, 6)).astype(np.float32)
def encode(images):
    return np.tanh(images.reshape(len(images), -1) @ W)
NAMED = Encoder(encode, "net", weights={weights})
"""


@pytest.fixture
def file(tmp_path):
    """From a seed of the weights to the name of the encoder; one that is read anew."""

    def written(seed=0, attribute="NAMED", weights="W"):
        (tmp_path / "mine.py").write_text(FILE.format(seed=seed, weights=weights))
        return f"{tmp_path / 'mine.py'}:{attribute}"

    return written


def test_a_run_goes_on_with_its_encoder_and_no_other(tmp_path, file):
    made = {"canaries": 20, "canary_kind": "noise", "whiten_noise_multiplier": 8.0}
    cfg, rows = small.config(features=file(), **made), small.dataset()
    assert cfg.example_shape() == (6,)
    assert runs.RunConfig.from_dict(json.loads(json.dumps(cfg.to_dict()))) == cfg
    small.crash(tmp_path / "r", cfg, 6, rows=rows)
    file(seed=1)
    other = f"those that the run was begun with, net .* from {tmp_path}"
    refused(other, small.go, tmp_path / "r", cfg)
    file(weights="2 * W")  # others, by which no probe is changed: said beside those of then
    result = small.go(tmp_path / "r", cfg, rows=rows)
    now = str(encoders.named(cfg.features))
    assert now != cfg.encoder["words"]
    said = {encoders.public(words) for words in (now, cfg.encoder["words"])}
    assert said <= set(result.ledger.unverified())
    file()
    seen = assemble.featured(cfg, rows)
    np.testing.assert_allclose(seen.train_x, encode(rows.train_x), rtol=1e-5)
    # Another machine's digits are no other encoder; nor must there be test records.
    known = {**cfg.encoder, "numbers": [x * (1 + 1e-4) for x in cfg.encoder["numbers"]]}
    assert encoders.by_name(cfg.features, rows.test_x[:0], known).shape == (0, 6)
    assert (
        small.config(features=file(attribute="encode")).encoder["words"].startswith(str(tmp_path))
    )
    all_refused(
        [
            ("must name a function or an Encoder", lambda: small.config(features=file(0, "no"))),
            ("must name a function or an Encoder", lambda: small.config(features="no.such:f")),
            ("must be a function from records", lambda: small.config(features=file(0, "W"))),
        ]
    )


def test_names_are_looked_up_anew(tmp_path, monkeypatch):
    made = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        Path("mine.py").write_text(FILE.format(seed=len(made), weights="W"))
        made.append(encoders.named("mine.py:NAMED"))
    Path("mine.py").write_text(FILE.format(seed=7, weights="W"))  # as long, in the same second
    made.append(encoders.named("mine.py:NAMED"))
    assert len({str(encoder) for encoder in made}) == 3
    assert len({encoder(X).tobytes() for encoder in made}) == 3
    # Of a notebook.
    monkeypatch.setattr(encoders, "mine", encode, raising=False)
    numbers = encoders.probed("jaxdp.recipes.encoders:mine", (8, 8, 1))["numbers"]
    monkeypatch.setattr(encoders, "mine", lambda x: 2 * encode(x))
    now = encoders.probed("jaxdp.recipes.encoders:mine", (8, 8, 1))["numbers"]
    np.testing.assert_allclose(now, 2 * np.array(numbers), rtol=1e-5)
    Path("half.py").write_text("1 +")
    refused("must name a function or an Encoder", encoders.named, "half.py:f")
    refused("features must be a name", runs.recipe, "digits", features=made[0])


def test_what_was_resolved_with_an_encoder_can_do_without(file):
    cfg = small.config(features=file())
    assert runs.resolve(dataclasses.replace(cfg, features=None, epsilon=None)).encoder is None


@small.undrawn()
def test_the_command_line_and_the_page_name_it(tmp_path, file):
    options = ["--features", file(), "--steps", 2, "--batch-size", 50, "--epsilon", 3]
    ran("train", *options, "--out", tmp_path / "r")
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    assert report["unverified"] == [encoders.public(report["config"]["encoder"]["words"])]
    page = " ".join((tmp_path / "r" / "report.md").read_text().split())
    assert "one record at a time; taken as public, and computed before training" in page
    assert "of nobody" not in page
    assert "of no data of anybody" not in page


@small.undrawn()
def test_a_program_says_it_of_its_own_features(tmp_path):
    said = encoders.public("net, trained on ImageNet")
    run = own.run(tmp_path / "r", features="net, trained on ImageNet", report=True)
    run.fit()
    assert run.unverified() == [said]
    page = " ".join((tmp_path / "r" / "report.md").read_text().split())
    assert "| Features | net, trained on ImageNet; taken as public" in page
    assert said in page
    refused("features must be an Encoder or", own.run, tmp_path / "s", features=3)
    forgotten = Encoder(encode, "net")
    refused("net, which was never called", own.run, tmp_path / "s", features=forgotten)
    forgotten(X)
    own.run(tmp_path / "s", features=forgotten)


def test_a_search_says_it_too(tmp_path, file):
    law = jaxdp.accounting.PoissonTries(1.0)
    cfg = tuned.configured(
        "digits", law, epsilon=None, noise_multiplier=2.0, features=file(), steps=2, batch_size=50
    )
    tuned.tuned(tmp_path / "t", cfg, jaxdp.data.load("digits"), {"momentum": [0.0, 0.5]}, law)
    ledger = (tmp_path / "t" / "ledger.jsonl").read_text()
    assert encoders.public(cfg.encoder["words"]) in ledger
