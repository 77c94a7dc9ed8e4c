"""Callbacks that bring a loss, in whole trainings: automatic and manual optimisation, checkpoints, refusals."""

import re

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fulgurite.callbacks import LossTermCallback
from fulgurite.command_line.provenance import ROOT
from fulgurite.modules import LossContext, LossTerm, LossTerms


class Pull(LossTerm):
    """Pulls a parameter of its own towards 3, and the host's output towards that."""

    def __init__(self, name="pull"):
        super().__init__()
        self.name = name
        self.target = nn.Parameter(torch.zeros(1))

    def forward(self, context):
        output = context.networks["model"](context.batch[0])
        return {"own": (self.target - 3).square().sum(), "host": (output - self.target).square().mean()}


class PullCallback(LossTermCallback):
    def __init__(self, player="model", name="pull"):
        super().__init__()
        self.player = player
        self.name = name

    def build_term(self, module):
        return Pull(self.name)


class Automatic(LightningModule):
    def __init__(self, terms=True):
        super().__init__()
        self.network = nn.Linear(2, 1)
        if terms:
            self.loss_terms = LossTerms("model")

    def training_step(self, batch, batch_idx):
        loss = (self.network(batch[0]) - batch[1]).square().mean()
        if hasattr(self, "loss_terms"):
            loss = self.loss_terms.add_to("model", loss, LossContext(batch, networks={"model": self.network}), self.log)
        return loss

    def test_step(self, batch, batch_idx):
        self.log("test/loss", (self.network(batch[0]) - batch[1]).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Manual(Automatic):
    """Two players, two optimisers; the second one forgets the terms if told so."""

    def __init__(self, forgets=False):
        super().__init__(terms=False)
        self.automatic_optimization = False
        self.other = nn.Linear(2, 1)
        self.loss_terms = LossTerms("model", "other")
        self.forgets = forgets

    def training_step(self, batch, batch_idx):
        for optimizer, player, network in zip(
            self.optimizers(), ("model", "other"), (self.network, self.other), strict=True
        ):
            loss = (network(batch[0]) - batch[1]).square().mean()
            context = LossContext(batch, networks={"model": network})
            optimizer.zero_grad()
            self.manual_backward(self.loss_terms.add_to(player, loss, context, self.log))
            optimizer.step()

    def configure_optimizers(self):
        terms = [] if self.forgets else list(self.loss_terms.parameters_of("other"))
        return [
            torch.optim.SGD([*self.network.parameters(), *self.loss_terms.parameters_of("model")], lr=0.05),
            torch.optim.SGD([*self.other.parameters(), *terms], lr=0.05),
        ]


def data():
    x = torch.randn(32, 2, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)


def fit(module, *callbacks, epochs=4, **options):
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
    )
    trainer.fit(module, data(), **options)
    return trainer


def built(kind, **arguments):
    seed_everything(0)
    return kind(**arguments)


def test_a_host_without_terms_trains_bit_for_bit_like_one_that_never_heard_of_them():
    plain, host = built(Automatic, terms=False), built(Automatic)
    fit(plain)
    fit(host)
    for name, value in plain.state_dict().items():
        assert torch.equal(host.state_dict()[name], value)


@pytest.mark.parametrize(("kind", "player"), [(Automatic, "model"), (Manual, "model"), (Manual, "other")])
def test_a_term_and_its_parameters_are_trained(kind, player):
    plain, host = built(kind), built(kind)
    fit(plain)
    callback = PullCallback(player)
    trainer = fit(host, callback)
    assert callback.terms[player].target.item() > 1.0, "its own parameter moved towards 3"
    changed = "other.bias" if player == "other" else "network.bias"
    assert host.state_dict()[changed].item() > plain.state_dict()[changed].item() + 0.3
    assert set(trainer.callback_metrics) == {"train/pull_own", "train/pull_host"}
    if kind is Manual:
        kept = "network.bias" if player == "other" else "other.bias"
        assert torch.equal(host.state_dict()[kept], plain.state_dict()[kept]), "the other player is left alone"


def test_several_callbacks_add_up_and_are_gone_after_the_fit():
    host = built(Automatic)
    trainer = fit(host, PullCallback(), PullCallback(name="second"))
    assert {"train/pull_own", "train/second_own"} <= set(trainer.callback_metrics)
    assert host.loss_terms.names() == []


def test_a_second_fit_goes_on_with_the_same_term():
    host, callback = built(Automatic), PullCallback()
    fit(host, callback)
    term = callback.terms["model"]
    before = term.target.item()
    fit(host, callback)
    assert callback.terms["model"] is term
    assert term.target.item() > before


def test_a_checkpoint_keeps_the_term_goes_on_exactly_and_is_tested_without_it(tmp_path):
    whole = built(Automatic)
    whole_callback = PullCallback()
    fit(whole, whole_callback, epochs=4)

    first = built(Automatic)
    fit(first, PullCallback(), ModelCheckpoint(tmp_path, save_last=True), epochs=2)
    resumed, callback = built(Automatic), PullCallback()
    fit(resumed, callback, epochs=4, ckpt_path=tmp_path / "last.ckpt")
    assert torch.equal(callback.terms["model"].target, whole_callback.terms["model"].target)
    assert torch.equal(resumed.network.weight, whole.network.weight)

    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
    (result,) = trainer.test(built(Automatic), data(), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert result["test/loss"] > 0


@pytest.mark.parametrize("parameters", [True, False], ids=["with parameters", "without"])
def test_other_terms_are_refused_on_resuming_and_named(tmp_path, parameters):
    class Plain(LossTerm):
        name = "second"

        def forward(self, context):
            return {}

    class Second(LossTermCallback):
        def build_term(self, module):
            return Pull("second") if parameters else Plain()

    fit(built(Automatic), PullCallback(), ModelCheckpoint(tmp_path, save_last=True), epochs=1)
    expected = {
        True: (RuntimeError, "has no state for the loss terms ['model.second']; it was trained without them"),
        False: (ValueError, "trained with the loss terms ['model.pull'], this run has ['model.pull', 'model.second']"),
    }[parameters]
    with pytest.raises(expected[0], match=re.escape(expected[1])):
        fit(built(Automatic), PullCallback(), Second(), ckpt_path=tmp_path / "last.ckpt")


def test_a_parameter_in_no_optimiser_is_refused():
    with pytest.raises(ValueError, match=r"no optimiser of Manual has the parameters target of term 'pull'.*'other'"):
        fit(built(Manual, forgets=True), PullCallback("other"))


def test_a_module_without_loss_terms_is_told_how_to_get_them():
    with pytest.raises(TypeError, match=r"PullCallback adds a loss .* Automatic has no loss_terms"):
        fit(built(Automatic, terms=False), PullCallback())


def test_a_player_that_the_module_does_not_have_is_refused():
    with pytest.raises(ValueError, match="no player 'critic', there are model"):
        fit(built(Automatic), PullCallback("critic"))


def test_a_double_backward_is_refused_under_torch_compile():
    class Curvature(Pull):
        needs_double_backward = True

    class Callback(PullCallback):
        def build_term(self, module):
            return Curvature()

    module = torch.compile(built(Automatic))
    with pytest.raises(ValueError, match=r"term 'pull' differentiates a gradient, which torch.compile"):
        fit(module, Callback())


def test_the_example_of_the_docs_runs_and_its_term_counts(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/callbacks.md").read_text(), re.DOTALL)
    exec(compile(code, "docs/callbacks.md", "exec"), {"__name__": "example"})
    assert "'train/noise_change': " in capsys.readouterr().out
