"""The README's Python runs as it stands; its commands are commands of jaxdp."""

import re
import shlex
from pathlib import Path

import click
import pytest

from jaxdp.cli import app

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [
    line.split("#")[0]
    for language, text in BLOCKS
    if not language
    for line in text.splitlines()
    if line.startswith("jaxdp ")
]


def test_python_runs_from_top_to_bottom(capsys):
    namespace = {}
    snippets = [text for language, text in BLOCKS if language == "python"]
    assert len(snippets) >= 3
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), namespace)
    epsilon = float(re.search(r"epsilon (\d\.\d+) at", capsys.readouterr().out).group(1))
    assert epsilon == pytest.approx(namespace["mechanism"].epsilon(150, 1e-4).upper, abs=1e-3)


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_parse(line):
    command, args = app, shlex.split(line)[1:]
    context = click.Context(app)
    while isinstance(command, click.Group):
        command, args = command.get_command(context, args[0]), args[1:]
    command.make_context(command.name, args)


def test_the_two_commands_are_named():
    plain = [text.strip() for language, text in BLOCKS if not language]
    assert "make demo" in plain
    assert "make test" in plain
