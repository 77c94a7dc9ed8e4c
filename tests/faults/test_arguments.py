"""Every number that a public class takes, out of its range: refused at construction by the argument's name."""

import inspect
import types
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from PIL import Image

from fulgurite import callbacks, datamodules, modules
from fulgurite.command_line.configs import shipped_configs
from fulgurite.datamodules import SIZES
from fulgurite.modules.rocp.functional_scores import raps_scores, socop_scores

NAN, INFINITY = float("nan"), float("inf")
REFUSED = (ValueError, TypeError, MisconfigurationException)
GIVEN: dict[str, dict[str, Any]] = {  # arguments beyond those of the smoke config that a construction needs
    "ImageFolderHazard": {"root": "images"},
    "ConformalDecision": {"loss": [[0.0, 1.0], [1.0, 0.0]]},
    "ConformalCalibration": {"loss_matrix": [[0.0, 1.0], [1.0, 0.0]]},
    "RunCheckpoint": {"dirpath": "checkpoints", "name": "last"},
}
ACCEPTED = {
    # -1, 0 or something huge means something
    "Classifier.in_channels": "of a timm backbone; the perceptron does not look at it",
    "ConformalDecision.penalty": "of RAPS and SOCOP, which refuse it; ROCP does not look at it",
    "ConformalDecision.free_rank": "likewise",
    "ConformalDecision.seed": "numbers a generator of torch, which takes any",
    "ConformalCalibration.seed": "likewise",
    "Arm.alpha": "checked by the callback that it is given to",
    "Arm.penalty": "likewise",
    "Arm.free_rank": "likewise",
}
NEGATIVE = {"SAC.target_entropy": "an entropy of a density may be negative"}


def smoke_arguments() -> dict[str, dict[str, Any]]:
    """Class name -> the arguments that the smoke configs give, with the sizes of their data."""
    found: dict[str, dict[str, Any]] = {}
    for slug in modules.METHODS:
        tree = yaml.safe_load(shipped_configs()[f"{slug}/smoke"].read_text())
        data, model = (tree[section]["class_path"].rpartition(".")[2] for section in ("data", "model"))
        found[data] = tree["data"].get("init_args", {})
        plain = {k: v for k, v in tree["model"].get("init_args", {}).items() if not isinstance(v, dict)}
        made = getattr(datamodules, data)(**found[data])
        sizes = {name: getattr(made, name) for name in SIZES if hasattr(made, name)}
        for name in modules.METHODS[slug].classes:  # the other classes of the method work on the same data
            takes = inspect.signature(getattr(modules, name)).parameters
            found[name] = {size: value for size, value in sizes.items() if size in takes}
        found[model] |= plain
    return found


def numbers_of(cls: type) -> dict[str, type]:
    """Argument -> int or float, of those whose type has one of them."""
    hints = typing.get_type_hints(cls.__init__)
    found = {}
    for name in inspect.signature(cls).parameters:
        hint = hints.get(name)
        kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        found[name] = float if float in kinds else int if int in kinds else None
    return {name: kind for name, kind in found.items() if kind is not None}


PUBLIC = [(table.__name__, name) for table in (modules, datamodules, callbacks) for name in table.CLASSES]


@pytest.mark.parametrize(("package", "name"), PUBLIC, ids=[name for _, name in PUBLIC])
def test_a_number_out_of_range_is_refused_at_construction_by_its_name(workspace, package, name):
    for folder in ("images/a", "images/b"):
        Path(folder).mkdir(parents=True)
        for number in range(12):
            Image.new("L", (8, 8), number).save(f"{folder}/{number}.png")
    cls = getattr(__import__(package, fromlist=[name]), name)
    given = smoke_arguments().get(name, {}) | GIVEN.get(name, {})
    cls(**given)

    for argument, kind in numbers_of(cls).items():
        if f"{name}.{argument}" in ACCEPTED:
            continue
        refused = (NAN, -1.0) if kind is float else (-1,)
        if f"{name}.{argument}" in NEGATIVE:
            refused = refused[:-1]
        for value in refused:
            said = refusal(cls, {**given, argument: value})
            assert said is not None, f"{name} took {argument} = {value}"
            assert argument in said or str(value) in said
        for value in (0.0, 1e30, INFINITY) if kind is float else (0,):
            said = refusal(cls, {**given, argument: value})  # in range or out of it, but nothing else
            assert said is None or argument in said or str(value) in said


def refusal(cls: type, arguments: dict[str, Any]) -> str | None:
    """Why a construction was refused; None where it was not."""
    try:
        cls(**arguments)
    except REFUSED as error:
        return str(error)
    return None


def test_what_is_accepted_out_of_range_still_exists():
    names = {f"{name}.{argument}" for package, name in PUBLIC for argument in
             inspect.signature(getattr(__import__(package, fromlist=[name]), name)).parameters}  # fmt: skip
    assert names >= ACCEPTED.keys()


@pytest.mark.parametrize("penalty", [NAN, -1.0, INFINITY])
@pytest.mark.parametrize("scores", [raps_scores, socop_scores])
def test_a_penalty_that_is_no_number_is_refused_by_the_score(penalty, scores):
    with pytest.raises(ValueError, match="penalty"):
        scores(torch.full((5, 2), 0.5), penalty)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--data.seed -1", "command line, data.seed: seed is -1; give 0 or more"),
        ("--trainer.callbacks+=PlainProgress --trainer.callbacks.lines 0", "lines is 0; give at least 1"),
        ("--data.n_train 1000000000", "which leaves nothing to validate on"),
    ],
)
def test_a_number_out_of_range_on_the_command_line_leaves_no_run(fulgurite_cli, assert_short_error, words, message):
    assert_short_error(fulgurite_cli("fit", "--config", "rocp/smoke", *words.split()), message)
    assert not list(Path("runs").rglob("*"))
