"""The ReLU network of block coordinate descent, its convolution, and its lifted variables."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxdp import arguments
from jaxdp.papers.block_coordinate import forms

Weights = tuple[jax.Array, ...]
LOSSES = ("squared", "softmax")
# The norm of softmax(u) - y is at most this for a one-hot y.
SOFTMAX_RESIDUAL = math.sqrt(2.0)


class Lifted(NamedTuple):
    """The data of one example for the training of one block: minimise |W v - u|^2.

    Attributes:
        v: V_{i-1} [d_{i-1}], the block's input, of length at most ``activation_bound``; of a
            convolution [positions, d_{i-1}], a patch at each.
        u: U_i [d_i], the block's target; of a softmax block the one-hot label.
    """

    v: jax.Array
    u: jax.Array


def in_float32(name: str, bound: float) -> float:
    """A bound in [1e-10, 1e10]: further out, float32 norms under- or overflow and miss it."""
    if not 1e-10 <= arguments.positive(name, bound) <= 1e10:
        raise ValueError(f"{name} must be in [1e-10, 1e10], got {bound!r}")
    return float(bound)


@dataclasses.dataclass(frozen=True)
class Patches:
    """Square patches of an image, which a convolution multiplies by one matrix.

    Attributes:
        shape: (height, width, channels) of the image.
        kernel: the side of a patch.
        stride: the distance of two patches.
        channels: outputs at every position.
    """

    shape: tuple[int, int, int]
    kernel: int
    stride: int
    channels: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if len(self.shape) != 3:
            raise ValueError(f"shape must be (height, width, channels), got {self.shape}")
        for size in self.shape:
            arguments.integer("shape", size, least=1)
        for name in ("kernel", "stride", "channels"):
            arguments.integer(name, getattr(self, name), least=1)
        if self.kernel > min(self.shape[:2]):
            raise ValueError(f"kernel must be within an image of {self.shape}, got {self.kernel}")

    @property
    def numbers(self) -> int:
        """The numbers of a patch."""
        return self.kernel**2 * self.shape[2]

    @property
    def positions(self) -> int:
        """The number of patches."""
        rows, columns = ((side - self.kernel) // self.stride + 1 for side in self.shape[:2])
        return rows * columns

    @property
    def outputs(self) -> int:
        """The width of the layer: positions times channels."""
        return self.positions * self.channels

    def check(self, widths: tuple[int, ...]) -> None:
        """Raises ValueError for a network whose first widths are not these."""
        inputs = self.shape[0] * self.shape[1] * self.shape[2]
        if (widths[0], widths[1]) != (inputs, self.outputs):
            raise ValueError(
                f"widths must begin with {inputs} and {self.outputs} for these patches, got "
                f"{widths[0]} and {widths[1]}"
            )

    def extract(self, x: jax.Array) -> jax.Array:
        """The patches [positions, numbers] of one image x [height * width * channels]."""
        image = x.reshape(self.shape)
        ends = [side - self.kernel + 1 for side in self.shape[:2]]
        parts = [
            image[i : i + ends[0] : self.stride, j : j + ends[1] : self.stride]
            for i in range(self.kernel)
            for j in range(self.kernel)
        ]
        return jnp.stack(parts, axis=2).reshape(self.positions, self.numbers)


@dataclasses.dataclass(frozen=True)
class Network:
    """f(x) = W_L relu(... relu(W_1 x)), every layer's input clipped to a ball (DP-SBCD, (1)).

    Attributes:
        widths: (d_0, ..., d_L): inputs, hidden layers, outputs.
        activation_bound: B in [1e-10, 1e10]; the input of every layer is shortened to this length
            (Assumption 3.1).
        gamma: weight of the splitting's quadratic terms; 1 in DP-SBCD.
        loss: "squared", as in DP-SBCD, or "softmax": cross-entropy of the outputs, which the last
            block minimises itself; what is wanted is then the class of the largest y.
        patches: None, or the convolution that the first block is: one matrix for all patches of
            an image of d_0 numbers; d_1 is positions times channels.
    """

    widths: tuple[int, ...]
    activation_bound: float
    gamma: float = 1.0
    loss: str = "squared"
    patches: Patches | None = None

    def __post_init__(self) -> None:
        widths = tuple(self.widths)
        if len(widths) < 2:
            raise ValueError(f"widths must hold at least inputs and outputs, got {self.widths!r}")
        widths = tuple(arguments.integer("widths", width, least=1) for width in widths)
        object.__setattr__(self, "widths", widths)
        in_float32("activation_bound", self.activation_bound)
        arguments.positive("gamma", self.gamma)
        arguments.one_of("loss", self.loss, LOSSES)
        if self.patches is not None:
            self.patches.check(widths)

    @property
    def blocks(self) -> int:
        """L, the number of layers."""
        return len(self.widths) - 1

    @property
    def smoothness(self) -> float:
        """The largest ``smoothness_of`` a block."""
        return max(self.smoothness_of(block) for block in range(self.blocks))

    def smoothness_of(self, block: int) -> float:
        """The smoothness of one example's loss in a block: gamma B^2 (DP-SBCD, Lemma 3.2).

        Of a softmax block B^2 / 2: the Hessian of log-sum-exp, diag(p) - p p', is at most 1/2.
        """
        weight = 0.5 if self.is_softmax(block) else self.gamma
        return weight * self.activation_bound**2

    def is_softmax(self, block: int) -> bool:
        """True if the block minimises the cross-entropy."""
        return self.loss == "softmax" and block == self.blocks - 1

    def shape(self, block: int) -> tuple[int, int]:
        """The shape of W_i, (d_i, d_{i-1}); of a convolution (channels, numbers of a patch)."""
        if block == 0 and self.patches is not None:
            return self.patches.channels, self.patches.numbers
        return self.widths[block + 1], self.widths[block]

    def init(self, key: jax.Array) -> Weights:
        """Fresh weights N(0, 1/fan_in), float32, a function of the key alone."""
        keys = jax.random.split(key, self.blocks)
        shapes = map(self.shape, range(self.blocks))
        return tuple(
            jax.random.normal(k, shape, jnp.float32) / jnp.sqrt(float(shape[1]))
            for k, shape in zip(keys, shapes, strict=True)
        )

    def apply(self, weights: Weights, x: jax.Array) -> jax.Array:
        """Outputs [m, d_L] of examples x [m, d_0]."""
        return jax.vmap(lambda row: self.forward(weights, row)[1][-1])(x)

    def forward(self, weights: Weights, x: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        """The inputs V_0 ... V_{L-1} and products U_1 ... U_L of one example x [d_0]."""
        inputs: list[jax.Array] = []
        products: list[jax.Array] = []
        for i, w in enumerate(weights):
            v = x if i == 0 else jax.nn.relu(products[-1])
            if i == 0 and self.patches is not None:
                v = self.patches.extract(x)
            inputs.append(forms.clip_to_ball(v, self.activation_bound))
            products.append((inputs[-1] @ w.T).reshape(-1))
        return inputs, products

    def residual(self, block: int, products: jax.Array, u: jax.Array, y: jax.Array) -> jax.Array:
        """The gradient [m, d_i] of a block's loss with respect to its products.

        Args:
            block: i, from 0.
            products: W_i V_{i-1} [m, d_i].
            u: U_i [m, d_i]; not read by a softmax block.
            y: the wanted outputs [m, d_L]; read by a softmax block.
        """
        if self.is_softmax(block):
            return jax.nn.softmax(products) - forms.one_hot(y)
        return self.gamma * (products - u)

    def target(
        self, block: int, weights: Weights, factor: jax.Array | None, product: jax.Array,
        y: jax.Array, u_next: jax.Array | None,
    ) -> jax.Array:  # fmt: skip
        """U_i [d_i] of one example: V_i by its closed form, then U_i by its own.

        Args:
            block: i, from 0.
            weights: the current weights; W_{i+1} is read.
            factor: ``ridge_factor(W_{i+1})``; None for the last block.
            product: W_i V_{i-1} of the forward pass [d_i].
            y: the wanted output [d_L]; read for the last block.
            u_next: U_{i+1}, already updated; None for the last block.
        """
        if factor is None or u_next is None:
            if self.loss == "softmax":
                return forms.softmax_u(forms.one_hot(y), product, self.gamma)
            return forms.last_u(forms.last_v(y, product, self.gamma), product)
        v = forms.hidden_v(weights[block + 1], factor, product, u_next)
        return forms.hidden_u(forms.clip_to_ball(v, self.activation_bound), product)

    def lift(self, block: int, weights: Weights, x: jax.Array, y: jax.Array) -> Lifted:
        """The block's problem for examples x [m, d_0], y [m, d_L], all from the given weights."""
        factors = {i: forms.ridge_factor(weights[i + 1]) for i in range(block, self.blocks - 1)}

        def one(x: jax.Array, y: jax.Array) -> Lifted:
            inputs, products = self.forward(weights, x)
            if self.is_softmax(block):
                return Lifted(inputs[block], forms.one_hot(y))
            u = self.target(self.blocks - 1, weights, None, products[-1], y, None)
            for i in reversed(range(block, self.blocks - 1)):
                u = self.target(i, weights, factors[i], products[i], y, u)
            return Lifted(inputs[block], u)

        return jax.vmap(one)(x, y)
