"""Data sets: read from their original files, prepared, loaded, or of a file of one's own."""

import dataclasses
import gzip
import hashlib
import io

import numpy as np
import requests
from sklearn.datasets import load_digits

from jaxdp import data
from jaxdp.data import builders, sources
from jaxdp.data.specs import SPECS, SourceFile
from tests.data import originals
from tests.refusing import refused


def test_cifar_mosaics_are_checked_against_the_original_bytes(tmp_path):
    rng = np.random.default_rng(0)
    webp, tiles = originals.mosaic(rng)
    labels, buffer = rng.integers(0, 10, (2, 10_000), np.uint8), io.BytesIO()
    np.save(buffer, labels)
    paths = {"c/a.webp": webp, "c/b.webp": webp, "c/labels.npy": buffer.getvalue()}
    written = originals.write(tmp_path, paths)
    planar = tiles.transpose(0, 3, 1, 2).reshape(10_000, -1)
    whole = [np.concatenate([row[:, None], planar], 1).tobytes() for row in labels]
    one, two = (hashlib.md5(each).hexdigest() for each in whole)

    def spec(second):
        files = (SourceFile("c/a.webp", one), SourceFile("c/b.webp", second), written[2])
        return dataclasses.replace(SPECS["cifar10"], files=files)

    splits = sources.read(spec(two), tmp_path)
    np.testing.assert_array_equal(splits["train"][0], tiles)
    np.testing.assert_array_equal(splits["test"][1], labels[1])
    words = r"b\.webp is damaged: its md5 must be 0000"
    refused(words, sources.read, spec("0" * 32), tmp_path)
    (tmp_path / "c/a.webp").write_bytes(webp[:1000])
    refused(r"a\.webp is damaged", sources.read, spec(two), tmp_path)


def test_the_original_files_are_read_and_a_damaged_or_missing_one_is_named(tmp_path):
    spec, arrays = originals.mnist(tmp_path, np.random.default_rng(0))
    splits = sources.read(spec, tmp_path)
    for name, (images, labels) in arrays.items():
        np.testing.assert_array_equal(splits[name][0][..., 0], images)
        np.testing.assert_array_equal(splits[name][1], labels)
    for file in spec.files:
        path = tmp_path / file.path
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        refused(rf"{path.name} is damaged: its md5 must be", sources.read, spec, tmp_path)
        path.unlink()
        refused(f"{path.name} is missing", sources.read, spec, tmp_path)
        path.write_bytes(whole)
    # The columns of the census.
    spec, table = originals.pums(tmp_path, np.random.default_rng(0))
    splits = sources.read(spec, tmp_path)
    x, y = (np.concatenate([splits["train"][part], splits["test"][part]]) for part in (0, 1))
    order = np.random.Generator(np.random.Philox(key=2021)).permutation(50)
    table["collegedegree"] = table["educ"] >= 13
    expected = np.stack([table[name] for name in sources.PUMS_COLUMNS], 1)
    np.testing.assert_array_equal(x, expected[order])
    np.testing.assert_array_equal(y, 1 - table["employed"][order])
    assert len(splits["train"][1]) == 40
    # One that is out of its range is refused.
    path = spec.files[0].path
    lines = (tmp_path / path).read_text().splitlines()
    cells = lines[1].split(",")
    lines[1] = ",".join([*cells[:2], "2", *cells[3:]])
    files = originals.write(tmp_path, {path: "\n".join(lines).encode()})
    refused("must be 0 or 1", sources.read, dataclasses.replace(spec, files=files), tmp_path)
    # Madelon's: a gzipped file is checked by what is inside, and must be whole.
    spec, _ = originals.madelon(tmp_path, np.random.default_rng(0))
    zipped = tmp_path / f"{spec.files[0].path}.gz"
    whole = zipped.read_bytes()
    for content, words in (
        (gzip.compress(gzip.decompress(whole) + b" "), "train.data is damaged: its md5 must be"),
        (whole[:-9], r"train\.data\.gz is damaged: it must be gzipped, got Compressed file ended"),
        (whole[:99] + b"ab" + whole[101:], r"train\.data\.gz is damaged: it must be gzipped, got"),
        (b"1 2 3", r"train\.data\.gz is damaged: it must be gzipped, got Not a gzipped file"),
    ):
        zipped.write_bytes(content)
        refused(words, sources.read, spec, tmp_path)
    zipped.unlink()
    refused(r"train\.data is missing", sources.read, spec, tmp_path)


def sort_rows(x, y):
    rows = np.concatenate([x.reshape(len(x), -1), np.asarray(y)[:, None]], axis=1)
    return rows[np.lexsort(rows.T)]


def test_images_and_tables_survive_the_round_trip(tmp_path, monkeypatch):
    rng, folder = np.random.default_rng(1), tmp_path / "tfds"
    mnist, arrays = originals.mnist(tmp_path / "originals", rng)
    pums, table = originals.pums(tmp_path / "originals", rng)
    madelon, parts = originals.madelon(tmp_path / "originals", rng)
    for name, spec in (("mnist", mnist), ("pums", pums), ("madelon", madelon)):
        monkeypatch.setitem(SPECS, name, spec)
        data.prepare(name, tmp_path / "originals", folder)
    loaded = data.load("mnist", folder)
    assert (loaded.train_x.dtype, loaded.train_y.dtype) == (np.float32, np.int32)
    pairs = ((loaded.train_x, loaded.train_y), (loaded.test_x, loaded.test_y))
    for (x, y), (images, labels) in zip(pairs, arrays.values(), strict=True):
        expected = sort_rows(images.astype(np.float32) / np.float32(255), labels)
        np.testing.assert_array_equal(sort_rows(x, y), expected)
    loaded = data.load("pums", folder)
    assert set(np.unique(loaded.train_x)) == {-1.0, 1.0}
    assert len(loaded.train_y) == 40
    assert loaded.train_y.sum() + loaded.test_y.sum() == (1 - table["employed"]).sum()
    loaded = data.load("madelon", folder)
    for x, y, column, label in (
        (loaded.train_x, loaded.train_y, *parts[:2]),
        (loaded.test_x, loaded.test_y, *parts[2:]),
    ):
        np.testing.assert_array_equal(
            sort_rows(np.round((x + 1.0) * 499.5), 2 * y - 1), sort_rows(column, label)
        )
    # Preparing twice does nothing, and needs no source.
    made = builders.prepared_folder(SPECS["pums"], folder)
    before = made.stat().st_mtime
    data.prepare("pums", folder / "gone", folder)
    assert made.stat().st_mtime == before


def test_digits_are_scikit_learns_and_a_fingerprint_sees_every_array_and_needs_the_key():
    digits, bunch = data.load("digits"), load_digits()
    assert digits.train_x.shape == (1_437, 8, 8, 1)
    assert digits.test_x.shape == (360, 8, 8, 1)
    assert (digits.train_x.min(), digits.train_x.max()) == (0, 1)
    pixels = np.concatenate([digits.train_x, digits.test_x])[..., 0]
    np.testing.assert_array_equal(np.round(pixels * 255), np.round(bunch.images * (255 / 16)))
    np.testing.assert_array_equal(np.concatenate([digits.train_y, digits.test_y]), bunch.target)
    base = digits.fingerprint(b"key")
    assert digits.fingerprint(b"key") == base
    assert digits.fingerprint(b"other") != base
    names = ("train_x", "train_y", "test_x", "test_y")
    for name in names:
        changed = {n: np.array(getattr(digits, n)) for n in names}
        changed[name].flat[0] += 1
        assert data.Dataset(digits.spec, **changed).fingerprint(b"key") != base, name


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
    # An unknown data set is refused.
    refused("dataset must be one of digits", data.load, "imagenet", tmp_path)
    refused("source must be a folder", data.prepare, "pums", tmp_path / "nowhere", tmp_path)


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
        ({"y": np.array(["secret"] * 20)}, "got text in y: give categories as integers"),
    ):
        arrays = {name: value for name, value in {**right, **changes}.items() if value is not None}
        np.savez(path, **arrays)
        refused(words, data.from_file, path, 3)
    np.savez(path, **right)
    damaged = bytearray(path.read_bytes())
    damaged[200] ^= 0xFF
    for content, words in ((damaged, "file to be read, got"), (b"no", r"a \.npz file to be read")):
        path.write_bytes(content)
        refused(words, data.from_file, path, 3)
    refused(r"data must be a \.npz file with x", data.from_file, tmp_path / "mine.csv", 3)
