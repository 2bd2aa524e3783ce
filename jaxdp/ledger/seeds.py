"""Secret randomness: one 128-bit secret, and a separate stream for each use of it."""

import dataclasses
import hashlib
import secrets

import jax
import jax.numpy as jnp
import numpy as np

from jaxdp import arguments
from jaxdp.devices import processes

# For what runs once: LLVM's best code for a random generator takes a second or two to compile.
AT_ONCE = {"xla_backend_optimization_level": 0}


@dataclasses.dataclass(frozen=True, repr=False)
class Secret:
    """The seed of a run, from which noise, sampling and initialisation take separate streams.

    The guarantee of a run holds against adversaries who do not know its secret. ``Secret.new()``
    takes 128 bits from the operating system. ``Secret.from_seed(7)`` is for reproducing a figure:
    such a run carries the label "no guarantee against whoever knows the seed".

    Attributes:
        entropy: integer in [0, 2**128). Never logged: ``repr`` hides it.
        reproducible: True if a person chose the seed.
    """

    entropy: int
    reproducible: bool

    @classmethod
    def new(cls) -> "Secret":
        """A secret from the operating system's entropy."""
        return cls(secrets.randbits(128), reproducible=False)

    @classmethod
    def of_all_processes(cls, secret: "Secret | None") -> "Secret":
        """The secret itself, or a new one: that of process 0 in several processes.

        Raises:
            ValueError: processes were given different ones, or JAX has several processes that
                jaxdp cannot exchange texts with.
        """
        if jax.process_count() > 1 and processes.count() != jax.process_count():
            raise ValueError(
                "jax.distributed.initialize() must be called before jaxdp is used by several "
                f"processes, got {jax.process_count()} that were not joined by it: each would draw "
                "and add noise by itself"
            )
        processes.agree(secret=secret and (lambda: secret.stream("agreement").hex()))
        if secret is None:
            found = processes.from_process_0(lambda: f"{cls.new().entropy:032x}")
            return cls(int(found, 16), reproducible=False)
        return secret

    @classmethod
    def from_seed(cls, seed: int) -> "Secret":
        """A secret that a person chose, hence labelled reproducible."""
        seed = arguments.integer("seed", seed, least=0)
        if seed >= 2**128:
            raise ValueError(f"seed must be below 2**128, got {seed!r}")
        return cls(seed, reproducible=True)

    def stream(self, name: str) -> bytes:
        """16 bytes for one named use; different names give independent streams (BLAKE2b)."""
        data = self.entropy.to_bytes(16, "big") + name.encode()
        return hashlib.blake2b(data, digest_size=16, person=b"jaxdp stream").digest()

    def key(self, name: str) -> bytes:
        """32 bytes for one named use: a key of a cipher (BLAKE2b keyed with the secret)."""
        secret, data = self.entropy.to_bytes(16, "big"), name.encode()
        return hashlib.blake2b(data, digest_size=32, key=secret, person=b"jaxdp key").digest()

    def child(self, name: str) -> "Secret":
        """A secret derived from this one for a part of a run, such as the draws of an energy."""
        entropy = int.from_bytes(self.stream(f"child {name}"), "big")
        return Secret(entropy, reproducible=self.reproducible)

    def jax_key(self, name: str) -> jax.Array:
        """A threefry key with all of its 64 bits from the stream ``name``.

        ``jax.random.key(seed)`` keeps only 32 bits of the seed, few enough to search through.
        """
        words = np.frombuffer(self.stream(name)[:8], dtype=np.uint32)
        return jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")

    def philox(self, name: str, counter: int) -> np.random.Generator:
        """NumPy's 64-bit Philox generator at position ``counter`` of the stream ``name``."""
        key = np.frombuffer(self.stream(name), dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, counter]))

    def __repr__(self) -> str:
        return f"Secret(<hidden>, reproducible={self.reproducible})"
