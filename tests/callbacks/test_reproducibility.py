import random
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader

from fulgurite.callbacks import AtomicCheckpointIO, FiniteGuard, Preemption, RandomState, RunCheckpoint
from fulgurite.callbacks.reproducibility import NonFiniteError, collect_random_state, restore_random_state
from fulgurite.datamodules import DigitsHazard
from fulgurite.modules import Classifier


class Stranger(LightningModule):
    """A LightningModule that knows nothing of this package; its loss is spoilt at one step."""

    def __init__(self, manual: bool = False, spoil_at: int | None = None):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("threshold", torch.tensor(float("inf")))
        self.automatic_optimization = not manual
        self.spoil_at = spoil_at

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).square().mean()
        if batch_idx == self.spoil_at:
            loss = loss * float("nan")
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.25)


def fit(module, tmp_path, callbacks, **options):
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=any(isinstance(callback, RunCheckpoint) for callback in callbacks),
        default_root_dir=tmp_path, callbacks=callbacks, **options,
    )  # fmt: skip
    trainer.fit(module, DataLoader(torch.randn(12, 3), batch_size=2))
    return trainer


def draws():
    return random.random(), np.random.standard_normal(3).tolist(), torch.randn(3).tolist()


def test_the_random_state_survives_a_checkpoint_file(tmp_path):
    random.gauss(0, 1)  # leaves a half-used pair in Python's generator
    np.random.standard_normal()  # and in NumPy's
    torch.save(collect_random_state(), tmp_path / "state")
    expected = draws()
    assert draws() != expected
    restore_random_state(torch.load(tmp_path / "state", weights_only=True))
    assert draws() == expected


def test_the_random_state_of_a_checkpoint_is_restored_at_the_start_of_a_fit_and_only_once():
    callback, checkpoint = RandomState(), {}
    strategy = SimpleNamespace(restore_checkpoint_after_setup=False)
    trainer = SimpleNamespace(world_size=1, global_rank=0, state=SimpleNamespace(fn="fit"), strategy=strategy)
    callback.on_save_checkpoint(trainer, None, checkpoint)
    expected = draws()
    callback.on_load_checkpoint(trainer, None, checkpoint)
    callback.on_fit_start(trainer, None)
    assert draws() == expected
    callback.on_fit_start(trainer, None)
    assert draws() != expected


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_a_loss_that_is_not_finite_never_reaches_the_optimizer(tmp_path, manual):
    torch.manual_seed(0)
    module = Stranger(manual=manual, spoil_at=3)
    with pytest.raises(NonFiniteError) as caught:
        fit(module, tmp_path, [FiniteGuard()])
    message = str(caught.value)
    assert "the loss is nan at step 3 (epoch 0, batch 3)" in message
    assert "learning rate 0.25; last finite loss " in message
    assert module.layer.weight.isfinite().all()


def test_a_finite_run_is_the_same_with_and_without_the_guard(tmp_path):
    weights = []
    for callbacks in ([], [FiniteGuard()]):
        torch.manual_seed(0)
        module = Stranger()
        fit(module, tmp_path, callbacks)
        weights.append(module.layer.weight.detach())
    assert torch.equal(*weights)


def test_a_parameter_that_is_not_finite_never_enters_a_checkpoint_but_a_buffer_may(tmp_path):
    module = Stranger()
    trainer = fit(module, tmp_path, [FiniteGuard()])
    trainer.save_checkpoint(tmp_path / "good.ckpt")
    with torch.no_grad():
        module.layer.bias.fill_(float("inf"))
    with pytest.raises(NonFiniteError, match=r"parameter 'layer.bias' is not finite after step 6"):
        trainer.save_checkpoint(tmp_path / "bad.ckpt")
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["good.ckpt"]


def test_the_newest_state_is_kept_when_a_run_fails_inside_a_batch(tmp_path):
    class Fails(Stranger):
        def training_step(self, batch, batch_idx):
            if batch_idx == 4:
                raise OSError("the disk of the data is gone")
            return super().training_step(batch, batch_idx)

    with pytest.raises(OSError, match="the disk of the data is gone"):
        fit(Fails(), tmp_path, [RunCheckpoint(tmp_path, "last")])
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 4


def test_a_run_that_failed_inside_a_batch_resumes_exactly_with_that_batch(tmp_path):
    class Fragile(Classifier):
        fail_at = None

        def training_step(self, batch, batch_idx):
            if self.global_step == self.fail_at:
                raise OSError("the disk of the data is gone")
            return super().training_step(batch, batch_idx)

    def run(folder, module, checkpoint=None):
        trainer = Trainer(
            accelerator="cpu", max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=folder, callbacks=[RandomState(), RunCheckpoint(folder, "last")],
        )  # fmt: skip
        trainer.fit(module, datamodule=DigitsHazard(batch_size=32), ckpt_path=checkpoint)
        return module.state_dict()

    def module():
        seed_everything(1)
        return Fragile(n_classes=4, n_features=64, dropout=0.5)

    whole = run(tmp_path / "whole", module())
    fragile = module()
    fragile.fail_at = 11
    with pytest.raises(OSError, match="gone"):
        run(tmp_path / "failed", fragile)
    resumed = run(tmp_path / "failed", module(), tmp_path / "failed" / "last.ckpt")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_the_newest_state_is_not_written_for_a_loss_that_is_not_finite(tmp_path):
    with pytest.raises(NonFiniteError):
        fit(Stranger(spoil_at=2), tmp_path, [FiniteGuard(), RunCheckpoint(tmp_path, "last")])
    assert not list(tmp_path.glob("*.ckpt"))


def test_the_state_of_a_checkpoint_names_no_folder(tmp_path):
    fit(Stranger(), tmp_path, [RunCheckpoint(tmp_path, "last")])
    (state,) = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"].values()
    assert str(tmp_path) not in str(state)
    moved = RunCheckpoint(tmp_path / "moved", "last")
    moved.load_state_dict(state)
    assert moved.best_model_path == "", "there is no such file in the other folder"
    (tmp_path / "moved").mkdir()
    (tmp_path / "last.ckpt").rename(tmp_path / "moved" / "last.ckpt")
    moved.load_state_dict(state)
    assert moved.best_model_path == str(Path(moved.dirpath) / "last.ckpt")


def test_a_checkpoint_is_written_beside_its_place_and_renamed(tmp_path, monkeypatch):
    """A system folder for temporary files that does not exist: nothing may be written there."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    module = Stranger()
    trainer = fit(module, tmp_path, [], plugins=[AtomicCheckpointIO()])
    trainer.save_checkpoint(tmp_path / "folder" / "x.ckpt")
    assert torch.load(tmp_path / "folder" / "x.ckpt", weights_only=True)["global_step"] == 6
    whole = (tmp_path / "folder" / "x.ckpt").read_bytes()
    monkeypatch.setattr(torch, "save", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.save_checkpoint(tmp_path / "folder" / "x.ckpt")
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["x.ckpt"]
    assert (tmp_path / "folder" / "x.ckpt").read_bytes() == whole


class Signalled(LightningModule):
    """Raises a signal in one training batch or one validation batch, and validates in the middle of the epoch."""

    def __init__(self, where, signum=signal.SIGINT):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.where, self.signum, self.validations = where, signum, 0

    def training_step(self, batch, batch_idx):
        if self.where == ("train", batch_idx):
            signal.raise_signal(self.signum)
        return self.layer(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        if self.where == ("val", batch_idx) and not self.trainer.sanity_checking:
            signal.raise_signal(self.signum)
        self.log("val/loss", self.layer(batch).square().mean())

    def on_validation_end(self):
        self.validations += not self.trainer.sanity_checking

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("where", "options", "step", "validations"),
    [
        (("train", 1), {}, 2, 0),  # after its batch
        (("train", 5), {"val_check_interval": 6}, 7, 1),  # validation is due: after the batch that follows it
        (("val", 0), {"val_check_interval": 6}, 7, 1),  # the validation is finished
        (("train", 11), {"max_epochs": 2}, 12, 1),  # the last batch: at the end of the epoch, with its validation
        (("train", 3), {"accumulate_grad_batches": 3}, 2, 0),  # after the batch that completes the step
    ],
)
@pytest.mark.parametrize("every", [None, 5])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_fit_at_a_safe_point(tmp_path, where, options, step, validations, signum, every):
    module = Signalled(where, signum)
    newest = [RunCheckpoint(tmp_path, "last", every_n_train_steps=every)] if every else []
    before = signal.getsignal(signal.SIGINT)
    options = {"max_epochs": 1} | options
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path, callbacks=[Preemption(), *newest, RunCheckpoint(tmp_path, "last")], **options,
    )  # fmt: skip
    loader = DataLoader(torch.randn(24, 3), batch_size=2)
    with pytest.raises(SystemExit):
        trainer.fit(module, loader, loader)
    assert signal.getsignal(signal.SIGINT) is before
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == step
    assert checkpoint["loops"]["fit_loop"]["epoch_progress"]["total"]["ready"] == 1, "the next epoch has not begun"
    assert module.validations == validations


def test_preemption_does_nothing_outside_the_main_thread(tmp_path):
    done = []
    thread = threading.Thread(target=lambda: done.append(fit(Stranger(), tmp_path, [Preemption()])))
    thread.start()
    thread.join()
    assert done[0].global_step == 6


def test_one_interrupt_ends_the_run_after_its_batch_and_the_handler_is_put_back(tmp_path):
    class Interrupted(Stranger):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                signal.raise_signal(signal.SIGINT)
            return super().training_step(batch, batch_idx)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as caught:
        fit(Interrupted(), tmp_path, [Preemption(), RunCheckpoint(tmp_path, "last")])
    assert isinstance(caught.value.__context__, KeyboardInterrupt)
    assert signal.getsignal(signal.SIGINT) is before
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 3, "the batch was finished"

    fit(Stranger(), tmp_path, [Preemption()])
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_interrupt_ends_at_once_and_leaves_the_half_step_out(tmp_path):
    class Impatient(Stranger):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
            return super().training_step(batch, batch_idx)

    with pytest.raises(SystemExit):
        fit(Impatient(), tmp_path, [Preemption(), RunCheckpoint(tmp_path, "last", every_n_train_steps=1)])
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 2
