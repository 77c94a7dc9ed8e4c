"""What PolicyEvaluation measures in a real validation, against direct computations."""

import math

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything

from fulgurite.callbacks.policy_evaluation import PolicyEvaluation, policy_slopes
from fulgurite.datamodules.pave import ContinuousControl, OneStepControl
from fulgurite.modules.pave.functional_hessian import critic_geometry
from fulgurite.modules.pave.module import SAC, TD3


def validated(module, data, callback, folder, test=False):
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        default_root_dir=folder,
    )
    (result,) = (trainer.test if test else trainer.validate)(module, datamodule=data, verbose=False)
    return result


@pytest.mark.parametrize("kind", [TD3, SAC])
def test_it_logs_the_geometry_of_the_first_critic_where_the_policy_goes(kind, tmp_path):
    seed_everything(0)
    module, data = kind(3, 2, (16, 16)), OneStepControl(seed=0, n_evaluation=40)
    result = validated(module, data, PolicyEvaluation(jacobian_states=16), tmp_path)
    states = next(iter(data.val_dataloader()))["observation"]
    with torch.no_grad():
        actions = module.act(states)
    expected = critic_geometry(lambda s, a: module.critic(s, a)[0], states, actions, 1.0)
    assert result["val/M_mean"] == pytest.approx(expected.mixed_mean, rel=1e-5)
    assert result["val/M_sup"] == pytest.approx(expected.mixed_sup, rel=1e-5)
    assert result["val/neg_def_rate"] == pytest.approx(expected.negative_definite_rate)
    assert 0 <= result["val/J_share"] <= 1
    assert "val/flip_rate" not in result, "these states are no steps of an episode"
    assert result["val/policy_slope_sup"] >= result["val/policy_slope_mean"] > 0
    assert (tmp_path / "figures" / "val_surface.png").stat().st_size > 1000


def test_the_slope_of_a_policy_is_that_of_small_steps():
    module = TD3(3, 2, (16, 16)).double()
    states = torch.randn(5, 3, dtype=torch.float64)
    steps = 1e-6 * torch.eye(3, dtype=torch.float64)
    columns = [(module.act(states + step) - module.act(states - step)) / 2e-6 for step in steps]
    assert torch.allclose(
        policy_slopes(module, states), torch.linalg.matrix_norm(torch.stack(columns, -1), 2), rtol=1e-5
    )


def test_after_a_training_the_formula_and_the_bound_are_measured(tmp_path):
    def adam(parameters):
        return torch.optim.Adam(parameters, lr=1e-2)

    seed_everything(0)
    module = TD3(3, 2, (16, 16), critic_optimizer=adam)
    data = OneStepControl(seed=0, reward_noise=0.1, n_samples=400, updates_per_epoch=300)
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, callbacks=[PolicyEvaluation(jacobian_states=40)], default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert metrics["val/J_share"] > 0.1
    assert metrics["val/J_formula_error"] < 1e-3
    assert metrics["val/J_within_bound"] == 1.0
    assert (tmp_path / "figures" / "val_bound.png").exists()


def test_episodes_keep_their_borders_and_a_film_is_made(tmp_path):
    seed_everything(0)
    data = ContinuousControl(seed=0, evaluation_episodes=2)
    module = TD3(data.n_observations, data.n_actions, (16, 16))
    result = validated(module, data, PolicyEvaluation(max_pairs=50, video=True), tmp_path, test=True)
    assert math.isfinite(result["test/flip_rate"])
    assert -1 <= result["test/gradient_cosine"] <= 1
    film = (tmp_path / "figures" / "test_episode.gif").read_bytes()
    assert film.startswith(b"GIF89a")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_pairs": 0}, "max_pairs is 0"),
        ({"jacobian_states": -1}, "jacobian_states is -1"),
        ({"delta": float("nan")}, "delta is nan"),
        ({"surface_limit": -1.0}, "surface_limit is -1.0"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        PolicyEvaluation(**arguments)
