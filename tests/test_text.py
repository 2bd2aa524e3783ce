"""The texts of benchmarks/text.py: who is held out, what is left out, and how they are embedded."""

import numpy as np

from benchmarks import text


def write(path, *paragraphs):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('"""' + "\n\n".join(paragraphs) + '"""\n', encoding="utf-8")


def prose(number):
    return f"Returns the value number {number} of a table that somebody wrote long ago."


def test_files_are_held_out_whole_and_each_text_is_one_record(tmp_path):
    one, two = folders = tmp_path / "one", tmp_path / "two"
    each = [(folder, number) for folder in folders for number in range(40)]
    for folder, number in each:
        tag = f"{folder.name} {number}"
        write(folder / f"f{number}.py", prose(tag), prose(f"{tag} again"))
    write(one / "f40.py", prose("of both"), prose("one 3"))
    write(two / "f40.py", prose("of both"))
    write(two / "tests/f.py", prose("of a test"))
    write(two / "short.py", "Short.", "No full stop at the end of this one here")
    rows = text.collected({folder.name: folder for folder in folders})
    kept = {words: (label, held_out) for words, label, held_out in rows}
    assert len(kept) == len(rows) == 160
    assert prose("of both") not in kept
    for folder, number in each:
        tag = f"{folder.name} {number}"
        assert kept[prose(tag)] == kept[prose(f"{tag} again")]
        assert kept[prose(tag)][0] == folders.index(folder)
    assert 0.1 < np.mean([held_out for _, _, held_out in rows]) < 0.35
    # Names of packages are taken out.
    named = "Like numpy.sum and JAX and jnp.add, but of SciPy, not of Numpyro."
    write(tmp_path / "three/a.py", named)
    ((words, _, _),) = text.collected({"a": tmp_path / "three"})
    assert words == "Like .sum and and .add, but of , not of Numpyro."


def test_embeddings_are_projections_of_counts():
    one = text.embedded("Returns the mean of an array.")
    np.testing.assert_array_equal(one, text.embedded("returns the MEAN of an array."))
    np.testing.assert_allclose(np.linalg.norm(one), 1, rtol=1e-5)
    assert one.dtype == np.float32
    assert one.shape == (text.WIDTH,)
    near, far = "Returns the mean of two arrays.", "Opens a window, waits for a key, closes it."
    assert one @ text.embedded(near) > 0.4
    assert abs(one @ text.embedded(far)) < 0.25
    # Inner products are those of the counts, up to what hashing mixes: unrelated texts are near 0.
    random = np.random.default_rng(0).integers(97, 123, (60, 80), np.uint8)
    found = np.stack([text.embedded(bytes(row).decode()) for row in random])
    others = found @ found.T - np.eye(60)
    assert abs(others[np.triu_indices(60, 1)].mean()) < 0.15
