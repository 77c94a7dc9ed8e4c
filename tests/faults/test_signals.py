"""Signals in every phase of a command: the documented exit code, a checkpoint that loads, no process left."""

import signal
import time
from pathlib import Path

import pytest
import torch

SMOKE = ("--config", "rocp/smoke")
PHASES = """\
import time
from pathlib import Path
from fulgurite.datamodules import DigitsHazard
from lightning.pytorch import Callback

def pause():
    Path("reached").touch()
    end = time.monotonic() + 1.5
    while time.monotonic() < end:  # a signal handler that returns lets a sleep go on
        time.sleep(0.05)

class Pause(Callback):
    \"\"\"Says that a phase is reached, and stays in it long enough to be signalled.\"\"\"

    def __init__(self, phase: str) -> None:
        self.phase, self.done = phase, False

    def _in(self, phase):
        if phase == self.phase and not self.done:
            self.done = True
            pause()

    def on_train_batch_start(self, trainer, *args):
        if trainer.current_epoch == 1:
            self._in("train")

    def on_validation_batch_start(self, trainer, *args):
        if trainer.state.fn == "validate" or trainer.current_epoch == 1:
            self._in("validation")

    def on_save_checkpoint(self, trainer, *args):
        if trainer.current_epoch == 1:
            self._in("checkpoint")

    def on_test_batch_start(self, *args):
        self._in("test")

    def on_predict_batch_start(self, *args):
        self._in("predict")

class SlowCalibration(DigitsHazard):
    def calibration_dataloader(self):
        pause()
        return super().calibration_dataloader()
"""
ENDS = {signal.SIGINT: (130, "error: ended by Ctrl-C"), signal.SIGTERM: (143, "error: ended by SIGTERM")}

pytestmark = pytest.mark.fault


def wait_until_reached(command) -> None:
    command.wait_for(Path("reached").exists, 90)
    time.sleep(0.2)


def newest() -> Path:
    (path,) = Path("runs").rglob("last.ckpt")
    return path


@pytest.mark.parametrize("phase", ["train", "validation", "checkpoint"])
@pytest.mark.parametrize("signum", ENDS)
def test_a_signal_in_a_fit_ends_it_with_its_code_and_it_goes_on(background, fulgurite_cli, trust, phase, signum):
    trust("phases", PHASES)
    pause = ("--trainer.callbacks+=phases.Pause", f"--trainer.callbacks.phase={phase}")
    command = background("fit", *SMOKE, *pause, "--data.num_workers", "1")
    wait_until_reached(command)
    command.process.send_signal(signum)
    code, _, err = command.finish()
    assert code == ENDS[signum][0], err
    assert err.startswith(ENDS[signum][1])
    assert "continue with: fulgurite fit --ckpt_path runs/rocp/smoke/" in err
    command.assert_no_orphans()
    assert 8 <= torch.load(newest(), weights_only=True)["global_step"] <= 24
    assert not list(Path("runs").rglob("results.json"))
    outcome = fulgurite_cli("fit", "--ckpt_path", str(newest()), "--trainer.callbacks", "null")
    assert outcome.code == 0, outcome.err
    assert torch.load(newest(), weights_only=True)["global_step"] == 48


@pytest.mark.parametrize("phase", ["train", "checkpoint"])
def test_a_second_interrupt_ends_a_fit_at_once_and_leaves_the_last_whole_state(background, fulgurite_cli, trust, phase):
    trust("phases", PHASES)
    command = background("fit", *SMOKE, "--trainer.callbacks+=phases.Pause", f"--trainer.callbacks.phase={phase}")
    wait_until_reached(command)
    began = time.monotonic()
    command.process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    command.process.send_signal(signal.SIGINT)
    code, _, err = command.finish()
    assert code == 130
    assert err.startswith("error: ended by Ctrl-C")
    assert time.monotonic() - began < 30
    command.assert_no_orphans()
    assert torch.load(newest(), weights_only=True)["global_step"] == 8, "the state at the end of the first epoch"
    assert {path.name for path in newest().parent.iterdir()} <= {"best.ckpt", "last.ckpt"}, "no half of a file is left"
    assert fulgurite_cli("fit", "--ckpt_path", str(newest()), "--trainer.callbacks", "null").code == 0


@pytest.mark.parametrize(
    ("command", "phase"),
    [("test", "test"), ("predict", "predict"), ("validate", "validation"), ("test", "calibration")],
)
@pytest.mark.parametrize("signum", ENDS)
def test_a_signal_in_an_evaluation_ends_it_and_leaves_no_result(
    background, run_folder, trust, contents, command, phase, signum
):
    trust("phases", PHASES)
    before = contents(run_folder)
    options = ("--trainer.callbacks+=phases.Pause", f"--trainer.callbacks.phase={phase}")
    if phase == "calibration":
        options = ("--data", "phases.SlowCalibration", "--trainer.callbacks+=ConformalCalibration",
                   "--trainer.callbacks.loss_matrix=[[0,8,8,6],[50,0,7,3],[50,7,0,2],[50,6,6,0]]")  # fmt: skip
    process = background(command, "--ckpt_path", str(run_folder / "checkpoints/best.ckpt"), *options)
    wait_until_reached(process)
    process.process.send_signal(signum)
    code, _, err = process.finish()
    assert code == ENDS[signum][0], err
    assert err.startswith(ENDS[signum][1])
    process.assert_no_orphans()
    after = contents(run_folder)
    assert {name: value for name, value in after.items() if not name.startswith(command)} == before
    assert not [name for name in after if name.startswith(command) and name.endswith(("results.json", ".npz"))]


def test_an_interrupt_while_the_command_starts_is_one_line(background):
    command = background("fit", *SMOKE)
    time.sleep(1.5)
    command.process.send_signal(signal.SIGINT)
    code, _, err = command.finish()
    assert code == 130
    assert err == "error: ended by Ctrl-C\n"
    assert not list(Path("runs").rglob("*"))


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGHUP])
def test_another_signal_ends_a_fit_as_the_system_does_and_the_last_state_is_whole(
    background, fulgurite_cli, trust, signum
):
    """Outside of SLURM they have no meaning here, and are left to the system: docs/faults.md says so."""
    trust("phases", PHASES)
    command = background("fit", *SMOKE, "--trainer.callbacks+=phases.Pause", "--trainer.callbacks.phase=train")
    wait_until_reached(command)
    command.process.send_signal(signum)
    assert command.finish()[0] == -signum
    command.assert_no_orphans()
    assert torch.load(newest(), weights_only=True)["global_step"] == 8
    assert fulgurite_cli("fit", "--ckpt_path", str(newest()), "--trainer.callbacks", "null").code == 0
