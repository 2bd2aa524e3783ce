"""The block function of ChaCha20 (RFC 8439, Section 2.3) on JAX arrays of uint32."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

Words = tuple[jax.Array, ...]

# "expand 32-byte k", little-endian.
_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
_ROUNDS = 20


def block(key: jax.Array, counter: jax.Array, nonce: Sequence[jax.Array | int]) -> Words:
    """The 16 words of every block: the key stream of RFC 8439, each word uint32 like ``counter``.

    Args:
        key: uint32 [8].
        counter: uint32, any shape: of the block.
        nonce: three words, uint32 scalars or arrays that broadcast against ``counter``.

    Raises:
        ValueError: key or counter is not uint32: the rounds would be those of no known cipher.
    """
    for name, given in (("key", key), ("counter", counter)):
        if given.dtype != jnp.uint32:
            raise ValueError(f"{name} must be uint32, got {given.dtype}")
    shape = jnp.broadcast_shapes(counter.shape, *(jnp.shape(word) for word in nonce))
    words = [*_CONSTANTS, *(key[n] for n in range(8)), counter, *nonce]
    # Added to all, so that within a shard_map all vary as the key and the counter do.
    zero = (key[0] ^ key[0]) + (counter ^ counter)
    first = tuple(jnp.broadcast_to(word + zero, shape) for word in map(_word, words))
    # A loop: unrolled, every reader of a word would make XLA run all rounds again for it. Never a
    # reduction of one element with the rounds as its operation: XLA leaves out the operation.
    last = jax.lax.fori_loop(0, _ROUNDS // 2, lambda _, state: _double_round(state), first)
    return tuple(a + b for a, b in zip(last, first, strict=True))


def subkey(key: jax.Array, place: jax.Array | int, kind: int) -> jax.Array:
    """A key uint32 [8] of its own for each ``place``: half of a block that no stream uses.

    Args:
        key: uint32 [8].
        place: uint32 scalar.
        kind: the purpose; different kinds give unrelated keys.
    """
    made = block(key, jnp.asarray(place, jnp.uint32), (0xFFFFFFFF, 0xFFFFFFFF, kind))
    return jnp.stack(made[:8])


def _word(word: jax.Array | int) -> jax.Array:
    return jnp.asarray(word, jnp.uint32)


def _double_round(state: Words) -> Words:
    """Four quarter rounds on the columns, and four on the diagonals."""
    words = list(state)
    for n in range(4):
        _quarter_round(words, n, 4 + n, 8 + n, 12 + n)
    for n in range(4):
        _quarter_round(words, n, 4 + (n + 1) % 4, 8 + (n + 2) % 4, 12 + (n + 3) % 4)
    return tuple(words)


def _quarter_round(words: list[jax.Array], a: int, b: int, c: int, d: int) -> None:
    for to, add, turned, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        words[to] = words[to] + words[add]
        words[turned] = _rotated(words[turned] ^ words[to], bits)


def _rotated(word: jax.Array, bits: int) -> jax.Array:
    return (word << np.uint32(bits)) | (word >> np.uint32(32 - bits))
