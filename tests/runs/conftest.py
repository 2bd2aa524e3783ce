"""Runs that several tests go on from, each made once; a test has a copy of its folder."""

import shutil

import pytest

from jaxdp.runs import RunDirectory
from tests.runs import own, small


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """A finished run's result, and its folder."""
    folder = tmp_path_factory.mktemp("whole") / "r"
    return small.go(folder, small.config()), folder


@pytest.fixture
def finished(whole, tmp_path):
    return RunDirectory(shutil.copytree(whole[1], tmp_path / "r"))


@pytest.fixture(scope="session")
def crashed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("crashed") / "r"
    small.crash(folder, small.config(), 8)
    return folder


@pytest.fixture
def stopped(crashed, tmp_path):
    """A run that crashed in its eighth step."""
    return RunDirectory(shutil.copytree(crashed, tmp_path / "r"))


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "r"
    own.again(folder).fit(6)
    return folder


@pytest.fixture
def six(trained, tmp_path):
    """The folder of ``own.again`` after six steps."""
    return shutil.copytree(trained, tmp_path / "r")
