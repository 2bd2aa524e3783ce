import numpy as np
import pytest
import requests

from jaxdp import data
from jaxdp.data import builders
from jaxdp.data.specs import SPECS
from tests.data import originals
from tests.runs.small import refused


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """MNIST-like and census files, prepared into tmp_path/tfds."""
    rng = np.random.default_rng(1)
    mnist, arrays = originals.mnist(tmp_path / "originals", rng)
    pums, table = originals.pums(tmp_path / "originals", rng)
    monkeypatch.setitem(SPECS, "mnist", mnist)
    monkeypatch.setitem(SPECS, "pums", pums)
    for name in ("mnist", "pums"):
        data.prepare(name, tmp_path / "originals", tmp_path / "tfds")
    return tmp_path, arrays, table


def sort_rows(x, y):
    rows = np.concatenate([x.reshape(len(x), -1), np.asarray(y)[:, None]], axis=1)
    return rows[np.lexsort(rows.T)]


def test_images_survive_the_round_trip(prepared):
    folder, arrays, _ = prepared
    loaded = data.load("mnist", folder / "tfds")
    assert loaded.train_x.dtype == np.float32
    assert loaded.train_y.dtype == np.int32
    pairs = ((loaded.train_x, loaded.train_y), (loaded.test_x, loaded.test_y))
    for (x, y), (images, labels) in zip(pairs, arrays.values(), strict=True):
        np.testing.assert_array_equal(
            sort_rows(x, y), sort_rows(images.astype(np.float32) / np.float32(255), labels)
        )


def test_census_rows_survive_the_round_trip(prepared):
    folder, _, table = prepared
    loaded = data.load("pums", folder / "tfds")
    assert set(np.unique(loaded.train_x)) == {-1.0, 1.0}
    assert len(loaded.train_y) == 40
    total = loaded.train_y.sum() + loaded.test_y.sum()
    assert total == (1 - table["employed"]).sum()


def test_preparing_twice_does_nothing_and_needs_no_source(prepared):
    folder, _, _ = prepared
    before = builders.prepared_folder(SPECS["pums"], folder / "tfds").stat().st_mtime
    data.prepare("pums", folder / "gone", folder / "tfds")
    assert builders.prepared_folder(SPECS["pums"], folder / "tfds").stat().st_mtime == before


def test_digits_are_embedded_and_split_by_position():
    digits = data.load("digits")
    assert digits.train_x.shape == (1_437, 8, 8, 1)
    assert digits.test_x.shape == (360, 8, 8, 1)
    assert digits.train_x.min() == 0
    assert digits.train_x.max() == 1


def test_fingerprint_sees_every_array_and_needs_the_key():
    digits = data.load("digits")
    base = digits.fingerprint(b"key")
    assert digits.fingerprint(b"key") == base
    assert digits.fingerprint(b"other") != base
    for name in ("train_x", "train_y", "test_x", "test_y"):
        changed = {n: getattr(digits, n) for n in ("train_x", "train_y", "test_x", "test_y")}
        changed[name] = changed[name].copy()
        changed[name].flat[0] += 1
        assert data.Dataset(digits.spec, **changed).fingerprint(b"key") != base


def test_without_a_network_the_answer_is_quick_and_says_what_to_do(tmp_path, monkeypatch):
    asked = []

    def unreachable(url, timeout):
        asked.append((url, timeout))
        raise requests.ConnectionError("no network")

    monkeypatch.setattr(requests, "head", unreachable)
    words = r"could not be fetched \(ConnectionError\): write it with"
    refused(words, data.load, "mnist", tmp_path)
    assert len(asked) == 1
    assert list(tmp_path.iterdir()) == []


def test_bad_input(tmp_path):
    for words, call, *args in (
        ("dataset must be one of digits", data.load, "imagenet", tmp_path),
        ("dataset 'pums' is not in .*: write it with", data.load, "pums", tmp_path),
        ("dataset 'digits' is embedded", data.prepare, "digits", tmp_path, tmp_path),
        ("source must be a folder", data.prepare, "pums", tmp_path / "nowhere", tmp_path),
        ("FultonPUMS5full.csv is missing", data.prepare, "pums", tmp_path, tmp_path),
    ):
        refused(words, call, *args)


def test_a_file_of_another_kind_is_refused(tmp_path):
    path, whole = tmp_path / "mine.npz", np.zeros((20, 4, 4), np.uint8)
    right = {"x": whole, "y": np.zeros(20, int), "x_test": whole, "y_test": np.zeros(20, int)}
    for changes, words in (
        ({"x": None}, "data must hold x"),
        ({"y_test": None}, "data must hold x"),
        ({"y": np.zeros(19, int)}, "x and y must have one row for each record"),
        ({"x": np.full((20, 4), np.nan)}, "x must be finite"),
        ({"x": np.zeros(20)}, r"x must be numbers \[n, ...\]"),
        ({"x": np.zeros((20, 5))}, "x_test must have rows of shape"),
        ({"y": np.zeros(20)}, r"y must be whole numbers \[n\]"),
    ):
        arrays = {name: value for name, value in {**right, **changes}.items() if value is not None}
        np.savez(path, **arrays)
        refused(words, data.from_file, path, 3)
    np.savez(path, **right)
    damaged = bytearray(path.read_bytes())
    damaged[200] ^= 0xFF
    path.write_bytes(damaged)
    refused("file to be read, got", data.from_file, path, 3)
    path.write_bytes(b"no")
    refused(r"data must be a \.npz file to be read", data.from_file, path, 3)
    refused(r"data must be a \.npz file with x", data.from_file, tmp_path / "mine.csv", 3)
