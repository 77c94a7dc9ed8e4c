"""The strategy that a method runs under, decided and checked before any process is started or folder is made."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jsonargparse
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy

from fulgurite.command_line.errors import UsageError
from fulgurite.command_line.output import process_rank
from fulgurite.modules.base import Method

FIND_UNUSED = "_find_unused_parameters_true"
ONE_PROCESS = "--trainer.devices 1 --trainer.num_nodes 1 --trainer.strategy auto"
SIZES_OPTION = "trainer.strategy.init_args"


def strategy_of(model: Any, strategy: Any) -> Any:
    """What the option ``trainer.strategy`` means for a model's class: ``ddp`` becomes the method's own kind of it.

    Args:
        model: the class; one of another package gets what was asked for.
        strategy: the parsed option, a name or a class with its arguments.
    """
    if not (isinstance(model, type) and issubclass(model, Method)) or model.ddp in (None, "ddp"):
        return strategy
    if isinstance(strategy, str) and strategy.startswith("ddp") and "find_unused" not in strategy:
        return strategy + FIND_UNUSED
    if isinstance(strategy, jsonargparse.Namespace) and _name(strategy) == DDPStrategy.__name__:
        strategy["init_args"]["find_unused_parameters"] = True
    return strategy


def strategy_instead(model: LightningModule, trainer: Trainer) -> str | None:
    """The strategy to take where the Trainer itself chose plain DDP (``auto`` with several devices), if another."""
    if isinstance(model, Method) and model.ddp not in (None, "ddp") and isinstance(trainer.strategy, DDPStrategy):
        return model.ddp
    return None


def check_strategy(model: LightningModule, trainer: Trainer, option: Any) -> None:
    """Refuse a strategy that the method does not run under, and sizes that do not fit the number of processes.

    Args:
        model: the module; one of another package is checked for the sizes alone.
        trainer: built, not started.
        option: the parsed option ``trainer.strategy``.

    Raises:
        UsageError: naming the method, what it supports, and what to do.
    """
    processes = trainer.num_devices * trainer.num_nodes
    sharded = isinstance(trainer.strategy, ModelParallelStrategy | FSDPStrategy)
    if isinstance(model, Method):
        name, kind = type(model).__name__, type(trainer.strategy).__name__
        if sharded and not model.fsdp:
            remedy = f"layer --config trainer/ddp last, or give {ONE_PROCESS}" if model.ddp else f"give {ONE_PROCESS}"
            raise UsageError(f"{name} cannot be sharded ({kind}); it runs {_supported(model)}\n{remedy}")
        if not sharded and processes > 1 and model.ddp is None:
            remedy = f"layer --config trainer/fsdp last, or give {ONE_PROCESS}" if model.fsdp else f"give {ONE_PROCESS}"
            raise UsageError(
                f"{name} cannot run in {processes} processes ({kind}); it runs {_supported(model)}\n{remedy}"
            )
    _check_launch(trainer)
    if isinstance(trainer.strategy, ModelParallelStrategy):
        _check_sizes(model, option, trainer.num_devices, trainer.num_nodes)


def _supported(model: Method) -> str:
    kinds = [kind for kind, runs in (("under ddp", model.ddp), ("under fsdp", model.fsdp)) if runs]
    return " and ".join(["in one process", *kinds]) if kinds else "in one process only"


@contextmanager
def explained_launch() -> Iterator[None]:
    """Turn what is missing of SLURM's variables into an error that says so.

    Raises:
        UsageError: a SLURM environment is asked for, and ``srun`` did not start this process.
    """
    try:
        yield
    except KeyError as error:
        if not str(error).startswith("'SLURM_"):
            raise
        raise UsageError(
            f"trainer.plugins asks for SLURM, but {error} is not set: start the command with srun\n"
            "or, to run outside of SLURM, give --trainer.plugins null"
        ) from error


def _check_launch(trainer: Trainer) -> None:
    """The launcher and the Trainer must agree on the number of processes; else each would wait, or work, alone."""
    devices, nodes = trainer.num_devices, trainer.num_nodes
    if process_rank() > 0 and devices * nodes == 1:
        raise UsageError(
            f"this is process {process_rank()} of those that were launched, but the Trainer runs one\n"
            "give --trainer.devices (processes per node), --trainer.num_nodes and --config trainer/ddp or trainer/fsdp"
        )
    environment = getattr(trainer.strategy, "cluster_environment", None)
    try:
        if environment is not None:
            environment.validate_settings(num_devices=devices, num_nodes=nodes)
    except ValueError as error:
        raise UsageError(f"trainer.devices is {devices}, trainer.num_nodes is {nodes}\n{error}") from error


def _check_sizes(model: LightningModule, option: Any, devices: int, nodes: int) -> None:
    given: Mapping[str, Any] = option.get("init_args", {}) if isinstance(option, jsonargparse.Namespace) else {}
    data, tensor = given.get("data_parallel_size", "auto"), given.get("tensor_parallel_size", "auto")
    if isinstance(model, Method) and tensor != 1:
        raise UsageError(
            f"{SIZES_OPTION}.tensor_parallel_size is {tensor}; give 1: {type(model).__name__} splits its weights over "
            "the processes (FSDP2), not its layers' products"
        )
    if data == "auto" and tensor == "auto":
        return  # a foreign module: one group of devices on each node
    tensor = devices if tensor == "auto" else tensor
    data = nodes if data == "auto" else data
    if data * tensor != devices * nodes:
        there = f"{devices} device{'s' * (devices > 1)} x {nodes} node{'s' * (nodes > 1)}"
        raise UsageError(
            f"{SIZES_OPTION}.data_parallel_size is {data}, but there are {devices * nodes} processes ({there})"
            f"{f' for a tensor_parallel_size of {tensor}' if tensor != 1 else ''}\n"
            f"give --{SIZES_OPTION}.data_parallel_size {devices * nodes // tensor}"
            + (f", or leave one process unsharded: {ONE_PROCESS}" if devices * nodes == 1 else "")
        )


def _name(option: jsonargparse.Namespace) -> str:
    return str(option.get("class_path")).rpartition(".")[2]
