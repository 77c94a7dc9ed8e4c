"""Values that the parser accepts and a run would stumble over, refused before anything is built."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from fulgurite.command_line.configs import Layer
from fulgurite.command_line.errors import UsageError, place

INTERVALS: Mapping[str, str] = {  # Lightning divides by these without a look
    "check_val_every_n_epoch": "epochs",
    "val_check_interval": "batches, or a fraction of an epoch",
    "accumulate_grad_batches": "batches",
}
BUILDERS = ("torch.optim.", "lightning.pytorch.cli.")  # packages of optimisers and schedulers


def refuse_intervals(trainer: Mapping[str, Any], layers: Sequence[Layer], argv: Sequence[str]) -> None:
    """Refuse an interval of the Trainer that is not positive.

    Raises:
        UsageError: naming it and where it is set.
    """
    for name, unit in INTERVALS.items():
        value = trainer.get(name)
        if isinstance(value, int | float) and not value > 0:
            where = place(["trainer", name], layers, argv)
            raise UsageError(f"{where}it is {value}; give a positive number of {unit}")


def refuse_null_callables(
    model: Any, arguments: Mapping[str, Any], layers: Sequence[Layer], argv: Sequence[str]
) -> None:
    """Refuse ``null`` for an argument that must be called, such as an optimiser; the parser takes it for absent.

    Raises:
        UsageError: naming the argument and where it is set.
    """
    try:
        hints = get_type_hints(model.__init__)
    except NameError:  # a module of the user's own that imports names for type checkers only
        return
    for name, hint in hints.items():
        if get_origin(hint) is Callable and arguments.get(name, hint) is None:
            raise UsageError(f"{place(['model', name], layers, argv)}{model.__name__} needs a class here, not null")


def refuse_other_optimizers(now: Mapping[str, Any], stored: Mapping[str, Any], checkpoint: Path | None) -> None:
    """Refuse to go on with an optimiser or scheduler other than the one whose state a checkpoint holds.

    Loading that state would put the old options in the place of the new ones without a word.

    Args:
        now: the resolved config.
        stored: the one in the checkpoint.
        checkpoint: its file.

    Raises:
        UsageError: naming the first option that differs.
    """
    here, there = _builders(now), _builders(stored)
    for name in here.keys() & there.keys():
        for key in ("class_path", *sorted(_options(here[name]).keys() & _options(there[name]).keys())):
            one, other = (
                group["class_path"] if key == "class_path" else _options(group)[key]
                for group in (here[name], there[name])
            )
            if one != other:
                shown = f"model.{name}" + ("" if key == "class_path" else f".{key}")
                raise UsageError(
                    f"{shown} is {one} here, {other} in {checkpoint}, whose state of the {name} would undo it\n"
                    f"leave it out to go on as before, or begin a run of its own without --ckpt_path"
                )


def _builders(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The optimisers and schedulers among a model's arguments."""
    arguments = (config.get("model") or {}).get("init_args") or {}
    return {
        name: value
        for name, value in arguments.items()
        if isinstance(value, Mapping) and str(value.get("class_path", "")).startswith(BUILDERS)
    }


def _options(group: Mapping[str, Any]) -> Mapping[str, Any]:
    return group.get("init_args") or {}
