"""What makes a run repeatable and safe to interrupt: random state, finite losses, checkpoints, signals."""

import random
import signal
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor


class RandomState(Callback):
    """Keep the random state of every rank in the checkpoint, and restore it when a run resumes.

    Together with a data module that knows its position, a resumed run equals the uninterrupted one.
    """

    def __init__(self) -> None:
        self._loaded: list[dict[str, Any]] = []

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        own = collect_random_state()
        states = [own]
        if trainer.world_size > 1:
            states = [{} for _ in range(trainer.world_size)]
            torch.distributed.all_gather_object(states, own)
        checkpoint["random_state"] = states

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._loaded = checkpoint.get("random_state", [])

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Later hooks are too late: the loaders and the sanity check have run by then. A rank that the checkpoint does
        # not know (more ranks than before) keeps the state of its seed.
        if trainer.global_rank < len(self._loaded):
            restore_random_state(self._loaded[trainer.global_rank])
        self._loaded = []


def collect_random_state() -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's global generators, as tensors and plain values."""
    version, python_words, python_gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - the global state is the point
    return {
        "python": {"version": version, "words": torch.tensor(python_words), "gauss": python_gauss},
        "numpy": {
            "words": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
            "position": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Set the global generators to what :func:`collect_random_state` returned."""
    python, numpy_state = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    words = numpy_state["words"].numpy().astype(np.uint32)
    position, has_gauss = numpy_state["position"], numpy_state["has_gauss"]
    np.random.set_state(("MT19937", words, position, has_gauss, numpy_state["gauss"]))  # noqa: NPY002
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([value.cpu() for value in state["cuda"]])


class NonFiniteError(RuntimeError):
    """A loss or a parameter is NaN or infinite."""


class FiniteGuard(Callback):
    """Stop the run before a NaN or infinite loss reaches the optimiser, or such a weight a checkpoint.

    On a GPU the check waits for the loss of each step.

    Raises:
        NonFiniteError: naming the step, the batch, the learning rate and the last finite loss.
    """

    def __init__(self) -> None:
        self._last_loss: Tensor | None = None

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if not torch.isfinite(loss).all():
            rates = [f"{group['lr']:.3g}" for optimizer in trainer.optimizers for group in optimizer.param_groups]
            last = "none" if self._last_loss is None else f"{self._last_loss.item():.6g}"
            epoch, batch = trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1
            raise NonFiniteError(
                f"the loss is {loss.detach().sum()} at step {trainer.global_step} (epoch {epoch}, batch {batch})\n"
                f"learning rate {', '.join(rates) or 'unknown'}; last finite loss {last}\n"
                "lower the learning rate, clip the gradients (--trainer.gradient_clip_val 1.0), or look at that batch"
            )
        self._last_loss = loss.detach()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # Buffers may hold infinity on purpose (a threshold that nothing exceeds); parameters never do.
        parameters = dict(pl_module.named_parameters())
        finite = [torch.isfinite(parameter.detach()).all() for parameter in parameters.values()]
        if finite and not torch.stack(finite).all():
            wrong = next(name for name, is_finite in zip(parameters, finite, strict=True) if not is_finite)
            raise NonFiniteError(
                f"parameter {wrong!r} is not finite after step {trainer.global_step}; no checkpoint was written\n"
                "lower the learning rate or clip the gradients (--trainer.gradient_clip_val 1.0)"
            )


class RunCheckpoint(ModelCheckpoint):
    """A ModelCheckpoint that overwrites one file, ``<name>.ckpt``, and whose state names files without their folder.

    With a ``monitor`` it keeps the best state, without one the newest; the newest is also written when the run is
    interrupted between two batches or fails inside one (a non-finite loss excepted), so that it can go on from there.

    Args:
        dirpath: folder of the checkpoint.
        name: stem of the file.
        monitor: metric that decides which state is best; None keeps the newest.
        mode: whether a smaller (``"min"``) or larger (``"max"``) metric is better.
        every_n_train_steps: write the newest state also in the middle of an epoch, after so many optimiser steps.
    """

    def __init__(
        self,
        dirpath: str | Path,
        name: str,
        monitor: str | None = None,
        mode: str = "min",
        every_n_train_steps: int | None = None,
    ) -> None:
        super().__init__(
            dirpath=dirpath,
            filename=name,
            monitor=monitor,
            mode=mode,
            every_n_train_steps=every_n_train_steps,
            save_on_train_epoch_end=None if monitor else True,
            save_on_exception=monitor is None,
            auto_insert_metric_name=False,
            enable_version_counter=False,
        )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        interrupted = isinstance(exception, KeyboardInterrupt | SIGTERMException)
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        if isinstance(exception, NonFiniteError) or trainer.state.fn != "fit":
            return
        if interrupted and progress.processed != progress.ready:
            return  # a second Ctrl-C, inside a batch: the optimiser may be half-way through its step
        if trainer.world_size > 1 and not interrupted:
            return  # the other ranks are elsewhere, and saving would wait for them
        super().on_exception(trainer, pl_module, exception)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        for key in ("best_model_path", "kth_best_model_path", "last_model_path"):
            state[key] = Path(state[key]).name
        state["best_k_models"] = {Path(path).name: score for path, score in state["best_k_models"].items()}
        return {**state, "dirpath": None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        folder = Path(self.dirpath or ".")
        state = {**state_dict, "dirpath": self.dirpath}
        for key in ("best_model_path", "kth_best_model_path", "last_model_path"):
            state[key] = str(folder / state[key]) if state[key] else ""
        state["best_k_models"] = {str(folder / name): score for name, score in state["best_k_models"].items()}
        super().load_state_dict(state)


class Preemption(Callback):
    """End a run at the next batch after Ctrl-C (SIGINT), so that its last checkpoint is exact; a second one ends it.

    SIGTERM is Lightning's to handle; this callback adds the prediction loop, which does not look for it.
    """

    def __init__(self) -> None:
        self._asked = False
        self._previous: Any = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._asked = False
        self._previous = signal.signal(signal.SIGINT, self._on_interrupt)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True

    def _stop_if_asked(self, trainer: Trainer) -> None:
        if self._asked:
            raise KeyboardInterrupt
        if trainer.received_sigterm and trainer.predicting:
            raise SIGTERMException

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._stop_if_asked(trainer)

    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._stop_if_asked(trainer)

    def on_test_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._stop_if_asked(trainer)

    def on_predict_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._stop_if_asked(trainer)
