"""Numbers that go wrong, and runs that must be the same: for the smoke config of every method."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from fulgurite.command_line.configs import shipped_configs
from fulgurite.modules import METHODS

SABOTEUR = """\
import torch
from lightning.pytorch import Callback
from lightning_utilities.core.apply_func import apply_to_collection

class Spoil(Callback):
    \"\"\"Spoils one value of each input of one sample, or one label, at the beginning of the second epoch.\"\"\"

    def __init__(self, what: str) -> None:
        self.what = what

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.current_epoch < 1 or batch_idx > 0:
            return
        fields = []
        apply_to_collection(batch, torch.Tensor, fields.append)
        numbers = [field for field in fields if field.is_floating_point()]
        labels = [field for field in fields if not field.is_floating_point()]
        if self.what == "input":
            for field in [field for field in numbers if field.ndim > 1] or numbers[:1]:
                field.view(-1)[0] = float("nan")
        elif len(numbers) > 1:
            numbers[-1].view(-1)[0] = float("nan")
        else:
            for field in labels:
                field.view(-1)[0] = 2**30  # a whole number cannot be NaN: it lies outside every range
"""


def optimizers_of(slug: str) -> list[str]:
    """The options of a smoke config's learning rates."""
    arguments = yaml.safe_load(shipped_configs()[f"{slug}/smoke"].read_text())["model"]["init_args"]
    names = [name for name, value in arguments.items() if isinstance(value, dict) and "torch.optim." in str(value)]
    return [f"--model.{name}.lr" for name in names if "scheduler" not in name]


def assert_finite_checkpoints(root: str) -> None:
    checkpoints = list(Path(root).rglob("*.ckpt"))
    for path in checkpoints:
        state = torch.load(path, weights_only=True)["state_dict"]
        assert all(value.isfinite().all() for value in state.values() if value.is_floating_point()), path


@pytest.mark.parametrize("slug", METHODS)
@pytest.mark.parametrize("what", ["input", "label"])
def test_one_spoilt_value_stops_the_run_and_enters_no_checkpoint(fulgurite_cli, trust, slug, what):
    trust("saboteur", SABOTEUR)
    fit = ("fit", "--config", f"{slug}/smoke", "--trainer.max_epochs", "3")
    spoil = ("--trainer.callbacks+=saboteur.Spoil", f"--trainer.callbacks.what={what}")
    outcome, surprise = None, ""
    try:
        outcome = fulgurite_cli(*fit, *spoil)
    except (IndexError, RuntimeError) as error:
        surprise = str(error)
    if outcome is None:
        assert what == "label", "a label outside the range is named by the loss itself, in a trace"
        assert str(2**30) in surprise
    else:
        assert outcome.code == 1, outcome.err
        assert "the loss is nan at step " in outcome.err
        assert "(epoch 1, batch 0)" in outcome.err
        assert len(outcome.err.splitlines()) <= 10
    assert {path.name for path in Path("runs").rglob("*.ckpt")} >= {"best.ckpt", "last.ckpt"}
    assert_finite_checkpoints("runs")
    assert not list(Path("runs").rglob("results.json"))
    own = yaml.safe_load(shipped_configs()[f"{slug}/smoke"].read_text())["trainer"].get("callbacks")
    clean = fulgurite_cli(*fit, "--ckpt_path", "last", "--trainer.callbacks", json.dumps(own))
    assert clean.code == 0, "what was kept goes on without the fault"


@pytest.mark.parametrize("slug", METHODS)
def test_a_learning_rate_of_a_million_ends_in_finite_checkpoints(fulgurite_cli, slug):
    rates = [f"{option}=1e6" for option in optimizers_of(slug)]
    outcome = fulgurite_cli("fit", "--config", f"{slug}/smoke", "--trainer.max_epochs", "2", *rates)
    assert outcome.code in (0, 1)
    if outcome.code == 1:
        assert "not finite" in outcome.err or "the loss is " in outcome.err
        assert "at step " in outcome.err or "after step " in outcome.err
    assert_finite_checkpoints("runs")


@pytest.mark.parametrize("slug", METHODS)
def test_the_same_seed_gives_the_same_bits_and_another_seed_others(fulgurite_cli, slug, assert_equal_state):
    newest = {}
    for root, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        fit = ("fit", "--config", f"{slug}/smoke", "--trainer.max_epochs", "1", "--seed_everything", seed)
        assert fulgurite_cli(*fit, "--trainer.default_root_dir", root).code == 0
        (newest[root],) = Path(root).rglob("last.ckpt")
    assert_equal_state(newest["a"], newest["b"])
    tables = [(newest[root].parents[1] / "metrics.csv").read_text() for root in "abc"]
    assert tables[0] == tables[1] != tables[2]
    with pytest.raises(AssertionError):
        assert_equal_state(newest["a"], newest["c"])


@pytest.mark.parametrize("slug", METHODS)
@pytest.mark.parametrize(
    "arguments",
    [
        ("--trainer.precision", "bf16-mixed"),
        pytest.param(("--trainer.precision", "64-true"), marks=pytest.mark.fault),
        pytest.param(("--trainer.deterministic", "true"), marks=pytest.mark.fault),
    ],
    ids=["bf16-mixed", "64-true", "deterministic"],
)
def test_another_precision_runs_or_is_refused_in_a_few_lines(fulgurite_cli, slug, arguments):
    outcome = fulgurite_cli("fit", "--config", f"{slug}/smoke", "--trainer.max_epochs", "1", *arguments)
    assert outcome.code in (0, 2), outcome.err
    if outcome.code == 2:
        assert len(outcome.err.splitlines()) <= 10
        assert not list(Path("runs").rglob("*"))
    else:
        assert_finite_checkpoints("runs")
        assert fulgurite_cli("test", "--config", f"{slug}/smoke", "--ckpt_path", "last", *arguments).code == 0


def test_half_precision_that_overflows_is_stopped(fulgurite_cli, assert_short_error):
    outcome = fulgurite_cli("fit", "--config", "rocp/smoke", "--trainer.precision", "16-true")
    assert_short_error(outcome, "the loss is nan at step 1 (epoch 0, batch 1)", code=1)
    assert_finite_checkpoints("runs")


DEGENERATE = {
    "one sample in every split": ("--data.conditions", "[[0],[1],[2],[3]]", "--data.n_train", "1",
                                  "--data.n_calibration", "1", "--data.n_test", "1"),
    "one calibration sample": ("--data.n_calibration", "1"),
    "one training sample": ("--data.n_train", "1"),
    "no noise": ("--data.noise", "0"),
    "noise alone": ("--data.noise", "1e30"),
    "one batch": ("--data.batch_size", "1000000000"),
    "batches of one": ("--data.batch_size", "1", "--trainer.limit_train_batches", "3"),
}  # fmt: skip


IN_SUITE = ("one sample in every split", "one calibration sample")


@pytest.mark.parametrize(
    "name", [name if name in IN_SUITE else pytest.param(name, marks=pytest.mark.fault) for name in DEGENERATE]
)
def test_degenerate_data_give_a_defined_result(fulgurite_cli, name):
    short = ("--config", "rocp/cpu", "--trainer.max_epochs", "1", "--trainer.check_val_every_n_epoch", "1")
    outcome = fulgurite_cli("fit", *short, *DEGENERATE[name])
    assert outcome.code == 0, outcome.err
    outcome = fulgurite_cli("test", "--config", "rocp/cpu", "--ckpt_path", "last")
    assert outcome.code == 0, outcome.err
    (results,) = Path("runs").rglob("test/*/results.json")
    metrics = json.loads(results.read_text())["metrics"]
    assert 0 <= metrics["test/accuracy"] <= 1
    assert 0 <= metrics["test/rocp_loss"] <= 50
    if name == "one calibration sample":
        assert metrics["test/rocp_coverage"] == 1.0, "one sample cannot vouch for 90 %: the set holds every label"
