"""``fit``, ``validate``, ``test`` and ``predict``: a LightningCLI with run folders, exact resume and short errors."""

import inspect
import logging
import shutil
import sys
import time
from argparse import ArgumentError
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jsonargparse
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins import CheckpointIO

from fulgurite.callbacks.reporting import FigureSaver, MetricsFile, PlainProgress, PredictionFile
from fulgurite.callbacks.reproducibility import (
    AtomicCheckpointIO,
    FiniteGuard,
    Preemption,
    RandomState,
    RunCheckpoint,
)
from fulgurite.command_line.arguments import Invocation
from fulgurite.command_line.checkpoints import CHECKPOINT_KEY, StoredConfig, read_stored_config
from fulgurite.command_line.checks import refuse_intervals, refuse_null_callables, refuse_other_optimizers
from fulgurite.command_line.configs import imported_object
from fulgurite.command_line.errors import (
    UsageError,
    explain_construction_error,
    explain_parse_error,
)
from fulgurite.command_line.output import process_rank
from fulgurite.command_line.results import Results, differences
from fulgurite.command_line.runs import (
    CHECKPOINT_FOLDER,
    CONFIG_FILE,
    NEWEST,
    discard_if_empty,
    lock_run,
    new_run,
    portable_config,
    run_of_checkpoint,
)
from fulgurite.command_line.slurm import run_of_job, slurm_job
from fulgurite.command_line.strategies import check_strategy, explained_launch, strategy_instead, strategy_of
from fulgurite.command_line.trust import refuse_functions
from fulgurite.datamodules import SIZES
from fulgurite.storage import point_link, write_text

log = logging.getLogger(__name__)


@dataclass
class Session:
    """What is known of a command while it runs, also where it fails.

    Args:
        resources: closed at the command's end, whatever the end is.
        invocation: the prepared command line.
        folder: the run's folder; None for a dry run.
        running: whether the first batch was reached; an error before it is one of usage.
    """

    resources: ExitStack = field(default_factory=ExitStack)
    invocation: Invocation | None = None
    folder: Path | None = None
    running: bool = False


class RunRecord(Callback):
    """Keep the resolved config in the run's folder and in every checkpoint: a checkpoint alone is enough to test it.

    Args:
        config: the config.
        session: of the command.

    Attributes:
        trained: whether a training loop began: a finished checkpoint or a limit of 0 leaves nothing to do.
    """

    def __init__(self, config: StoredConfig, session: Session) -> None:
        self.trained = False
        self.config = config
        self._session = session

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.trained = self._session.running = True
        folder = self._session.folder
        if folder and trainer.is_global_zero:
            # Not earlier: a fit that cannot start leaves the config of the run that it would have gone on with.
            write_text(folder / CONFIG_FILE, self.config.text)
            point_link(folder.parent / "latest", folder.name)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._session.running |= trainer.state.fn == "validate"

    def on_test_batch_start(self, *args: Any) -> None:
        self._session.running = True

    def on_predict_batch_start(self, *args: Any) -> None:
        self._session.running = True

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[CHECKPOINT_KEY] = self.config.as_plain()


class FulguriteCLI(LightningCLI):
    """The LightningCLI of this package; constructing it runs the command.

    Args:
        session: of the command, with its prepared command line.
    """

    def __init__(self, session: Session) -> None:
        assert session.invocation is not None
        self.session, self.invocation = session, session.invocation
        self.started = time.monotonic()
        strict: dict[str, Any] = {"exit_on_error": False, "allow_abbrev": False}
        super().__init__(
            save_config_callback=None,
            trainer_defaults={"enable_model_summary": False},
            seed_everything_default=0,
            parser_kwargs={**strict, **{name: dict(strict) for name in self.subcommands()}},
            auto_configure_optimizers=False,
            args=self.invocation.argv,
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

    @property
    def seed(self) -> int | None:
        """The run's seed; None where the user turned seeding off."""
        seed = self.options["seed_everything"]
        return None if seed is False else seed

    def before_instantiate_classes(self) -> None:
        data = self.options.get("data")
        if data is not None and "seed" in data.get("init_args", {}) and data["init_args"]["seed"] is None:
            data["init_args"]["seed"] = self.seed or 0
        if "verbose" in self.options:
            self.options["verbose"] = False  # one table of metrics is enough, and it is ours
        for section in ("trainer", "model", "data"):
            refuse_functions(self.options.get(section), self.invocation.trusted, section)
        trainer = self.options["trainer"]
        trainer["strategy"] = strategy_of(self._class_of("model"), trainer["strategy"])
        dumped = yaml.safe_load(self.parser.dump(self.config, skip_unset=False))[self.config["subcommand"]]
        self.resolved = portable_config(dumped)
        self._refuse_typed_sizes()
        given = self.invocation.layers, self.invocation.argv
        refuse_intervals(self.resolved["trainer"], *given)
        refuse_null_callables(self._class_of("model"), _init_args(self.resolved, "model"), *given)
        if self.invocation.stored:
            if self.subcommand == "fit":
                refuse_other_optimizers(self.resolved, self.invocation.stored.tree, self.invocation.checkpoint)
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
            text = explain_construction_error(error, self.resolved, self.invocation.layers, self.invocation.argv)
            raise UsageError(text) from error

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
        stored = StoredConfig.of(self.resolved, self.invocation.given_layers, self.invocation.stored)
        self.record = RunRecord(stored, self.session)
        folder = None if settings["fast_dev_run"] or settings["barebones"] else self._new_folder()
        self.session.folder = folder
        added: list[Callback] = [self.record, RandomState(), FiniteGuard(), Preemption(requeue=True)]
        if plain:
            added.append(PlainProgress())
        arguments: dict[str, Any] = {"enable_progress_bar": not plain}
        if folder:
            added.append(FigureSaver())
            arguments["default_root_dir"] = str(folder)
            arguments["plugins"] = with_atomic_writes(settings["plugins"])
            if self.subcommand == "predict":
                arguments["logger"] = False
                added.append(PredictionFile())
            elif settings["logger"] in (None, True):
                arguments["logger"] = [TensorBoardLogger(folder, name="tensorboard", version=""), MetricsFile(folder)]
            if self.subcommand == "fit" and settings["enable_checkpointing"] is not False:
                added += self._checkpoints(folder / CHECKPOINT_FOLDER)
        kinds = {type(callback) for callback in callbacks} - {RunCheckpoint}
        callbacks += [callback for callback in added if type(callback) not in kinds]
        try:
            with explained_launch():
                trainer = super().instantiate_trainer(callbacks=list(callbacks), **arguments, **kwargs)
                if settings["strategy"] == "auto" and (strategy := strategy_instead(self.model, trainer)):
                    trainer = super().instantiate_trainer(callbacks=callbacks, strategy=strategy, **arguments, **kwargs)
                check_strategy(self.model, trainer, self.options["trainer"]["strategy"])
        except BaseException:
            if folder:
                discard_if_empty(folder)
            raise
        return trainer

    def _checkpoints(self, folder: Path) -> list[Callback]:
        callbacks: list[Callback] = []
        if monitor := getattr(self.model, "monitor", None):
            callbacks.append(RunCheckpoint(folder, "best", monitor, getattr(self.model, "mode", "min")))
        if steps := self.options["checkpoint_every"]:
            callbacks.append(RunCheckpoint(folder, "last", every_n_train_steps=steps))
        return [*callbacks, RunCheckpoint(folder, "last")]

    def _new_folder(self) -> Path:
        """The folder of this run: a resumed fit goes on in its own, other commands write below the run they read."""
        checkpoint = self.invocation.checkpoint
        first = process_rank() == 0
        earlier = run_of_checkpoint(checkpoint) if checkpoint else None
        if self.subcommand != "fit":
            parent = earlier / str(self.subcommand) if earlier else self.invocation.experiment.folder
            return new_run(parent, self.seed, create=first)
        if checkpoint and earlier and (checkpoint.name == NEWEST or not (checkpoint.parent / NEWEST).exists()):
            self._lock(earlier)
            return earlier
        # From an older state than its run's newest: what came after it is not overwritten.
        parent = earlier.parent if earlier else self.invocation.experiment.folder
        folder = self._folder_of_fit(parent)
        if checkpoint and earlier and self.invocation.checkpoint == checkpoint:
            log.info("%s is not the newest state of its run: this goes on in a run of its own", checkpoint)
            if first:
                (folder / CHECKPOINT_FOLDER).mkdir(exist_ok=True)
                shutil.copy(checkpoint, folder / CHECKPOINT_FOLDER / checkpoint.name)
        return folder

    def _folder_of_fit(self, parent: Path) -> Path:
        """A new run's folder; in a SLURM job that began the same fit before, that one's: it goes on."""
        job = slurm_job()
        if job is None:
            return new_run(parent, self.seed, create=process_rank() == 0)
        folder = run_of_job(parent, job, self.record.config.text, create=process_rank() == 0)
        newest = folder / CHECKPOINT_FOLDER / NEWEST
        if newest.is_file():
            read_stored_config(newest)  # says what is wrong with a file that is not whole
            self._lock(folder)
            self.invocation = self.session.invocation = replace(self.invocation, checkpoint=newest)
        return folder

    def _lock(self, run: Path) -> None:
        if process_rank() == 0:
            self.session.resources.enter_context(lock_run(run))

    def _before(self) -> None:
        """Announce what is about to run, and leave its config in its folder."""
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        data = type(self.datamodule).__name__ if self.datamodule else "its own data"
        model = f"{type(self.model).__name__} ({parameters:,} parameters)"
        log.info("%s %s on %s, seed %s", self.subcommand, model, data, self.seed)
        if self.subcommand == "fit":
            self._say_effective_batch()
        if self.session.folder:
            log.info("run folder %s", self.session.folder)
        if self.invocation.checkpoint:
            # Set here, a module can tell in its setup hook that it need not fetch weights to start from.
            self.trainer.ckpt_path = self.invocation.checkpoint
            log.info("from checkpoint %s", self.invocation.checkpoint)
        elif self.subcommand != "fit":
            log.info("no --ckpt_path: these are the weights the model starts with, nothing was trained")
        if self.subcommand != "fit" and self.session.folder and process_rank() == 0:
            write_text(self.session.folder / CONFIG_FILE, self.record.config.text)

    def _say_effective_batch(self) -> None:
        processes = self.trainer.num_devices * self.trainer.num_nodes
        size = getattr(self.datamodule, "batch_size", None)
        if processes > 1 and isinstance(size, int):
            windows = self.trainer.accumulate_grad_batches
            product = f"{processes} processes x {size}" + (f" x {windows} accumulated batches" if windows > 1 else "")
            log.info("effective batch %d = %s", processes * size * windows, product)

    def _after(self) -> None:
        """Write results.json, and show the metrics and where everything lies."""
        if not self.trainer.is_global_zero:
            return
        if self.subcommand == "fit" and not self.record.trained:
            log.info("nothing was trained: the checkpoint or the Trainer's limits leave no step to take")
            if self.session.folder and not (self.session.folder / CONFIG_FILE).exists():
                shutil.rmtree(self.session.folder)
            return
        results = Results.of(self)
        if self.session.folder:
            results.write(self.session.folder)
        tables = [getattr(callback, "metric_table", None) for callback in self.trainer.callbacks]  # type: ignore[attr-defined]
        results.show(self.session.folder, [table for table in tables if table is not None])

    before_fit = before_validate = before_test = before_predict = _before
    after_fit = after_validate = after_test = after_predict = _after


def with_atomic_writes(plugins: Any) -> list[Any]:
    """The user's plugins, and ours for checkpoint files unless there is one for them already."""
    given = plugins if isinstance(plugins, list) else [plugins] if plugins else []
    return given if any(isinstance(plugin, CheckpointIO) for plugin in given) else [*given, AtomicCheckpointIO()]


def _init_args(tree: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    """The constructor arguments that a config gives to a section."""
    group = tree.get(section)
    arguments = group.get("init_args") if isinstance(group, dict) else None
    return arguments if isinstance(arguments, dict) else {}
