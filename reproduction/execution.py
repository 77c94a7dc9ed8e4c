"""Running a plan: child processes side by side, what is finished kept, what failed shown."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fulgurite.reproduction.plan import Job, Plan
from fulgurite.storage import write_text

JOB_FILE = "run.json"
RESULT_FILE = "result.json"
FAILURE_FILE = "failure.json"
LOG_FILE = "log.txt"
GRACE = 20.0  # seconds that an interrupted run has to write its checkpoint


@dataclass(frozen=True)
class Failure:
    """A job that gave no result.

    Args:
        exit_code: of its process, negative for a signal.
        error: the last lines that it printed.
    """

    exit_code: int
    error: str


@dataclass(frozen=True)
class Outcome:
    """What is known of a job.

    Args:
        job: the job.
        result: what it left; None if it did not finish.
        failure: how it failed; None if it did not, or was not run.
    """

    job: Job
    result: Mapping[str, Any] | None = None
    failure: Failure | None = None

    def value(self, metric: str) -> float | None:
        """A metric of the result; None where it is missing or not finite."""
        if self.result is None:
            return None
        if metric in ("run/seconds", "run/peak_memory_mib"):
            return float(self.result[metric.removeprefix("run/")])
        value = self.result["metrics"].get(metric)
        # Metrics are float32, printed with the digits of float64: seven of them mean something.
        return None if value is None else float(f"{value:.7g}")


def outcomes_of(plan: Plan, root: Path) -> dict[str, Outcome]:
    """Key -> outcome of every job of a plan, from the files below ``root``."""
    return {key: outcome_of(job, root) for key, job in plan.jobs.items()}


def outcome_of(job: Job, root: Path) -> Outcome:
    """The outcome of a job, from its files."""
    folder = root / job.key
    if (folder / RESULT_FILE).is_file():
        return Outcome(job, result=json.loads((folder / RESULT_FILE).read_text(encoding="utf-8")))
    if (folder / FAILURE_FILE).is_file():
        return Outcome(job, failure=Failure(**json.loads((folder / FAILURE_FILE).read_text(encoding="utf-8"))))
    return Outcome(job)


def execute(
    plan: Plan, root: Path, parallel: int, fresh: bool, report: Callable[[Outcome], None]
) -> dict[str, Outcome]:
    """Run every job that has no result yet.

    Args:
        plan: the jobs.
        root: the folder of all jobs; each has one of its own, by its key.
        parallel: processes at a time.
        fresh: forget earlier results.
        report: called for each job that ended.

    Returns:
        Key -> outcome.

    Raises:
        KeyboardInterrupt: Ctrl-C; the running jobs were ended first.
        TerminationError: SIGTERM, likewise.
    """
    if fresh:
        for key in plan.jobs:
            shutil.rmtree(root / key, ignore_errors=True)
    outcomes = outcomes_of(plan, root)
    waiting = [job for key, job in plan.jobs.items() if outcomes[key].result is None]
    running: dict[str, tuple[Job, subprocess.Popen[bytes]]] = {}
    with sigterm_as_exception():
        try:
            while waiting or running:
                for job in startable(waiting, running):
                    if len(running) == parallel:
                        break
                    waiting.remove(job)
                    if job.source and outcomes[job.source.key].result is None:
                        outcomes[job.key] = Outcome(job, failure=Failure(1, f"{job.source.label} failed"))
                        report(outcomes[job.key])
                    else:
                        running[job.key] = (job, start(job, root, parallel))
                for job, process in list(running.values()):
                    if process.poll() is not None:
                        del running[job.key]
                        outcomes[job.key] = ended(job, root, process.returncode)
                        report(outcomes[job.key])
                time.sleep(0.05)
        finally:
            stop([process for _, process in running.values()])
    return outcomes


def startable(waiting: list[Job], running: Mapping[str, Any]) -> list[Job]:
    """The waiting jobs whose source has ended, if they have one."""
    pending = {job.key for job in waiting} | running.keys()
    return [job for job in waiting if job.source is None or job.source.key not in pending]


def start(job: Job, root: Path, parallel: int) -> subprocess.Popen[bytes]:
    """Start the process of a job."""
    folder = root / job.key
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FAILURE_FILE).unlink(missing_ok=True)
    source = None
    if job.run and job.run.checkpoint_from and job.source:
        wanted = job.run.checkpoint_from
        source = {"folder": str((root / job.source.key).resolve()), "which": wanted.which, "option": wanted.option}
    task = {
        "key": job.key,
        "name": job.name,
        "seed": job.seed,
        "tests": list(job.tests),
        "arguments": job.arguments(folder.resolve()) if job.run else [],
        "commands": list(job.run.commands) if job.run else [],
        "checkpoint": job.run.checkpoint if job.run else None,
        "checkpoint_from": source,
    }
    write_text(folder / JOB_FILE, json.dumps(task, indent=2) + "\n")
    threads = str(max(1, (os.cpu_count() or 1) // parallel))
    environment = {"OMP_NUM_THREADS": threads, "MPLBACKEND": "Agg", **os.environ}
    with (folder / LOG_FILE).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "fulgurite.reproduction.worker", str(folder / JOB_FILE)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C in the terminal is ours to hand on
        )


def ended(job: Job, root: Path, exit_code: int) -> Outcome:
    """The outcome of a job whose process ended; a failure is kept for those who read the results later."""
    outcome = outcome_of(job, root)
    if outcome.result is None:
        failure = Failure(exit_code, last_words(root / job.key / LOG_FILE))
        write_text(root / job.key / FAILURE_FILE, json.dumps({"exit_code": exit_code, "error": failure.error}) + "\n")
        outcome = Outcome(job, failure=failure)
    return outcome


def last_words(log: Path, lines: int = 3) -> str:
    """The last lines of a log: from the last ``error:`` on, if there is one near the end."""
    words = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    starts = [place for place, line in enumerate(words) if line.startswith("error:")]
    return "\n".join(words[starts[-1] :][:lines] if starts and starts[-1] >= len(words) - 10 else words[-lines:])


def stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """Ask processes to end, and end them after a time of grace."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + GRACE
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with its loader processes
            process.wait()


class TerminationError(Exception):
    """SIGTERM ended the command."""


@contextmanager
def sigterm_as_exception() -> Iterator[None]:
    """Raise :class:`TerminationError` on SIGTERM."""

    def raise_it(*_: Any) -> None:
        raise TerminationError

    before = signal.signal(signal.SIGTERM, raise_it)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
