"""Several processes at once, and loader processes that fail or are killed."""

import os
import signal
from pathlib import Path

import pytest
import torch

SMOKE = ("--config", "rocp/smoke")
SHORT = ("fit", *SMOKE, "--trainer.max_epochs", "1")

FRAGILE = """\
import os, signal
from fulgurite.datamodules import DigitsHazard
from torch.utils.data import Dataset

class Fragile(Dataset):
    def __init__(self, inner, how):
        self.inner, self.how = inner, how

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        if index == 7:
            if self.how == "raise":
                raise OSError("the disk of image 7 is gone")
            if self.how == "exhaust":
                raise MemoryError("no memory for image 7")
            os.kill(os.getpid(), signal.SIGKILL)
        return self.inner[index]

class FragileDigits(DigitsHazard):
    def __init__(self, how: str, batch_size: int = 32, num_workers: int = 2, seed: int | None = None):
        super().__init__(batch_size=batch_size, num_workers=num_workers, seed=seed)
        self.how = how

    def split(self, name):
        inner = super().split(name)
        return Fragile(inner, self.how) if name == "train" else inner
"""
CAUSES = {
    "raise": "OSError: the disk of image 7 is gone",
    "exhaust": "MemoryError: no memory for image 7",
    "kill": "is killed by signal: Killed",
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", *(pytest.param(how, marks=pytest.mark.fault) for how in ("raise", "exhaust"))])
def test_a_loader_process_that_ends_takes_the_run_with_it_and_shows_why(background, trust, how):
    trust("fragile", FRAGILE)
    command = background("fit", *SMOKE, "--data", "fragile.FragileDigits", "--data.how", how)
    code, _, err = command.finish(120)
    assert code == 1
    assert CAUSES[how] in err
    command.assert_no_orphans()
    assert not list(Path("runs").rglob("results.json"))
    for path in Path("runs").rglob("*.ckpt"):
        torch.load(path, weights_only=True)


@pytest.mark.fault
def test_a_killed_run_leaves_no_loader_process_behind_and_goes_on(background, fulgurite_cli):
    command = background("fit", *SMOKE, "--trainer.max_epochs", "400", "--data.num_workers", "2")
    command.wait_for(lambda: list(Path("runs").rglob("last.ckpt")) and len(command.members()) > 2)
    os.kill(command.process.pid, signal.SIGKILL)
    command.process.wait(10)
    command.assert_no_orphans()
    (last,) = Path("runs").rglob("last.ckpt")
    reached = torch.load(last, weights_only=True)["epoch"]
    outcome = fulgurite_cli("fit", *SMOKE, "--ckpt_path", "last", "--trainer.max_epochs", str(reached + 2))
    assert outcome.code == 0, outcome.err


@pytest.mark.fault
def test_two_fits_of_one_experiment_that_begin_together_have_a_run_each(background):
    commands = [background(*SHORT) for _ in range(2)]
    assert [command.finish(120)[0] for command in commands] == [0, 0]
    experiment = Path("runs/rocp/smoke")
    runs = [path for path in experiment.iterdir() if not path.is_symlink()]
    assert len(runs) == 2
    for run in runs:
        assert {path.name for path in run.iterdir()} >= {"config.yaml", "results.json", "metrics.csv", "checkpoints"}
    assert experiment / (experiment / "latest").readlink() in runs


@pytest.mark.fault
def test_of_two_fits_that_go_on_in_one_run_one_is_refused(background, run_folder):
    go_on = ("fit", *SMOKE, "--ckpt_path", "last", "--trainer.max_epochs", "150")
    first = background(*go_on)
    first.wait_for((run_folder / ".lock").exists)
    second = background(*go_on)
    code, _, err = second.finish(120)
    assert code == 2, err
    assert "is in use: another fit goes on in it" in err
    assert len(err.splitlines()) == 1
    assert first.finish(120)[0] == 0
    assert torch.load(run_folder / "checkpoints/last.ckpt", weights_only=True)["epoch"] == 149
