"""Programs that train badly for a planted reason, and healthy ones: the test of the diagnosis.

``python -m benchmarks.illnesses`` trains each, diagnoses each, and prints what is named first.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a user of ``jaxdp.Trainer`` has in hand.

    Attributes:
        loss_fn: the loss of one example.
        params: the first parameters.
        data: the private records, a pytree of arrays [N, ...].
        mechanism: from ``jaxdp.dp_sgd`` or ``jaxdp.dp_mf``.
        optimizer: an optax optimizer.
        public: public records of the same shape, for ``diagnose(public=)``.
        score: from parameters to accuracy (or another figure, larger is better) on a test set.
        steps: how many steps are trained.
        options: further arguments of ``jaxdp.Trainer`` and ``jaxdp.diagnose`` (``trainable`` ...).
        diagnose: further arguments of ``jaxdp.diagnose`` alone (``group``, ``groups`` ...).
    """

    loss_fn: Callable[..., Any]
    params: Any
    data: Any
    mechanism: Any
    optimizer: Any
    public: Any
    score: Callable[[Any], float]
    steps: int
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    diagnose: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Case:
    """One program.

    Attributes:
        name: short.
        illness: what is wrong with it, in a sentence; "" for a healthy one.
        cure: what its author would change; "" for a healthy one.
        make: the program.
        cured: the same program with the cure, which scores better; None for a healthy one.
        kinds: the kinds of ``Finding`` that name it, decided after the first run by a reader.
    """

    name: str
    illness: str
    cure: str
    make: Callable[[], Parts]
    cured: Callable[[], Parts] | None = None
    kinds: tuple[str, ...] = ()
