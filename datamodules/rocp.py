"""Data for decisions under hazard: what is the condition, and what should be done about it?"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fulgurite.datamodules.base import DataModule, Split
from fulgurite.datamodules.common.tensors import TensorFields

PIXEL_MAXIMUM = 16.0  # scikit-learn's digits count the ink of 4x4 blocks: 0..16


class DigitsHazard(DataModule):
    """Scikit-learn's 1797 handwritten digits, disturbed by noise and grouped into hazard conditions.

    The ten digits become a few conditions of unequal frequency, one of them benign; the classifier is trained on few
    images, so that its probabilities are over-confident. The four splits are disjoint and drawn at random, hence
    exchangeable. A batch holds ``image`` (B, 1, 8, 8), ink in units of the full scale before the noise; ``label`` (B,),
    the condition; ``fine_label`` (B,), the digit, counted through the conditions; ``index`` (B,), the image's place in
    scikit-learn's set.

    Args:
        root: unused; the data ship with scikit-learn.
        batch_size: samples per batch on each rank.
        num_workers: loader processes.
        seed: seed of splits, noise and order; None means the run's ``seed_everything``.
        noise: standard deviation of the Gaussian noise, in pixel units of 0..16.
        n_train: training images.
        n_calibration: calibration images.
        n_test: test images; what remains is the validation split.
        conditions: the digits of each condition; digits that are not named are left out.
        condition_names: a name for each condition.

    Raises:
        ValueError: a size, the noise or the grouping is out of range.
    """

    def __init__(
        self,
        root: str | Path = "data",
        batch_size: int = 64,
        num_workers: int = 0,
        seed: int | None = None,
        noise: float = 3.0,
        n_train: int = 250,
        n_calibration: int = 500,
        n_test: int = 600,
        conditions: Sequence[Sequence[int]] = ((0, 1, 2, 3, 4), (5, 6), (7,), (8, 9)),
        condition_names: Sequence[str] = ("benign", "condition A", "condition B", "condition C"),
    ) -> None:
        super().__init__(root=root, batch_size=batch_size, num_workers=num_workers, seed=seed)
        digits = [digit for group in conditions for digit in group]
        if (
            len(conditions) < 2
            or not all(conditions)
            or len(set(digits)) != len(digits)
            or not set(digits) <= {*range(10)}
        ):
            raise ValueError(f"conditions is {conditions}; give at least two non-empty groups of different digits 0..9")
        if len(condition_names) != len(conditions):
            raise ValueError(f"condition_names has {len(condition_names)} names for {len(conditions)} conditions")
        if not 0 <= noise < float("inf"):
            raise ValueError(f"noise is {noise}; give a standard deviation of at least 0 in pixel units of 0..16")
        if min(n_train, n_calibration, n_test) < 1:
            raise ValueError(
                f"n_train, n_calibration, n_test are {n_train}, {n_calibration}, {n_test}; give at least 1 each"
            )
        self.noise = noise
        self.sizes = {"train": n_train, "calibration": n_calibration, "test": n_test}
        self.conditions = [list(group) for group in conditions]
        self.condition_names = list(condition_names)

    @property
    def n_features(self) -> int:
        return 64

    @property
    def in_channels(self) -> int:
        return 1

    @property
    def n_classes(self) -> int:
        return len(self.conditions)

    @property
    def class_names(self) -> list[str]:
        return self.condition_names

    @property
    def label_groups(self) -> list[list[int]]:
        ends = np.cumsum([len(group) for group in self.conditions])
        return [list(range(end - len(group), end)) for group, end in zip(self.conditions, ends.tolist(), strict=True)]

    def setup(self, stage: str) -> None:
        _ = self._splits  # a size that does not fit fails here, before the first batch

    def split(self, name: Split) -> Dataset[Any]:
        return self._splits["test" if name == "predict" else name]

    @cached_property
    def _splits(self) -> dict[str, TensorFields]:
        fields = self._load()
        n_images = len(fields["label"])
        n_held = sum(self.sizes.values())
        if n_held >= n_images:
            raise ValueError(
                f"n_train + n_calibration + n_test is {n_held}, which leaves nothing to validate on: these conditions "
                f"have {n_images} images"
            )
        order = torch.randperm(n_images, generator=torch.Generator().manual_seed(self.seed))
        parts = order.split([*self.sizes.values(), n_images - n_held])
        return {
            name: TensorFields({key: tensor[part] for key, tensor in fields.items()})
            for name, part in zip([*self.sizes, "val"], parts, strict=True)
        }

    def _load(self) -> dict[str, Tensor]:
        from sklearn.datasets import load_digits

        digits = load_digits()
        # The noise is drawn for all images before any is left out: it belongs to the image, not to the grouping.
        noise = np.random.default_rng(self.seed).normal(scale=self.noise, size=digits.images.shape)
        condition_of, fine_of = np.full(10, -1), np.full(10, -1)
        for condition, (group, fine) in enumerate(zip(self.conditions, self.label_groups, strict=True)):
            condition_of[group], fine_of[group] = condition, fine
        kept = np.flatnonzero(condition_of[digits.target] >= 0)
        images = (digits.images[kept] + noise[kept]) / PIXEL_MAXIMUM
        return {
            "image": torch.from_numpy(images).float().unsqueeze(1),
            "label": torch.from_numpy(condition_of[digits.target[kept]]),
            "fine_label": torch.from_numpy(fine_of[digits.target[kept]]),
            "index": torch.from_numpy(kept),
        }
