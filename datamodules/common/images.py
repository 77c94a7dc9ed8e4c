"""Images in one folder per class: finding, reading and disturbing them."""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

SUFFIXES = (".png", ".jpg", ".jpeg")
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "I;16B", "I;16L", "I;16N")
UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError)
MAXIMUM_ROTATION = 5.0  # degrees, either way
MAXIMUM_SHIFT = 0.05  # of the image's side, either way and along both axes


def images_of_class(folder: Path) -> list[Path]:
    """The images of a class folder by name: those in its ``images/``, or those directly in it.

    Other files and other folders, such as ``masks/``, are no images of the class.

    Raises:
        ValueError: there are none, or there are some in both places.
    """
    inner = folder / "images"
    direct, inside = _images_in(folder), _images_in(inner) if inner.is_dir() else []
    if not direct and not inside:
        raise ValueError(
            f"class folder {folder} holds no image; put {', '.join(SUFFIXES)} files into it or into its images/, "
            "remove it, or name the other folders in `classes`"
        )
    if direct and inside:
        raise ValueError(
            f"class folder {folder} holds {len(direct)} images itself and {len(inside)} in images/; keep one of the two"
        )
    return direct or inside


def _images_in(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and not path.name.startswith(".")
    )


def read_image(path: Path, mode: Literal["L", "RGB"]) -> Image.Image:
    """Decode an image file as 8-bit grey (``"L"``) or ``"RGB"``.

    Of 16-bit grey the full scale 0..65535 becomes 0..255; what is transparent becomes black.

    Raises:
        ValueError: the file is missing, damaged or no image, or its pixel format has no defined range of values.
    """
    try:
        with Image.open(path) as image:
            image.load()
    except UNREADABLE as error:
        raise ValueError(
            f"{path}: this image cannot be read ({error}); replace or remove it, or give skip_unreadable: true"
        ) from error
    if image.mode not in MODES:
        raise ValueError(
            f"{path}: the pixel format is {image.mode!r}; convert the image to 8-bit grey (L) or RGB (also read are "
            f"{', '.join(MODES)}), or give skip_unreadable: true"
        )
    if image.mode.startswith("I;16"):
        # Pillow's own conversion cuts off at 255.
        return Image.fromarray(np.rint(np.asarray(image) / 257).astype(np.uint8)).convert(mode)
    if image.has_transparency_data:
        black = Image.new("RGBA", image.size, "black")
        return Image.alpha_composite(black, image.convert("RGBA")).convert(mode)
    return image.convert(mode)


def is_readable(path: Path) -> bool:
    """Whether :func:`read_image` can decode the file."""
    try:
        read_image(path, "L")
    except ValueError:
        return False
    return True


def disturb(image: Image.Image, generator: np.random.Generator) -> Image.Image:
    """Mirror an image left to right with probability 1/2, turn it by at most 5 degrees and shift it by at most 5 %.

    What moves in from outside is black.
    """
    if generator.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    angle = generator.uniform(-MAXIMUM_ROTATION, MAXIMUM_ROTATION)
    across, down = generator.uniform(-MAXIMUM_SHIFT, MAXIMUM_SHIFT, size=2) * image.size
    return image.rotate(angle, Image.Resampling.BILINEAR, translate=(across, down))


class ImageFiles(Dataset[dict[str, Tensor]]):
    """Image files with labels, read when they are asked for.

    A sample holds ``image`` (C, S, S), float32 and normalised; ``label``; ``index``. With ``augment_seed`` the set is
    indexed by (epoch, position), and (seed, epoch, index) decide how an image is disturbed, whichever process reads it.
    An index of the other kind is a TypeError.

    Args:
        files: the image files, N of them.
        labels: (N,) label of each file.
        indices: (N,) what identifies each file in the whole data.
        image_size: side S of the square that each image is resized to, whatever its shape, in pixels.
        mean: mean of each channel, subtracted from the values in 0..1; one channel is grey, three are RGB.
        std: standard deviation of each channel, by which the difference is divided.
        augment_seed: seed of the disturbances; None leaves the images as they are.
    """

    def __init__(
        self,
        files: Sequence[Path],
        labels: Tensor,
        indices: Tensor,
        image_size: int,
        mean: Sequence[float],
        std: Sequence[float],
        augment_seed: int | None = None,
    ) -> None:
        self.files = list(files)
        self.labels = labels
        self.indices = indices
        self.image_size = image_size
        self.mean = torch.tensor(mean).view(-1, 1, 1)
        self.std = torch.tensor(std).view(-1, 1, 1)
        self.augment_seed = augment_seed

    @property
    def needs_epoch(self) -> bool:
        """Whether a sample depends on the epoch; see :class:`fulgurite.datamodules.base.EpochSampler`."""
        return self.augment_seed is not None

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, key: int | tuple[int, int]) -> dict[str, Tensor]:
        if self.needs_epoch != isinstance(key, tuple):
            wanted = "(epoch, position), as EpochSampler does," if self.needs_epoch else "a position"
            raise TypeError(f"index is {key!r}; give {wanted} to images with augment_seed {self.augment_seed}")
        epoch, position = key if isinstance(key, tuple) else (0, key)
        image = read_image(self.files[position], "L" if len(self.mean) == 1 else "RGB")
        image = image.resize((self.image_size, self.image_size), Image.Resampling.BILINEAR)
        if self.augment_seed is not None:
            image = disturb(image, np.random.default_rng((self.augment_seed, epoch, int(self.indices[position]))))
        pixels = torch.from_numpy(np.array(image)).view(self.image_size, self.image_size, -1).permute(2, 0, 1)
        return {
            "image": ((pixels / 255 - self.mean) / self.std).contiguous(),
            "label": self.labels[position],
            "index": self.indices[position],
        }
