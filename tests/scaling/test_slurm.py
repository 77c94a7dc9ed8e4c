"""Under SLURM, played by environment variables and an `scontrol` that notes its arguments."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

EPOCHS = 80
FIT = ("fit", "--config", "rocp/smoke", "--config", "trainer/slurm", "--trainer.max_epochs", str(EPOCHS))


@pytest.fixture
def slurm(tmp_path):
    """The variables that `srun` sets for a task, by its number and the number of tasks; `scontrol` is on the path."""
    commands = tmp_path / "bin"
    commands.mkdir()
    scontrol = commands / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\ntest ! -e {tmp_path}/refuse\n')
    scontrol.chmod(0o755)

    def variables(task=0, tasks=1):
        return {
            "PATH": f"{commands}:{os.environ['PATH']}", "SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "4711",
            "SLURM_NTASKS": str(tasks), "SLURM_NTASKS_PER_NODE": str(tasks), "SLURM_NNODES": "1",
            "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task), "SLURM_NODEID": "0", "MASTER_ADDR": "127.0.0.1",
        }  # fmt: skip

    return variables


def wait_for_rows(folder, rows=4):
    metrics = Path(folder) / "runs" / "rocp" / "smoke" / "4711" / "metrics.csv"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (metrics.exists() and len(metrics.read_text().splitlines()) > rows):
        time.sleep(0.02)


def test_a_job_whose_time_ends_is_requeued_and_ends_like_the_uninterrupted_one(
    start, launch, here, slurm, tmp_path, assert_equal_state
):
    job = start(*FIT, folder=tmp_path, **slurm())
    wait_for_rows(tmp_path)
    job.process.send_signal(signal.SIGUSR1)
    ended = job.wait()
    assert ended.code == 143, ended.err
    last = "runs/rocp/smoke/4711/checkpoints/last.ckpt"
    assert f"ended by the job's time limit; requeued, it goes on from {last}" in ended.err
    assert (tmp_path / "asked").read_text() == "requeue 4711\n"
    reached = torch.load(tmp_path / last, weights_only=True)["global_step"]
    assert 0 < reached < EPOCHS * 8, "the signal came too late or too early to show anything"

    again = launch(*FIT, folder=tmp_path, **slurm())
    assert f"from checkpoint {last}" in again.out
    here(tmp_path, *FIT, "--trainer.default_root_dir", "whole")
    (whole,) = (tmp_path / "whole").rglob("last.ckpt")
    assert_equal_state(whole, tmp_path / last)
    rows = [path.parents[1].joinpath("metrics.csv").read_text().splitlines()[-1] for path in (whole, tmp_path / last)]
    assert rows[0] == rows[1]


def test_the_signal_to_one_task_requeues_the_job_of_all(start, slurm, free_port, tmp_path):
    (tmp_path / "refuse").touch()
    tasks = [
        start(*FIT, "--config", "trainer/ddp", folder=tmp_path, **slurm(task, 2) | {"MASTER_PORT": free_port})
        for task in (0, 1)
    ]
    wait_for_rows(tmp_path)
    tasks[1].process.send_signal(signal.SIGUSR1)
    first, second = (task.wait() for task in tasks)
    assert (first.code, second.code) == (143, 143), first.err + second.err
    assert (tmp_path / "asked").read_text() == "requeue 4711\n", "one of them asks"
    last = "runs/rocp/smoke/4711/checkpoints/last.ckpt"
    assert "SLURM did not requeue it: scontrol requeue 4711 ended with 1" in first.err
    assert f"continue with: fulgurite fit --ckpt_path {last}" in first.err
    assert not second.err
    assert len(torch.load(tmp_path / last, weights_only=True)["random_state"]) == 2


def test_a_job_may_run_several_fits_each_in_its_folder(here, slurm, tmp_path, monkeypatch):
    for name, value in slurm().items():
        monkeypatch.setenv(name, value)
    for _ in range(2):  # the second time it was requeued
        for seed in ("0", "1"):
            here(tmp_path, "fit", "--config", "rocp/smoke", "--trainer.max_epochs", "1", "--seed_everything", seed)
    runs = {path.name for path in (tmp_path / "runs" / "rocp" / "smoke").iterdir() if not path.is_symlink()}
    assert runs == {"4711", "4711-2"}
