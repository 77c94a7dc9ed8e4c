from functools import partial

import pytest
import timm
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.cli import ReduceLROnPlateau
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fulgurite.datamodules import DigitsHazard
from fulgurite.modules import Classifier
from fulgurite.modules.base import Method, repeated_blocks


def test_a_checkpoint_of_a_plain_trainer_loads_with_weights_only_and_restores_the_arguments(tmp_path):
    module = Classifier(n_classes=4, n_features=64, hidden=[8], optimizer=partial(torch.optim.SGD, lr=0.1))
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, limit_train_batches=2, limit_val_batches=1, logger=False,
        default_root_dir=tmp_path, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, datamodule=DigitsHazard())
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    checkpoint = torch.load(tmp_path / "plain.ckpt", weights_only=True)
    assert checkpoint["hyper_parameters"]["hidden"] == [8]
    assert "optimizer" not in checkpoint["hyper_parameters"], "a callable is not plain"

    loaded = Classifier.load_from_checkpoint(tmp_path / "plain.ckpt")
    image = torch.randn(3, 1, 8, 8)
    assert torch.equal(loaded.eval()(image), module.eval()(image))


def test_the_arguments_of_a_subclass_are_recorded():
    class Mine(Method):
        def __init__(self, width: int = 3):
            super().__init__()

    class Wider(Mine):
        def __init__(self, height: int):
            super().__init__(width=height)

    assert Wider(height=5).hparams["height"] == 5


@pytest.mark.parametrize(
    ("scheduler", "kind"),
    [
        (None, torch.optim.SGD),
        (partial(torch.optim.lr_scheduler.StepLR, step_size=3), dict),
        (partial(ReduceLROnPlateau, monitor="val/loss"), dict),
    ],
    ids=["none", "step", "plateau"],
)
def test_an_optimizer_comes_with_at_most_one_scheduler(scheduler, kind):
    layer = nn.Linear(2, 2)
    configured = Method().single_optimizer(layer.parameters(), partial(torch.optim.SGD, lr=0.1), scheduler)
    assert isinstance(configured, kind)
    if isinstance(scheduler and configured["lr_scheduler"], dict):
        assert configured["lr_scheduler"]["monitor"] == "val/loss"


def test_an_optimizer_that_refuses_its_arguments_is_named():
    with pytest.raises(ValueError, match="optimizer: Invalid learning rate: -1"):
        Method().single_optimizer(nn.Linear(2, 2).parameters(), partial(torch.optim.SGD, lr=-1.0))


# ---- pieces


class Parts(Method):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"one": nn.Linear(2, 2), "two": nn.Linear(2, 2)})
        self.steps = nn.ModuleList([nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)])])
        self.body = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.activation = nn.ReLU()


def test_the_pieces_are_the_children_with_parameters_and_the_members_of_containers():
    parts = Parts()
    assert list(parts.pieces()) == [
        parts.heads["one"], parts.heads["two"], parts.steps[0], parts.steps[1][0], parts.body
    ]  # fmt: skip


def test_without_a_mesh_nothing_is_sharded():
    parts = Parts()
    parts.configure_model()
    assert not any(isinstance(module, FSDPModule) for module in parts.modules())


def test_the_blocks_of_deep_networks_are_found():
    resnet = timm.create_model("resnet18")
    assert [type(block).__name__ for block in repeated_blocks(resnet)] == ["BasicBlock"] * 8
    vit = timm.create_model("vit_tiny_patch16_224")
    assert list(repeated_blocks(vit)) == list(vit.blocks)
    assert not list(repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))), "a layer is no block"
