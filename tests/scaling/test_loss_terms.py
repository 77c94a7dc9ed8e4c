"""A term that a callback brings, with a parameter of its own: equal over processes, sharded, saved and dropped."""

import json

import pytest
import torch

pytestmark = pytest.mark.slow

MODULE = '''
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fulgurite.callbacks import LossTermCallback
from fulgurite.modules import LossContext, LossTerm, LossTerms, Method


class Host(Method):
    """A linear classifier of digits that is open to terms."""

    monitor = "val/loss"

    def __init__(self, n_features: int, n_classes: int) -> None:
        super().__init__()
        self.network = nn.Linear(n_features, n_classes)
        self.loss_terms = LossTerms("model")

    def losses(self, batch):
        logits = self.network(batch["image"].flatten(1) / 16)
        return logits, cross_entropy(logits, batch["label"])

    def training_step(self, batch, batch_idx):
        logits, loss = self.losses(batch)
        return self.add_terms("model", loss, LossContext(batch, {"logits": logits}, {"model": self.network}))

    def validation_step(self, batch, batch_idx):
        self.log_epoch("val/loss", self.losses(batch)[1], len(batch["label"]))

    def test_step(self, batch, batch_idx):
        self.log_epoch("test/loss", self.losses(batch)[1], len(batch["label"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Centre(LossTerm):
    """Pulls the logits of each sample towards a learned centre."""

    name = "centre"

    def __init__(self, n_classes: int) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.linspace(-1, 1, n_classes))

    def forward(self, context):
        return {"pull": 0.1 * (context.outputs["logits"] - self.place).square().sum(1).mean()}


class CentreCallback(LossTermCallback):
    def build_term(self, module):
        return Centre(module.hparams.n_classes)
'''

BASE = (
    "--model", "terms.Host", "--data", "DigitsHazard", "--trust", "terms", "--trainer.max_epochs", "2",
    "--trainer.accelerator", "cpu", "--seed_everything", "1",
)  # fmt: skip
TERM = ("--trainer.callbacks+=terms.CentreCallback",)


@pytest.fixture(scope="module")
def states(tmp_path_factory, launch):
    """The checkpoint of one process, of two under DDP and of two under FSDP2, with the same samples in each step."""
    folder = tmp_path_factory.mktemp("terms")
    (folder / "terms.py").write_text(MODULE)
    runs = {
        "one": ("--data.batch_size", "50"),
        "ddp": ("--data.batch_size", "25", "--config", "trainer/ddp"),
        "fsdp": ("--data.batch_size", "25", "--config", "trainer/fsdp"),
    }
    files = {}
    for name, arguments in runs.items():
        launch(
            "fit", *BASE, *arguments, *TERM, "--trainer.default_root_dir", name, folder=folder, PYTHONPATH=str(folder)
        )
        (files[name],) = (folder / name).rglob("last.ckpt")
    return folder, files


def test_the_terms_parameter_is_trained_alike_by_one_process_ddp_and_fsdp(states):
    _, files = states
    weights = {name: torch.load(file, weights_only=True)["state_dict"] for name, file in files.items()}
    key = "loss_terms.model.centre.place"
    assert (weights["one"][key] - torch.linspace(-1, 1, len(weights["one"][key]))).abs().max() > 0.01
    for name in ("ddp", "fsdp"):
        assert weights[name].keys() == weights["one"].keys()
        for part, value in weights[name].items():
            torch.testing.assert_close(value, weights["one"][part], rtol=0, atol=1e-5, msg=f"{name}, {part}")


def test_a_test_without_the_callback_leaves_the_term_out_and_a_fit_without_it_is_refused(states, start, launch):
    folder, files = states
    options = {"folder": folder, "PYTHONPATH": str(folder)}
    plain = ("--trust", "terms", "--ckpt_path", str(files["fsdp"]), "--config", "trainer/cpu")
    tested = launch("test", *plain, "--trainer.callbacks", "null", **options)
    assert "['model.centre'] is left out" in tested.out
    (results,) = files["fsdp"].parent.parent.glob("test/*/results.json")
    assert json.loads(results.read_text())["metrics"]["test/loss"] > 0
    refused = start("fit", *plain, "--trainer.callbacks", "null", "--trainer.max_epochs", "3", **options).wait()
    assert refused.code in (1, 2)
    assert "trained with the loss terms ['model.centre'], this run has none" in refused.err
    assert len(refused.err.splitlines()) < 12
