"""What a finished command leaves and shows: results.json, a table of metrics, and where the files are."""

import json
import logging
import math
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

from fulgurite.callbacks.reporting import MetricTable, PredictionFile
from fulgurite.callbacks.reproducibility import RunCheckpoint
from fulgurite.command_line import provenance
from fulgurite.command_line.runs import RESULTS_FILE, slug_of
from fulgurite.storage import write_text

if TYPE_CHECKING:
    from fulgurite.command_line.app import FulguriteCLI

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Results:
    """One finished command.

    Args:
        command: fit, validate, test or predict.
        method: slug of the method.
        metrics: final value of every metric; null where it is not finite.
        seed: the run's seed; null where seeding was turned off.
        epochs: epochs trained, by this and earlier parts of the run.
        steps: optimiser steps, likewise.
        best_checkpoint: file, metric and value, the file relative to the run's folder; null without one.
        last_checkpoint: file relative to the run's folder; null without one.
        predictions: file of the predictions, relative to the run's folder; null for other commands.
        seconds: from the start of parsing to here.
        peak_memory_mib: peak resident memory of the process.
        peak_gpu_memory_mib: peak memory allocated on the GPU; null without one.
        versions: package -> version.
        commit: of the checkout; null for an installed package.
        code_hash: of the code that the model and the data consist of.
        config_hash: of the resolved config.
    """

    command: str
    method: str
    metrics: dict[str, float | None]
    seed: int | None
    epochs: int
    steps: int
    best_checkpoint: dict[str, Any] | None
    last_checkpoint: str | None
    predictions: str | None
    seconds: float
    peak_memory_mib: float
    peak_gpu_memory_mib: float | None
    versions: dict[str, str]
    commit: str | None
    code_hash: str
    config_hash: str

    @classmethod
    def of(cls, cli: "FulguriteCLI") -> "Results":
        """Gather what a command that has just run leaves."""
        trainer, folder = cli.trainer, cli.session.folder
        best: dict[str, Any] | None = None
        last: str | None = None
        predictions: str | None = None
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, RunCheckpoint) and callback.best_model_path and folder:
                if not Path(callback.best_model_path).is_relative_to(folder.resolve()):
                    continue  # one of the user's own, elsewhere
                file = str(Path(callback.best_model_path).relative_to(folder.resolve()))
                if callback.monitor:
                    score = callback.best_model_score
                    best = {"file": file, "metric": callback.monitor, "value": None if score is None else score.item()}
                else:
                    last = file
            elif isinstance(callback, PredictionFile) and callback.path and folder and cli.subcommand == "predict":
                predictions = os.path.relpath(callback.path, folder)
        classes = [group["class_path"] for group in (cli.resolved.get("model"), cli.resolved.get("data")) if group]
        return cls(
            command=str(cli.subcommand),
            method=slug_of(classes[0]),
            metrics=dict(_numbers(trainer.callback_metrics)),
            seed=cli.seed,
            epochs=trainer.current_epoch,
            steps=trainer.global_step,
            best_checkpoint=best,
            last_checkpoint=last,
            predictions=predictions,
            seconds=round(time.monotonic() - cli.started, 3),
            peak_memory_mib=round(peak_memory(), 1),
            peak_gpu_memory_mib=torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else None,
            versions=provenance.package_versions(),
            commit=provenance.commit(),
            code_hash=provenance.code_hash(classes),
            config_hash=provenance.config_hash(cli.resolved),
        )

    def write(self, folder: Path) -> None:
        """Write results.json into the run's folder."""
        write_text(folder / RESULTS_FILE, json.dumps(asdict(self), indent=2) + "\n")

    def show(self, folder: Path | None, tables: Sequence[MetricTable] = ()) -> None:
        """Print the metrics, those of ``tables`` side by side, and the paths of what the command made."""
        console = Console(highlight=False, soft_wrap=True)
        with console.capture() as shown:
            self._print(console, folder, tables)
        log.info("%s", shown.get().rstrip("\n"))

    def _print(self, console: Console, folder: Path | None, tables: Sequence[MetricTable]) -> None:
        grouped = {key for side_by_side in tables for key in side_by_side.keys.values()}
        for side_by_side in tables:
            # Measures as rows: there are more of them than arms, and a terminal is narrow.
            table = Table("", *side_by_side.rows)
            for column in side_by_side.columns:
                keys = [side_by_side.keys.get((row, column)) for row in side_by_side.rows]
                table.add_row(column, *("" if key is None else _text(self.metrics.get(key)) for key in keys))
            console.print(table)
        plain = {name: value for name, value in self.metrics.items() if name not in grouped}
        if plain:
            table = Table("metric", "value")
            for name, value in sorted(plain.items()):
                table.add_row(name, _text(value))
            console.print(table)
        if folder is None:
            return
        if self.best_checkpoint:
            value = self.best_checkpoint["value"]
            shown = "" if value is None else f" ({self.best_checkpoint['metric']} {value:.4f})"
            console.print(f"best checkpoint {folder / self.best_checkpoint['file']}{shown}")
        elif self.last_checkpoint:
            console.print(f"last checkpoint {folder / self.last_checkpoint}")
        if self.predictions:
            console.print(f"predictions {folder / self.predictions}")
        for figure in sorted((folder / "figures").glob(f"{self.command}_*.png")):
            console.print(f"figure {figure}")


def _text(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _numbers(metrics: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, float | None]]:
    """JSON has no NaN; a metric that is not finite becomes null."""
    for name, tensor in metrics.items():
        if tensor.numel() == 1:
            value = tensor.item()
            yield name, value if math.isfinite(value) else None


def peak_memory() -> float:
    """Peak resident memory of this process in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10  # bytes there, KiB elsewhere


def differences(now: Mapping[str, Any], stored: Mapping[str, Any]) -> list[str]:
    """One line for each model or data value that differs from the config in the checkpoint."""
    here, there = (
        {key: value for section in ("model", "data") for key, value in _leaves(config.get(section), section)}
        for config in (now, stored)
    )
    return [
        f"{key}: {here.get(key)} here, {there.get(key)} in the checkpoint"
        for key in sorted(here.keys() | there.keys())
        if here.get(key) != there.get(key)
    ]


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, path if key == "init_args" else f"{path}.{key}")
    else:
        yield path, tree
