"""The data modules on demand, and the vocabulary of sizes.

A method's data modules live in ``datamodules/<slug>.py``. What the data determine is a property of the data module
under one of the names in ``SIZES``; the command line links it to the model's argument of the same name, so that a size
is never typed twice.
"""

from collections.abc import Mapping
from typing import Any

from fulgurite import import_lazily

CLASSES: Mapping[str, str] = {
    "DigitsHazard": "fulgurite.datamodules.rocp",
    "ImageFolderHazard": "fulgurite.datamodules.rocp",
    "ContinuousControl": "fulgurite.datamodules.pave",
    "OneStepControl": "fulgurite.datamodules.pave",
}

SIZES: Mapping[str, str] = {
    "n_features": "numbers in one input, flattened",
    "n_classes": "labels of a classification target",
    "class_names": "a name for each label, in the order of the label indices",
    "label_groups": "for each label the finer labels that it sums up, where the data have finer ones",
    "in_channels": "channels of an image or a field",
    "n_observations": "numbers that a policy observes",
    "n_actions": "numbers that an action consists of",
}


def __getattr__(name: str) -> Any:
    return import_lazily(__name__, CLASSES, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *CLASSES])
