"""Every quantity of one critic update against what the authors' public code gave for TD3 and SAC."""

import numpy as np
import pytest
import torch

from fulgurite.modules.pave.functional import action_gradient, pave_losses
from fulgurite.modules.pave.functional_hessian import action_hessian, critic_geometry, mixed_hessian
from fulgurite.modules.pave.functional_mlp import mlp_action_derivatives, pave_losses_mlp
from fulgurite.modules.pave.networks import TwinCritic

pytestmark = pytest.mark.reference
TD_FACTOR = {"td3": 1.0, "sac": 0.5}
LEARNING_RATE = 1e-3


@pytest.fixture(params=["td3", "sac"])
def step(request, reference_folder):
    stored = np.load(reference_folder("pave") / f"{request.param}_step.npz")
    return {"algorithm": request.param, **{name: torch.from_numpy(np.asarray(stored[name])) for name in stored}}


def layers(step, which):
    """The stored critics, layer by layer: weight (2, in, out), bias (2, out)."""
    names = [[f"critic_{which}/qf{i}.{layer}." for i in (0, 1)] for layer in (0, 2, 4)]
    return [
        (torch.stack([step[n + "weight"].T for n in both]), torch.stack([step[n + "bias"] for n in both]))
        for both in names
    ]


@pytest.fixture
def critic(step):
    before = layers(step, "before")
    n_observations, n_actions = step["obs"].shape[1], step["act"].shape[1]
    twin = TwinCritic(n_observations, n_actions, [w.shape[2] for w, _ in before[:-1]])
    with torch.no_grad():
        for (weight, bias), w, b in zip(before, twin.weight, twin.bias, strict=True):
            w.copy_(weight)
            b.copy_(bias)
    return twin


def close(found, expected):
    """The tolerance of the stored float32 values: 1e-5, relative to the largest."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


@pytest.fixture(params=["autograd", "closed"])
def losses(request, step, critic):
    given = {
        "s": step["obs"],
        "a": step["act"],
        "s_next": step["next_obs"],
        "eps": step["eps_unit"] * step["scalar/sigma"].float(),
        "v": step["rademacher"],
        "delta": step["scalar/delta"].item(),
    }
    if request.param == "closed":
        return lambda: pave_losses_mlp(critic.weights(), "silu", **given)
    return lambda: pave_losses(critic, **given)


def test_values_gradients_and_curvature(step, critic):
    s, a, v = step["obs"], step["act"], step["rademacher"]
    q = critic(s, a)
    noisy = s + step["scalar/sigma"].float() * step["eps_unit"]
    for i in (0, 1):
        close(q[i], step[f"q{i + 1}"].squeeze(1))
        for states, suffix in ((s, ""), (noisy, "_noisy"), (step["next_obs"], "_next")):
            expected = step[f"grad_q{i + 1}{suffix}"]
            close(action_gradient(critic, states, a)[i], expected)
            close(mlp_action_derivatives(critic.weights(), "silu", states, a)[0][i], expected)
        _, tau = mlp_action_derivatives(critic.weights(), "silu", s, a, v)
        close(tau[i], (step[f"hv_q{i + 1}"] * v).sum(1))
        close(
            (action_hessian(lambda s, a, i=i: critic(s, a)[i], s, a) @ v[:, :, None]).squeeze(2), step[f"hv_q{i + 1}"]
        )


def test_exact_second_derivatives_of_the_first_critic(step, critic):
    def first(s, a):
        return critic(s, a)[0]

    s, a = step["obs"], step["act"]
    mixed, own = mixed_hessian(first, s, a), action_hessian(first, s, a)
    close(mixed, step["mixed_hessian_q1"])
    close(own, step["action_hessian_q1"])
    geometry = critic_geometry(first, s, a, step["scalar/delta"].item())
    eigenvalues = step["action_eigs_q1"]
    assert geometry.mixed_sup == pytest.approx(step["mixed_spectral_q1"].max().item(), rel=1e-5)
    assert geometry.mixed_mean == pytest.approx(step["mixed_spectral_q1"].mean().item(), rel=1e-5)
    assert geometry.negative_definite_rate == (eigenvalues < 0).all(1).double().mean()
    assert geometry.concavity_rate == (eigenvalues.sum(1) < -1).double().mean()


def test_the_losses(step, losses):
    for name, value in losses().items():
        assert value.item() == pytest.approx(step[f"scalar/{name}"].item(), rel=1e-5), name


def test_the_critics_after_one_step(step, critic, losses):
    weights = {name: step[f"scalar/{key}"].item() for name, key in (("mpr", "lamS"), ("vfc", "lamT"), ("curv", "lamC"))}
    optimizer = torch.optim.Adam(critic.parameters(), LEARNING_RATE)
    error = critic(step["obs"], step["act"]) - step["target_q"].squeeze(1)
    loss = TD_FACTOR[step["algorithm"]] * error.square().mean(1).sum()
    for name, value in losses().items():
        loss = loss + weights[name] * value
    assert loss.item() == pytest.approx(step["scalar/critic_loss"].item(), rel=1e-5)
    loss.backward()
    optimizer.step()
    for (weight, bias), w, b in zip(layers(step, "after"), critic.weight, critic.bias, strict=True):
        for found, expected in ((w, weight), (b, bias)):
            # Adam turns the sign of a gradient that is nothing but rounding into a step of its own.
            slack = torch.where(found.grad.abs() < 1e-7, 2e-3 * LEARNING_RATE, 0.0)
            assert ((found - expected).abs() <= 2e-6 + 1e-4 * expected.abs() + slack).all()


def test_the_step_sees_the_regularisers(step, critic):
    """Without them the stored critics are missed: the comparison above is no comparison of Adam with itself."""
    optimizer = torch.optim.Adam(critic.parameters(), LEARNING_RATE)
    error = critic(step["obs"], step["act"]) - step["target_q"].squeeze(1)
    (TD_FACTOR[step["algorithm"]] * error.square().mean(1).sum()).backward()
    optimizer.step()
    far = [
        (found - expected).abs().max().item()
        for (weight, bias), w, b in zip(layers(step, "after"), critic.weight, critic.bias, strict=True)
        for found, expected in ((w, weight), (b, bias))
    ]
    assert max(far) > 1e-4
