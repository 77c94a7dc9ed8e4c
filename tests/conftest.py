"""Fixtures: the real command line in this process or a fresh one, and the reference folders."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

# Before torch is imported, here and in every process that a test starts.
os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", MPLBACKEND="Agg")

import torch

import fulgurite
from fulgurite.cli import main

torch.set_num_threads(1)
ROOT = Path(fulgurite.__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    """The README's method table and the ledger of claims are generated; this writes them."""
    parser.addoption(
        "--update-readme", action="store_true", help="write the generated parts of README.md and the ledger"
    )


@dataclass(frozen=True)
class Outcome:
    """What a command gave back."""

    code: int
    out: str
    err: str


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def fulgurite_cli(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Run a command in this process: ``fulgurite_cli("fit", "--config", "rocp/smoke")``."""
    monkeypatch.setattr(sys, "argv", ["fulgurite"])
    for name in ("LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"):
        # What Lightning's launcher leaves behind would tell the next command that its processes run already.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def run(*arguments: str) -> Outcome:
        capsys.readouterr()
        code = main(arguments)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture
def fresh_process(workspace: Path) -> Callable[..., Outcome]:
    """Run a command in a process of its own, in the empty working folder."""

    def run(*arguments: str, **environment: str) -> Outcome:
        command = [sys.executable, "-m", "fulgurite.cli", *arguments]
        done = subprocess.run(
            command, cwd=workspace, capture_output=True, text=True, timeout=180, env={**os.environ, **environment}
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def reference_folder() -> Callable[[str], Path]:
    """The folder with a method's reference vectors; skips where it is absent.

    It lies below ``FULGURITE_REFERENCE``, or else in ``../shared/reference`` beside the checkout.
    """

    def folder(slug: str) -> Path:
        base = Path(os.environ.get("FULGURITE_REFERENCE", ROOT.resolve().parent / "shared" / "reference"))
        if not (base / slug).is_dir():
            pytest.skip(
                f"no reference vectors in {base / slug}; set FULGURITE_REFERENCE to the folder that has {slug}/"
            )
        return base / slug

    return folder


@pytest.fixture
def assert_equal_state() -> Callable[[Path, Path], None]:
    """Assert that two checkpoint files hold the same bits: weights, optimisers, schedulers, random state, progress."""

    def equal(one: object, other: object, where: str) -> None:
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other), where
        elif isinstance(one, dict):
            assert one.keys() == other.keys(), where
            for key in one:
                equal(one[key], other[key], f"{where}.{key}")
        elif isinstance(one, list):
            assert len(one) == len(other), where
            for position, pair in enumerate(zip(one, other, strict=True)):
                equal(*pair, f"{where}.{position}")
        else:
            assert one == other, where

    def compare(one: Path, other: Path) -> None:
        states = [torch.load(path, weights_only=True) for path in (one, other)]
        for part in ("state_dict", "optimizer_states", "lr_schedulers", "random_state", "epoch", "global_step"):
            equal(states[0][part], states[1][part], part)

    return compare
