"""Run folders that were copied, edited or taken apart: what can be mended goes on, nothing is lost without a word."""

import csv
import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

SMOKE = ("--config", "rocp/smoke")
GO_ON = ("fit", *SMOKE, "--ckpt_path", "last", "--trainer.max_epochs", "3")
TEST = ("test", *SMOKE, "--ckpt_path", "best")
SHORT = ("fit", *SMOKE, "--trainer.max_epochs", "1")


@pytest.mark.parametrize("command", [GO_ON, TEST, SHORT], ids=["go on", "test", "fit"])
def test_a_copy_in_the_place_of_the_latest_link_is_refused_and_kept(
    fulgurite_cli, run_folder, assert_short_error, contents, command
):
    """``cp -rL`` and most file shares turn the link into a folder."""
    latest = run_folder.parent / "latest"
    latest.unlink()
    shutil.copytree(run_folder, latest)
    before = contents(Path("runs"))
    assert_short_error(fulgurite_cli(*command), f"{latest} is no link to the newest run", "rename it")
    assert contents(Path("runs")) == before


def test_the_checkpoint_of_a_copied_run_is_gone_on_with_after_renaming_it(
    fulgurite_cli, run_folder, assert_short_error
):
    latest = run_folder.parent / "latest"
    latest.unlink()
    shutil.copytree(run_folder, latest)
    explicit = ("fit", "--trainer.max_epochs", "3", "--ckpt_path")
    assert_short_error(fulgurite_cli(*explicit, str(latest / "checkpoints/last.ckpt")), "is no link")
    latest.rename(latest.with_name("copied"))
    outcome = fulgurite_cli(*explicit, str(latest.with_name("copied") / "checkpoints/last.ckpt"))
    assert outcome.code == 0, outcome.err
    assert latest.readlink() == Path("copied")


@pytest.mark.parametrize("command", [GO_ON, TEST], ids=["go on", "test"])
def test_a_link_to_a_run_that_is_gone_is_no_run(fulgurite_cli, run_folder, assert_short_error, command):
    shutil.rmtree(run_folder)
    assert_short_error(fulgurite_cli(*command), "no run in runs/rocp/smoke")
    assert fulgurite_cli(*SHORT).code == 0, "a new run takes the link over"
    assert fulgurite_cli(*TEST).code == 0


def damage(name):
    def write(run):
        if name == "config.yaml":
            (run / name).write_text("\tnot: yaml")
        else:
            (run / name).unlink()

    return write


@pytest.mark.parametrize("name", ["results.json", "config.yaml", "metrics.csv"])
def test_a_run_goes_on_without_what_only_describes_it(fulgurite_cli, run_folder, name):
    damage(name)(run_folder)
    assert fulgurite_cli(*TEST).code == 0
    outcome = fulgurite_cli(*GO_ON)
    assert outcome.code == 0, outcome.err
    assert json.loads((run_folder / "results.json").read_text())["epochs"] == 3
    assert (run_folder / "config.yaml").read_text().startswith("seed_everything: 0")
    assert list(csv.DictReader((run_folder / "metrics.csv").open()))[-1]["epoch"] == "2"


def test_an_edited_config_of_a_run_does_not_change_what_its_checkpoint_is(fulgurite_cli, run_folder):
    config = run_folder / "config.yaml"
    config.write_text(config.read_text().replace("dropout: 0.1", "dropout: 0.7"))
    outcome = fulgurite_cli(*TEST)
    assert outcome.code == 0
    assert "in the checkpoint" not in outcome.out
    named = fulgurite_cli("test", "--config", str(config), "--ckpt_path", "best")
    assert "model.dropout: 0.7 here, 0.1 in the checkpoint" in named.out


@pytest.mark.parametrize(
    "content",
    [bytes(range(256)), b"a,b\n1,2\n", b"epoch;step;loss\n0;7;1.5\n"],
    ids=["binary", "another table", "saved with semicolons"],
)
def test_a_table_of_metrics_that_cannot_be_read_is_kept_aside(fulgurite_cli, run_folder, content):
    (run_folder / "metrics.csv").write_bytes(content)
    outcome = fulgurite_cli(*GO_ON)
    assert outcome.code == 0, outcome.err
    assert "it is kept as metrics-unread-1.csv" in outcome.out
    assert (run_folder / "metrics-unread-1.csv").read_bytes() == content
    rows = list(csv.DictReader((run_folder / "metrics.csv").open()))
    assert [row["epoch"] for row in rows] == ["2"]


def test_zeros_that_a_lost_disk_left_at_the_end_of_the_metrics_are_dropped(fulgurite_cli, run_folder):
    with (run_folder / "metrics.csv").open("ab") as file:
        file.write(bytes(100))
    outcome = fulgurite_cli(*GO_ON)
    assert outcome.code == 0, outcome.err
    rows = list(csv.DictReader((run_folder / "metrics.csv").open()))
    assert [row["epoch"] for row in rows] == ["0", "1", "2"]


@pytest.mark.parametrize("name", ["tensorboard", ".lock"])
def test_something_in_the_way_of_a_runs_own_files_is_named(
    fulgurite_cli, run_folder, assert_short_error, contents, name
):
    shutil.rmtree(run_folder / name, ignore_errors=True)
    if name == ".lock":
        (run_folder / name).mkdir()
    else:
        (run_folder / name).write_text("")
    before = contents(run_folder / "checkpoints")
    assert_short_error(outcome := fulgurite_cli(*GO_ON), str(run_folder), code=2 if name == ".lock" else 1)
    assert "is whole" in outcome.err or "copy the checkpoint elsewhere" in outcome.err
    assert contents(run_folder / "checkpoints") == before


@pytest.mark.parametrize("place", ["runs", "runs/rocp", "runs/rocp/smoke"])
def test_a_file_in_the_way_of_the_runs_is_named(fulgurite_cli, assert_short_error, place):
    Path(place).parent.mkdir(parents=True, exist_ok=True)
    Path(place).write_text("mine")
    assert_short_error(fulgurite_cli(*SHORT), "cannot be made", "--trainer.default_root_dir")
    assert_short_error(fulgurite_cli(*TEST), "no run in runs/rocp/smoke")
    assert Path(place).read_text() == "mine"


@pytest.mark.parametrize("place", ["data", "runs/rocp/smoke/latest"])
def test_a_file_of_the_users_is_never_overwritten(fulgurite_cli, place):
    Path(place).parent.mkdir(parents=True, exist_ok=True)
    Path(place).write_text("mine")
    outcome = fulgurite_cli(*SHORT)
    assert outcome.code == (0 if place == "data" else 2), "these data ship with a package and need no folder"
    assert Path(place).read_text() == "mine"


def test_a_root_of_300_characters_is_refused_before_training(fulgurite_cli, assert_short_error):
    assert_short_error(
        fulgurite_cli(*SHORT, "--trainer.default_root_dir", "x" * 300), "cannot be made: File name too long"
    )
    deep = "/".join(["x" * 60] * 5)
    assert fulgurite_cli(*SHORT, "--trainer.default_root_dir", deep).code == 0, "300 characters in parts are no fault"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--trainer.max_epochs", "0"),
        ("--trainer.max_steps", "0"),
        ("--trainer.limit_train_batches", "0"),
        ("--trainer.max_time", "00:00:00:00"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_limit_of_nothing_says_that_nothing_was_trained_and_leaves_no_run(fulgurite_cli, arguments):
    outcome = fulgurite_cli("fit", *SMOKE, *arguments)
    assert outcome.code == 0, outcome.err
    assert "nothing was trained" in outcome.out
    assert not list(Path("runs").rglob("*")), "nothing that `latest` or a later --ckpt_path could take for a run"


def test_a_run_that_its_time_ends_says_so_and_goes_on(fulgurite_cli, trust):
    trust("slow_run", "import time\nfrom lightning.pytorch import Callback\nclass Slow(Callback):\n"
          "    def on_train_batch_end(self, *args):\n        time.sleep(0.2)\n")  # fmt: skip
    limits = ("--trainer.max_epochs", "2", "--trainer.max_time", "00:00:00:01")
    outcome = fulgurite_cli("fit", *SMOKE, *limits, "--trainer.callbacks+=slow_run.Slow")
    assert outcome.code == 0, outcome.err
    (last,) = Path("runs").rglob("last.ckpt")
    assert 0 < torch.load(last, weights_only=True)["global_step"] < 16
    outcome = fulgurite_cli(
        "fit", *SMOKE, "--ckpt_path", "last", "--trainer.max_time", "null", "--trainer.callbacks", "null"
    )
    assert outcome.code == 0, outcome.err
    assert torch.load(last, weights_only=True)["global_step"] == 16


def test_a_clock_that_was_set_back_does_not_hide_the_newest_run(fulgurite_cli, run_folder):
    ahead = run_folder.with_name("29991231-235959-0")
    run_folder.rename(ahead)
    latest = run_folder.parent / "latest"
    latest.unlink()
    latest.symlink_to(ahead.name)
    assert fulgurite_cli(*SHORT, "--seed_everything", "7").code == 0
    outcome = fulgurite_cli(*TEST)
    assert outcome.code == 0, outcome.err
    assert latest.readlink().name.endswith("-7"), "the newest is the one that began last, whatever its name"
    assert list(latest.glob("test/*/results.json"))
    assert not (ahead / "test").exists()


def test_a_fit_that_fails_before_training_leaves_the_earlier_run_as_it_was(fulgurite_cli, run_folder, contents):
    before = contents(Path("runs"))
    outcome = fulgurite_cli(*SHORT, "--model.optimizer.lr", "-1")
    assert outcome.code == 2
    assert contents(Path("runs")) == before


def test_a_file_system_without_links_costs_only_the_link(fulgurite_cli, monkeypatch):
    """As on exFAT and on some network drives."""

    def refuse(self, target, target_is_directory=False):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(Path, "symlink_to", refuse)
    outcome = fulgurite_cli(*SHORT)
    assert outcome.code == 0, outcome.err
    assert "no link runs/rocp/smoke/latest (Operation not supported): name checkpoints by their path" in outcome.out
    (checkpoint,) = Path("runs").rglob("best.ckpt")
    assert fulgurite_cli("test", "--ckpt_path", str(checkpoint)).code == 0
