"""Executes notebooks and the tutorial, and stores what they show: `make notebooks`.

`python notebooks/execute.py [notebook or page ...]` runs each from top to bottom, a notebook in a
folder of its own, and writes it back. What is stored says nothing of the machine: no times, no
paths, no addresses. The hash of the code that was executed is stored beside a notebook's outputs;
the tests compare it to the code.
"""

import argparse
import contextlib
import hashlib
import io
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbclient
import nbformat

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
TUTORIAL = ROOT / "docs" / "tutorial.md"
# Progress bars: their last state, without "[00:03<00:00, 17.1it/s" and with what follows it.
_TIMES = re.compile(r"\[\d+:[\d:]+<[\d:?]+, +[\d.?]+ ?(?:s/it|it/s)(?:, )?(.*)\]")
_BAR = re.compile(r"\d+%\|.*\| *\d+/\d+")
# A page's block of Python, and the block with what it printed.
_BLOCK = re.compile(r"(```python\n(.*?)```\n)(?:\n```output\n.*?```\n)?", re.DOTALL)
_OF_A_MACHINE = re.compile(r"0x[0-9a-f]{6,}|\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d|[0-9.]+ ?it/s")


def paths() -> list[Path]:
    """The notebooks, in the order in which they are read."""
    return sorted(FOLDER.glob("*.ipynb"))


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """The cells that are executed."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def hash_of_code(notebook: nbformat.NotebookNode) -> str:
    """SHA-256 of the sources of all code cells, in order."""
    sources = "\0".join(cell.source for cell in code_cells(notebook))
    return hashlib.sha256(sources.encode()).hexdigest()


def execute(
    notebook: nbformat.NotebookNode, env: dict[str, str] | None = None, timeout: int = 900
) -> nbformat.NotebookNode:
    """The same notebook, executed with this checkout's jaxdp in an empty folder.

    Args:
        notebook: left as it is.
        env: of the kernel; None takes this process's.
        timeout: seconds of one cell.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    found = nbformat.from_dict(notebook)
    env = dict(os.environ if env is None else env)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH", "")]))
    with tempfile.TemporaryDirectory() as folder:
        client = nbclient.NotebookClient(
            found,
            timeout=timeout,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
            record_timing=False,
        )
        client.execute(env=env)
    return found


def tidied(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The executed notebook as it is stored.

    Raises:
        ValueError: an output holds what belongs to one machine: a path, a time, an address.
    """
    for cell in code_cells(notebook):
        cell.metadata.pop("execution", None)
        cell.outputs = [output for output in map(_stored, _joined(cell.outputs)) if output]
        for output in cell.outputs:
            _check(output)
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {
                "display_name": "Python 3",
                "language": "python",
                "name": "python3",
            },
            "language_info": {"name": "python"},
            "jaxdp": {"executed": hash_of_code(notebook)},
        }
    )
    nbformat.validate(notebook)
    return notebook


def page(text: str, namespace: dict[str, Any]) -> str:
    """A page of Markdown, and beneath each block of Python what it printed just now."""

    def ran(found: re.Match[str]) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            exec(compile(found[2], "page", "exec"), namespace)
        shown = said.getvalue().rstrip()
        return found[1] + (f"\n```output\n{shown}\n```\n" if shown else "")

    return _BLOCK.sub(ran, text)


def text_of(output: nbformat.NotebookNode) -> str:
    """The text that an output shows; "" for a picture alone."""
    if output.output_type == "stream":
        return output.text
    return output.get("data", {}).get("text/plain", "")


def _joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """All of a stream in one output: where it is cut depends on the time."""
    first: dict[str, nbformat.NotebookNode] = {}
    kept = []
    for output in outputs:
        if output.output_type != "stream":
            kept.append(output)
        elif output.name in first:
            first[output.name].text += output.text
        else:
            first[output.name] = output
            kept.append(output)
    return kept


def _stored(output: nbformat.NotebookNode) -> nbformat.NotebookNode | None:
    """Without execution counts and times; of the error stream, progress bars alone."""
    if output.output_type == "stream" and output.name == "stderr":
        lines = [line.rstrip("\r").rsplit("\r", 1)[-1] for line in output.text.split("\n")]
        bars = [line for line in lines if _BAR.search(line)]
        for line in lines:
            if line.strip() and line not in bars:
                print(f"not stored: {line}", file=sys.stderr)
        output.text = "".join(f"{_without_times(bar)}\n" for bar in bars)
        return output if bars else None
    # Beside a picture the text is its size, or names an object.
    if "image/png" in output.get("data", {}):
        output.data = {"image/png": output.data["image/png"], "text/plain": "<Figure>"}
        output.metadata = {}
    return output


def _without_times(bar: str) -> str:
    return _TIMES.sub(lambda found: f"[{found[1]}]" if found[1] else "", bar).rstrip()


def _check(output: nbformat.NotebookNode) -> None:
    text = text_of(output)
    own = {str(Path.home()), str(ROOT), sys.prefix, sys.base_prefix, tempfile.gettempdir()}
    found = [path for path in own if len(path) > 1 and path in text]
    found += _OF_A_MACHINE.findall(text)
    if found:
        raise ValueError(f"an output must be the same on every machine, got {found} in {text!r}")


def main(arguments: list[str] | None = None) -> None:
    """Executes the notebooks and pages that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebook", nargs="*", type=Path, help="default: all of them")
    for path in parser.parse_args(arguments).notebook or [TUTORIAL, *paths()]:
        begun = time.perf_counter()
        if path.suffix == ".md":
            path.write_text(page(path.read_text(encoding="utf-8"), {}), encoding="utf-8")
        else:
            nbformat.write(tidied(execute(nbformat.read(path, as_version=4))), path)
        seconds, size = time.perf_counter() - begun, path.stat().st_size
        print(f"{path.name}: {seconds:.0f} s, {size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
