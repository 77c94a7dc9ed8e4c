"""From outcomes to measured claims: what each variant gave, the gains, the verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fulgurite.command_line.errors import nearest
from fulgurite.reproduction.claims import Claim, Comparison, Growth, Margin, Property, Setting, Variant
from fulgurite.reproduction.execution import Outcome
from fulgurite.reproduction.plan import Plan, run_names, seeds_of
from fulgurite.reproduction.statistics import (
    Estimate,
    Summary,
    Verdict,
    difference_estimate,
    growth_estimate,
    joined,
    mean_estimate,
)


@dataclass(frozen=True)
class Part:
    """One of the things that a claim asks for: a comparison in a setting, a growth, a test.

    Args:
        label: the setting; empty where there is one only.
        variant: the method's variant.
        other: the variant that it is compared with; empty where there is none.
        verdict: on this part.
        estimate: gain over the other (positive is better), exponent or slope; None where nothing could be computed.
        excess: the gain less the margin, which the verdict looks at; None likewise.
        reason: why the verdict is not ``holds``; empty if it is.
    """

    label: str
    variant: str
    other: str
    verdict: Verdict
    estimate: Estimate | None = None
    excess: Estimate | None = None
    reason: str = ""


@dataclass(frozen=True)
class Measured:
    """A claim with what was measured.

    Args:
        claim: the claim.
        verdict: on all its parts.
        parts: what it asks for.
        values: setting -> variant -> the value of each seed; None where a run gave none.
        outcomes: of the runs that it reads.
        reason: why the verdict is not ``holds``; empty if it is.
    """

    claim: Claim
    verdict: Verdict
    parts: tuple[Part, ...]
    values: Mapping[str, Mapping[str, Sequence[float | None]]] = field(default_factory=dict)
    outcomes: tuple[Outcome, ...] = ()
    reason: str = ""

    @property
    def decisive(self) -> Part:
        """The part that decides: the worst verdict, and of those the least estimate."""
        order = ("does not hold", "inconclusive", "holds")
        return min(
            self.parts,
            key=lambda part: (
                order.index(part.verdict),
                (part.excess or part.estimate or Estimate(0, None, None)).value,
            ),
        )

    def summary(self, setting: str, variant: str) -> Summary | None:
        """Mean over the seeds; None where one of them is missing."""
        values = self.values[setting][variant]
        return Summary.of([value for value in values if value is not None]) if complete(values) else None


def measure(claim: Claim, plan: Plan, outcomes: Mapping[str, Outcome], seeds: int | None = None) -> Measured:
    """Measure one claim from the outcomes of its jobs."""
    if isinstance(claim, Property):
        return measure_property(claim, outcomes[plan.job(claim.id, None).key])
    assert isinstance(claim, Comparison | Growth)
    number = seeds or seeds_of(claim)
    read = [outcomes[plan.job(name, seed).key] for name in run_names(claim) for seed in range(number)]
    values = {
        setting.label: {
            name: [value_of(variant, plan, outcomes, seed) for seed in range(number)]
            for name, variant in setting.variants.items()
        }
        for setting in claim.settings
    }
    missing = why_missing(claim, plan, outcomes, number)
    parts = compare(claim, values) if isinstance(claim, Comparison) else grow(claim, values)
    verdict = joined([part.verdict for part in parts])
    return Measured(claim, verdict, tuple(parts), values, tuple(read), missing or why(parts))


def why(parts: Sequence[Part]) -> str:
    """Why a claim's verdict is not ``holds``: how many of its parts do not, and the first of each kind."""
    reasons = []
    for verdict in ("does not hold", "inconclusive"):
        found = [part for part in parts if part.verdict == verdict]
        if found:
            number = f"{len(found)} of {len(parts)} comparisons, such as: " if len(parts) > 1 else ""
            reasons.append(number + found[0].reason)
    return "; ".join(reasons)


def measure_property(claim: Property, outcome: Outcome) -> Measured:
    """An exact property holds if its tests pass, all of them."""
    verdict: Verdict = "inconclusive"
    reason = "the tests were not run"
    if outcome.failure:
        reason = f"the tests could not be run: {outcome.failure.error}"
    elif outcome.result:
        counts = outcome.result["metrics"]
        verdict, reason = "holds", ""
        if counts["skipped"]:
            verdict, reason = "inconclusive", f"{counts['skipped']} tests were skipped"
        if counts["failed"]:
            verdict, reason = "does not hold", f"{counts['failed']} tests fail"
    return Measured(claim, verdict, (Part("", "", "", verdict, reason=reason),), {}, (outcome,), reason)


def value_of(variant: Variant, plan: Plan, outcomes: Mapping[str, Outcome], seed: int) -> float | None:
    """The value of a variant at a seed."""
    if variant.value is not None:
        return variant.value
    outcome = outcomes[plan.job(variant.run, seed).key]
    value = outcome.value(variant.metric)
    if variant.minus and value is not None:
        subtracted = outcome.value(variant.minus)
        value = None if subtracted is None else value - subtracted
    return value


def why_missing(claim: Comparison | Growth, plan: Plan, outcomes: Mapping[str, Outcome], seeds: int) -> str:
    """What stands in the way of a verdict: runs that failed or were not made, metrics that are not there."""
    read = [outcomes[plan.job(name, seed).key] for name in run_names(claim) for seed in range(seeds)]
    failed = [outcome.job.label for outcome in read if outcome.failure]
    if failed:
        return f"{len(failed)} of {len(read)} runs failed: {', '.join(failed[:3])}"
    absent = [outcome for outcome in read if outcome.result is None]
    if absent:
        return f"{len(absent)} of {len(read)} runs were not made"
    for variant in (variant for setting in claim.settings for variant in setting.variants.values()):
        for seed in range(seeds if variant.run else 0):
            outcome = outcomes[plan.job(variant.run, seed).key]
            assert outcome.result is not None
            for metric in variant.metrics:
                if outcome.value(metric) is None:
                    known = outcome.result["metrics"]
                    what = "is not finite" if metric in known else f"is not there{nearest(metric, known)}"
                    return f"{metric} of {outcome.job.label} {what}"
    return ""


def compare(claim: Comparison, values: Mapping[str, Mapping[str, Sequence[float | None]]]) -> list[Part]:
    """The method's variant against each of the others, in each setting."""
    parts = []
    for setting in claim.settings:
        first, *others = setting.variants
        parts += [_compared(claim, setting, first, other, values[setting.label]) for other in others]
    return parts


def _compared(
    claim: Comparison, setting: Setting, first: str, other: str, values: Mapping[str, Sequence[float | None]]
) -> Part:
    label = setting.label
    if not complete(values[first]) or not complete(values[other]):
        return Part(label, first, other, "inconclusive", reason="values are missing")
    sign = 1.0 if claim.direction == "higher" else -1.0
    own = [sign * value for value in values[first] if value is not None]
    theirs = [sign * value for value in values[other] if value is not None]
    asked = [value + allowance(claim.margin, value) for value in theirs]
    if claim.paired or setting.variants[other].value is not None:
        gain = mean_estimate([a - b for a, b in zip(own, theirs, strict=True)])
        excess = mean_estimate([a - b for a, b in zip(own, asked, strict=True)])
    else:
        gain, excess = difference_estimate(own, theirs), difference_estimate(own, asked)
    verdict = excess.against(at_least=0.0)
    where = f" ({label})" if label else ""
    reason = ""
    if excess.bootstrap is None:
        reason = "one seed has no interval"
    elif verdict == "does not hold":
        reason = f"{first} is not better than {other} by more than {claim.margin}{where}"
    elif verdict == "inconclusive":
        reason = f"the interval of {first} against {other} includes the margin{where}"
    return Part(label, first, other, verdict, gain, excess, reason)


def allowance(margin: Margin, value: float) -> float:
    """The margin in the metric's unit, against a value."""
    return margin.size * abs(value) if margin.relative else margin.size


def grow(claim: Growth, values: Mapping[str, Mapping[str, Sequence[float | None]]]) -> list[Part]:
    """A fit of each variant over the sizes, for each choice of the other things."""
    parts = []
    groups: dict[str, list[Setting]] = {}
    for setting in claim.settings:
        groups.setdefault(setting.without(claim.size).label, []).append(setting)
    for label, settings in groups.items():
        for name in settings[0].variants:
            columns = [values[setting.label][name] for setting in settings]
            if not all(complete(column) for column in columns):
                parts.append(Part(label, name, "", "inconclusive", reason="values are missing"))
                continue
            rows: Any = list(zip(*columns, strict=True))
            try:
                sizes = [float(setting.values[claim.size]) for setting in settings]
                fitted = growth_estimate(sizes, rows, log=claim.scale == "log")
            except ValueError as error:
                parts.append(Part(label, name, "", "inconclusive", reason=str(error)))
                continue
            verdict = fitted.against(claim.at_least, claim.at_most)
            what = "exponent" if claim.scale == "log" else "slope"
            reason = (
                "" if verdict == "holds" else f"the {what} of {name} is {fitted.value:.3g}, asked is {bounds(claim)}"
            )
            parts.append(Part(label, name, "", verdict, fitted, reason=reason))
    return parts


def bounds(claim: Growth) -> str:
    """What a growth claim asks for, in words."""
    words = []
    if claim.at_least is not None:
        words.append(f"more than {claim.at_least:g}")
    if claim.at_most is not None:
        words.append(f"less than {claim.at_most:g}")
    return " and ".join(words)


def complete(values: Sequence[float | None]) -> bool:
    """Whether no value is missing."""
    return all(value is not None for value in values)
