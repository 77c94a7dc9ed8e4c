"""The base of every method's LightningModule."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable, ReduceLROnPlateau
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLAIN_TYPES = (str, int, float, bool, list, dict, tuple, type(None))


class Method(LightningModule):
    """A LightningModule that the command line can train, test and resume.

    A subclass logs its metrics as ``<stage>/<name>`` and names the one that selects the best checkpoint.

    Attributes:
        monitor: the validation metric that decides which checkpoint is best.
        mode: whether a smaller (``"min"``) or a larger (``"max"``) ``monitor`` is better.
    """

    monitor: ClassVar[str] = "val/loss"
    mode: ClassVar[Literal["min", "max"]] = "min"

    def __init__(self) -> None:
        super().__init__()
        # Called here, it records the constructor arguments of the outermost subclass.
        self.save_hyperparameters(logger=False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep only plain hyper-parameters, so that the file loads with ``weights_only=True``.

        An optimiser or a module that was passed as an object is left out: ``load_from_checkpoint`` then needs it again.
        """
        hyper_parameters = checkpoint.get("hyper_parameters", {})
        checkpoint["hyper_parameters"] = {k: v for k, v in hyper_parameters.items() if isinstance(v, PLAIN_TYPES)}

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
        self.log(name, value, on_step=False, on_epoch=True, batch_size=batch_size, sync_dist=synchronise, **options)
