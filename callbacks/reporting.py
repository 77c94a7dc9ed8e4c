"""What a run leaves for a reader: metrics, figures, predictions, and lines of progress."""

import csv
import logging
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from fulgurite.modules.base import Method
from fulgurite.storage import atomic_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)


class MetricsFile(Logger):
    """A logger that writes ``metrics.csv``, one row a step, and goes on in the same file when a run resumes.

    Rows of an earlier part of the run are kept up to the first step that is logged anew.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.path = Path(folder) / "metrics.csv"
        self._columns: list[str] = []
        self._row: dict[str, Any] = {}

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: the run's config.yaml holds them."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        step = 0 if step is None else step
        if not self._columns:
            self._open(step)
        if self._row and self._row["step"] != step:
            self._flush()
        self._row.update(metrics, step=step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self._flush()

    def _open(self, first_step: int) -> None:
        self._columns = ["step"]
        earlier = [row for row in self._read() if int(row["step"]) < first_step]
        self._rewrite(earlier, [key for row in earlier for key in row])

    def _read(self) -> list[dict[str, str]]:
        if not self.path.exists():
            return []
        try:
            with self.path.open(newline="", encoding="utf-8") as file:
                # A killed process may have left half a last line.
                table = csv.DictReader(file)
                if table.fieldnames and "step" not in table.fieldnames:
                    raise ValueError("it has no column 'step'")
                return [row for row in table if None not in row.values() and row["step"].isdigit()]
        except (ValueError, csv.Error, IsADirectoryError) as error:
            number = 1 + sum(1 for _ in self.path.parent.glob("metrics-unread-*"))
            aside = self.path.rename(self.path.with_name(f"metrics-unread-{number}.csv"))
            log.warning("%s cannot be gone on with (%s); it is kept as %s", self.path, error, aside.name)
            return []

    def _rewrite(self, rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> None:
        self._columns = sorted({*self._columns, *keys}, key=lambda key: (key not in ("epoch", "step"), key))
        with atomic_path(self.path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns, restval="")
            writer.writeheader()
            writer.writerows(rows)

    def _flush(self) -> None:
        if not self._row:
            return
        if not self._row.keys() <= set(self._columns):
            self._rewrite(self._read(), list(self._row))
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns, restval="").writerow(self._row)
        self._row = {}


@dataclass(frozen=True)
class MetricTable:
    """Metrics that belong side by side: a callback that has one as ``metric_table`` gets it printed after the run.

    Args:
        rows: the rows' names.
        columns: the columns' names.
        keys: (row, column) -> the logged metric's name, where there is one.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    keys: Mapping[tuple[str, str], str]

    @classmethod
    def of(cls, rows: Mapping[str, Mapping[str, float]], prefix: str) -> "MetricTable":
        """The table of metrics logged as ``<prefix><row>_<column>``."""
        columns = tuple(dict.fromkeys(name for row in rows.values() for name in row))
        keys = {(row, name): f"{prefix}{row}_{name}" for row, values in rows.items() for name in values}
        return cls(tuple(rows), columns, keys)


class FigureSaver(Callback):
    """Send the figures of a :class:`~fulgurite.modules.base.Method` to the loggers, and save each as a PNG.

    The files lie in ``figures/`` below the Trainer's ``default_root_dir``.
    """

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._save(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer, pl_module, "test")

    def _save(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(pl_module, Method) or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        figures = pl_module.figures(stage)
        if trainer.is_global_zero:
            for name, figure in figures.items():
                save_figure(figure, Path(trainer.default_root_dir) / "figures" / f"{stage}_{name}.png")
                log_figure(figure, f"{stage}/{name}", trainer)


def save_figure(figure: "Figure", path: Path) -> None:
    """Save a figure as a PNG, atomically."""
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=150)


def log_figure(figure: "Figure", tag: str, trainer: Trainer) -> None:
    """Send a figure to every logger of the Trainer that takes images."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3]
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image(tag, pixels, trainer.global_step, dataformats="HWC")
        elif hasattr(logger, "log_image"):
            logger.log_image(tag, [pixels], step=trainer.global_step)


class PredictionFile(BasePredictionWriter):
    """Write what ``predict_step`` returns, a dict of tensors (B, ...) or one tensor, to one ``predictions.npz``.

    A single tensor becomes the field ``prediction``. Rows are gathered over all ranks and come in the order of the
    field ``index``, which is the sample's place in the data set where ``predict_step`` returns none of its own.

    Args:
        path: the file; None puts it below the Trainer's ``default_root_dir``.

    Raises:
        TypeError: ``predict_step`` returned something else.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        super().__init__(write_interval="epoch")
        self.path = None if path is None else Path(path)

    def write_on_epoch_end(
        self, trainer: Trainer, pl_module: LightningModule, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        own = concatenate_fields(predictions)
        rows = len(next(iter(own.values()), []))
        places = np.array([place for batches in batch_indices or [] for batch in batches or [] for place in batch])
        if "index" not in own and len(places) == rows > 0:
            own["index"] = places
        parts = [own]
        if trainer.world_size > 1:
            parts = [{} for _ in range(trainer.world_size)]
            torch.distributed.all_gather_object(parts, own)
        if not trainer.is_global_zero:
            return
        fields = {name: np.concatenate([part[name] for part in parts if part]) for name in own}
        if "index" in fields:
            _, order = np.unique(fields["index"], return_index=True)
            fields = {name: values[order] for name, values in fields.items()}
        self.path = self.path or Path(trainer.default_root_dir) / "predictions.npz"
        with atomic_path(self.path) as temporary:
            np.savez(temporary, allow_pickle=False, **fields)


def concatenate_fields(outputs: Sequence[Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Batches of named tensors (B, ...) as one array (N, ...) per name; bfloat16 becomes float32."""
    outputs = [{"prediction": output} if isinstance(output, Tensor) else output for output in outputs]
    wrong = next((output for output in outputs if not isinstance(output, dict)), None)
    if wrong is not None or not all(isinstance(value, Tensor) for output in outputs for value in output.values()):
        given = type(wrong).__name__ if wrong is not None else "a dict with other values"
        raise TypeError(
            f"predict_step returned {given}; return a tensor or a dict of tensors (B, ...) to have it written"
        )

    def array(value: Tensor) -> np.ndarray[Any, Any]:
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy(force=True)

    names = outputs[0] if outputs else {}
    return {name: np.concatenate([array(output[name]) for output in outputs]) for name in names}


class PlainProgress(Callback):
    """A log line after an epoch, for output that is not a terminal; of a long run about ``lines`` epochs are shown.

    Args:
        lines: epochs to show, at most.

    Raises:
        ValueError: ``lines`` is not positive.
    """

    def __init__(self, lines: int = 10) -> None:
        if lines < 1:
            raise ValueError(f"lines is {lines}; give at least 1")
        self.lines = lines

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epoch, limit = trainer.current_epoch + 1, trainer.max_epochs or -1
        every = max(1, -(-limit // self.lines))
        if trainer.is_global_zero and (epoch % every == 0 or epoch == limit):
            metrics = {name: value for name, value in trainer.callback_metrics.items() if value.numel() == 1}
            shown = "  ".join(f"{name} {value.item():.4g}" for name, value in sorted(metrics.items()))
            log.info("epoch %d%s  step %d  %s", epoch, f"/{limit}" if limit > 0 else "", trainer.global_step, shown)
