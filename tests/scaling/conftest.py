"""Fixtures: a command in a process group of its own, which never outlives its test, or in this process."""

import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from fulgurite.cli import main

TIMEOUT = 120  # seconds; a command in two processes takes about ten


@dataclass(frozen=True)
class Ended:
    """What a job left: the first process's exit code, what all of them wrote, and the processes that still run."""

    code: int
    out: str
    err: str
    left: list[int]


@dataclass
class Job:
    """A command that runs in a process group of its own."""

    process: "subprocess.Popen[str]"
    timeout: float = TIMEOUT

    def wait(self) -> Ended:
        """Wait for its end; on a time-out the whole group is killed and the test fails."""
        try:
            out, err = self.process.communicate(timeout=self.timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            out, err = self.process.communicate()
            pytest.fail(f"no end after {self.timeout} s\n{out}\n{err}")
        return Ended(self.process.returncode, out, err, group(self.process.pid))

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def group(leader: int) -> list[int]:
    """The processes of a group that run; one that ended and waits for its parent to ask does not."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, rest = stat.read_text().split(" (", 1)
        except OSError:
            continue  # it ended just now
        state, _, its_group = rest.rpartition(") ")[2].split()[:3]
        if int(its_group) == leader and state != "Z":
            members.append(int(pid))
    return members


def port() -> str:
    """A port that nothing listens on, below those that the system hands out to others in the meantime."""
    while True:
        number = random.randrange(20000, 32000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", number))
            return str(number)


@pytest.fixture
def free_port() -> str:
    """The number of a port that nothing listens on."""
    return port()


@pytest.fixture(scope="session")
def start() -> Iterator[Callable[..., Job]]:
    """Start a command: ``start("fit", "--config", "rocp/smoke", folder=path)``; a keyword in capitals is a variable."""
    jobs: list[Job] = []

    def begin(*arguments: str, folder: Path, program: Sequence[str] = ("-m", "fulgurite.cli"), **variables: str) -> Job:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": port(), **variables}
        process = subprocess.Popen(
            [sys.executable, *program, *arguments], cwd=folder, env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        jobs.append(Job(process))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.kill()


@pytest.fixture(scope="session")
def launch(start: Callable[..., Job]) -> Callable[..., Ended]:
    """Run a command to its end, which must be a good one."""

    def run(*arguments: str, **options: object) -> Ended:
        ended = start(*arguments, **options).wait()
        assert ended.code == 0, ended.err
        return ended

    return run


@pytest.fixture(scope="session")
def here() -> Callable[..., None]:
    """Run a command in this process and a folder, to a good end: ``here(path, "fit", ...)``."""

    def run(folder: Path, *arguments: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setattr(sys, "argv", ["fulgurite"])
            assert main(list(arguments)) == 0

    return run
