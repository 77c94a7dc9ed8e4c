"""Under SLURM: a requeued job finds its run and goes on in it, and a job whose time ends asks to be requeued."""

import os
import subprocess
from itertools import count
from pathlib import Path

import torch

from fulgurite.command_line.errors import print_error
from fulgurite.command_line.output import process_rank
from fulgurite.command_line.runs import CHECKPOINT_FOLDER, CONFIG_FILE, NEWEST, make_folder
from fulgurite.storage import write_text

SCONTROL_TIMEOUT = 30  # seconds; the time limit is close


def slurm_job() -> str | None:
    """Name of the SLURM job, the same when it is requeued; None outside of one and in an interactive one."""
    if os.environ.get("SLURM_JOB_NAME") in (None, "bash", "interactive"):
        return None
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID', 0)}"
    return os.environ.get("SLURM_JOB_ID")


def run_of_job(parent: Path, job: str, config: str, create: bool) -> Path:
    """The folder of the run that a job makes from a config; a requeued job gets the one that it began.

    A job may run several fits: the first is named by the job, others get a number.

    Args:
        parent: folder that it lies in.
        job: name of the job.
        config: the run's resolved config, by which it is known again.
        create: make the folder where there is none (rank 0 alone does).

    Raises:
        UsageError: the folder cannot be made.
    """
    for number in count(1):
        run = parent / (job if number == 1 else f"{job}-{number}")
        if create and make_folder(run):
            write_text(run / CONFIG_FILE, config)
            return run
        file = run / CONFIG_FILE
        if file.is_file():
            if file.read_text(encoding="utf-8") == config:
                return run
        elif not create:
            return run  # the first rank is about to make it
    raise AssertionError


def requeue_job(run: Path | None) -> int:
    """Ask SLURM to start the job anew, and say where it will go on; returns the exit code.

    Every rank calls this: none may end before the first one has asked, since SLURM may end a job when a task fails.
    """
    problem = _call_scontrol() if process_rank() == 0 else ""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    if process_rank() == 0:
        newest = run / CHECKPOINT_FOLDER / NEWEST if run else None
        saved = newest is not None and newest.is_file()
        if problem:
            then = f"continue with: fulgurite fit --ckpt_path {newest}" if saved else "nothing was saved"
            print_error(f"ended by the job's time limit; SLURM did not requeue it: {problem}\n{then}")
        else:
            print_error(f"ended by the job's time limit; requeued, it goes on from {newest if saved else 'the start'}")
    return 143


def _call_scontrol() -> str:
    """What went wrong; empty if nothing did."""
    command = ["scontrol", "requeue", str(slurm_job())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SCONTROL_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{' '.join(command)}: {error}"
    return "" if done.returncode == 0 else done.stderr.strip() or f"{' '.join(command)} ended with {done.returncode}"
