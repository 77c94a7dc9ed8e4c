"""From claims to jobs: each (run, seed) once, under a key that says what its result stands on."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from fulgurite import callbacks, datamodules, modules
from fulgurite.command_line.arguments import find_config, read_layer
from fulgurite.command_line.configs import Layer
from fulgurite.command_line.errors import UsageError
from fulgurite.command_line.provenance import PACKAGE, ROOT, code_hash
from fulgurite.reproduction.claims import Claim, ClaimFile, Comparison, Growth, Property, Run
from fulgurite.storage import write_text

TABLES = {"model": modules, "data": datamodules, "trainer.callbacks": callbacks}
CALLBACK_KEYS = ("callbacks", "callbacks+")
RUNS_FOLDER = "runs"  # of a job, below its folder


@dataclass(frozen=True)
class Job:
    """One child process.

    Args:
        name: of its run, or of its claim where it runs tests.
        seed: the run's seed; None for tests.
        config: hash of what is run.
        code: hash of the code that is run.
        key: hash of both, the versions of torch and Lightning, and the job that this one starts from.
        description: what is run, for a reader.
        layers: config files, those without some callbacks as text.
        run: the run; None for tests.
        source: the job whose checkpoint it starts from.
        tests: pytest nodes; empty for a run.
    """

    name: str
    seed: int | None
    config: str
    code: str
    key: str
    description: Mapping[str, Any]
    layers: tuple[Layer, ...] = ()
    run: Run | None = None
    source: "Job | None" = None
    tests: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """What a line of progress calls it."""
        return self.name if self.seed is None else f"{self.name}, seed {self.seed}"

    def arguments(self, folder: Path) -> list[str]:
        """The options of its commands; a config file that lost a callback is written into the folder.

        Args:
            folder: the job's own.
        """
        assert self.run is not None
        words = []
        for layer in self.layers:
            path = layer.path
            if layer.changed and path:
                path = folder / path.name
                write_text(path, layer.text)
            words += ["--config", str(path)]
        words += ["--seed_everything", str(self.seed), "--trainer.default_root_dir", str(folder / RUNS_FOLDER)]
        words += [f"--trainer.callbacks+={name}" for name, on in self.run.callbacks.items() if on]
        return words + [f"--{option}={as_word(value)}" for option, value in self.run.overrides.items()]


@dataclass
class Plan:
    """All jobs of some claims.

    Args:
        file: the claims' file.
        jobs: key -> job; a job stands behind the one whose checkpoint it starts from.
    """

    file: ClaimFile
    jobs: dict[str, Job] = field(default_factory=dict)
    _keys: dict[tuple[str, int | None], str] = field(default_factory=dict)

    def add(self, claim: Claim, seeds: int | None = None) -> None:
        """Add the jobs of a claim.

        Args:
            claim: the claim.
            seeds: number of seeds; None means the claim's own.

        Raises:
            UsageError: a config cannot be found or read.
        """
        if isinstance(claim, Property):
            job = tests_job(claim)
            self.jobs[job.key] = job
            self._keys[claim.id, None] = job.key
        else:
            for name in run_names(claim):
                for seed in range(seeds or seeds_of(claim)):
                    self._add_run(self.file.runs[name], seed)

    def job(self, name: str, seed: int | None) -> Job:
        """The job of a run, or of the tests of a claim."""
        return self.jobs[self._keys[name, seed]]

    def _add_run(self, run: Run, seed: int) -> Job:
        if (run.name, seed) not in self._keys:
            source = None
            if run.checkpoint_from:
                source = self._add_run(self.file.runs[run.checkpoint_from.run], seed)
            job = run_job(run, seed, source)
            job = self.jobs.setdefault(job.key, job)  # an equal run under another name
            self._keys[run.name, seed] = job.key
        return self.job(run.name, seed)


def seeds_of(claim: Claim) -> int:
    """The claim's own number of seeds; 0 for one that has none."""
    return claim.seeds if isinstance(claim, Comparison | Growth) else 0


def run_names(claim: Claim) -> list[str]:
    """The runs that a claim reads, each once."""
    if not isinstance(claim, Comparison | Growth):
        return []
    names = (variant.run for setting in claim.settings for variant in setting.variants.values() if variant.run)
    return list(dict.fromkeys(names))


def run_job(run: Run, seed: int, source: Job | None) -> Job:
    """The job of a run.

    Raises:
        UsageError: a config cannot be found or read, or has no callback that the run is to do without.
    """
    layers = layers_of(run)
    what = {
        "layers": [layer.tree for layer in layers],
        "overrides": run.overrides,
        "with": [name for name, on in run.callbacks.items() if on],
        "commands": run.commands,
        "checkpoint": run.checkpoint,
        "option": run.checkpoint_from and [run.checkpoint_from.option, run.checkpoint_from.which],
        "source": source and source.config,
    }
    config, code = digest(what), code_hash(class_paths_of(run, layers))
    if source:
        code = digest([code, source.code])
    description: dict[str, Any] = {"configs": list(run.configs)}
    for name in ("overrides", "callbacks"):
        if value := getattr(run, name):
            description[name] = value
    if run.checkpoint_from:
        description["checkpoint_from"] = asdict(run.checkpoint_from)
    return Job(
        name=run.name,
        seed=seed,
        config=config,
        code=code,
        key=digest([config, code, seed, *versions()]),
        description=description,
        layers=layers,
        run=run,
        source=source,
    )


def tests_job(claim: Property) -> Job:
    """The job that runs the tests of an exact property."""
    paths = [ROOT / node.partition("::")[0] for node in claim.tests]
    code = code_hash((), [path for path in paths if path.is_file()])
    config = digest(claim.tests)
    return Job(
        name=claim.id,
        seed=None,
        config=config,
        code=code,
        key=digest([config, code, *versions()]),
        description={"tests": list(claim.tests)},
        tests=claim.tests,
    )


def layers_of(run: Run) -> tuple[Layer, ...]:
    """A run's config files, less the callbacks that it does without."""
    layers = [read_layer(find_config(name)) for name in run.configs]
    for name in (name for name, on in run.callbacks.items() if not on):
        changed = [without_callback(layer, name) for layer in layers]
        if changed == layers:
            raise UsageError(f"run {run.name}, callbacks: none of {', '.join(run.configs)} has a callback {name}")
        layers = changed
    return tuple(layers)


def without_callback(layer: Layer, name: str) -> Layer:
    """A layer less a callback, by its class's name."""
    trainer = layer.tree.get("trainer")
    if not isinstance(trainer, dict):
        return layer
    kept = dict(trainer)
    for key in CALLBACK_KEYS:
        given = trainer.get(key)
        if given is not None:
            entries = given if isinstance(given, list) else [given]
            kept[key] = [entry for entry in entries if callback_name(entry) != name]
            if len(kept[key]) == len(entries):
                kept[key] = given
    return layer if kept == trainer else layer.with_tree({**layer.tree, "trainer": kept})


def callback_name(entry: Any) -> str:
    """The class name of a callback in a config, which is a mapping or a name."""
    path = entry.get("class_path", "") if isinstance(entry, dict) else str(entry)
    return str(path).rpartition(".")[2]


def class_paths_of(run: Run, layers: Iterable[Layer]) -> list[str]:
    """Every class that the run's configs and overrides name."""
    found = {path for layer in layers for path in _class_paths(layer.tree)}
    for option, value in run.overrides.items():
        table = TABLES.get(option.rstrip("+"))
        if table and isinstance(value, str) and value in table.CLASSES:
            found.add(f"{table.__name__}.{value}")
        found |= set(_class_paths(value))
    found |= {f"{PACKAGE}.callbacks.{name}" for name in run.callbacks if name in callbacks.CLASSES}
    return sorted(found)


def _class_paths(tree: Any) -> Iterator[str]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            if key == "class_path" and isinstance(value, str):
                yield value
            yield from _class_paths(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _class_paths(value)


def fingerprint(plan: Plan, claim: Claim, seeds: int | None = None) -> str:
    """Hash of what a verdict stands on but for versions: the claim's definition, its configs and its code."""
    words = ("claim", "source", "minutes", "remark", "measure")
    definition = {key: value for key, value in claim.raw.items() if key not in (*words, "seeds")}
    if isinstance(claim, Property):
        jobs = [plan.job(claim.id, None)]
    else:
        jobs = [plan.job(name, seed) for name in run_names(claim) for seed in range(seeds or seeds_of(claim))]
    # The first variant is the method's, and keys are sorted below.
    order = list(claim.raw.get("variants", {}))
    return digest([definition, order, sorted({(job.config, job.code) for job in jobs})])


def digest(value: Any) -> str:
    """Hash of plain data, independent of the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def versions() -> tuple[str, str]:
    """The versions of torch and Lightning."""
    return metadata.version("torch"), metadata.version("lightning")


def as_word(value: Any) -> str:
    """A value as one word of a command line."""
    return value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True, width=10**9).strip()
