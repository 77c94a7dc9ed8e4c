"""Data for decisions under hazard: what is the condition, and what should be done about it?"""

import logging
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fulgurite.datamodules.base import DataModule, Split
from fulgurite.datamodules.common.images import SUFFIXES, ImageFiles, images_of_class, is_readable
from fulgurite.datamodules.common.tensors import TensorFields

PIXEL_MAXIMUM = 16.0  # scikit-learn's digits count the ink of 4x4 blocks: 0..16
RADIOGRAPHY_FOLDER = "COVID-19_Radiography_Dataset"  # the top folder of the published archive
RADIOGRAPHY_SOURCE = "tawsifurrahman/covid19-radiography-database"  # on Kaggle
IMAGENET_MEAN = (0.485, 0.456, 0.406)  # of RGB in 0..1, with which timm's weights were trained
IMAGENET_STD = (0.229, 0.224, 0.225)

log = logging.getLogger(__name__)


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


class ImageFolderHazard(DataModule):
    """Images in one folder per class, such as the COVID-19 Radiography database: which condition does an image show?

    Read are ``root/<class>/images/*`` or ``root/<class>/*`` with the endings .png, .jpg and .jpeg; ``masks/`` and all
    other files are left alone. ``root`` may also be the folder that holds ``COVID-19_Radiography_Dataset``. The four
    splits are disjoint and drawn at random, hence exchangeable over images; folders do not name patients, so that two
    images of one patient may lie in different splits. A batch holds ``image`` (B, C, S, S), normalised; ``label`` (B,);
    ``index`` (B,), the image's place in ``files``.

    Args:
        root: the folder of the class folders.
        batch_size: samples per batch on each rank.
        num_workers: loader processes.
        seed: seed of splits, order and augmentation; None means the run's ``seed_everything``.
        image_size: side S of the square that each image is resized to, whatever its shape, in pixels.
        in_channels: 1 reads the images as grey, 3 as RGB.
        val_fraction: share of the images to validate on, in (0, 1).
        calibration_fraction: share of the images to calibrate on, in (0, 1).
        test_fraction: share of the images to test on, in (0, 1); what remains is the training split.
        classes: the class folders in the order of the labels, others being left out; None takes all, by name.
        augment: mirror, turn (5 degrees) and shift (5 %) the training images anew in each epoch.
        mean: mean of each channel in 0..1; None means ImageNet's, averaged over the colours for one channel.
        std: standard deviation of each channel; None as for ``mean``.
        skip_unreadable: read all images once before the start, and leave out (with a warning that counts and names
            them) those that cannot be read; otherwise such an image is an error when its turn comes.

    Raises:
        FileNotFoundError: ``root`` or a class folder does not exist.
        ValueError: an argument is out of range, a class folder has no images, or an image cannot be read.
    """

    def __init__(
        self,
        root: str | Path = "data",
        batch_size: int = 64,
        num_workers: int = 0,
        seed: int | None = None,
        image_size: int = 224,
        in_channels: Literal[1, 3] = 3,
        val_fraction: float = 0.1,
        calibration_fraction: float = 0.2,
        test_fraction: float = 0.2,
        classes: Sequence[str] | None = None,
        augment: bool = False,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        skip_unreadable: bool = False,
    ) -> None:
        super().__init__(root=root, batch_size=batch_size, num_workers=num_workers, seed=seed)
        if image_size < 1:
            raise ValueError(f"image_size is {image_size}; give at least 1 pixel")
        if in_channels not in (1, 3):
            raise ValueError(f"in_channels is {in_channels}; give 1 (grey) or 3 (RGB)")
        fractions = {"val": val_fraction, "calibration": calibration_fraction, "test": test_fraction}
        for name, fraction in fractions.items():
            if not 0 < fraction < 1:
                raise ValueError(f"{name}_fraction is {fraction}; give a share in (0, 1)")
        if sum(fractions.values()) >= 1:
            raise ValueError(
                f"val_fraction, calibration_fraction, test_fraction are {', '.join(map(str, fractions.values()))}; "
                "give less than 1 in sum, the rest is for training"
            )
        self.image_size = image_size
        self.fractions = fractions
        self.augment = augment
        self.mean = _per_channel("mean", mean, IMAGENET_MEAN, in_channels)
        self.std = _per_channel("std", std, IMAGENET_STD, in_channels)
        if min(self.std) <= 0:
            raise ValueError(f"std is {self.std}; give standard deviations above 0")
        self.skip_unreadable = skip_unreadable

        self.folder = _existing_folder(self.root)
        self._class_names = _class_folders(self.folder, classes)
        images = [images_of_class(self.folder / name) for name in self._class_names]
        self.files = [path for group in images for path in group]
        self.labels = torch.arange(len(images)).repeat_interleave(torch.tensor([len(group) for group in images]))

    @property
    def n_features(self) -> int:
        return self.in_channels * self.image_size**2

    @property
    def in_channels(self) -> int:
        return len(self.mean)

    @property
    def n_classes(self) -> int:
        return len(self._class_names)

    @property
    def class_names(self) -> list[str]:
        return self._class_names

    def setup(self, stage: str) -> None:
        _ = self._parts  # too few images fail here, before the first batch

    def split(self, name: Split) -> Dataset[Any]:
        part = self._parts["test" if name == "predict" else name]
        return ImageFiles(
            [self.files[index] for index in part.tolist()],
            labels=self.labels[part],
            indices=part,
            image_size=self.image_size,
            mean=self.mean,
            std=self.std,
            augment_seed=self.seed if self.augment and name == "train" else None,
        )

    @cached_property
    def _parts(self) -> dict[str, Tensor]:
        """Indices of the files of each split."""
        usable = self._readable() if self.skip_unreadable else torch.arange(len(self.files))
        order = usable[torch.randperm(len(usable), generator=torch.Generator().manual_seed(self.seed))]
        sizes = {name: round(fraction * len(order)) for name, fraction in self.fractions.items()}
        sizes["train"] = len(order) - sum(sizes.values())
        if min(sizes.values()) < 1:
            raise ValueError(
                f"{len(order)} images in {self.folder} make splits of {sizes}; each needs at least one image: "
                "add images or change the fractions"
            )
        return dict(zip(sizes, order.split([*sizes.values()]), strict=True))

    def _readable(self) -> Tensor:
        """Indices of the files that can be read.

        Raises:
            ValueError: a class has none.
        """
        with ThreadPoolExecutor() as pool:
            readable = torch.tensor([*pool.map(is_readable, self.files)])
        bad = [str(self.files[index]) for index in (~readable).nonzero().flatten().tolist()]
        if bad:
            more = f" and {len(bad) - 10} more" if len(bad) > 10 else ""
            log.warning(
                "left out %d of %d images that cannot be read: %s%s", len(bad), len(readable), ", ".join(bad[:10]), more
            )
        for label, name in enumerate(self._class_names):
            if not readable[self.labels == label].any():
                raise ValueError(
                    f"class folder {self.folder / name} holds no image that can be read; replace its files"
                )
        return readable.nonzero().flatten()


def _per_channel(name: str, given: Sequence[float] | None, imagenet: Sequence[float], in_channels: int) -> list[float]:
    """One finite number for each channel; ImageNet's where none are given."""
    if given is None:
        return list(imagenet) if in_channels == 3 else [sum(imagenet) / 3]
    if len(given) != in_channels or not all(map(math.isfinite, given)):
        raise ValueError(f"{name} is {list(given)}; give {in_channels} finite numbers, one for each channel")
    return list(given)


def _existing_folder(root: Path) -> Path:
    """The folder of the class folders: ``root``, or the database's own folder in it."""
    folder = root / RADIOGRAPHY_FOLDER if (root / RADIOGRAPHY_FOLDER).is_dir() else root
    if not folder.is_dir():
        parent = root.parent if root.name == RADIOGRAPHY_FOLDER else root
        raise FileNotFoundError(
            f"root is {root}; looked in {folder.absolute()}: {'a file' if folder.exists() else 'no such folder'}\n"
            f"expected one folder per class with {', '.join(SUFFIXES)} files in it or in its images/ folder,\n"
            "such as COVID/images/COVID-1.png of the COVID-19 Radiography database; to get it (an account is needed):\n"
            f"kaggle datasets download {RADIOGRAPHY_SOURCE} --unzip -p {parent}"
        )
    return folder


def _class_folders(folder: Path, classes: Sequence[str] | None) -> list[str]:
    """Names of the class folders in the order of their labels."""
    found = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if classes is None:
        if len(found) < 2:
            raise ValueError(
                f"root is {folder}, which holds {len(found)} folders ({', '.join(found) or 'none'}); "
                f"expected one for each of at least two classes, with {', '.join(SUFFIXES)} files"
            )
        return found
    if len(classes) < 2 or len(set(classes)) != len(classes):
        raise ValueError(f"classes is {list(classes)}; give at least two different folders of {folder}")
    if missing := [name for name in classes if name not in found]:
        raise FileNotFoundError(
            f"classes is {list(classes)}, but {folder} has no folder {', '.join(map(repr, missing))}; "
            f"it has {', '.join(found) or 'none'}"
        )
    if left_out := [name for name in found if name not in classes]:
        log.info("left out the folders %s of %s", ", ".join(left_out), folder)
    return list(classes)
