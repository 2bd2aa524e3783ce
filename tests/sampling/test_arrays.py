"""Sources made of arrays: what they give, and that nothing else is read."""

import subprocess
import sys
import textwrap
import zipfile
from itertools import product

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxdp.data.own import from_file
from jaxdp.sampling import Source, as_source, load
from jaxdp.sampling.source import ArraySource
from tests.refusing import refused
from tests.sampling.fakes import H5, Tensor, ask, refused_without


def host(rows=7):
    x = np.arange(rows * 6, dtype=np.float32).reshape(rows, 2, 3)
    return {"x": x, "deep": (np.arange(rows, dtype=np.int32), [x[:, 0] + 1])}


def assert_trees_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert jax.tree.structure(found) == jax.tree.structure(expected)


def test_gather_gives_the_rows_in_the_order_asked_for():
    data = host()
    structs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), data)
    for move in (np.asarray, jnp.asarray, H5):
        source = as_source(jax.tree.map(move, data))
        assert isinstance(source, Source)
        assert len(source) == 7
        found = ask(source, 5, 0, 5, 3)
        assert_trees_equal(found, jax.tree.map(lambda leaf: leaf[[5, 0, 5, 3]], data))
        assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(found))
        assert source.example == structs
    # Arrays are not copied and stay where they lie; JAX beside NumPy lies on the host.
    for data, on_device in ((host(), False), (jax.tree.map(jnp.asarray, host()), True)):
        source = as_source(data)
        assert isinstance(source, ArraySource)
        assert source.on_device == on_device
        assert source.arrays["x"] is data["x"]
        assert as_source(source) is source
    source = as_source({"x": np.ones((3, 2), np.float32), "y": jnp.arange(3)})
    assert not source.on_device
    expected = {"x": np.ones((1, 2), np.float32), "y": np.array([2], np.int32)}
    assert_trees_equal(ask(source, 2), expected)
    for data in (host(31), jax.tree.map(jnp.asarray, host(31))):
        assert "31" not in repr(as_source(data))  # their number is private


def test_padding_is_zeros_whatever_it_points_at_and_is_not_read():
    values = np.full((7, 2), np.nan, np.float32)
    for data, padding in product((values, jnp.asarray(values)), (-1, 7, 10**9, -(2**31))):
        places, mask = np.array([padding, 1, padding]), np.array([False, True, False])
        found = as_source(data).gather(places, mask)
        assert np.isnan(found[1]).all(), padding
        np.testing.assert_array_equal(found[[0, 2]], 0)
    data = H5(np.ones((7, 2), np.float32))
    as_source(data).gather(np.array([1, 2, 3]), np.array([True, False, False]))
    assert data.read == 1
    as_source(data).gather(np.array([1, 2, 3]), np.zeros(3, bool))
    assert data.read == 1
    # Few records and empty draws.
    for rows, move in product((0, 1), (np.asarray, jnp.asarray, H5)):
        source = as_source(move(np.ones((rows, 2), np.float32)))
        assert len(source) == rows
        found = source.gather(np.zeros(3, np.int32), np.zeros(3, bool))
        np.testing.assert_array_equal(found, np.zeros((3, 2)))
        assert source.gather(np.zeros(0, np.int32), np.zeros(0, bool)).shape == (0, 2)
        refused("within the source", ask, source, rows)


def test_indices_are_integers_and_others_are_refused_without_saying_how_many_records_there_are():
    data, on = host(), np.ones(2, bool)
    for dtype in ("int8", "uint8", ">i4", "int64", "uint64"):
        found = as_source(data).gather(np.array([6, 1], dtype), on)
        np.testing.assert_array_equal(found["x"], data["x"][[6, 1]], dtype)
    form, mask = "indices must be integers", r"mask must be bool \[2\]"
    for indices, given, words in (
        *((np.array([0, index]), on, "within the source") for index in (-1, 7, -(2**40), 2**40)),
        (np.array([2**63 + 1], np.uint64), on[:1], "within the source"),
        *((other, on, form) for other in (np.zeros(2), np.ones(2, bool))),
        (np.zeros((2, 1), int), np.ones((2, 1), bool), form),
        *((np.zeros(2, int), other, mask) for other in (np.ones(3, bool), np.ones(2))),
    ):
        refused_without("7", words, as_source(data).gather, indices, given)


# fmt: off
KEPT = {
    "float64": "float32", ">f8": "float32", ">f4": "float32", "float16": "float16",
    "int64": "int32", ">i8": "int32", "uint64": "uint32", "uint8": "uint8", "int8": "int8",
    "bool": "bool", "complex128": "complex64", ml_dtypes.bfloat16: ml_dtypes.bfloat16,
}
# fmt: on


def test_dtypes_become_those_of_jax():
    for (given, kept), move in product(KEPT.items(), (np.asarray, H5)):
        values = np.array([[0, 1], [1, 0], [1, 1]]).astype(given)
        source = as_source(move(values))
        found = ask(source, 2, 0)
        assert source.example.dtype == found.dtype == np.dtype(kept), given
        assert found.dtype.isnative, given
        np.testing.assert_array_equal(found.astype(complex), values[[2, 0]].astype(complex))
    found = ask(as_source(np.array([1e300, -1e300, np.nan])), 0, 1, 2)  # without a warning
    np.testing.assert_array_equal(found, np.array([np.inf, -np.inf, np.nan], np.float32))
    # Wide dtypes stay wide where JAX keeps them.
    with jax.enable_x64(True):
        source, wide = as_source((np.array([2**40]), np.array([0.1]))), jnp.array([2**40, 1])
    # The source stays as it was made, and so does an array on the device.
    numbers, floats = ask(source, 0)
    assert (numbers[0], floats[0]) == (2**40, 0.1)
    source = as_source(wide)
    assert source.example.dtype == wide.dtype == np.int64
    assert ask(source, 0)[0] == 2**40
    # Integers that do not fit are refused when drawn.
    for value in (2**31, -(2**31) - 1, 2**62):
        source = as_source(np.array([1, value, 2]))
        np.testing.assert_array_equal(ask(source, 2, 0), [2, 1])
        refused_without(f"{value}", "integers that fit int32", ask, source, 0, 1)


def test_read_only_and_strided_arrays_and_tensors_and_one_that_grew_is_refused():
    values = np.arange(24.0, dtype=np.float32).reshape(3, 8)[:, ::-2].T
    values.flags.writeable = False
    found = ask(as_source(values), 3, 0)
    np.testing.assert_array_equal(found, values[[3, 0]])
    found[0] = 9  # what is gathered is the caller's own
    changing = np.zeros((3, 2), np.float32)
    found = ask(as_source(changing), 0)
    changing[:] = 5
    np.testing.assert_array_equal(found, 0)
    found = ask(as_source((Tensor(np.eye(3, dtype=np.float32)),)), 2)
    np.testing.assert_array_equal(found[0], [[0, 0, 1]])

    class Odd(H5):
        def __getitem__(self, indices):
            return self._array[:1]

    data = H5(np.ones((3, 2), np.float32))
    source = as_source(data)
    data._array = np.ones((4, 2), np.float32)
    refused("keep its number of records", ask, source, 0)
    refused("[indices]", ask, as_source(Odd(np.ones((3, 2)))), 0, 1)


# Files.


def test_an_npy_file_stays_a_memory_map_an_npz_file_is_a_dict_or_tuple_others_are_refused(tmp_path):
    values = np.arange(12.0).reshape(6, 2)
    np.save(tmp_path / "x.npy", values)
    source = as_source({"x": load(tmp_path / "x.npy")})
    assert isinstance(source.arrays["x"], np.memmap)
    found = ask(source, 4, 1)["x"]
    np.testing.assert_array_equal(found, values[[4, 1]])
    assert type(found) is np.ndarray
    for mode in ("r", "r+", "c"):  # what was written is not lost
        np.save(tmp_path / mode, np.zeros((4, 2), np.float32))
        mapped = np.load(tmp_path / f"{mode}.npy", mmap_mode=mode)
        if mode != "r":
            mapped[1] = 7
        for _ in range(2):
            written = np.full((1, 2), 0 if mode == "r" else 7)
            np.testing.assert_array_equal(ask(as_source(mapped), 1), written, mode)
    arrays = [np.full(3, i) for i in range(12)]
    np.savez(tmp_path / "a.npz", *arrays)
    np.savez(tmp_path / "b.npz", x=arrays[0], y=arrays[1])
    for found, expected in zip(load(tmp_path / "a.npz"), arrays, strict=True):
        np.testing.assert_array_equal(found, expected)
    assert sorted(load(str(tmp_path / "b.npz"))) == ["x", "y"]
    np.save(tmp_path / "o.npy", np.array([{}, {}]), allow_pickle=True)
    refused(".npy or .npz", load, "x.csv")
    refused("object", load, tmp_path / "o.npy")
    refused("", load, tmp_path / "none.npy", error=FileNotFoundError)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
def test_a_large_memory_map_is_never_in_memory_whole(tmp_path):
    code = f"""
    import re
    import numpy as np
    from jaxdp.sampling import as_source, load
    rows = 75_000
    path = {str(tmp_path / "x.npy")!r}
    np.lib.format.open_memmap(path, mode="w+", dtype="float32", shape=(rows, 1_000))
    # Not ru_maxrss, which begins at the peak of the process that started this one.
    peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1_000
    as_source(np.ones((4, 2))).gather(np.arange(4), np.ones(4, bool))
    before = peak()
    source = as_source({{"x": load(path)}})
    rng = np.random.default_rng(0)
    for _ in range(50):
        source.gather(rng.choice(rows, 256, replace=False), np.ones(256, bool))
    assert peak() - before < 100, peak() - before
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)


def declared(path, shape, **small):
    """A .npz file of a few hundred bytes, whose array x says that it has this shape."""
    np.savez(path, **small)
    with zipfile.ZipFile(path, "a") as archive, archive.open("x.npy", "w") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)


def test_a_zipped_file_larger_than_memory_is_refused_before_it_is_read(tmp_path):
    """Before: NumPy asked for as much memory as a file of 3 GB, or of 300 bytes, said."""
    declared(tmp_path / "a.npz", (10**7, 10**5), y=np.zeros(3, np.int32))
    words = r"fit into memory.*got 4e\+03 GB where there are .* \(the largest is 'x'\).*\.npy file"
    refused(words, load, tmp_path / "a.npz")
    refused("got 8e+03 GB", from_file, tmp_path / "a.npz", 3)  # and as float32
    np.save(tmp_path / "no.npy", np.zeros(3))
    (tmp_path / "no.npy").rename(tmp_path / "no.npz")
    refused("got another kind of file", load, tmp_path / "no.npz")
    # Only the arrays of a data set are read: what else lies in the file may be of any size.
    path, (x, y) = tmp_path / "a.npz", (np.ones((4, 2), np.float32), np.arange(4) % 3)
    declared(path, (10**7, 10**5))
    path.rename(tmp_path / "large.npz")
    np.savez(path, x=x, y=y)
    with zipfile.ZipFile(tmp_path / "large.npz") as large, zipfile.ZipFile(path, "a") as file:
        file.writestr("other.npy", large.read("x.npy"))
    with pytest.warns(UserWarning, match="holds 'other', which is not read"):
        np.testing.assert_array_equal(from_file(path, 3).train_x, x)
