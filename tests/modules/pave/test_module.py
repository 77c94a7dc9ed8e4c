"""TD3 and SAC: targets and losses against hand-made ones, the order of updates, what a term may and may not touch."""

import copy
import math

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution

from fulgurite.callbacks.pave import PAVE
from fulgurite.callbacks.smoothness import CAPS
from fulgurite.datamodules.pave import OneStepControl
from fulgurite.modules.loss_terms import LossContext
from fulgurite.modules.pave.module import SAC, TD3, polyak

HIDDEN = (16, 16)


def batch(n=12, seed=0, states=3, actions=2):
    generator = torch.Generator().manual_seed(seed)
    return {
        "previous_observation": torch.randn(n, states, generator=generator),
        "observation": torch.randn(n, states, generator=generator),
        "next_observation": torch.randn(n, states, generator=generator),
        "action": 2 * torch.rand(n, actions, generator=generator) - 1,
        "reward": torch.randn(n, generator=generator),
        "terminated": (torch.rand(n, generator=generator) < 0.3).float(),
    }


def test_the_target_of_td3_is_the_smaller_value_at_a_noisy_clipped_action():
    module = TD3(3, 2, HIDDEN, gamma=0.9, target_noise=0.7, noise_clip=0.5)
    data = batch()
    torch.manual_seed(1)
    found = module.target(data)
    torch.manual_seed(1)
    noise = (0.7 * torch.randn(12, 2)).clamp(-0.5, 0.5)
    assert (noise.abs() == 0.5).any()
    action = (module.target_actor(data["next_observation"]) + noise).clamp(-1, 1)
    values = module.target_critic(data["next_observation"], action)
    expected = data["reward"] + 0.9 * (1 - data["terminated"]) * torch.minimum(values[0], values[1])
    assert torch.allclose(found, expected, rtol=1e-6)
    ended = data["terminated"] == 1
    assert torch.equal(found[ended], data["reward"][ended])


def test_the_target_of_sac_subtracts_the_weighted_log_density():
    module = SAC(3, 2, HIDDEN, gamma=0.9, alpha=0.3)
    data = batch()
    torch.manual_seed(1)
    found = module.target(data)
    mean, log_std = module.actor(data["next_observation"])
    torch.manual_seed(1)
    noise = torch.randn(12, 2)
    squashed = TransformedDistribution(Independent(Normal(mean, log_std.exp()), 1), [TanhTransform(cache_size=1)])
    action = torch.tanh(mean + log_std.exp() * noise)
    values = module.target_critic(data["next_observation"], action).amin(0)
    soft = values - 0.3 * squashed.log_prob(action)
    expected = data["reward"] + 0.9 * (1 - data["terminated"]) * soft
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_the_actors_ascend_the_critic():
    td3, sac = TD3(3, 2, HIDDEN), SAC(3, 2, HIDDEN, alpha=0.3)
    states = batch()["observation"]
    assert torch.allclose(td3.actor_loss(states), -td3.critic(states, td3.act(states))[0].mean())
    torch.manual_seed(1)
    found = sac.actor_loss(states)
    torch.manual_seed(1)
    action, log_density = sac.actor.sample(states)
    assert torch.allclose(found, (0.3 * log_density - sac.critic(states, action).amin(0)).mean())


def test_polyak_moves_by_the_share():
    module, target = TD3(3, 2, HIDDEN).critic, TD3(3, 2, HIDDEN).critic
    before = [parameter.clone() for parameter in target.parameters()]
    polyak(target, module, 0.25)
    for old, new, source in zip(before, target.parameters(), module.parameters(), strict=True):
        assert torch.allclose(new, 0.75 * old + 0.25 * source)


def fit(module, *callbacks, updates=6, epochs=1, **data):
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, datamodule=OneStepControl(seed=0, updates_per_epoch=updates, batch_size=16, **data))
    return trainer


def built(kind=TD3, **arguments):
    seed_everything(0)
    return kind(3, 2, HIDDEN, **arguments)


def test_td3_updates_the_actor_and_the_targets_every_second_time():
    module = built()
    actor, target = copy.deepcopy(module.actor), copy.deepcopy(module.target_critic)
    fit(module, updates=1)
    assert all(map(torch.equal, actor.parameters(), module.actor.parameters()))
    assert all(map(torch.equal, target.parameters(), module.target_critic.parameters()))
    fit(module, updates=1)
    assert not all(map(torch.equal, actor.parameters(), module.actor.parameters()))
    assert not all(map(torch.equal, target.parameters(), module.target_critic.parameters()))
    assert int(module.updates) == 2


@pytest.mark.parametrize("kind", [TD3, SAC])
def test_training_lowers_the_temporal_difference_and_the_regret(kind):
    def adam(parameters):
        return torch.optim.Adam(parameters, lr=5e-3)

    data = {"reward_noise": 0.1, "n_samples": 500}
    first, last = (built(kind, critic_optimizer=adam, actor_optimizer=adam) for _ in range(2))
    early = fit(first, updates=5, **data).callback_metrics
    late = fit(last, updates=1000, **data).callback_metrics
    assert late["train/td_loss"] < 0.8 * early["train/td_loss"]
    assert late["val/regret"] < 0.5 * early["val/regret"]


def test_pave_of_weight_nothing_leaves_the_training_bit_for_bit_as_it_is():
    plain, weightless, weighed = built(), built(), built()
    fit(plain)
    fit(weightless, PAVE(mpr=0, vfc=0, curv=0))
    fit(weighed, PAVE(curv=0.5))
    for one, other in zip(plain.parameters(), weightless.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not all(map(torch.equal, plain.critic.parameters(), weighed.critic.parameters()))


def test_the_terms_of_the_critic_reach_neither_actor_nor_targets_nor_the_batch():
    module = built()
    callback = PAVE(mpr=1.0, vfc=1.0, curv=1.0)
    for closed_form in (True, False):
        callback.closed_form = closed_form
        module.trainer = None  # the preset needs no data
        term = callback.build_term(_attached(module))
        data = batch()
        kept = {name: value.clone() for name, value in data.items()}
        parts = term(LossContext(data, networks={"critics": module.critic}))
        sum(parts.values()).backward()
        assert set(parts) == {"mpr", "vfc", "curv"}
        for network in (module.actor, module.target_actor, module.target_critic):
            assert all(parameter.grad is None for parameter in network.parameters())
        assert any(
            parameter.grad.abs().sum() > 0 for parameter in module.critic.parameters() if parameter.grad is not None
        )
        for name, value in data.items():
            assert torch.equal(value, kept[name])
            assert not value.requires_grad
        module.critic.zero_grad()


def _attached(module):
    """The module in a Trainer without data."""
    Trainer(accelerator="cpu", logger=False, enable_checkpointing=False).strategy.connect(module)
    module.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    return module


def test_the_actors_own_update_does_not_know_of_pave():
    """With the critic held, an actor step is bit-equal with and without the callback."""
    states = []
    for callbacks in ([], [PAVE(mpr=1.0, vfc=1.0, curv=1.0)]):
        module = built(critic_optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
        fit(module, *callbacks, updates=4)
        states.append([parameter.clone() for parameter in module.actor.parameters()])
    assert all(map(torch.equal, *states))


def test_caps_and_pave_work_together_and_log_their_parts():
    trainer = fit(built(), CAPS(), PAVE())
    names = {name for name in trainer.callback_metrics if name.startswith("train/")}
    assert {"train/caps_temporal", "train/caps_spatial", "train/pave_mpr", "train/pave_vfc", "train/pave_curv"} <= names
    for name in names:
        assert math.isfinite(trainer.callback_metrics[name])


def test_a_learned_alpha_moves_towards_the_target_entropy():
    low, high = built(SAC, target_entropy=-20.0), built(SAC, target_entropy=20.0)
    fit(low, updates=20)
    fit(high, updates=20)
    assert low.log_alpha.item() < math.log(0.2) < high.log_alpha.item()


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (TD3, {"gamma": 1.5}, "gamma is 1.5"),
        (TD3, {"tau": float("nan")}, "tau is nan"),
        (TD3, {"policy_delay": 0}, "policy_delay is 0"),
        (TD3, {"noise_clip": -1.0}, "noise_clip is -1.0"),
        (SAC, {"alpha": 0.0}, "alpha is 0.0"),
        (SAC, {"target_entropy": float("nan")}, "target_entropy is nan"),
        (SAC, {"hidden": (0,)}, "give at least 1 each"),
    ],
)
def test_arguments_out_of_range_are_refused(kind, arguments, message):
    with pytest.raises(ValueError, match=message):
        kind(3, 2, **{"hidden": HIDDEN, **arguments})
