import dataclasses
import hashlib
import io

import numpy as np
import pytest

from jaxdp.data import sources
from jaxdp.data.specs import SPECS, SourceFile
from tests.data import originals
from tests.runs.small import refused


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_idx_files(tmp_path, rng):
    spec, arrays = originals.mnist(tmp_path, rng)
    splits = sources.read(spec, tmp_path)
    for name, (images, labels) in arrays.items():
        np.testing.assert_array_equal(splits[name][0][..., 0], images)
        np.testing.assert_array_equal(splits[name][1], labels)


def test_census_columns(tmp_path, rng):
    spec, table = originals.pums(tmp_path, rng)
    splits = sources.read(spec, tmp_path)
    x = np.concatenate([splits["train"][0], splits["test"][0]])
    y = np.concatenate([splits["train"][1], splits["test"][1]])
    order = np.random.Generator(np.random.Philox(key=2021)).permutation(50)
    expected = [
        (table["educ"] >= 13) if c == "collegedegree" else table[c] for c in sources.PUMS_COLUMNS
    ]
    np.testing.assert_array_equal(x, np.stack(expected, 1)[order])
    np.testing.assert_array_equal(y, 1 - table["employed"][order])
    assert len(splits["train"][1]) == 40


def test_a_census_column_out_of_its_range_is_refused(tmp_path, rng):
    spec, _ = originals.pums(tmp_path, rng)
    path = tmp_path / spec.files[0].path
    lines = path.read_text().splitlines()
    cells = lines[1].split(",")
    cells[2] = "2"
    lines[1] = ",".join(cells)
    files = originals.write(tmp_path, {spec.files[0].path: "\n".join(lines).encode()})
    refused("must be 0 or 1", sources.read, dataclasses.replace(spec, files=files), tmp_path)


def test_cifar_mosaics_are_checked_against_the_original_bytes(tmp_path, rng):
    webp, tiles = originals.mosaic(rng)
    labels = rng.integers(0, 10, (2, 10_000), np.uint8)
    buffer = io.BytesIO()
    np.save(buffer, labels)
    paths = {"c/a.webp": webp, "c/b.webp": webp, "c/labels.npy": buffer.getvalue()}
    written = originals.write(tmp_path, paths)
    planar = tiles.transpose(0, 3, 1, 2).reshape(10_000, -1)
    digests = [
        hashlib.md5(np.concatenate([row[:, None], planar], 1).tobytes()).hexdigest()
        for row in labels
    ]
    files = (SourceFile("c/a.webp", digests[0]), SourceFile("c/b.webp", digests[1]), written[2])
    spec = dataclasses.replace(SPECS["cifar10"], files=files)
    splits = sources.read(spec, tmp_path)
    np.testing.assert_array_equal(splits["train"][0], tiles)
    np.testing.assert_array_equal(splits["test"][1], labels[1])
    wrong = (files[0], SourceFile("c/b.webp", "0" * 32), files[2])
    wrong = dataclasses.replace(spec, files=wrong)
    refused(r"b\.webp is damaged: its md5 must be 0000", sources.read, wrong, tmp_path)
    (tmp_path / "c/a.webp").write_bytes(webp[:1000])
    refused(r"a\.webp is damaged", sources.read, spec, tmp_path)


def test_a_damaged_or_missing_file_is_named(tmp_path, rng):
    spec, _ = originals.mnist(tmp_path, rng)
    for file in spec.files:
        path = tmp_path / file.path
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        refused(rf"{path.name} is damaged: its md5 must be", sources.read, spec, tmp_path)
        path.unlink()
        refused(f"{path.name} is missing", sources.read, spec, tmp_path)
        path.write_bytes(whole)
