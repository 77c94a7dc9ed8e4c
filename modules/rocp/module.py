"""The classifier that ROCP calibrates: any black box that gives probabilities will do, this is ours.

Paper: Tao Wang, Edgar Dobriban, "Optimal Decision-Making Based on Prediction Sets", ICML 2026 (arXiv 2602.00989);
code at github.com/TaoWangPenn/Risk-Optimal-Conformal-Prediction.

Deviations: the paper's classifiers are not described; backbone and training are the user's choice here.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics import CatMetric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassCalibrationError,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)

from fulgurite.modules.base import Method, repeated_blocks
from fulgurite.modules.rocp.figures import confusion_figure, reliability_figure
from fulgurite.modules.rocp.networks import load_timm_weights, perceptron, timm_backbone

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Batch = dict[str, Tensor]


class Classifier(Method):
    """A multi-class classifier of images or feature vectors, trained with cross-entropy.

    With ``label_groups`` the network learns finer labels (``fine_label`` in the training batch), and the probability of
    a label is the sum over its group. A batch holds ``image`` (B, ...) and ``label`` (B,).

    Args:
        n_classes: number of labels K.
        n_features: numbers in one input, flattened (for ``backbone="mlp"``).
        in_channels: channels of an image (for a timm backbone).
        class_names: a name for each label, for figures.
        label_groups: for each label the indices of the fine labels that it sums up; None learns the labels themselves.
        backbone: ``"mlp"`` or the name of a timm model.
        hidden: widths of the perceptron's hidden layers; empty means softmax regression.
        dropout: dropout rate, in [0, 1).
        backbone_options: further arguments of the timm model, such as ``{img_size: 64}``.
        weights: pre-trained weights of the timm model: ``"hub"`` (downloads) or a ``.safetensors``/``.pth`` path.
        optimizer: makes the optimiser from the parameters.
        scheduler: makes a scheduler, stepped each epoch, from the optimiser.

    Raises:
        ValueError: an argument is out of range, or the backbone is unknown.
    """

    monitor = "val/accuracy"
    mode = "max"

    def __init__(
        self,
        n_classes: int,
        n_features: int | None = None,
        in_channels: int = 1,
        class_names: Sequence[str] | None = None,
        label_groups: Sequence[Sequence[int]] | None = None,
        backbone: str = "mlp",
        hidden: Sequence[int] = (128,),
        dropout: float = 0.0,
        backbone_options: dict[str, Any] | None = None,
        weights: str | None = None,
        optimizer: OptimizerCallable = torch.optim.Adam,
        scheduler: LRSchedulerCallable | None = None,
    ) -> None:
        super().__init__()
        if n_classes < 2:
            raise ValueError(f"n_classes is {n_classes}; give at least 2")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout is {dropout}; give a rate in [0, 1)")
        if class_names is not None and len(class_names) != n_classes:
            raise ValueError(f"class_names has {len(class_names)} names for {n_classes} classes")
        n_outputs = n_classes
        if label_groups is not None:
            fine_labels = sorted(fine for group in label_groups for fine in group)
            n_outputs = len(fine_labels)
            if len(label_groups) != n_classes or fine_labels != list(range(n_outputs)) or not all(label_groups):
                raise ValueError(
                    f"label_groups is {label_groups}; give {n_classes} groups that hold each fine label from 0 on once"
                )
        self.network: nn.Module
        if backbone == "mlp":
            if n_features is None:
                raise ValueError("backbone 'mlp' needs n_features, the numbers in one input")
            if weights or backbone_options:
                raise ValueError("weights and backbone_options are for a timm backbone; backbone is 'mlp'")
            self.network = perceptron(n_features, hidden, n_outputs, dropout)
        else:
            self.network = timm_backbone(backbone, in_channels, n_outputs, dropout, backbone_options)
        self.class_names = list(class_names) if class_names else [str(label) for label in range(n_classes)]
        self.label_groups = label_groups and [list(group) for group in label_groups]
        self.in_channels = in_channels
        self.weights = weights
        self.optimizer = optimizer
        self.scheduler = scheduler

        metrics = MetricCollection(
            {
                "accuracy": MulticlassAccuracy(n_classes, average="micro"),
                "macro_f1": MulticlassF1Score(n_classes),
                "calibration_error": MulticlassCalibrationError(n_classes, n_bins=15),
            }
        )
        self.val_metrics = metrics.clone(prefix="val/")
        self.test_metrics = metrics.clone(prefix="test/")
        self.test_confusion = MulticlassConfusionMatrix(n_classes)
        self.test_confidence = CatMetric()
        self.test_correct = CatMetric()

    def pieces(self) -> Iterator[nn.Module]:
        yield from repeated_blocks(self.network)
        yield from super().pieces()

    def setup(self, stage: str) -> None:
        """Read the pre-trained weights, unless a checkpoint is about to bring its own."""
        if self.weights and self.trainer.ckpt_path is None:
            load_timm_weights(self.network, self.weights, self.in_channels)

    def forward(self, image: Tensor) -> Tensor:
        """Logits (B, K) of inputs (B, ...)."""
        return self._of_labels(self.network(image))

    def _of_labels(self, outputs: Tensor) -> Tensor:
        """Logits of the labels from the network's outputs: the log of the summed probabilities of each group."""
        if self.label_groups is None:
            return outputs
        fine = outputs.log_softmax(-1)
        return torch.stack([fine[:, group].logsumexp(-1) for group in self.label_groups], dim=-1)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        outputs = self.network(batch["image"])
        loss = cross_entropy(outputs, batch["label" if self.label_groups is None else "fine_label"])
        self.log_epoch("train/loss", loss, len(outputs), prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        logits = self(batch["image"])
        self.val_metrics.update(logits.float().softmax(-1), batch["label"])
        self.log_epoch("val/loss", cross_entropy(logits, batch["label"]), len(logits), prog_bar=True)
        self.log_dict(self.val_metrics)

    def test_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        logits = self(batch["image"])
        probabilities = logits.float().softmax(-1)
        confidence, predicted = probabilities.max(-1)
        self.test_metrics.update(probabilities, batch["label"])
        self.test_confusion.update(predicted, batch["label"])
        self.test_confidence.update(confidence)
        self.test_correct.update(predicted == batch["label"])
        self.log_epoch("test/loss", cross_entropy(logits, batch["label"]), len(logits))
        self.log_dict(self.test_metrics)
        return {"logits": logits}

    def predict_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """Fields of the prediction file: ``probabilities`` (B, K), ``prediction`` (B,), ``index`` and ``label``."""
        probabilities = self(batch["image"]).float().softmax(-1)
        known: Batch = {name: batch[name] for name in ("index", "label") if name in batch}
        return {**known, "probabilities": probabilities, "prediction": probabilities.argmax(-1)}

    def configure_optimizers(self) -> OptimizerLRScheduler:
        return self.single_optimizer(self.parameters(), self.optimizer, self.scheduler)

    def figures(self, stage: str) -> "dict[str, Figure]":
        if stage != "test":
            return {}
        confidence, correct = self.test_confidence.compute(), self.test_correct.compute()
        return {
            "confusion": confusion_figure(self.test_confusion.compute().cpu().numpy(), self.class_names),
            "reliability": reliability_figure(confidence.double().cpu().numpy(), correct.bool().cpu().numpy()),
        }

    def on_test_epoch_start(self) -> None:
        for metric in (self.test_confusion, self.test_confidence, self.test_correct):
            metric.reset()
