"""Where runs lie: ``runs/<slug>/<name>/<time>-<seed>/``, and a ``latest`` link per experiment."""

import fcntl
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fulgurite import modules
from fulgurite.command_line.configs import Layer
from fulgurite.command_line.errors import UsageError
from fulgurite.storage import exists

CHECKPOINT_FOLDER = "checkpoints"
NEWEST = "last.ckpt"
CONFIG_FILE = "config.yaml"
RESULTS_FILE = "results.json"
CONFIG_KEYS = ("seed_everything", "checkpoint_every", "trainer", "model", "data")


@dataclass(frozen=True)
class Experiment:
    """All runs of one method under one name.

    Args:
        root: folder of all runs.
        slug: the method, or the class name of a foreign model.
        name: stem of the first config.
    """

    root: Path
    slug: str
    name: str

    @classmethod
    def of(cls, layers: Sequence[Layer], model: str | None, root: str | None) -> "Experiment":
        """The experiment of a command line.

        Args:
            layers: its config files.
            model: the class path of ``--model``.
            root: the value of ``--trainer.default_root_dir``.
        """
        for layer in reversed(layers):
            group: Any = layer.tree.get("model")
            if model is None and isinstance(group, dict):
                model = group.get("class_path")
            trainer: Any = layer.tree.get("trainer")
            if root is None and isinstance(trainer, dict):
                root = trainer.get("default_root_dir")
        return cls(Path(root or "runs").expanduser(), slug_of(model), _name_of(layers))

    @property
    def folder(self) -> Path:
        return self.root / self.slug / self.name

    def latest_checkpoint(self, which: str) -> Path:
        """``best`` or ``last`` of the latest run.

        Raises:
            UsageError: there is no run, or it has no such checkpoint.
        """
        latest = self.folder / "latest"
        refuse_copied_link(latest)
        if not exists(latest):
            raise UsageError(
                f"--ckpt_path {which}: no run in {self.folder}\n"
                f"fit first, or name the config it was fitted with (a run is found by its model and first --config)"
            )
        run = self.folder / latest.readlink()
        path = run / CHECKPOINT_FOLDER / f"{which}.ckpt"
        if not path.exists():
            there = sorted(file.stem for file in path.parent.glob("*.ckpt"))
            has = f"it has {', '.join(there)}" if there else "it wrote none before it ended"
            raise UsageError(f"--ckpt_path {which}: the latest run {run} has no such checkpoint; {has}")
        return path


def new_run(parent: Path, seed: int | None, create: bool) -> Path:
    """A new run's folder, named by the time and the seed.

    Args:
        parent: folder that it lies in.
        seed: the run's seed; None where the random state was left as it was.
        create: make the folder (rank 0 alone does).

    Raises:
        UsageError: the folder cannot be made.
    """
    refuse_copied_link(parent / "latest")
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{'unseeded' if seed is None else seed}"
    run = parent / stem
    number = 1
    while create and not make_folder(run):  # another run began in this second
        number += 1
        run = parent / f"{stem}-{number}"
    return run


def make_folder(run: Path) -> bool:
    """Make a run's folder; False where it exists already.

    Raises:
        UsageError: it cannot be made.
    """
    try:
        run.parent.mkdir(parents=True, exist_ok=True)
        run.mkdir()
    except FileExistsError:
        if run.is_dir():
            return False
        raise _cannot_be_made(run, "a file is in its way") from None
    except OSError as error:
        raise _cannot_be_made(run, error.strerror) from error
    return True


def _cannot_be_made(run: Path, why: str | None) -> UsageError:
    below_a_run = run_of_checkpoint(run.parents[1] / CHECKPOINT_FOLDER / NEWEST) is not None
    remedy = "copy the checkpoint to a folder" if below_a_run else "choose one with --trainer.default_root_dir"
    return UsageError(f"the run's folder {run} cannot be made: {why}\n{remedy} that can be written to")


@contextmanager
def lock_run(run: Path) -> Iterator[None]:
    """Hold a run's folder while a fit goes on in it; the lock ends with the process, however that ends.

    Raises:
        UsageError: another process holds it, or it cannot be written to.
    """
    refuse_copied_link(run.parent / "latest")
    with ExitStack() as stack:
        try:
            file = stack.enter_context((run / ".lock").open("w"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"{run} is in use: another fit goes on in it") from error
        except OSError as error:
            raise UsageError(
                f"{run} cannot be gone on with: {error.strerror}\ncopy the checkpoint elsewhere and go on from there"
            ) from error
        yield


def refuse_copied_link(latest: Path) -> None:
    """Refuse a file or folder in the place of the link to the newest run, such as a copy of the runs makes of it.

    Raises:
        UsageError: naming it.
    """
    if exists(latest) and not latest.is_symlink():
        raise UsageError(
            f"{latest} is no link to the newest run: was it copied?\nrename it, and give the path of its checkpoint"
        )


def discard_if_empty(run: Path) -> None:
    """Remove the folder of a run that could not start, if nothing is in it, and those above that were made for it."""
    with suppress(OSError):
        if run.exists():
            run.rmdir()
        for folder in run.parents[:2]:
            folder.rmdir()


def discard_unstarted(run: Path, command: str) -> None:
    """Remove what a command left in its own new folder before it failed to start."""
    if not (run / (CONFIG_FILE if command == "fit" else RESULTS_FILE)).exists():
        shutil.rmtree(run, ignore_errors=True)
        discard_if_empty(run)


def run_of_checkpoint(checkpoint: Path) -> Path | None:
    """The run that a checkpoint belongs to, if it lies in one."""
    run = checkpoint.parent.parent
    return run if checkpoint.parent.name == CHECKPOINT_FOLDER and exists(run / CONFIG_FILE) else None


def slug_of(class_path: str | None) -> str:
    """The slug of a class, or a foreign class's own name in lower case."""
    if class_path is None:
        return "unnamed"
    name = class_path.rpartition(".")[2]
    for record in modules.METHODS.values():
        if name in record.classes and class_path.startswith("fulgurite."):
            return record.slug
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def portable_config(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A config less what belongs to one machine: paths in the working folder or at home become relative ones."""

    def portable(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: portable(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [portable(inner) for inner in value]
        if isinstance(value, str) and Path(value).is_absolute():
            for base, replacement in ((Path.cwd(), "."), (home, "~")):
                if Path(value).is_relative_to(base):
                    return str(Path(replacement) / Path(value).relative_to(base))
        return value

    kept = {key: value for key, value in tree.items() if key in CONFIG_KEYS}
    try:
        home = Path.home()
    except RuntimeError:  # a user without an entry in the system's list, as in some containers
        home = Path.cwd()
    result: dict[str, Any] = portable(kept)
    result.get("trainer", {}).pop("default_root_dir", None)
    return result


def _name_of(layers: Sequence[Layer]) -> str:
    if not layers or layers[0].path is None:
        return "run"
    path = layers[0].path
    if path.name == CONFIG_FILE and (path.parent / CHECKPOINT_FOLDER).is_dir():
        return path.resolve().parent.parent.name  # the saved config of a run: the same experiment
    return path.stem
