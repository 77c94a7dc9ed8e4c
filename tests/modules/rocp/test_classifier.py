from functools import partial

import pytest
import timm
import torch
from lightning.pytorch import Trainer
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy

from fulgurite.datamodules import DigitsHazard
from fulgurite.modules import Classifier
from fulgurite.modules.rocp.networks import load_timm_weights, timm_backbone


def trainer(tmp_path, **options):
    return Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, **options,
    )  # fmt: skip


def test_the_probability_of_a_label_is_the_sum_over_its_group():
    groups = [[0, 1, 2, 3, 4], [5, 6], [7], [8, 9]]
    module = Classifier(n_classes=4, n_features=64, label_groups=groups).double().eval()
    image = torch.randn(5, 1, 8, 8, dtype=torch.float64)
    fine = module.network(image).softmax(-1)
    expected = torch.stack([fine[:, group].sum(-1) for group in groups], dim=-1)
    torch.testing.assert_close(module(image).softmax(-1), expected)
    torch.testing.assert_close(module(image).exp().sum(-1), torch.ones(5, dtype=torch.float64))


@pytest.mark.parametrize("groups", [None, [[1, 0], [2]]])
def test_training_takes_the_cross_entropy_of_the_labels_that_the_network_learns(groups):
    module = Classifier(n_classes=2, n_features=3, hidden=[], label_groups=groups)
    module.log = lambda *args, **kwargs: None
    batch = {
        "image": torch.randn(6, 3),
        "label": torch.tensor([0, 1, 0, 1, 1, 0]),
        "fine_label": torch.tensor([0, 2, 1, 2, 2, 1]),
    }
    target = batch["label"] if groups is None else batch["fine_label"]
    torch.testing.assert_close(module.training_step(batch, 0), cross_entropy(module.network(batch["image"]), target))


def test_gradients_are_finite_and_reach_every_parameter():
    module = Classifier(n_classes=4, n_features=64, label_groups=[[0], [1], [2], [3, 4]], hidden=[16, 16])
    cross_entropy(module(torch.randn(8, 1, 8, 8)), torch.randint(4, (8,))).backward()
    for parameter in module.parameters():
        assert parameter.grad.isfinite().all()
        assert parameter.grad.abs().max() > 0


def test_without_hidden_layers_it_is_softmax_regression():
    assert sum(p.numel() for p in Classifier(n_classes=4, n_features=64, hidden=[]).parameters()) == 64 * 4 + 4


def test_logged_metrics_equal_scikit_learn(tmp_path):
    from sklearn.metrics import accuracy_score, f1_score, log_loss

    torch.manual_seed(0)
    data = DigitsHazard(batch_size=64)
    module = Classifier(n_classes=4, n_features=64, label_groups=data.label_groups)
    (metrics,) = trainer(tmp_path).test(module, datamodule=data, verbose=False)
    fields = data.split("test").fields
    with torch.no_grad():
        probabilities = module.eval()(fields["image"]).softmax(-1).numpy()
    label, predicted = fields["label"].numpy(), probabilities.argmax(1)
    assert metrics["test/accuracy"] == pytest.approx(accuracy_score(label, predicted), abs=1e-6)
    assert metrics["test/macro_f1"] == pytest.approx(f1_score(label, predicted, average="macro"), abs=1e-6)
    assert metrics["test/loss"] == pytest.approx(log_loss(label, probabilities), abs=1e-5)


def test_it_learns_the_digits_far_above_the_majority(tmp_path):
    torch.manual_seed(0)
    data = DigitsHazard(seed=0, batch_size=50)
    module = Classifier(
        n_classes=4,
        n_features=64,
        hidden=[],
        label_groups=data.label_groups,
        optimizer=partial(torch.optim.Adam, lr=0.05),
    )
    fit = trainer(tmp_path, max_epochs=30)
    fit.fit(module, datamodule=data)
    (metrics,) = fit.test(module, datamodule=data, verbose=False)
    majority = (data.split("test").fields["label"] == 0).float().mean().item()
    assert metrics["test/accuracy"] > 0.85 > majority + 0.3


def test_testing_twice_gives_the_same_figures_and_numbers(tmp_path):
    module, data = Classifier(n_classes=4, n_features=64), DigitsHazard()
    tester = trainer(tmp_path)
    first, second = (tester.test(module, datamodule=data, verbose=False) for _ in range(2))
    assert first == second
    assert int(module.test_confusion.compute().sum()) == 600
    assert len(module.test_confidence.compute()) == 600
    assert set(module.figures("test")) == {"confusion", "reliability"}
    assert module.figures("val") == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_classes": 1}, "n_classes is 1"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"n_features": None}, "'mlp' needs n_features"),
        ({"class_names": ["a"]}, "class_names has 1 names for 4 classes"),
        ({"label_groups": [[0], [1]]}, "give 4 groups"),
        ({"label_groups": [[0], [1], [2], [2]]}, "each fine label from 0 on once"),
        ({"label_groups": [[0], [1], [2], []]}, "each fine label"),
        ({"weights": "x.safetensors"}, "weights and backbone_options are for a timm backbone"),
        ({"backbone": "resnet1"}, "neither 'mlp' nor a timm model"),
        ({"backbone": "resnet18", "backbone_options": {"colour": 3}}, "refused backbone_options"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Classifier(**({"n_classes": 4, "n_features": 64} | arguments))


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224"])
def test_a_timm_backbone_trains_through_the_command_line(fulgurite_cli, name):
    options = ["--model.backbone_options", "{img_size: 8, patch_size: 4}"] if name.startswith("vit") else []
    outcome = fulgurite_cli(
        "fit", "--config", "rocp/smoke", "--model.backbone", name, *options, "--trainer.fast_dev_run", "2"
    )
    assert outcome.code == 0, outcome.err


def test_weights_of_a_file_are_loaded_but_for_the_head(tmp_path):
    torch.manual_seed(1)
    source = timm.create_model("resnet18", num_classes=1000, in_chans=1)
    save_file(source.state_dict(), tmp_path / "weights.safetensors")
    torch.save(source.state_dict(), tmp_path / "weights.pth")
    for name in ("weights.safetensors", "weights.pth"):
        network = timm_backbone("resnet18", in_channels=1, n_classes=4, dropout=0.0)
        load_timm_weights(network, str(tmp_path / name), in_channels=1)
        assert torch.equal(network.layer1[0].conv1.weight, source.layer1[0].conv1.weight)
        assert network.fc.weight.shape == (4, 512)


def test_weights_of_another_model_are_refused(tmp_path):
    save_file(timm.create_model("resnet18", in_chans=3).state_dict(), tmp_path / "other.safetensors")
    network = timm_backbone("resnet18", in_channels=1, n_classes=4, dropout=0.0)
    with pytest.raises(ValueError, match=r"are not of this model: 1 tensors differ, first 'conv1.weight'"):
        load_timm_weights(network, str(tmp_path / "other.safetensors"), in_channels=1)


def test_missing_weights_are_named(fulgurite_cli):
    outcome = fulgurite_cli(
        "fit", "--config", "rocp/smoke", "--model.backbone", "resnet18", "--model.weights", "nowhere.safetensors"
    )
    assert outcome.code == 2
    assert (
        outcome.err
        == "error: weights 'nowhere.safetensors': there is no such file; give 'hub' or the path of a weights file\n"
    )


def test_pretrained_weights_are_read_at_a_fresh_start_only(fulgurite_cli, workspace):
    network = timm.create_model("resnet18", num_classes=10, in_chans=1)
    save_file(network.state_dict(), workspace / "start.safetensors")
    fit = ("fit", "--config", "rocp/smoke", "--trainer.max_epochs", "1", "--trainer.limit_train_batches", "1")
    assert fulgurite_cli(*fit, "--model.backbone", "resnet18", "--model.weights", "start.safetensors").code == 0
    (workspace / "start.safetensors").unlink()
    outcome = fulgurite_cli("test", "--config", "rocp/smoke", "--ckpt_path", "last")
    assert outcome.code == 0, outcome.err
