"""What is secret is for its owner alone, whatever the umask; what is public is not narrowed."""

import contextlib
import os
import stat

import pytest

from jaxdp.runs import RunDirectory
from tests.runs import small
from tests.runs.test_resume import Stop, crash_at


@contextlib.contextmanager
def umask(mask):
    before = os.umask(mask)
    try:
        yield
        assert os.umask(mask) == mask  # nothing left it changed
    finally:
        os.umask(before)


def modes(folder):
    """Of everything in a folder, and of the folder itself."""
    return {
        path.relative_to(folder): stat.S_IMODE(path.lstat().st_mode)
        for path in (folder, *folder.rglob("*"))
    }


def assert_private(secret):
    found = modes(secret)
    assert len(found) > 8
    for path, mode in found.items():
        assert mode == (0o700 if (secret / path).is_dir() else 0o600), f"{path}: {mode:o}"


@pytest.mark.parametrize(
    ("mask", "changes"),
    [(0o000, {"canaries": 20}), (0o000, {"sensitive": True}), (0o022, {"sensitive": True})],
)
def test_secret_files_are_private_whatever_the_umask(tmp_path, mask, changes):
    directory = RunDirectory(tmp_path / "r")
    with umask(mask):
        with pytest.raises(Stop):
            small.go(tmp_path / "r", small.config(**changes), crash_at(8))
        assert_private(directory.secret)  # also of a run that ended before its time
        small.go(tmp_path / "r", small.config(**changes))
    assert_private(directory.secret)
    if "sensitive" in changes:
        assert stat.S_IMODE(directory.sensitive.stat().st_mode) == 0o600
    public = stat.S_IMODE(directory.ledger.stat().st_mode)
    assert public == 0o666 & ~mask
    assert stat.S_IMODE(directory.path.stat().st_mode) == 0o777 & ~mask


def test_resuming_closes_what_older_versions_left_open(tmp_path):
    directory = RunDirectory(tmp_path / "r")
    with pytest.raises(Stop):
        small.go(tmp_path / "r", small.config(), crash_at(8))
    outside = tmp_path / "mine.txt"
    outside.write_text("not of the run")
    outside.chmod(0o644)
    (directory.secret / "link").symlink_to(outside)
    for path in directory.secret.rglob("*"):
        path.chmod(0o777 if path.is_dir() else 0o666)
    outside.chmod(0o644)
    directory.secret.chmod(0o755)
    directory.lock()
    directory.unlock()
    (directory.secret / "link").unlink()
    assert_private(directory.secret)
    assert stat.S_IMODE(outside.stat().st_mode) == 0o644


def test_a_secret_folder_of_somebody_else_is_refused(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(1, "Operation not permitted", str(path))

    directory = RunDirectory(tmp_path / "r")
    directory.create()
    monkeypatch.setattr("jaxdp.runs.directory.make_private", refuse)
    with pytest.raises(ValueError, match="out must be a run whose secret folder can be closed"):
        directory.lock()
    monkeypatch.undo()
    directory.lock()  # it is not held
    directory.unlock()
