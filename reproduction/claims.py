"""What a ``claim.yaml`` says: the runs, and the claims that are computed from their metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fulgurite.command_line.errors import UsageError, nearest

Direction = Literal["lower", "higher"]
Scale = Literal["log", "linear"]
Which = Literal["best", "last"]
COMMANDS = ("fit", "test")


@dataclass(frozen=True)
class CheckpointFrom:
    """The checkpoint of another run, of the same seed, that a run starts from.

    Args:
        run: the other run.
        option: the option that takes the file: ``ckpt_path``, or an argument such as ``model.source``.
        which: the other run's best or last checkpoint.
    """

    run: str
    option: str = "ckpt_path"
    which: Which = "best"


@dataclass(frozen=True)
class Run:
    """What is run, once for each seed.

    Args:
        name: its name in the claim file.
        configs: ``--config`` layers, in order.
        overrides: option without its dashes -> value, such as ``model.hidden: [64]``.
        callbacks: callback's name -> whether it takes part: true adds it, false drops it from the layers.
        commands: ``fit``, ``test`` or both.
        checkpoint: which checkpoint of the fit the test reads.
        checkpoint_from: another run that this one starts from.
    """

    name: str
    configs: tuple[str, ...]
    overrides: Mapping[str, Any]
    callbacks: Mapping[str, bool]
    commands: tuple[str, ...] = COMMANDS
    checkpoint: Which = "best"
    checkpoint_from: CheckpointFrom | None = None


@dataclass(frozen=True)
class Variant:
    """A run and a metric of it, or a constant.

    Args:
        run: the run's name.
        metric: of its results; ``run/seconds`` and ``run/peak_memory_mib`` are what it took.
        minus: a second metric, to be subtracted.
        value: the constant; then there is no run.
    """

    run: str = ""
    metric: str = ""
    minus: str | None = None
    value: float | None = None

    @property
    def metrics(self) -> list[str]:
        """The names of the metrics that are read."""
        return [] if self.value is not None else [self.metric, *([self.minus] if self.minus else [])]


@dataclass(frozen=True)
class Margin:
    """By how much a variant must be better; a negative margin says by how much it may be worse.

    Args:
        size: in the metric's unit, or as a share of the other variant's value.
        relative: which of the two.
    """

    size: float
    relative: bool

    def __str__(self) -> str:
        return f"{100 * self.size:g} %" if self.relative else f"{self.size:g}"


@dataclass(frozen=True)
class Setting:
    """The variants of a claim under one choice of what it ranges over."""

    values: Mapping[str, Any]
    variants: Mapping[str, Variant]

    @property
    def label(self) -> str:
        """Such as ``price 10, alpha 0.05``; empty where the claim ranges over nothing."""
        return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in self.values.items())

    def without(self, name: str) -> "Setting":
        """This setting less one of the values."""
        return Setting({key: value for key, value in self.values.items() if key != name}, self.variants)


@dataclass(frozen=True)
class Claim:
    """What all claims have.

    Args:
        id: its name.
        claim: the sentence, in our words.
        source: where the paper says it.
        minutes: what measuring it alone takes, about, on two cores.
        remark: what a reader of the verdict should know, such as why it cannot hold at this scale.
        raw: the definition as it stands in the file.
    """

    id: str
    claim: str
    source: str
    minutes: float
    remark: str
    raw: Mapping[str, Any]


@dataclass(frozen=True)
class Comparison(Claim):
    """The first variant is better than each of the others, in every setting.

    Args:
        settings: one for each combination of what the claim ranges over.
        direction: whether lower or higher is better.
        margin: by how much.
        paired: whether equal seeds belong together.
        seeds: number of seeds: 0, 1, ...
        measure: what is measured, for the figure; empty means the metric's name.
    """

    settings: tuple[Setting, ...]
    direction: Direction
    margin: Margin
    paired: bool
    seeds: int
    measure: str


@dataclass(frozen=True)
class Growth(Claim):
    """A metric grows with a size as a power of it (``log``), or by an amount for each unit (``linear``).

    Args:
        settings: one for each combination of the sizes and what else the claim ranges over.
        size: the name of the size.
        scale: ``log`` fits the exponent, ``linear`` the slope.
        at_least: lower bound of the fitted number; None without one.
        at_most: upper bound; None without one.
        seeds: number of seeds.
        measure: what is measured, for the figure.
    """

    settings: tuple[Setting, ...]
    size: str
    scale: Scale
    at_least: float | None
    at_most: float | None
    seeds: int
    measure: str


@dataclass(frozen=True)
class Property(Claim):
    """Something exact, shown by tests.

    Args:
        tests: pytest nodes, relative to the repository's root.
    """

    tests: tuple[str, ...]


@dataclass(frozen=True)
class ClaimFile:
    """A whole file.

    Args:
        name: the method's slug, or the stem of a file of the user's own.
        path: the file.
        runs: name -> run.
        claims: id -> claim.
        minutes: what measuring all claims takes, about, on two cores; runs are shared, so it is less than their sum.
    """

    name: str
    path: Path
    runs: Mapping[str, Run]
    claims: Mapping[str, Claim]
    minutes: float = 0.0

    def chosen(self, ids: Sequence[str]) -> list[Claim]:
        """The claims of these ids, all of them where none is given.

        Raises:
            UsageError: there is no claim of an id.
        """
        for name in ids:
            if name not in self.claims:
                known = f"it has {', '.join(self.claims)}"
                raise UsageError(f"{self.path} has no claim {name!r}{nearest(name, self.claims, known)}")
        return [self.claims[name] for name in ids] if ids else list(self.claims.values())
