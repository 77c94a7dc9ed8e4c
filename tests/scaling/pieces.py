"""Sharding on a mesh of one process: test_sharding.py runs these cases in a process of their own.

A process group leaves threads behind, and loader processes that are forked beside them may hang.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fulgurite.modules import Classifier
from fulgurite.modules.base import Method
from fulgurite.modules.loss_terms import LossContext, LossTerm, LossTerms


@pytest.fixture
def mesh():
    """A device mesh of one process, this one."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("data_parallel",))
    torch.distributed.destroy_process_group()


def on(mesh, module):
    """The module as a strategy with a mesh prepares it."""
    module._device_mesh = mesh
    module.trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")))
    module.configure_model()
    return module


class Parts(Method):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"one": nn.Linear(2, 2), "two": nn.Linear(2, 2)})
        self.steps = nn.ModuleList([nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)])])
        self.body = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.activation = nn.ReLU()


class Weighted(LossTerm):
    name = "weighted"

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, context):
        return {"penalty": self.layer(context.batch).square().mean()}


class Host(Method):
    def __init__(self) -> None:
        super().__init__()
        self.loss_terms = LossTerms("model")
        self.network = nn.Linear(2, 2)


def test_every_piece_is_sharded_once_and_computes_what_it_did(mesh):
    torch.manual_seed(0)
    parts = Parts()
    x = torch.randn(5, 2)
    expected = parts.body(x).detach()
    parts.body[1].reset_running_stats()
    on(mesh, parts)
    assert all(isinstance(piece, FSDPModule) for piece in parts.pieces())
    assert all(isinstance(parameter, DTensor) for parameter in parts.parameters())
    before = list(parts.parameters())
    parts.configure_model()
    assert all(one is other for one, other in zip(before, parts.parameters(), strict=True))
    torch.testing.assert_close(parts.body(x), expected)


def test_a_parameter_outside_of_the_pieces_is_refused_and_a_frozen_one_is_not(mesh):
    class Bare(Parts):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

    with pytest.raises(ValueError, match=r"'scale' lies in none of the pieces .* Bare.pieces\(\)"):
        on(mesh, Bare())
    frozen = Bare()
    frozen.scale.requires_grad_(False)
    on(mesh, frozen)


def test_a_deep_classifier_is_sharded_block_by_block(mesh):
    classifier = Classifier(n_classes=3, in_channels=1, backbone="resnet18")
    image = torch.randn(2, 1, 32, 32)
    expected = classifier.eval()(image).detach()
    pieces = list(classifier.pieces())
    assert [type(piece).__name__ for piece in pieces] == ["BasicBlock"] * 8 + ["ResNet"]
    on(mesh, classifier)
    torch.testing.assert_close(classifier(image), expected)


def test_the_terms_of_a_loss_are_sharded_each_by_itself(mesh):
    host = Host()
    host.loss_terms.add("model", Weighted())
    on(mesh, host)
    host.configure_model()
    assert isinstance(host.loss_terms.get_submodule("model.weighted"), FSDPModule)
    assert not isinstance(host.loss_terms, FSDPModule)
    x = torch.randn(4, 2)
    loss = host.loss_terms.add_to("model", host.network(x).sum(), LossContext(batch=x))
    loss.backward()
    assert all(parameter.grad is not None for parameter in host.parameters())


def test_a_term_with_double_backward_is_refused_by_fsdp2(mesh):
    class Curved(Weighted):
        needs_double_backward = True

    host = Host()
    host.loss_terms.add("model", Curved())
    with pytest.raises(ValueError, match="'weighted' differentiates a gradient"):
        on(mesh, host)
