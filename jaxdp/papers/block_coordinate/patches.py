"""The patches of an image: a convolution is one linear map on all of them."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxdp import arguments


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

    def cut(self, x: jax.Array) -> jax.Array:
        """The patches [positions, numbers] of one image x [height * width * channels]."""
        image = x.reshape(self.shape)
        ends = [side - self.kernel + 1 for side in self.shape[:2]]
        parts = [
            image[i : i + ends[0] : self.stride, j : j + ends[1] : self.stride]
            for i in range(self.kernel)
            for j in range(self.kernel)
        ]
        return jnp.stack(parts, axis=2).reshape(self.positions, self.numbers)
