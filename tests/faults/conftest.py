"""Fixtures of the fault tests: a finished run to damage, processes to disturb, and what is left on disk."""

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fulgurite.cli import main

SMOKE = ("--config", "rocp/smoke")
COMMAND = (sys.executable, "-m", "fulgurite.cli")


@pytest.fixture(scope="session")
def finished_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder ``runs`` that a fit of two epochs left."""
    folder, before = tmp_path_factory.mktemp("finished"), Path.cwd()
    os.chdir(folder)
    try:
        assert main(["fit", *SMOKE, "--trainer.max_epochs", "2"]) == 0
    finally:
        os.chdir(before)
    return folder / "runs"


@pytest.fixture
def run_folder(workspace: Path, finished_runs: Path) -> Path:
    """A copy of the finished run in the working folder: the run's folder, relative to it."""
    shutil.copytree(finished_runs, "runs", symlinks=True)
    experiment = Path("runs/rocp/smoke")
    return experiment / (experiment / "latest").readlink()


@pytest.fixture
def assert_short_error() -> Callable[..., None]:
    """Assert that a command ended with a code and a message of at most ten lines, without a traceback."""

    def check(outcome: Any, *messages: str, code: int = 2) -> None:
        assert outcome.code == code, outcome.err
        assert outcome.err.startswith("error: "), outcome.err
        for message in messages:
            assert message in outcome.err
        assert len(outcome.err.splitlines()) <= 10
        assert "Traceback" not in outcome.err

    return check


@pytest.fixture
def contents() -> Callable[[Path], dict[str, str]]:
    """The state of a folder: relative path -> digest of the file, target of the link, or ``folder``."""

    def read(folder: Path) -> dict[str, str]:
        state = {}
        for path in sorted(folder.rglob("*")):
            if path.is_symlink():
                value = f"-> {path.readlink()}"
            elif path.is_file():
                value = hashlib.sha256(path.read_bytes()).hexdigest()
            else:
                value = "folder"
            state[str(path.relative_to(folder))] = value
        return state

    return read


@pytest.fixture
def trust(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Write a module of the user's own into the working folder, importable here and in new processes."""
    monkeypatch.syspath_prepend(str(workspace))
    monkeypatch.setenv("PYTHONPATH", str(workspace))

    def write(name: str, text: str) -> None:
        (workspace / f"{name}.py").write_text(text)
        monkeypatch.setenv("FULGURITE_TRUST", name)
        monkeypatch.delitem(sys.modules, name, raising=False)

    yield write  # type: ignore[misc]
    for name in [
        name for name, module in sys.modules.items() if str(workspace) in str(getattr(module, "__file__", ""))
    ]:
        del sys.modules[name]


class Background:
    """A command that runs beside the test, in a session of its own."""

    def __init__(self, arguments: tuple[str, ...], folder: Path, **options: Any) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True, **options,
        )  # fmt: skip

    def wait_for(self, condition: Callable[[], object], seconds: float = 60) -> None:
        """Wait until something is true, while the command runs."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "it did not come to pass"
            time.sleep(0.005)

    def finish(self, seconds: float = 60) -> tuple[int, str, str]:
        """Wait for the end: exit code, stdout, stderr."""
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err

    def members(self) -> list[int]:
        """The processes of the command's session that are alive."""
        alive = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                except (OSError, ValueError):
                    continue
                if int(session) == self.process.pid and state != "Z":
                    alive.append(int(entry.name))
        return alive

    def assert_no_orphans(self, seconds: float = 10) -> None:
        deadline = time.monotonic() + seconds
        while self.members():
            assert time.monotonic() < deadline, f"left behind: {self.members()}"
            time.sleep(0.1)

    def kill(self) -> None:
        for pid in self.members():
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        self.process.communicate(timeout=30)


@pytest.fixture
def background(workspace: Path) -> Iterator[Callable[..., Background]]:
    """Start a command in the working folder; whatever is left of it is killed at the end."""
    started: list[Background] = []

    def start(*arguments: str, **options: Any) -> Background:
        started.append(Background(arguments, workspace, **options))
        return started[-1]

    yield start
    for command in started:
        command.kill()
