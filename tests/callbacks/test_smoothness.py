"""PAVE and what it is compared with, as callbacks: presets, parts against the plain functions, refusals."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer

from fulgurite.callbacks.pave import PAVE
from fulgurite.callbacks.smoothness import ASAP, CAPS, GRAD, L2C2, GradientPenalty
from fulgurite.modules.loss_terms import LossContext
from fulgurite.modules.pave.functional import action_gradient, draw_noise, draw_rademacher, pave_losses
from fulgurite.modules.pave.functional_smoothness import caps_losses, grad_loss
from fulgurite.modules.pave.module import SAC, TD3


def attached(module, env_id="Pendulum-v1"):
    """A module in a Trainer with data of an environment."""
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.datamodule = SimpleNamespace(task=SimpleNamespace(env_id=env_id))
    module.trainer = trainer
    return module


def context(module, n=10):
    generator = torch.Generator().manual_seed(0)
    batch = {
        name: torch.randn(n, 3, generator=generator)
        for name in ("previous_observation", "observation", "next_observation")
    }
    batch["action"] = 2 * torch.rand(n, 2, generator=generator) - 1
    networks = {"critics": module.critic, "policy": module.act, "actor": module.actor}
    q = module.critic(batch["observation"], batch["action"])
    return LossContext(batch, {"q": q}, networks, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    ("kind", "env_id", "arguments", "weights"),
    [
        (TD3, "Pendulum-v1", {}, (2.0, 0.005, 2.0, 0.01, 1.0)),
        (SAC, "Pendulum-v1", {}, (0.1, 0.005, 0.5, 0.01, 1.0)),
        (TD3, "Hopper-v5", {}, (0.1, 0.005, 0.5, 0.01, 1.0)),
        (SAC, "Walker2d-v5", {"curv": 1.0}, (2.0, 0.005, 1.0, 0.01, 1.0)),
        (TD3, "Swimmer-v5", {}, (0.1, 0.1, 0.01, 0.01, 1.0)),
        (TD3, "Swimmer-v5", {"preset": "ant", "sigma": 0.5, "delta": 0.0}, (0.1, 0.005, 0.5, 0.5, 0.0)),
    ],
)
def test_pave_takes_the_published_weights_of_the_environment(kind, env_id, arguments, weights):
    term = PAVE(**arguments).build_term(attached(kind(3, 2, (8, 8)), env_id))
    found = term.weights
    assert (found.mpr, found.vfc, found.curv, found.sigma, found.delta) == weights


@pytest.mark.parametrize("closed_form", [True, False])
def test_paves_parts_are_the_weighted_losses_at_the_replay_action(closed_form):
    module = attached(TD3(3, 2, (8, 8)).double())
    given = context(module.float())
    term = PAVE(mpr=2.0, vfc=3.0, curv=5.0, sigma=0.3, delta=0.7, closed_form=closed_form).build_term(module)
    parts = term(given)
    generator = torch.Generator().manual_seed(5)
    s, a = given.batch["observation"], given.batch["action"]
    eps, v = draw_noise(s, 0.3, generator), draw_rademacher(a, generator)
    plain = pave_losses(module.critic, s, a, given.batch["next_observation"], eps=eps, v=v, delta=0.7)
    for name, weight in (("mpr", 2.0), ("vfc", 3.0), ("curv", 5.0)):
        assert torch.allclose(parts[name], weight * plain[name], rtol=1e-4)
    assert term.needs_double_backward is not closed_form


def test_caps_and_grad_are_the_weighted_functions():
    module = attached(TD3(3, 2, (8, 8)))
    given = context(module)
    parts = CAPS(sigma=0.4).build_term(module)(given)
    s, noise = given.batch["observation"], torch.randn(10, 3, generator=torch.Generator().manual_seed(5))
    policy = module.act
    temporal, spatial = caps_losses(policy(s), policy(given.batch["next_observation"]), policy(s + 0.4 * noise))
    assert torch.allclose(parts["temporal"], 1.0 * temporal), "the pendulum's weight"
    assert torch.allclose(parts["spatial"], 5.0 * spatial)
    names = ("previous_observation", "observation", "next_observation")
    found = GRAD(weight=0.5).build_term(module)(given)["temporal"]
    assert torch.allclose(found, 0.5 * grad_loss(*(policy(given.batch[name]) for name in names)))


@pytest.mark.parametrize("kind", [TD3, SAC])
def test_l2c2_has_a_term_for_each_player_and_vanishes_where_nothing_moves(kind):
    module = attached(kind(3, 2, (8, 8)))
    terms = L2C2().build_terms(module)
    given = context(module)
    policy, value = terms["actor"](given)["policy"], terms["critic"](given)["value"]
    assert policy > 0
    assert value > 0
    policy.backward(retain_graph=True)
    assert any(parameter.grad is not None for parameter in module.actor.parameters())
    given.batch["next_observation"] = given.batch["observation"]
    assert terms["actor"](given)["policy"].item() == pytest.approx(0.0, abs=1e-6)
    assert terms["critic"](given)["value"].item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("kind", [TD3, SAC])
def test_asap_trains_its_predictor_and_follows_the_actor_slowly(kind):
    module = attached(kind(3, 2, (8, 8), predict_next=True))
    callback = ASAP()
    callback.terms = {"actor": callback.build_term(module)}
    term = callback.terms["actor"]
    parts = term(context(module))
    assert set(parts) == {"temporal", "spatial", "prediction"}
    parts["prediction"].backward()
    assert module.actor.next_head.weight.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in term.slow.parameters())
    with torch.no_grad():
        module.actor.next_head.weight += 1.0
    before = term.slow.next_head.weight.clone()
    callback.on_train_batch_end(module.trainer, module)
    assert torch.allclose(term.slow.next_head.weight - before, torch.full_like(before, 0.01), atol=1e-6)
    with pytest.raises(ValueError, match="predict_next: true"):
        ASAP().build_term(attached(kind(3, 2, (8, 8))))


def test_the_gradient_penalty_is_per_critic():
    module = attached(TD3(3, 2, (8, 8)))
    given = context(module)
    g = action_gradient(module.critic, given.batch["observation"], given.batch["action"])
    expected = 0.2 * sum(one.square().sum(1).mean() for one in g)
    assert torch.allclose(GradientPenalty(0.2).build_term(module)(given)["critic"], expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PAVE(mpr=-1.0), "weight of mpr is -1.0"),
        (lambda: PAVE(curv=float("nan")), "weight of curv is nan"),
        (lambda: PAVE(sigma=0.0), "sigma is 0.0"),
        (lambda: PAVE(delta=-1.0), "delta is -1.0"),
        (lambda: PAVE(preset="pendulm"), "preset is 'pendulm'; choose auto"),
        (lambda: CAPS(temporal=-1.0), "temporal is -1.0"),
        (lambda: CAPS(preset="hoper"), "preset is 'hoper'"),
        (lambda: GRAD(weight=float("inf")), "weight is inf"),
        (lambda: L2C2(beta=-1.0), "beta is -1.0"),
        (lambda: L2C2(lower=5.0, upper=1.0).build_terms(attached(TD3(3, 2, (8,)))), "upper > sigma"),
        (lambda: ASAP(tau=2.0), "tau is 2.0"),
        (lambda: GradientPenalty(-1.0), "weight is -1.0"),
        (lambda: PAVE(curv=1.0).build_term(attached(TD3(3, 2, (8,), activation="relu"))), "'relu'.*curvature"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
