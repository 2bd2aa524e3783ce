"""The networks of the accelerator's figures, at its size and at one that a CPU takes in seconds."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import language_model_speed, networks, networks_large
from benchmarks.language_model_speed import llama

RANK = 8


@dataclasses.dataclass(frozen=True)
class Network:
    """Parameters, the loss of one example, a batch, and which parameters are trained."""

    params: Any
    loss_fn: Callable[[Any, Any], Any]
    batch: Any
    trainable: Callable[[str], bool] | None = None

    @functools.cached_property
    def parts(self) -> tuple[Any, Any]:
        """(trained, frozen): the parameters with None in place of the others."""
        wanted = self.trainable or (lambda path: True)
        flags = jax.tree_util.tree_map_with_path(
            lambda path, _: wanted(jax.tree_util.keystr(path)), self.params
        )
        split = lambda kept: jax.tree.map(  # noqa: E731
            lambda leaf, flag: leaf if flag == kept else None, self.params, flags
        )
        return split(True), split(False)

    def loss_of_parts(self, trained: Any, frozen: Any, example: Any) -> Any:
        """The same loss, for who differentiates by a first argument."""
        whole = jax.tree.map(
            lambda a, b: b if a is None else a, trained, frozen, is_leaf=lambda x: x is None
        )
        return self.loss_fn(whole, example)

    def rows(self, count: int) -> Any:
        """A batch of so many rows: those that it has, over and over."""
        return jax.tree.map(lambda x: x[jnp.arange(count) % len(x)], self.batch)


def _cnn(small: bool) -> Network:
    return Network(*networks.cnn(8 if small else 1_024))


def _wrn(small: bool) -> Network:
    shape = {"depth": 10, "widen": 1} if small else {}
    made = networks.wide_resnet(2 if small else 64, **shape)
    return Network(*networks_large.with_views(made, 2 if small else 16))


def _vit(small: bool) -> Network:
    shape = {"size": 32, "width": 32, "layers": 2, "heads": 2, "classes": 10} if small else {}
    return Network(*networks_large.vision_transformer(2 if small else 64, **shape, shapes=False))


def _gpt2(small: bool, rank: int = 0) -> Network:
    tiny = {"length": 16, "vocabulary": 100, "width": 32, "layers": 2, "heads": 2}
    made = networks_large.gpt(4 if small else 32, **(tiny if small else {}), rank=rank)
    return Network(*made, _is_adapter if rank else None)


def _smollm2(small: bool) -> Network:
    config = language_model_speed.smollm2(*((2, 128) if small else ()))
    params = language_model_speed.weights(config, jnp.bfloat16)
    adapted = language_model_speed.ADAPTED
    params = llama.with_lora(jax.random.key(1), params, RANK, adapted)
    shape = (2, 16) if small else (32, 128)
    tokens = jax.random.randint(jax.random.key(2), shape, 0, config.vocab_size)

    def loss_fn(params: Any, tokens: Any) -> Any:
        return llama.losses(params, tokens, config).mean()

    return Network(params, loss_fn, tokens, _is_adapter)


def _is_adapter(path: str) -> bool:
    return "lora" in path


NETWORKS: dict[str, Callable[[bool], Network]] = {
    "cnn": _cnn,
    "gpt2": _gpt2,
    "wrn": _wrn,
    "vit": _vit,
    "gpt2-lora": functools.partial(_gpt2, rank=RANK),
    "smollm2-lora": _smollm2,
}


@functools.cache
def made(name: str, small: bool) -> Network:
    """The network of that name, once in a process."""
    return NETWORKS[name](small)
