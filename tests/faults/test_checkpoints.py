"""Files that are no checkpoint, checkpoints of another model or version: refused by name, nothing is changed."""

import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml

import fulgurite
from fulgurite.modules import METHODS

SMOKE = ("--config", "rocp/smoke")
SLUGS = list(METHODS)


@pytest.mark.parametrize("command", ["test", "fit"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("results.json", "truncated, or not a checkpoint"),
        ("config.yaml", "truncated, or not a checkpoint"),
        ("metrics.csv", "truncated, or not a checkpoint"),
        ("weights.safetensors", "is not a Lightning checkpoint"),
        ("arrays.npz", "truncated, or not a checkpoint"),
        ("pipe.ckpt", "pipe.ckpt is not a file that could hold a checkpoint"),
        ("/dev/null", "/dev/null is not a file"),
        ("checkpoints", "is a folder; give the .ckpt file in it"),
    ],
)
def test_another_file_of_the_run_is_no_checkpoint(
    fulgurite_cli, run_folder, assert_short_error, contents, command, name, message
):
    import numpy as np
    from safetensors.torch import save_file

    os.mkfifo(run_folder / "pipe.ckpt")
    save_file({"weight": torch.zeros(3)}, run_folder / "weights.safetensors")
    np.savez(run_folder / "arrays.npz", weight=np.zeros(3))
    before = contents(Path("runs"))
    assert_short_error(fulgurite_cli(command, *SMOKE, "--ckpt_path", str(run_folder / name)), message, name)
    assert contents(Path("runs")) == before


@pytest.mark.parametrize("kept", [0.01, 0.5, 0.99])
def test_a_newest_state_that_was_copied_in_part_is_refused_and_names_the_other(
    fulgurite_cli, run_folder, assert_short_error, contents, kept
):
    newest = run_folder / "checkpoints/last.ckpt"
    whole = newest.read_bytes()
    newest.write_bytes(whole[: int(len(whole) * kept)])
    before = contents(Path("runs"))
    outcome = fulgurite_cli("fit", *SMOKE, "--ckpt_path", "last", "--trainer.max_epochs", "3")
    assert_short_error(outcome, f"last.ckpt ({newest.stat().st_size} bytes) is truncated", "best.ckpt")
    assert contents(Path("runs")) == before


@pytest.fixture
def changed(run_folder):
    """Write a copy of the run's newest checkpoint with something changed in it."""

    def write(change, name="changed.ckpt"):
        checkpoint = torch.load(run_folder / "checkpoints/last.ckpt", weights_only=True)
        change(checkpoint)
        torch.save(checkpoint, name)
        return name

    return write


def with_config(change):
    def apply(checkpoint):
        tree = yaml.safe_load(checkpoint["fulgurite"]["config"])
        change(tree)
        checkpoint["fulgurite"]["config"] = yaml.safe_dump(tree)
        checkpoint["fulgurite"]["version"] = "9.9.0"

    return apply


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree: tree["model"]["init_args"].update(wisdom=3), "model.wisdom: Classifier has no argument 'wisdom'"),
        (lambda tree: tree["trainer"].update(wisdom=3), "trainer.wisdom: there is no 'trainer.wisdom'"),
        (lambda tree: tree["model"].update(class_path="fulgurite.modules.Later"), "fulgurite.modules has no 'Later'"),
    ],
)
def test_a_checkpoint_of_a_newer_version_says_which_version_wrote_it(
    fulgurite_cli, changed, assert_short_error, change, message
):
    path = changed(with_config(change))
    version = f"written by Fulgurite 9.9.0 (this is {fulgurite.__version__})"
    assert_short_error(fulgurite_cli("test", "--ckpt_path", path), "changed.ckpt", version, message)
    assert not list(Path("runs").rglob("test"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(state_dict=[1]), "is not a Lightning checkpoint: its state_dict is no mapping"),
        (lambda c: c["state_dict"].popitem(), "does not fit this model"),
        (lambda c: c["state_dict"].update(extra=torch.zeros(1)), "does not fit this model"),
        (with_config(lambda tree: tree["model"].update(class_path=3)), "its 'fulgurite' entry holds no config"),
        (with_config(lambda tree: tree.pop("model")), "model not given"),
    ],
    ids=["state_dict", "missing tensor", "extra tensor", "class path", "no model"],
)
@pytest.mark.parametrize("command", ["test", "fit"])
def test_a_checkpoint_whose_inside_is_wrong_is_refused_and_leaves_nothing(
    fulgurite_cli, changed, assert_short_error, contents, command, change, message
):
    path = changed(change)
    before = contents(Path("runs"))
    assert_short_error(fulgurite_cli(command, "--ckpt_path", path, "--trainer.max_epochs", "3"), message)
    assert contents(Path("runs")) == before


@pytest.mark.parametrize("command", ["test", "predict", "validate"])
def test_weights_that_are_not_finite_give_no_result(fulgurite_cli, changed, assert_short_error, contents, command):
    path = changed(lambda checkpoint: next(iter(checkpoint["state_dict"].values())).fill_(float("nan")))
    before = contents(Path("runs"))
    outcome = fulgurite_cli(command, "--ckpt_path", path)
    assert_short_error(outcome, "parameter 'network.1.weight' is not finite", code=1)
    assert {name for name in contents(Path("runs")) if "results" in name} == {n for n in before if "results" in n}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--model.optimizer=torch.optim.SGD", "--model.optimizer.lr=0.1"),
            "model.optimizer is torch.optim.SGD here, torch.optim.Adam in",
        ),
        (("--model.optimizer.lr=0.5",), "model.optimizer.lr is 0.5 here, 0.01 in"),
    ],
)
def test_going_on_with_another_optimizer_is_refused(
    fulgurite_cli, run_folder, assert_short_error, contents, arguments, message
):
    before = contents(Path("runs"))
    outcome = fulgurite_cli("fit", *SMOKE, "--ckpt_path", "last", "--trainer.max_epochs", "3", *arguments)
    assert_short_error(outcome, message, "begin a run of its own without --ckpt_path")
    assert contents(Path("runs")) == before
    assert fulgurite_cli("test", *SMOKE, "--ckpt_path", "last", *arguments).code == 0, "a test takes no step"


def test_weights_with_a_pickle_in_them_are_not_executed(fulgurite_cli, assert_short_error):
    class Bomb:
        def __reduce__(self):
            return Path.touch, (Path("evil_was_here"),)

    torch.save({"weight": Bomb()}, "weights.pth")
    outcome = fulgurite_cli("fit", *SMOKE, "--model.backbone", "resnet18", "--model.weights", "weights.pth")
    assert outcome.code == 2
    assert "weights.pth" in outcome.err
    assert len(outcome.err.splitlines()) <= 10
    assert not Path("evil_was_here").exists()
    assert not list(Path("runs").rglob("*"))


def test_a_checkpoint_of_this_version_is_kept_readable(fulgurite_cli):
    """The file was written by Fulgurite 0.1.0; a later version must load it, or say how to convert it."""
    stored = Path(__file__).with_name("checkpoint_0_1_0.ckpt")
    outcome = fulgurite_cli("test", "--ckpt_path", str(stored))
    assert outcome.code == 0, outcome.err
    (results,) = Path("runs").rglob("results.json")
    expected = torch.load(stored, weights_only=True)["expected_test_accuracy"]
    assert yaml.safe_load(results.read_text())["metrics"]["test/accuracy"] == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(("one", "other"), [*pairwise(SLUGS), (SLUGS[-1], SLUGS[0])])
def test_a_checkpoint_of_another_method_is_refused(fulgurite_cli, assert_short_error, one, other):
    if one == other:
        pytest.skip("there is one method so far")
    fit = ("fit", "--config", f"{one}/smoke", "--trainer.max_epochs", "1", "--trainer.limit_train_batches", "1")
    assert fulgurite_cli(*fit).code == 0
    (checkpoint,) = Path("runs").rglob("last.ckpt")
    outcome = fulgurite_cli("test", "--config", f"{other}/smoke", "--ckpt_path", str(checkpoint))
    assert_short_error(outcome, "holds fulgurite.modules.", "is asked for")
