"""Findings of a check or a diagnosis, in words, and the lines of the user's code they name."""

import dataclasses
from collections.abc import Iterable

# Of each kind of finding: why the guarantee does not hold then, and what to write instead.
_ADVICE = {
    "captured": (
        "every example's gradient then depends on the records it was computed from, which are "
        "neither clipped nor noised there",
        "use a public constant, or a charged release (jaxdp.preprocess)",
    ),
    "collate": (
        "the shape of a batch tells the length of its longest record; a row moves with the others",
        "compute each row from its own record and pad it to a public length "
        "(jaxdp.sampling.padded_text or bucketed_text)",
    ),
    "independence": (
        "one record moves what all others add, so that clipping each of them bounds nothing",
        "compute each gradient from its own example and public constants: jaxdp.clipped_grad with "
        "the loss of one example; GroupNorm or LayerNorm in place of batch statistics",
    ),
    "copies": (
        "the guarantee is for one record: whoever is k of them is hidden k times worse, or more",
        "make the person the privacy unit (jaxdp.sampling.users); in place of copies weight the "
        "loss, with a clip norm above the weighted gradients, or the weights do nothing; or tell "
        "epsilon for all records of one: jaxdp.accounting.group_epsilon",
    ),
    "divisor": (
        "the number of records drawn is private under Poisson sampling, and one record changes it "
        "(arXiv:2605.15648)",
        "divide by the public mechanism.batch_size, after the noise (jaxdp.privatize does)",
    ),
    "key": (
        "all examples get the same numbers; without a guarantee if the key was made from records",
        "give the loss an argument rng (or key): each example then has a key of its own",
    ),
    "noise": (
        "epsilon is computed for Gaussian noise in every coordinate of every release, also where "
        "nobody was drawn",
        "add Gaussian noise to every leaf that is trained, new for every update, whoever was "
        "drawn (jax.random.normal); or charge for the law that is added",
    ),
    "preprocess": (
        "it is fitted on the private records: one of them moves what all others add, uncharged",
        "use public constants or public data, pad or cut to a public length, or make a charged "
        "release (jaxdp.preprocess.dp_pca); give what is random a fixed seed for the check",
    ),
    "public": (
        "what is used as a public constant depends on a record: a release that is not charged",
        "choose it beforehand, from public data, or from noisy releases "
        "(jaxdp.optimizers.quantile for a clip bound)",
    ),
    "refused": (
        "an example's gradient could depend on other examples, or on records that it is not",
        "compute the loss from its own example and public constants",
    ),
    "repeat": (
        "the difference of the two shows their un-noised sums",
        "take a new key for every update, also after a restart: save the key with the parameters, "
        "or take fresh randomness of the operating system (a jaxdp.Run does)",
    ),
    "sampling": (
        "epsilon is computed for the sampling that is charged; batches that exclude each other "
        "have a larger one (Chua et al. 2024, arXiv:2403.17673)",
        "draw with mechanism.sampler(...) or trainer.batches(); or charge what is drawn: "
        'sampling="allocation", "shuffle" or "fixed_size"',
    ),
    "sensitivity": (
        "noise must be the multiplier times what one record can move, in the same scale, in every "
        "release that it moves",
        "clip every example's gradient (one that is not finite counts as zero), sum, add "
        "noise_multiplier * clip_norm, then divide by the expected batch size and average "
        "(jaxdp.clipped_grad and mechanism.privatize do)",
    ),
    "shared": (
        "a combination of coordinates shows the un-noised sum of the gradients",
        "draw noise of each leaf's own shape, with a key of its own (jax.random.split)",
    ),
    "source": (
        "what a record adds then depends on the other records, or on how often it was read",
        "let [index] compute from that record and public constants alone; augment in the loss",
    ),
    "state": (
        "what comes from a record cannot be told from what was computed before it, or from chance",
        "compute a loss from (params, example) and its key alone, a loop's randomness from its "
        "seed (jaxdp: secret=jaxdp.Secret.from_seed(seed))",
    ),
    "steps": (
        "every update is a release, and no event is charged for a stop that depends on a record",
        "count updates: steps = epochs * dataset_size / batch_size (a jaxdp.Ledger counts them), "
        "and stop after a public number of them, or by noisy releases",
    ),
}

# Of each kind that breaks no guarantee: why the model does not learn then, and what to do.
_LEARNING = {
    "clip": (
        "the clip norm is far from the norms of the gradients: the noise is scaled to it",
        "clip at about the median norm of gradients on public records, and set the rate anew",
    ),
    "dead": (
        "nothing of the records reaches these parameters, and they are noised all the same",
        "freeze them (trainable=), or let the loss and the optimizer reach them",
    ),
    "delta": (
        "with delta of 1/n or more a release may publish one whole record",
        "take a delta well below 1/n",
    ),
    "epochs": (
        "most records are never drawn, and the noise is calibrated for so few updates",
        "steps = epochs * dataset_size / batch_size",
    ),
    "frozen": (
        "what is frozen keeps the model from learning",
        "train more of it (trainable=): the last layer, or LoRA",
    ),
    "groups": (
        "clipping shortens all gradients to one norm, and with them what weights were to do",
        "raise the clip norm until the weights act, or leave them out and move the threshold of "
        "the decision on public records",
    ),
    "inputs": (
        "the gradient of the largest feature is most of the norm, and clipping takes the rest away",
        "scale the features by public constants, or by a charged release (jaxdp.preprocess)",
    ),
    "labels": (
        "a group is not learned, also without noise",
        "look at its labels, and at how they are made",
    ),
    "loss scale": (
        "a loss that is scaled up has gradients beyond any clip norm: clipping normalises them all",
        "leave the scale out: clipped gradients do not underflow in float32",
    ),
    "model": (
        "the model does not learn without privacy, either",
        "mend model, loss or data first, without noise and clipping",
    ),
    "nonfinite": (
        "a gradient that is not finite counts as zero: such a record adds nothing, unsaid",
        "mend the loss at that line (a jnp.where on the input of the operation, not on its "
        "result), or leave such records out",
    ),
    "precision": (
        "half precision overflows or underflows there, and the record adds nothing",
        "compute the loss in float32, or at least its last layer and the logarithm",
    ),
    "rate": (
        "the learning rate does not suit the noise",
        "try others on public records",
    ),
    "signal": (
        "a step moves the parameters by noise more than by the gradient",
        "take a larger batch, fewer steps, fewer parameters (last layer, LoRA) or correlated noise",
    ),
    "softmax": (
        "the loss applies it a second time: its gradients are small, and it cannot be certain",
        "hand the loss the logits",
    ),
    "units": (
        "units that are off for every record have no gradient, and never come back",
        "take another activation (leaky, gelu), a smaller rate, or smaller first values",
    ),
    "zero": (
        "such a record adds nothing, and the noise is paid for all the same",
        "compute the loss from one example, such that it depends on the parameters",
    ),
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that breaks the guarantee, or keeps the model from learning; or may do so.

    Attributes:
        kind: a short name. Of what breaks the guarantee: "captured", "collate", "copies",
            "divisor", "independence", "key", "noise", "preprocess", "public", "refused", "repeat",
            "sampling", "sensitivity", "shared", "source", "state", "steps". Of what keeps a model
            from learning: "clip", "dead", "delta", "epochs", "frozen", "groups", "inputs",
            "labels", "loss scale", "model", "nonfinite", "precision", "rate", "signal", "softmax",
            "units", "zero".
        what: what was seen, with numbers; of a diagnosis without any that records decide, but for
            those that were asked for.
        where: ``file:line`` of the user's code, an operation or where a function begins; "" where
            it is not known.
        certain: False where it is only a suspicion (a correct program may look like this), or
            advice that numbers give.
        do: what to do, with numbers, in place of the kind's own remedy.
        count: (k, n): it was seen in k of the n records looked at. **Sensitive**.
        weight: how much of the trouble it may explain: 1 where nothing can be learned at all, 0.3
            where it is noticeable.
    """

    kind: str
    what: str
    where: str
    certain: bool = True
    do: str = ""
    count: tuple[int, int] | None = None
    weight: float = 0.0

    @property
    def breach(self) -> bool:
        """True where the guarantee does not hold then."""
        return self.kind in _ADVICE

    @property
    def why(self) -> str:
        """The reason that the guarantee does not hold, or that the model does not learn."""
        return (_ADVICE if self.breach else _LEARNING)[self.kind][0]

    @property
    def remedy(self) -> str:
        """The advice on how to write it instead."""
        return self.do or (_ADVICE if self.breach else _LEARNING)[self.kind][1]

    def __str__(self) -> str:
        head = "BROKEN" if self.certain else "suspicion" if self.breach else "advice"
        at = f" ({self.where})" if self.where else ""
        seen = "" if self.count is None else " (in {} of the {} records looked at)"
        what = self.what + seen.format(*self.count or ())
        return f"{head}, {self.kind}{at}: {what}\n  why: {self.why}\n  do: {self.remedy}"


@dataclasses.dataclass(frozen=True)
class Checked:
    """The answer of ``jaxdp.check`` and ``jaxdp.check_loop``; ``str`` gives it in words.

    No epsilon covers it: what it says was seen in the records themselves. It refutes; an empty
    answer proves nothing beyond the tests that it names.

    Attributes:
        findings: what breaks the guarantee, then suspicions.
        tested: the tests that ran, one sentence each.
        assumed: what cannot be seen and is taken to be public.
        seconds: the time that it took.
        untested: the tests that could not run, one sentence each.
    """

    findings: tuple[Finding, ...]
    tested: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    seconds: float = 0.0
    untested: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if nothing was found that breaks the guarantee; suspicions do not count."""
        return not self.broken

    @property
    def broken(self) -> tuple[Finding, ...]:
        """The findings that break the guarantee."""
        return tuple(f for f in self.findings if f.certain)

    @property
    def suspicions(self) -> tuple[Finding, ...]:
        """The findings that a correct program may show, too."""
        return tuple(f for f in self.findings if not f.certain)

    def raise_if_broken(self) -> None:
        """Raises ValueError with all findings in words, unless ``ok``."""
        if not self.ok:
            raise ValueError(str(self))

    def __str__(self) -> str:
        broken, suspicious = len(self.broken), len(self.suspicions)
        head = f"{broken} broken" if broken else "nothing broken"
        head += f", {suspicious} suspicious" if broken or suspicious else ""
        lines = [f"{head} ({self.seconds:.1f} s)", *map(str, self.findings)]
        lines += [f"tested: {name}" for name in self.tested]
        lines += [f"not tested: {name}" for name in self.untested]
        lines += [f"assumed to be public: {name}" for name in self.assumed]
        return "\n".join(lines)


def certain_first(findings: Iterable[Finding | None]) -> tuple[Finding, ...]:
    """The findings without None and repetitions: those that are certain first, then by weight."""
    kept = dict.fromkeys(finding for finding in findings if finding)
    return tuple(sorted(kept, key=lambda finding: (not finding.certain, -finding.weight)))
