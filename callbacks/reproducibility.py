"""What makes a run repeatable and safe to interrupt: random state, finite losses, checkpoints, signals."""

import random
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn

from fulgurite.storage import atomic_path


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
        if trainer.state.fn == "fit" and trainer.strategy.restore_checkpoint_after_setup:
            self._restore(trainer)  # sharded models are loaded after on_fit_start

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Later hooks are too late: the loaders and the sanity check have run by then.
        self._restore(trainer)

    def _restore(self, trainer: Trainer) -> None:
        # A rank that the checkpoint does not know (more ranks than before) keeps the state of its seed.
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
    """Stop the run before a NaN or infinite loss reaches the optimiser, or such a weight a checkpoint or a result.

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
        if wrong := non_finite_parameter(pl_module):
            raise NonFiniteError(
                f"parameter {wrong!r} is not finite after step {trainer.global_step}; no checkpoint was written\n"
                "lower the learning rate or clip the gradients (--trainer.gradient_clip_val 1.0)"
            )

    def _refuse(self, pl_module: LightningModule) -> None:
        if wrong := non_finite_parameter(pl_module):
            raise NonFiniteError(f"parameter {wrong!r} is not finite: nothing that these weights give means anything")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "validate":
            self._refuse(pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._refuse(pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._refuse(pl_module)


def non_finite_parameter(module: nn.Module) -> str | None:
    """The name of a parameter that is NaN or infinite, if any.

    Buffers may hold infinity on purpose (a threshold that nothing exceeds); parameters never do.
    """
    parameters = dict(module.named_parameters())
    finite = [torch.isfinite(parameter.detach()).all() for parameter in parameters.values()]
    if not finite or torch.stack(finite).all():
        return None
    return next(name for name, is_finite in zip(parameters, finite, strict=True) if not is_finite)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write a checkpoint beside its place and rename it: the old file or the whole new one is there, never a part.

    Lightning writes to the system's temporary folder and moves the file, which is a copy where that folder lies on
    another file system. Give it to a Trainer as one of its ``plugins``; the command line does.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise TypeError("AtomicCheckpointIO writes local files and takes no storage_options")
        with atomic_path(path) as temporary:
            torch.save(checkpoint, temporary)


class RunCheckpoint(ModelCheckpoint):
    """A ModelCheckpoint that overwrites one file, ``<name>.ckpt``, and whose state names files without their folder.

    With a ``monitor`` it keeps the best state, without one the newest. The newest is also written when the run is cut
    short in the middle of an epoch, and when it is interrupted between two batches or fails inside one (a non-finite
    loss excepted), so that it can go on from there. It is never written between a training batch and the validation
    that is due after it: a run that resumed there would leave the validation out.

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
        self._every = every_n_train_steps or 0
        self._reached = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._reached = self._multiple(trainer)

    def _multiple(self, trainer: Trainer) -> int:
        """How many times ``every_n_train_steps`` steps were taken; a batch of several optimisers takes several."""
        return trainer.global_step // self._every if self._every else 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        before, self._reached = self._reached, self._multiple(trainer)
        if epoch_end_or_validation_is_next(trainer, batch_idx):
            return
        if self.monitor is not None:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            return
        # Where the run ends here, it is not at the end of this epoch: its other batches are still to do.
        ends_here = trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step
        if ends_here or self._reached > before:
            self.best_model_path = self.format_checkpoint_name({})
            trainer.save_checkpoint(self.best_model_path)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_last_batch:
            super().on_train_epoch_end(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        interrupted = isinstance(exception, KeyboardInterrupt | SIGTERMException)
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        if isinstance(exception, NonFiniteError) or not trainer.training:
            return
        if interrupted and progress.processed != progress.ready:
            return  # a second Ctrl-C, inside a batch: the optimiser may be half-way through its step
        if interrupted and trainer.is_last_batch:
            return  # between two epochs: the state at the end of the first is written, and the next has half begun
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
        best = state_dict["best_model_path"]
        if not best or not (folder / best).is_file():
            return  # the run goes on in another folder, where no file is the best one yet
        state = {**state_dict, "dirpath": self.dirpath}
        for key in ("best_model_path", "kth_best_model_path", "last_model_path"):
            state[key] = str(folder / state[key]) if state[key] else ""
        state["best_k_models"] = {str(folder / name): score for name, score in state["best_k_models"].items()}
        super().load_state_dict(state)


def epoch_end_or_validation_is_next(trainer: Trainer, batch_idx: int) -> bool:
    """Whether the end of the epoch, or a validation, follows this training batch."""
    if trainer.is_last_batch:
        return True
    every: Any = trainer.val_check_batch
    if every is None or every == float("inf"):
        return False
    done = trainer.fit_loop.epoch_loop.total_batch_idx if trainer.check_val_every_n_epoch is None else batch_idx
    return bool((done + 1) % every == 0)


class Requeue(SIGTERMException):
    """SLURM announced the end of the job's time; the fit stopped at a safe point, for its caller to requeue the job."""


class Preemption(Callback):
    """End a fit at the next safe point after Ctrl-C (SIGINT) or SIGTERM, so that its last checkpoint is exact.

    A safe point lies after a training batch that completes a step and that no validation follows, or between two
    epochs. All ranks stop at the same one, whichever of them got the signal. A validation that is running is finished
    first; a second Ctrl-C ends the run at once. ``validate``, ``test`` and ``predict`` stop after their batch.

    Args:
        requeue: under a SLURM environment that requeues jobs, take its signal likewise and raise :class:`Requeue` in a
            fit; other commands ignore it. Without, that signal and SIGTERM are left to Lightning there, which saves
            wherever the fit happens to be and goes on until it is killed.
    """

    def __init__(self, requeue: bool = False) -> None:
        self.requeue = requeue
        self._received = 0
        self._requeue_signal: int | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._received = 0

    def _take_signals(self, trainer: Trainer) -> None:
        """Install the handlers, after Lightning has installed its own; it also puts back what was there before."""
        if threading.current_thread() is not threading.main_thread():
            return
        signal.signal(signal.SIGINT, self._on_signal)
        environment = trainer._accelerator_connector.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            if not self.requeue:
                return
            self._requeue_signal = environment.requeue_signal
            if self._requeue_signal:
                # An evaluation that is begun anew would come no further.
                signal.signal(self._requeue_signal, self._on_signal if trainer.state.fn == "fit" else signal.SIG_IGN)
        # Lightning's own handler calls a collective, at which ranks that are elsewhere hang.
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._received and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self._received = signum

    def _stop_if_asked(self, trainer: Trainer) -> None:
        received: int | Tensor = self._received
        if trainer.world_size > 1 and trainer.training:
            # Not in evaluation, where nothing is kept that must agree.
            received = torch.tensor(received, device=trainer.strategy.root_device)
            received = int(trainer.strategy.reduce(received, reduce_op="max"))
        if received == signal.SIGINT:
            raise KeyboardInterrupt
        if received:
            raise Requeue if received == self._requeue_signal else SIGTERMException

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._take_signals(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._take_signals(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_if_asked(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        completes_step = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if completes_step and not epoch_end_or_validation_is_next(trainer, batch_idx):
            self._stop_if_asked(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._take_signals(trainer)

    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.state.fn == "validate":
            self._stop_if_asked(trainer)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._take_signals(trainer)

    def on_test_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._stop_if_asked(trainer)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._take_signals(trainer)

    def on_predict_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._stop_if_asked(trainer)
