"""The base of every method's LightningModule."""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable, ReduceLROnPlateau
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from fulgurite.modules.loss_terms import CHECKPOINT_KEY, LossContext, LossTerms, refuse_other_terms

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLAIN_TYPES = (str, int, float, bool, list, dict, tuple, type(None))


class Method(LightningModule):
    """A LightningModule that the command line can train, test and resume.

    A subclass logs its metrics as ``<stage>/<name>`` and names the one that selects the best checkpoint.

    Attributes:
        monitor: the validation metric that decides which checkpoint is best.
        mode: whether a smaller (``"min"``) or a larger (``"max"``) ``monitor`` is better.
        ddp: the strategy that ``ddp`` means for this method; None: it runs in one process only. Several optimisers that
            step one after the other need ``"ddp_find_unused_parameters_true"``.
        fsdp: whether it can be sharded with FSDP2.
    """

    monitor: ClassVar[str] = "val/loss"
    mode: ClassVar[Literal["min", "max"]] = "min"
    ddp: ClassVar[Literal["ddp", "ddp_find_unused_parameters_true"] | None] = "ddp"
    fsdp: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        # Called here, it records the constructor arguments of the outermost subclass.
        self.save_hyperparameters(logger=False)

    def pieces(self) -> Iterator[nn.Module]:
        """The modules that FSDP2 shards, each as a unit that is gathered for its own forward and backward pass.

        Inner ones come first: the blocks of a deep network (see :func:`repeated_blocks`), then what holds them. Each
        must be called as a module, ``self.network(x)``: what reads the parameters of a piece otherwise sees a shard.
        """
        for child in self.children():
            yield from _callable_pieces(child)

    def configure_model(self) -> None:
        """Shard the pieces where the strategy has a device mesh (FSDP2); does nothing otherwise, or a second time.

        Raises:
            ValueError: a trainable parameter lies in no piece, so that the ranks would train it apart; or a loss term
                differentiates a gradient.
        """
        if self.device_mesh is None:
            return
        mesh = self.device_mesh["data_parallel"]
        if not any(isinstance(module, FSDPModule) for module in self.modules()):
            send_weights(self, mesh, self.trainer.strategy.root_device)
            for module in self.modules():
                if isinstance(module, LossTerms):
                    module.shard(mesh)
        for piece in self.pieces():
            if not isinstance(piece, FSDPModule):
                shard(piece, mesh)
        for name, parameter in self.named_parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                raise ValueError(
                    f"parameter {name!r} lies in none of the pieces that FSDP2 shards; put it into a sub-module with a "
                    f"forward of its own, or name that in {type(self).__name__}.pieces()"
                )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep only plain hyper-parameters, so that the file loads with ``weights_only=True``.

        An optimiser or a module that was passed as an object is left out: ``load_from_checkpoint`` then needs it again.
        """
        hyper_parameters = checkpoint.get("hyper_parameters", {})
        checkpoint["hyper_parameters"] = {k: v for k, v in hyper_parameters.items() if isinstance(v, PLAIN_TYPES)}
        if isinstance(terms := getattr(self, "loss_terms", None), LossTerms) and self.trainer.state.fn == "fit":
            checkpoint[CHECKPOINT_KEY] = terms.names()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse to go on with a training under other loss terms.

        Raises:
            ValueError: they differ from those of the checkpoint.
        """
        terms, trainer = getattr(self, "loss_terms", None), self._trainer
        if isinstance(terms, LossTerms) and trainer is not None and trainer.state.fn == "fit":
            refuse_other_terms(terms, checkpoint.get(CHECKPOINT_KEY, []))

    def add_terms(self, player: str, loss: Tensor, context: LossContext) -> Tensor:
        """A player's loss with the terms that callbacks have added; called in ``training_step``.

        For a module with ``self.loss_terms = LossTerms(...)``. The parts of the terms are logged as
        ``train/<term>_<part>``, means over the steps of an epoch.
        """
        terms: Any = self.loss_terms
        assert isinstance(terms, LossTerms)

        def log(name: str, value: Tensor) -> None:
            self.log(name, value, on_step=False, on_epoch=True, sync_dist=True, batch_size=1)

        return terms.add_to(player, loss, context, log)

    def figures(self, stage: str) -> "dict[str, Figure]":
        """Matplotlib figures that show the results of ``stage`` ("val" or "test"), by file name.

        Called at the end of the stage's epoch on every rank, so that a metric may synchronise in it.
        """
        return {}

    def single_optimizer(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer: OptimizerCallable,
        scheduler: LRSchedulerCallable | None = None,
    ) -> OptimizerLRScheduler:
        """What ``configure_optimizers`` returns for one optimiser and at most one epoch-wise scheduler.

        Raises:
            ValueError: the optimiser refuses its arguments, such as a negative learning rate.
        """
        try:
            built = optimizer(parameters)
        except ValueError as error:
            raise ValueError(f"optimizer: {error}") from error
        if scheduler is None:
            return built
        schedule = scheduler(built)
        if isinstance(schedule, ReduceLROnPlateau):
            return {"optimizer": built, "lr_scheduler": {"scheduler": schedule, "monitor": schedule.monitor}}
        return {"optimizer": built, "lr_scheduler": schedule}

    def log_epoch(self, name: str, value: Any, batch_size: int, **options: Any) -> None:
        """Log an epoch mean over all samples of all ranks; ``value`` is a scalar tensor or a metric."""
        synchronise = isinstance(value, Tensor)
        # A float: Lightning averages the ranks' sample counts, and a whole number would be rounded (601 / 2 = 300).
        weight: Any = float(batch_size)
        self.log(name, value, on_step=False, on_epoch=True, batch_size=weight, sync_dist=synchronise, **options)


def repeated_blocks(network: nn.Module) -> Iterator[nn.Module]:
    """The blocks of a deep network, inner ones first.

    A block is a module with sub-modules of its own that stands with another one of its class in a ``ModuleList`` or
    ``Sequential``.
    """
    for inner in network.children():
        yield from repeated_blocks(inner)
    if isinstance(network, nn.ModuleList | nn.Sequential):
        kinds = [type(block) for block in network]
        yield from (block for block in network if kinds.count(type(block)) > 1 and any(True for _ in block.children()))


def _callable_pieces(module: nn.Module) -> Iterator[nn.Module]:
    """A module that has parameters; of a container that has no forward pass, its members."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict | LossTerms):
        for member in module.children():
            yield from _callable_pieces(member)
    elif any(True for _ in module.parameters()):
        yield module


def send_weights(module: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
    """Give every rank of ``mesh`` the weights of the first one, as DDP does; they stay where they are."""
    for tensor in chain(module.parameters(), module.buffers()):
        sent = tensor.data.to(device)  # collectives of a GPU take tensors on it
        torch.distributed.broadcast(sent, group=mesh.get_group(), group_src=0)
        tensor.data.copy_(sent)


def shard(piece: nn.Module, mesh: DeviceMesh) -> None:
    """Split the parameters of a module that no inner piece holds over the ranks of ``mesh``; buffers stay whole.

    As under DDP, the first rank sends its buffers (such as the running statistics of batch normalisation) to the others
    at each forward pass.
    """
    # Not the default for what is the root of its own tree: evaluated, that would stay gathered until the next step.
    fully_shard(piece, mesh=mesh, reshard_after_forward=True)

    def send_buffers(module: nn.Module, _: Any) -> None:
        for buffer in _own_buffers(module):
            torch.distributed.broadcast(buffer, group=mesh.get_group(), group_src=0)

    if any(True for _ in _own_buffers(piece)):
        piece.register_forward_pre_hook(send_buffers)


def _own_buffers(module: nn.Module) -> Iterator[Tensor]:
    """The buffers of a module that no inner piece holds."""
    yield from module.buffers(recurse=False)
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _own_buffers(child)
