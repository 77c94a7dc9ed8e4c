import csv

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from fulgurite.callbacks import FigureSaver, PredictionFile
from fulgurite.callbacks.reporting import MetricsFile, concatenate_fields
from fulgurite.modules.base import Method


def rows(folder):
    return list(csv.DictReader((folder / "metrics.csv").open()))


def test_metrics_of_one_step_share_a_row_and_new_columns_may_come_later(tmp_path):
    logger = MetricsFile(tmp_path)
    logger.log_metrics({"train/loss": 2.0, "epoch": 0}, step=3)
    logger.log_metrics({"val/loss": 3.0}, step=3)
    logger.log_metrics({"train/loss": 1.0, "epoch": 1}, step=7)
    logger.log_metrics({"val/accuracy": 0.5}, step=7)
    logger.finalize("success")
    assert rows(tmp_path) == [
        {"epoch": "0", "step": "3", "train/loss": "2.0", "val/accuracy": "", "val/loss": "3.0"},
        {"epoch": "1", "step": "7", "train/loss": "1.0", "val/accuracy": "0.5", "val/loss": ""},
    ]


def test_a_resumed_run_goes_on_in_the_same_table_and_replaces_what_it_does_again(tmp_path):
    first = MetricsFile(tmp_path)
    for step in (1, 2, 3, 4):
        first.log_metrics({"loss": step}, step=step)
    first.finalize("failed")
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("5")  # what a killed process leaves of a row
    second = MetricsFile(tmp_path)
    for step in (3, 4, 5):
        second.log_metrics({"loss": 10 * step}, step=step)
    second.finalize("success")
    assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == [
        ("1", "1"), ("2", "2"), ("3", "30"), ("4", "40"), ("5", "50"),
    ]  # fmt: skip


class Drawn(Method):
    def test_step(self, batch, batch_idx):
        return None

    def figures(self, stage):
        figure = Figure()
        figure.subplots().plot([0, 1], [1, 0])
        return {"line": figure} if stage == "test" else {}


def trainer(tmp_path, callbacks, logger=False):
    return Trainer(
        accelerator="cpu", logger=logger, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, callbacks=callbacks,
    )  # fmt: skip


def test_figures_become_png_files_and_tensorboard_images(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="", version="events")
    trainer(tmp_path, [FigureSaver()], logger).test(Drawn(), DataLoader(torch.zeros(2, 1)), verbose=False)
    png = (tmp_path / "figures" / "test_line.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert events.Tags()["images"] == ["test/line"]


class Predicts(LightningModule):
    def __init__(self, output):
        super().__init__()
        self.output = output

    def predict_step(self, batch, batch_idx):
        return self.output(batch)


def test_predictions_of_a_strangers_module_are_one_file_in_the_order_of_the_index(tmp_path):
    order = torch.tensor([4, 1, 0, 3, 2])
    module = Predicts(
        lambda batch: {"index": batch, "double": (2.0 * batch).bfloat16(), "pair": torch.stack([batch, -batch], 1)}
    )
    trainer(tmp_path, [PredictionFile()]).predict(module, DataLoader(order, batch_size=2))
    fields = np.load(tmp_path / "predictions.npz", allow_pickle=False)
    assert fields["index"].tolist() == [0, 1, 2, 3, 4]
    assert fields["double"].tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert fields["double"].dtype == np.float32
    assert fields["pair"].shape == (5, 2)


@pytest.mark.parametrize(
    ("output", "given"), [(lambda batch: [batch], "list"), (lambda batch: {"x": "text"}, "a dict with other values")]
)
def test_predictions_that_are_no_dict_of_tensors_are_refused(tmp_path, output, given):
    with pytest.raises(TypeError, match=f"predict_step returned {given}; return a tensor or a dict of tensors"):
        trainer(tmp_path, [PredictionFile()]).predict(Predicts(output), DataLoader(torch.zeros(2)))


def test_no_batches_give_no_fields():
    assert concatenate_fields([]) == {}
