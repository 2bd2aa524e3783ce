"""Types of options that several commands share."""

import os
from pathlib import Path
from typing import Any

import click

# Of an option of the command line, once click has read it.
Option = float | str | Path | tuple[str, ...] | None


def papers() -> None:
    """Registers the papers' algorithms and networks, so that they can be named."""
    from jaxdp.papers import algorithms, networks

    del algorithms, networks


# Those of jaxdp.papers.block_coordinate, which have no optax chain and a command of their own.
BLOCK_ALGORITHMS = ("sbcd", "sbcd-hidden", "sbcd-one-layer")
# Of whole runs with noise that is correlated over the steps.
CANARY_KINDS = ("gradient", "noise", "pixel", "mislabelled")
CORRELATED = ("cyclic_poisson", "fixed_order")
# The names of jaxdp.runs.strategies, which imports jax.
STRATEGIES = ("banded", "buffered", "lambda", "banded_inverse", "square_root", "identity")
# Those of jaxdp.accounting, which imports SciPy.
ACCOUNTANTS = ("auto", "exact", "gdp", "clt", "rdp")
RELATIONS = ("add_or_remove_one", "replace_one", "replace_special")


class Filled(click.Path):
    """A path of at least one character: "" would be the working directory."""

    def __init__(self, **given: Any):
        super().__init__(path_type=Path, **given)

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:
        """The path; refused where it is empty."""
        if value == "":
            self.fail("expected a path, got ''", param, ctx)
        return super().convert(value, param, ctx)


class Features(click.Choice):
    """A name of built-in features, or of a function: package.module:function, file.py:function."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The name; a function's is looked up later."""
        return value if ":" in value else super().convert(value, param, ctx)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """The names, and how a function is named."""
        return f"[{'|'.join(self.choices)}|MODULE:FUNCTION]"


# Those of jaxdp.recipes.features, which imports jax.
FEATURES = Features(
    [
        "scattering",
        "random_convolutions",
        "pretrained",
        "pretrained_mirrored",
        "two_layers",
        "two_layers_mirrored",
    ]
)


class NumberOr(click.ParamType):
    """A whole number, or a word such as "auto".

    Args:
        word: the word.
    """

    name = "number"

    def __init__(self, word: str):
        self.word = word

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number, or the word."""
        if value == self.word:
            return value
        try:
            return int(value)
        except ValueError:
            self.fail(f'expected a whole number or "{self.word}", got {value!r}', param, ctx)
