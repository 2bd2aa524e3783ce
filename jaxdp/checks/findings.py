"""Findings of a check, in words."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that breaks the guarantee, or may break it.

    Attributes:
        kind: a short name: "company", "state", "captured", "refused", "preprocess", "public",
            "source", "collate", "sampling", "sensitivity", "noise", "shared", "divisor", "steps",
            "repeat".
        what: what was seen, with numbers.
        why: why the guarantee does not hold then.
        where: ``file:line`` of the user's code; "" where it is not known.
        remedy: what to write instead.
        certain: False where it is only a suspicion: a correct program may look like this.
    """

    kind: str
    what: str
    why: str
    where: str
    remedy: str
    certain: bool = True

    def __str__(self) -> str:
        head = "BROKEN" if self.certain else "suspicion"
        at = f" ({self.where})" if self.where else ""
        return f"{head}, {self.kind}{at}: {self.what}\n  why: {self.why}\n  do: {self.remedy}"


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
        count = len(self.broken)
        head = f"{count} broken, {len(self.suspicions)} suspicious" if count else "nothing broken"
        if not count and self.suspicions:
            head += f", {len(self.suspicions)} suspicious"
        lines = [f"{head} ({self.seconds:.1f} s)", *map(str, self.findings)]
        lines += [f"tested: {name}" for name in self.tested]
        lines += [f"not tested: {name}" for name in self.untested]
        lines += [f"assumed to be public: {name}" for name in self.assumed]
        return "\n".join(lines)


def in_order(findings: list[Finding]) -> tuple[Finding, ...]:
    """The findings without repetitions, those that are certain first."""
    kept = dict.fromkeys(findings)
    return tuple(sorted(kept, key=lambda finding: not finding.certain))
