"""The closed form against automatic differentiation, in value and in gradient."""

import pytest
import torch

from fulgurite.modules.pave.functional import action_gradient, draw_noise, draw_rademacher, pave_losses
from fulgurite.modules.pave.functional_mlp import mlp_action_derivatives, pave_losses_mlp
from fulgurite.modules.pave.networks import TwinCritic

SHAPES = [(5, 3, (16, 12), 2), (3, 1, (8,), 2), (2, 4, (6, 5, 7), 1), (4, 2, (64, 64), 3)]


def problem(n_observations, n_actions, hidden, n_critics, activation, n=9, **options):
    torch.manual_seed(0)
    critic = TwinCritic(n_observations, n_actions, hidden, activation, n_critics, **options).double()
    with torch.no_grad():
        for p in critic.parameters():
            p.mul_(2.5)  # so that the activations bend
    s, s_next = torch.randn(2, n, n_observations, dtype=torch.float64)
    return critic, s, torch.rand(n, n_actions, dtype=torch.float64) * 2 - 1, s_next


@pytest.mark.parametrize("activation", ["silu", "tanh"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradient_and_curvature_are_those_of_autograd(shape, activation):
    critic, s, a, _ = problem(*shape, activation)
    v = draw_rademacher(a)
    leaf = a.repeat(shape[-1], 1, 1).requires_grad_()
    (expected,) = torch.autograd.grad(critic(s, leaf).sum(), leaf, create_graph=True)
    (hv,) = torch.autograd.grad((expected * v).sum(), leaf)
    g, tau = mlp_action_derivatives(critic.weights(), activation, s, a, v)
    torch.testing.assert_close(g, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(tau, (hv * v).sum(2), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(g, action_gradient(critic, s, a), rtol=1e-12, atol=1e-13)
    assert tau.abs().max() > 1e-3


@pytest.mark.parametrize("activation", ["silu", "tanh"])
@pytest.mark.parametrize("shape", SHAPES)
def test_losses_and_their_gradients_are_those_of_autograd(shape, activation):
    critic, s, a, s_next = problem(*shape, activation)
    draws = {"eps": draw_noise(s, 0.1), "v": draw_rademacher(a)}
    expected = pave_losses(critic, s, a, s_next, **draws, delta=0.7)
    found = pave_losses_mlp(critic.weights(), activation, s, a, s_next, **draws, delta=0.7)
    parameters = list(critic.parameters())
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-15)
        for one, other in zip(
            torch.autograd.grad(found[name], parameters, allow_unused=True, retain_graph=True),
            torch.autograd.grad(value, parameters, allow_unused=True, retain_graph=True),
            strict=True,
        ):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("terms", [("mpr",), ("vfc",), ("curv",), ("mpr", "curv"), ("vfc", "curv"), ("mpr", "vfc")])
def test_any_selection_of_the_terms_has_the_same_values(terms):
    critic, s, a, s_next = problem(*SHAPES[0], "silu")
    draws = {"eps": draw_noise(s, 0.1), "v": draw_rademacher(a)}
    every = pave_losses(critic, s, a, s_next, **draws)
    flags = {name: name in terms for name in ("mpr", "vfc", "curv")}
    found = pave_losses_mlp(critic.weights(), "silu", s, a, s_next, **draws, **flags)
    assert list(found) == list(terms)
    for name in terms:
        torch.testing.assert_close(found[name], every[name], rtol=1e-12, atol=1e-15)


def test_directions_at_the_first_samples_only():
    critic, s, a, _ = problem(*SHAPES[0], "silu")
    v = draw_rademacher(a)
    _, every = mlp_action_derivatives(critic.weights(), "silu", s, a, v)
    g, first = mlp_action_derivatives(critic.weights(), "silu", s, a, v[:4])
    torch.testing.assert_close(first, every[:, :4], rtol=1e-12, atol=1e-14)
    assert g.shape == (2, 9, 3)
    assert mlp_action_derivatives(critic.weights(), "silu", s, a)[1] is None


def test_spectral_normalisation_is_differentiated_too():
    critic, s, a, s_next = problem(*SHAPES[0], "silu", spectral_norm=True)
    draws = {"eps": draw_noise(s, 0.5), "v": draw_rademacher(a)}
    one = pave_losses(critic, s, a, s_next, **draws)
    other = pave_losses_mlp(critic.weights(), "silu", s, a, s_next, **draws)
    gradients = [torch.autograd.grad(sum(x.values()), critic.weight) for x in (one, other)]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-13)


def test_a_third_differentiation_is_refused_rather_than_wrong():
    critic, s, a, _ = problem(*SHAPES[0], "silu")
    g, _ = mlp_action_derivatives(critic.weights(), "silu", s, a)
    (first,) = torch.autograd.grad(g.square().sum(), critic.weight[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize(
    ("hidden", "n_actions", "activation", "message"),
    [
        ((8,), 2, "silu", r"take 5 inputs, but s and a have 3 \+ 2|take 6 inputs, but s and a have 3 \+ 2"),
        ((), 3, "silu", "no hidden layer"),
        ((8,), 3, "gelu", "activation is 'gelu'; the closed form knows"),
    ],
)
def test_weights_that_do_not_fit_are_refused(hidden, n_actions, activation, message):
    critic = TwinCritic(3, 3, hidden)
    with pytest.raises(ValueError, match=message):
        mlp_action_derivatives(critic.weights(), activation, torch.zeros(4, 3), torch.zeros(4, n_actions))
