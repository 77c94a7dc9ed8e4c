"""Disks that are full, limited or read-only: a clear error, and the last whole checkpoint stays."""

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

SMOKE = ("--config", "rocp/smoke")
LIMIT = 800_000  # bytes: the events of a run fit in, a checkpoint of 1.8 MB does not

pytestmark = [
    pytest.mark.fault,
    # TensorBoard's own thread, whose events do not fit either
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]


@pytest.fixture
def disk(workspace: Path) -> Iterator:
    """Mount a small file system at ``disk`` in the working folder; skips where that is not allowed."""
    folder = workspace / "disk"
    folder.mkdir()

    def mount(options: str) -> Path:
        line = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if os.geteuid() != 0 or subprocess.run(line, capture_output=True, timeout=10).returncode != 0:
            pytest.skip("mounting a small file system needs the rights of root")
        return folder

    yield mount
    subprocess.run(["umount", str(folder)], capture_output=True, timeout=10)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True, timeout=10)


def assert_whole(run: Path) -> None:
    """All files under the names of checkpoints load, and nothing half-written is left beside them."""
    checkpoints = list((run / "checkpoints").iterdir())
    assert checkpoints
    for path in checkpoints:
        assert path.suffix == ".ckpt"
        assert not path.name.startswith("."), f"{path} is half of a file"
        torch.load(path, weights_only=True)


def test_a_disk_that_fills_up_ends_the_run_with_its_last_checkpoint_whole(fulgurite_cli, disk, assert_short_error):
    folder = disk("size=12m")
    small = ("--model.hidden", "[512]", "--trainer.default_root_dir", "disk/runs")
    assert fulgurite_cli("fit", *SMOKE, *small, "--trainer.max_epochs", "2").code == 0
    run = Path("disk/runs/rocp/smoke") / Path("disk/runs/rocp/smoke/latest").readlink()
    before = torch.load(run / "checkpoints/last.ckpt", weights_only=True)["global_step"]
    room = shutil.disk_usage(folder).free
    (folder / "filler").write_bytes(bytes(room - 300_000))
    outcome = fulgurite_cli("fit", *SMOKE, *small, "--ckpt_path", "last", "--trainer.max_epochs", "4")
    assert_short_error(outcome, f"cannot write below {run}", "the last checkpoint that was written is whole", code=1)
    assert_whole(run)
    (folder / "filler").unlink()
    outcome = fulgurite_cli("fit", *SMOKE, *small, "--ckpt_path", "last", "--trainer.max_epochs", "4")
    assert outcome.code == 0, outcome.err
    assert torch.load(run / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 2 * before


def test_a_full_disk_at_the_start_is_named(fulgurite_cli, disk, assert_short_error):
    folder = disk("size=1m")
    (folder / "filler").write_bytes(bytes(shutil.disk_usage(folder).free))
    outcome = fulgurite_cli("fit", *SMOKE, "--trainer.default_root_dir", "disk/runs", "--trainer.max_epochs", "1")
    assert_short_error(outcome, "No space left on device", code=1)
    assert not list(folder.rglob("*.ckpt"))


def test_a_read_only_root_is_refused_before_training(fulgurite_cli, disk, assert_short_error):
    disk("size=1m,ro")
    outcome = fulgurite_cli("fit", *SMOKE, "--trainer.default_root_dir", "disk/runs")
    assert_short_error(outcome, "cannot be made: Read-only file system", "--trainer.default_root_dir")


def test_a_run_on_a_read_only_disk_is_tested_from_a_copy_of_its_checkpoint(fulgurite_cli, disk, assert_short_error):
    folder = disk("size=12m")
    fit = ("fit", *SMOKE, "--trainer.default_root_dir", "disk/runs", "--trainer.max_epochs", "1")
    assert fulgurite_cli(*fit).code == 0
    remount(folder, "ro")
    (checkpoint,) = folder.rglob("best.ckpt")
    assert_short_error(fulgurite_cli("test", "--ckpt_path", str(checkpoint)), "copy the checkpoint to a folder")
    newest = str(checkpoint.with_name("last.ckpt"))
    outcome = fulgurite_cli("fit", "--ckpt_path", newest, "--trainer.max_epochs", "2")
    assert_short_error(outcome, "cannot be gone on with: Read-only file system", "copy the checkpoint elsewhere")
    shutil.copy(checkpoint, "copy.ckpt")
    assert fulgurite_cli("test", "--ckpt_path", "copy.ckpt").code == 0


def test_a_limit_on_the_size_of_files_ends_the_run_with_a_short_error(background):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT))

    command = background("fit", *SMOKE, "--model.hidden", "[2048]", "--trainer.max_epochs", "2", preexec_fn=limit)
    code, _, err = command.finish(120)
    assert code == 1, err
    assert "cannot write below runs/rocp/smoke/" in err
    assert len(err.splitlines()) <= 10
    assert not [path for path in Path("runs").rglob("*") if path.suffix == ".ckpt"], "neither whole nor half a file"
