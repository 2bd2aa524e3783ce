"""Locking where there is no fcntl, as on Windows."""

import os
import types

import pytest

from jaxdp import _durable


def test_a_lock_without_fcntl(tmp_path, monkeypatch):
    held = set()

    def locking(descriptor, mode, count):
        assert os.lseek(descriptor, 0, os.SEEK_CUR) == _durable._LOCK_AT  # never where data lie
        inode = os.fstat(descriptor).st_ino
        if inode in held:
            raise OSError(36, "Resource deadlock avoided")
        held.add(inode)

    fake = types.SimpleNamespace(locking=locking, LK_NBLCK=2)
    monkeypatch.setattr(_durable, "fcntl", None)
    monkeypatch.setattr(_durable, "msvcrt", fake, raising=False)
    first = _durable.open_locked(tmp_path / "lock", "w", "busy")
    with pytest.raises(ValueError, match="busy"):
        _durable.open_locked(tmp_path / "lock", "a", "busy")
    _durable.append_line(first, "written at the start")
    first.close()
    assert (tmp_path / "lock").read_text() == "written at the start\n"
