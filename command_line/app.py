"""``fit``, ``validate``, ``test`` and ``predict``: a LightningCLI with run folders, exact resume and short errors."""

import inspect
import logging
import os
import sys
import time
import traceback
import warnings
from argparse import ArgumentError
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonargparse
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException

from fulgurite.callbacks.reporting import FigureSaver, MetricsFile, PlainProgress, PredictionFile
from fulgurite.callbacks.reproducibility import FiniteGuard, NonFiniteError, Preemption, RandomState, RunCheckpoint
from fulgurite.command_line.arguments import Invocation, prepare
from fulgurite.command_line.checkpoints import CHECKPOINT_KEY, StoredConfig
from fulgurite.command_line.configs import imported_object
from fulgurite.command_line.errors import (
    UsageError,
    explain_construction_error,
    explain_load_error,
    explain_parse_error,
    is_deliberate,
    print_error,
)
from fulgurite.command_line.results import Results, differences
from fulgurite.command_line.runs import (
    CHECKPOINT_FOLDER,
    CONFIG_FILE,
    discard_if_empty,
    new_run,
    portable_config,
    run_of_checkpoint,
)
from fulgurite.datamodules import SIZES
from fulgurite.modules.base import Method
from fulgurite.storage import point_link, write_text

ALLOWED_IMPORTS = ("fulgurite", "lightning", "torch.optim", "torch.nn", "torchmetrics")
TRACEBACK_VARIABLE = "FULGURITE_TRACEBACK"
UNNEEDED_WARNINGS = (
    ".*does not have many workers.*",  # for data in memory, worker processes only cost time
    ".*smaller than the logging interval.*",  # epoch values are logged whatever the interval
    ".*your dataloader is not resumable.*",  # it is: the data module keeps the position
    ".*treespec, LeafSpec.*",  # Lightning's own use of torch, nothing a user can mend
    ".*Checkpoint directory .* exists and is not empty.*",  # a resumed run goes on in its own folder
)
CALLBACK_WARNING = ".*callbacks used to create the checkpoint need to be provided.*"  # to go on, not to test

log = logging.getLogger(__name__)


class RunRecord(Callback):
    """Keep the resolved config in the run's folder and in every checkpoint: a checkpoint alone is enough to test it.

    Args:
        config: the config.
        folder: the run's folder; None where nothing is to be written.

    Attributes:
        trained: whether a training loop began: a finished checkpoint or a limit of 0 leaves nothing to do.
    """

    def __init__(self, config: StoredConfig, folder: Path | None) -> None:
        self.trained = False
        self.config = config
        self._folder = folder

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.trained = True
        if self._folder and trainer.is_global_zero:
            # Not earlier: a fit that cannot start leaves the config of the run that it would have gone on with.
            write_text(self._folder / CONFIG_FILE, self.config.text)
            point_link(self._folder.parent / "latest", self._folder.name)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[CHECKPOINT_KEY] = self.config.as_plain()


class FulguriteCLI(LightningCLI):
    """The LightningCLI of this package; constructing it runs the command.

    Args:
        invocation: the prepared command line.
    """

    def __init__(self, invocation: Invocation) -> None:
        self.invocation = invocation
        self.run_folder: Path | None = None
        self.started = time.monotonic()
        strict: dict[str, Any] = {"exit_on_error": False, "allow_abbrev": False}
        super().__init__(
            save_config_callback=None,
            trainer_defaults={"enable_model_summary": False},
            seed_everything_default=0,
            parser_kwargs={**strict, **{name: dict(strict) for name in self.subcommands()}},
            auto_configure_optimizers=False,
            args=invocation.argv,
        )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        # weights_only is not offered: at its default a checkpoint file never runs code.
        return {name: skipped | {"weights_only"} for name, skipped in LightningCLI.subcommands().items()}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for size in SIZES:
            parser.link_arguments(f"data.{size}", f"model.init_args.{size}", apply_on="instantiate")
        parser.add_argument(
            "--checkpoint_every",
            type=jsonargparse.typing.PositiveInt | None,
            help="Write last.ckpt every so many optimiser steps, in addition to the end of each epoch.",
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        try:
            self.config = parser.parse_args(args)
        except ArgumentError as error:
            options = [*(f"trainer.{name}" for name in inspect.signature(Trainer).parameters)]
            options += ["seed_everything", "model", "data", "config", "ckpt_path", "trust", "print_config", "trainer"]
            message = explain_parse_error(str(error), self.invocation.layers, self.invocation.argv, options)
            raise UsageError(message) from error

    @property
    def options(self) -> Any:
        """The parsed options of the chosen command."""
        return self.config[self.config["subcommand"]]

    def before_instantiate_classes(self) -> None:
        data = self.options.get("data")
        if data is not None and "seed" in data.get("init_args", {}) and data["init_args"]["seed"] is None:
            data["init_args"]["seed"] = self.options["seed_everything"] or 0
        if "verbose" in self.options:
            self.options["verbose"] = False  # one table of metrics is enough, and it is ours
        dumped = yaml.safe_load(self.parser.dump(self.config, skip_unset=False))[self.config["subcommand"]]
        self.resolved = portable_config(dumped)
        self._refuse_typed_sizes()
        if self.invocation.stored:
            for line in differences(self.resolved, self.invocation.stored.tree):
                log.info("%s", line)

    def _refuse_typed_sizes(self) -> None:
        """A size that the data determine would be overridden without a word."""
        typed = {name: layer.name for layer in self.invocation.layers for name in _init_args(layer.tree, "model")}
        for word in self.invocation.argv:
            if word.startswith("--model."):
                typed[word.partition("=")[0].removeprefix("--model.").removeprefix("init_args.")] = "command line"
        data = self._class_of("data")
        for name in SIZES:
            if name in typed and hasattr(data, name):
                raise UsageError(f"{typed[name]}, model.{name}: {data.__name__} determines {name}; leave it out")

    def _class_of(self, section: str) -> Any:
        group = self.options.get(section)
        return None if group is None else imported_object(group["class_path"])

    def instantiate_classes(self) -> None:
        self._check_pairing()
        try:
            super().instantiate_classes()
        except (ValueError, TypeError, OSError, ImportError, MisconfigurationException) as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            text = str(cause) or type(cause).__name__
            raise UsageError(
                explain_construction_error(text, self.resolved, self.invocation.layers, self.invocation.argv)
            ) from error

    def _check_pairing(self) -> None:
        model, data = self._class_of("model"), self._class_of("data")
        needed = [
            name
            for name, parameter in inspect.signature(model).parameters.items()
            if name in SIZES and parameter.default is parameter.empty and not hasattr(data, name)
        ]
        given = _init_args(self.resolved, "model")
        missing = [name for name in needed if given.get(name) is None]
        if missing:
            what = ", ".join(f"{name} ({SIZES[name]})" for name in missing)
            source = f"{data.__name__} does not provide" if data else "no data module provides"
            raise UsageError(
                f"{model.__name__} needs {what}, which {source}\npair it with other data, or give --model.{missing[0]}"
            )

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        settings = self.config_init[self.subcommand]["trainer"]
        given = settings["callbacks"] or []
        callbacks: list[Callback] = list(given) if isinstance(given, list) else [given]
        plain = settings["enable_progress_bar"] is False or not sys.stdout.isatty()
        folder = None if settings["fast_dev_run"] else self._new_folder()
        self.run_folder = folder
        stored = StoredConfig.of(self.resolved, self.invocation.given_layers, self.invocation.stored)
        self.record = RunRecord(stored, folder)
        added: list[Callback] = [self.record, RandomState(), FiniteGuard(), Preemption(), FigureSaver()]
        if plain:
            added.append(PlainProgress())
        arguments: dict[str, Any] = {"enable_progress_bar": not plain}
        if folder:
            arguments["default_root_dir"] = str(folder)
            if self.subcommand == "predict":
                arguments["logger"] = False
                added.append(PredictionFile())
            elif settings["logger"] in (None, True):
                arguments["logger"] = [TensorBoardLogger(folder, name="tensorboard", version=""), MetricsFile(folder)]
            if self.subcommand == "fit" and settings["enable_checkpointing"] is not False:
                added += self._checkpoints(folder / CHECKPOINT_FOLDER)
        kinds = {type(callback) for callback in callbacks}
        callbacks += [callback for callback in added if type(callback) not in kinds]
        try:
            return super().instantiate_trainer(callbacks=callbacks, **arguments, **kwargs)
        except BaseException:
            if folder:
                discard_if_empty(folder)
            raise

    def _checkpoints(self, folder: Path) -> list[Callback]:
        callbacks: list[Callback] = []
        if isinstance(self.model, Method):
            callbacks.append(RunCheckpoint(folder, "best", self.model.monitor, self.model.mode))
        if steps := self.options["checkpoint_every"]:
            callbacks.append(RunCheckpoint(folder, "last", every_n_train_steps=steps))
        return [*callbacks, RunCheckpoint(folder, "last")]

    def _new_folder(self) -> Path:
        """The folder of this run: a resumed fit goes on in its own, other commands write below the run they read."""
        checkpoint = self.invocation.checkpoint
        earlier = run_of_checkpoint(checkpoint) if checkpoint else None
        if earlier and self.subcommand == "fit":
            return earlier
        parent = earlier / str(self.subcommand) if earlier else self.invocation.experiment.folder
        return new_run(parent, self.options["seed_everything"], create=process_rank() == 0)

    def _before(self) -> None:
        """Announce what is about to run, and leave its config in its folder."""
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        data = type(self.datamodule).__name__ if self.datamodule else "its own data"
        seed = self.options["seed_everything"]
        log.info(
            "%s %s (%s parameters) on %s, seed %s",
            self.subcommand,
            type(self.model).__name__,
            f"{parameters:,}",
            data,
            seed,
        )
        if self.run_folder:
            log.info("run folder %s", self.run_folder)
        if self.invocation.checkpoint:
            # Set here, a module can tell in its setup hook that it need not fetch weights to start from.
            self.trainer.ckpt_path = self.invocation.checkpoint
            log.info("from checkpoint %s", self.invocation.checkpoint)
        elif self.subcommand != "fit":
            log.info("no --ckpt_path: these are the weights the model starts with, nothing was trained")
        if self.subcommand != "fit" and self.run_folder and process_rank() == 0:
            write_text(self.run_folder / CONFIG_FILE, self.record.config.text)

    def _after(self) -> None:
        """Write results.json, and show the metrics and where everything lies."""
        if not self.trainer.is_global_zero:
            return
        if self.subcommand == "fit" and not self.record.trained:
            log.info("nothing was trained: the checkpoint or the Trainer's limits leave no step to take")
            return
        results = Results.of(self)
        if self.run_folder:
            results.write(self.run_folder)
        tables = [getattr(callback, "metric_table", None) for callback in self.trainer.callbacks]  # type: ignore[attr-defined]
        results.show(self.run_folder, [table for table in tables if table is not None])

    before_fit = before_validate = before_test = before_predict = _before
    after_fit = after_validate = after_test = after_predict = _after


def _init_args(tree: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    """The constructor arguments that a config gives to a section."""
    group = tree.get(section)
    arguments = group.get("init_args") if isinstance(group, dict) else None
    return arguments if isinstance(arguments, dict) else {}


def run(arguments: Sequence[str]) -> int:
    """Run ``fit``, ``validate``, ``test`` or ``predict``.

    Returns:
        The exit code, as :func:`fulgurite.cli.main` documents it.
    """
    set_up_output(arguments[0])
    invocation = None
    try:
        invocation = prepare(arguments)
        allow_imports(invocation.trusted)
        FulguriteCLI(invocation)
    except (UsageError, MisconfigurationException) as error:
        show_traceback()
        print_error(str(error))
        return 2
    except NonFiniteError as error:
        print_error(str(error))
        return 1
    except SIGTERMException:
        return ended_by("SIGTERM", 143)
    except KeyboardInterrupt:
        return ended_by("Ctrl-C", 130)
    except SystemExit as error:
        # Lightning turns Ctrl-C into exit code 1, and --help ends with 0.
        if isinstance(error.__context__, KeyboardInterrupt):
            return ended_by("Ctrl-C", 130)
        return error.code if isinstance(error.code, int) else 0
    except RuntimeError as error:
        if not str(error).startswith("Error(s) in loading state_dict"):
            raise
        show_traceback()
        print_error(explain_load_error(str(error), invocation.checkpoint if invocation else None))
        return 1
    except (ValueError, TypeError, OSError, ImportError) as error:
        if not is_deliberate(error):
            raise
        show_traceback()
        print_error(str(error))
        return 1
    return 0


def ended_by(what: str, code: int) -> int:
    """Say that a signal ended the run; returns the exit code."""
    print_error(f"ended by {what}\ncontinue with --ckpt_path last and the same --config")
    return code


def allow_imports(trusted: Sequence[str]) -> None:
    """Let configs name classes of a few packages only, before any is parsed: parsing imports what a config names."""
    if trusted:
        log.info("trusted beyond the allow-list: %s", ", ".join(trusted))
    jsonargparse.set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=[*ALLOWED_IMPORTS, *trusted])


def process_rank() -> int:
    """The rank of this process, known from the launcher before there is a Trainer."""
    return getattr(rank_zero_only, "rank", None) or 0


def show_traceback() -> None:
    """Print the whole trace where the user asked for it by the environment variable."""
    if os.environ.get(TRACEBACK_VARIABLE):
        traceback.print_exc()


def set_up_output(command: str) -> None:
    """Our own lines on stdout as they are; of Lightning's, warnings and errors only, less those that do not apply."""
    logger = logging.getLogger("fulgurite")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
    for handler in [handler for handler in logger.handlers if isinstance(handler, logging.StreamHandler)]:
        logger.removeHandler(handler)
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if process_rank() == 0 else logging.WARNING)
    logger.propagate = False
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    unneeded = UNNEEDED_WARNINGS if command == "fit" else (*UNNEEDED_WARNINGS, CALLBACK_WARNING)
    for message in unneeded:
        warnings.filterwarnings("ignore", message=message)
