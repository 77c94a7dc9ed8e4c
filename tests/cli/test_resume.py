"""A resumed run equals the uninterrupted one, with difference 0, for every method's smoke config."""

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest
import torch
import yaml

from fulgurite.command_line.configs import shipped_configs
from fulgurite.modules import METHODS

MID_EPOCH = "lightning.pytorch.callbacks.ModelCheckpoint"


def epochs_of(slug):
    return smoke(slug)["trainer"]["max_epochs"]


def last(root):
    """The newest state of the latest run below a folder."""
    (link,) = (path for path in Path(root).rglob("latest") if path.is_symlink())
    return link / "checkpoints" / "last.ckpt"


def smoke(slug):
    return yaml.safe_load(shipped_configs()[f"{slug}/smoke"].read_text())


def arguments_of(slug, section):
    """The constructor arguments of the class that a smoke config names."""
    package, _, name = smoke(slug)[section]["class_path"].rpartition(".")
    return inspect.signature(getattr(import_module(package), name)).parameters


def own_callbacks(slug):
    """The callbacks of the smoke config alone, whatever a checkpoint was made with."""
    return ("--trainer.callbacks", json.dumps(smoke(slug)["trainer"].get("callbacks")))


@pytest.fixture(params=[0, 2], ids=["no workers", "two workers"])
def workers(request):
    slug = request.getfixturevalue("slug")
    if "num_workers" in arguments_of(slug, "data"):
        return ("--data.num_workers", str(request.param))
    if request.param:
        pytest.skip(f"the data of {slug} are made in the main process")
    return ()


@pytest.mark.parametrize("slug", METHODS)
def test_resuming_is_exact_at_the_end_of_an_epoch_and_in_the_middle(fulgurite_cli, slug, workers, assert_equal_state):
    base = ("fit", "--config", f"{slug}/smoke", *workers, "--trainer.default_root_dir")
    epochs = epochs_of(slug)
    middle = ("--trainer.callbacks+=" + MID_EPOCH, "--trainer.callbacks.dirpath=middle")
    every = ("--trainer.callbacks.every_n_train_steps=5", "--trainer.callbacks.save_top_k=-1")
    assert fulgurite_cli(*base, "whole", *middle, *every).code == 0

    # At the end of an epoch, from the newest state and from the best one (which is written before the epoch's end).
    for which in ("last", "best"):
        root = f"from_{which}"
        assert fulgurite_cli(*base, root, "--trainer.max_epochs", str(epochs // 2)).code == 0
        (checkpoint,) = Path(root).rglob(f"{which}.ckpt")
        outcome = fulgurite_cli("fit", "--ckpt_path", str(checkpoint), "--trainer.max_epochs", str(epochs))
        assert outcome.code == 0, outcome.err
        assert_equal_state(last("whole"), last(root))
        tables = [(last(folder).parent.parent / "metrics.csv").read_text().splitlines() for folder in ("whole", root)]
        assert tables[0][-2:] == tables[1][-2:]
        assert (tables[0] == tables[1]) == (which == "last"), "from best.ckpt the run goes on in a folder of its own"

    steps = sorted(Path("middle").glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    end = torch.load(last("whole"), weights_only=True)["global_step"]
    steps = [path for path in steps if torch.load(path, weights_only=True)["global_step"] < end]
    for position, checkpoint in enumerate(steps[::4] if "2" in workers else steps):
        outcome = fulgurite_cli(
            "fit",
            "--ckpt_path",
            str(checkpoint),
            *own_callbacks(slug),
            "--trainer.default_root_dir",
            f"m{position}",
        )
        assert outcome.code == 0, outcome.err
        assert_equal_state(last("whole"), last(f"m{position}"))


@pytest.mark.parametrize("slug", METHODS)
def test_checkpoint_every_writes_the_newest_state_between_epochs(fulgurite_cli, slug):
    outcome = fulgurite_cli(
        "fit", "--config", f"{slug}/smoke", "--trainer.max_epochs", "1", "--checkpoint_every", "3",
        "--trainer.callbacks+=" + MID_EPOCH, "--trainer.callbacks.every_n_train_steps=1000",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    state = torch.load(last("runs"), weights_only=True)
    assert any("'every_n_train_steps': 3" in key for key in state["callbacks"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "code", "what"),
    [(signal.SIGTERM, 143, "SIGTERM"), (signal.SIGINT, 130, "Ctrl-C"), (signal.SIGKILL, -9, "")],
)
def test_a_run_that_a_signal_ends_goes_on_to_the_same_result(
    fulgurite_cli, workspace, signum, code, what, assert_equal_state
):
    base = ("--config", "rocp/smoke", "--trainer.max_epochs", "400")
    process = subprocess.Popen(
        [sys.executable, "-m", "fulgurite.cli", "fit", *base, "--checkpoint_every", "3"],
        cwd=workspace, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    metrics = Path("runs/rocp/smoke/latest/metrics.csv")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (metrics.exists() and len(metrics.read_text().splitlines()) > 4):
        time.sleep(0.02)
    process.send_signal(signum)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    if what:
        assert f"error: ended by {what}" in err
        assert "continue with: fulgurite fit --ckpt_path runs/rocp/smoke/" in err

    reached = torch.load(last("runs"), weights_only=True)
    assert 0 < reached["global_step"] < 400 * 8, "the signal came too late or too early to show anything"
    end = str(reached["epoch"] + 3)
    assert fulgurite_cli("fit", *base, "--ckpt_path", "last", "--trainer.max_epochs", end).code == 0
    assert fulgurite_cli("fit", *base, "--trainer.default_root_dir", "whole", "--trainer.max_epochs", end).code == 0
    assert_equal_state(last("whole"), last("runs"))


@pytest.mark.slow
def test_sigterm_ends_all_ranks_at_one_step(fulgurite_cli, workspace):
    two = ("--trainer.accelerator", "cpu", "--trainer.devices", "2", "--trainer.strategy", "ddp")
    process = subprocess.Popen(
        [sys.executable, "-m", "fulgurite.cli", "fit", "--config", "rocp/smoke", "--trainer.max_epochs", "900", *two],
        cwd=workspace, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    metrics = Path("runs/rocp/smoke/latest/metrics.csv")
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and not (metrics.exists() and len(metrics.read_text().splitlines()) > 2):
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    reached = torch.load(last("runs"), weights_only=True)
    assert len(reached["random_state"]) == 2
    end = str(reached["epoch"] + 2)
    assert (
        fulgurite_cli(
            "fit",
            "--config",
            "rocp/smoke",
            "--ckpt_path",
            "last",
            "--trainer.max_epochs",
            end,
            "--config",
            "trainer/cpu",
        ).code
        == 0
    )


@pytest.mark.parametrize("slug", METHODS)
def test_a_loss_that_is_not_finite_ends_the_run_and_never_enters_a_checkpoint(fulgurite_cli, slug):
    assert fulgurite_cli("fit", "--config", f"{slug}/smoke", "--trainer.max_epochs", "1").code == 0
    newest = last("runs").resolve()
    kept = newest.read_bytes()
    optimizer = next(name for name in arguments_of(slug, "model") if name in ("optimizer", "critic_optimizer"))
    wild = (f"--model.{optimizer}=torch.optim.Adam", f"--model.{optimizer}.lr=1e30")
    outcome = fulgurite_cli("fit", "--config", f"{slug}/smoke", *wild)
    assert outcome.code == 1
    assert "the loss is " in outcome.err
    assert "at step 1 (epoch 0, batch 1)" in outcome.err
    assert "learning rate 1e+30" in outcome.err
    assert "; last finite loss" in outcome.err
    assert len(outcome.err.splitlines()) <= 10
    assert newest.read_bytes() == kept, "the run that failed wrote no checkpoint, and touched no other"
    assert len(list(Path("runs").rglob("results.json"))) == 1, "a run that failed has no results"


def test_a_run_can_be_moved_and_resumed_with_its_best_score(fulgurite_cli):
    assert fulgurite_cli("fit", "--config", "rocp/smoke", "--trainer.max_epochs", "3").code == 0
    run = Path("runs/rocp/smoke/latest").resolve()
    best = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)
    state = next(value for key, value in best["callbacks"].items() if "val/accuracy" in key)
    assert state["best_model_path"] == "best.ckpt"
    assert str(Path.cwd()) not in str(best["callbacks"])

    run.rename("moved")
    outcome = fulgurite_cli("fit", "--ckpt_path", "moved/checkpoints/last.ckpt", "--trainer.max_epochs", "4")
    assert outcome.code == 0, outcome.err
    assert "best checkpoint moved/checkpoints/best.ckpt" in outcome.out.replace(f"{Path.cwd()}/", "")
