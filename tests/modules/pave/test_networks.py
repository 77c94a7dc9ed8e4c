"""The stacked critics against separate perceptrons, and the actors against torch.distributions."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.distributions import Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from fulgurite.modules.pave.networks import DeterministicActor, GaussianActor, TwinCritic, squashed_log_density

S, A = 5, 3


def perceptron(activation, *widths):
    layers = []
    for one, other in itertools.pairwise(widths):
        layers += [nn.Linear(one, other), activation()]
    return nn.Sequential(*layers[:-1])


@pytest.mark.parametrize(("name", "activation"), [("silu", nn.SiLU), ("relu", nn.ReLU), ("tanh", nn.Tanh)])
@pytest.mark.parametrize("n_critics", [1, 2, 3])
def test_stacked_critics_start_as_and_equal_separate_perceptrons(name, activation, n_critics):
    torch.manual_seed(3)
    critic = TwinCritic(S, A, (16, 9), name, n_critics)
    torch.manual_seed(3)
    separate = [perceptron(activation, S + A, 16, 9, 1) for _ in range(n_critics)]
    s, a = torch.randn(20, S), torch.rand(20, A)
    expected = torch.stack([q(torch.cat([s, a], 1)).squeeze(1) for q in separate])
    torch.testing.assert_close(critic(s, a), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        critic.double()(s.double(), a.double()),
        torch.stack([q.double()(torch.cat([s, a], 1).double()).squeeze(1) for q in separate]),
        rtol=1e-12,
        atol=1e-14,
    )
    critic(s.double(), a.double()).square().sum().backward()
    sum(q(torch.cat([s, a], 1).double()).square().sum() for q in separate).backward()
    for layer, gradient in enumerate(p.grad for p in critic.weight):
        theirs = torch.stack([q[2 * layer].weight.grad.T for q in separate])
        torch.testing.assert_close(gradient, theirs, rtol=1e-10, atol=1e-13)


def test_states_and_actions_may_be_shared_or_one_per_critic():
    critic = TwinCritic(S, A, (8,)).double()
    s, a = torch.randn(2, 6, S, dtype=torch.float64), torch.randn(2, 6, A, dtype=torch.float64)
    both = critic(s, a)
    assert both.shape == (2, 6)
    for i in (0, 1):
        torch.testing.assert_close(critic(s[i], a)[i], both[i])
        torch.testing.assert_close(critic(s, a[i])[i], both[i])
        torch.testing.assert_close(critic(s[i], a[i])[i], both[i])
    assert not torch.allclose(both[0], both[1])


def test_a_gradient_step_of_one_critic_leaves_the_other():
    critic = TwinCritic(S, A, (8,))
    critic(torch.randn(6, S), torch.randn(6, A))[0].sum().backward()
    assert all(p.grad[0].abs().sum() > 0 and not p.grad[1].any() for p in critic.parameters())


def test_spectral_norm_divides_by_the_largest_singular_value_of_each_critic():
    critic = TwinCritic(S, A, (16, 4), spectral_norm=True).double()
    for (used, _), raw in zip(critic.weights(), critic.weight, strict=True):
        torch.testing.assert_close(used, raw / torch.linalg.matrix_norm(raw, 2)[:, None, None], rtol=1e-12, atol=1e-14)
    s, a = torch.randn(7, S, dtype=torch.float64), torch.randn(7, A, dtype=torch.float64)
    assert not torch.allclose(critic(s, a), TwinCritic.forward(_plain(critic), s, a))


def _plain(critic):
    plain = copy.deepcopy(critic)
    plain.spectral_norm = False
    return plain


def test_the_gradient_of_spectral_norm_is_that_of_the_singular_values():
    critic = TwinCritic(S, A, (6,), spectral_norm=True).double()
    direction = [torch.randn_like(p) for p in critic.weight]
    found = torch.autograd.grad(
        sum((w * d).sum() for (w, _), d in zip(critic.weights(), direction, strict=True)), critic.weight
    )
    for mine, raw, d in zip(found, critic.weight, direction, strict=True):
        leaf = raw.detach().clone().requires_grad_()
        largest = torch.linalg.svdvals(leaf)[:, :1, None]
        (theirs,) = torch.autograd.grad((leaf / largest * d).sum(), leaf)
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def test_spectral_norm_keeps_no_state_and_follows_the_weights():
    critic = TwinCritic(S, A, (6,), spectral_norm=True)
    assert set(critic.state_dict()) == {"weight.0", "weight.1", "bias.0", "bias.1"}
    s, a = torch.randn(7, S), torch.randn(7, A)
    before = critic(s, a)
    assert torch.equal(critic(s, a), before)
    with torch.no_grad():
        critic.weight[0].mul_(5)
    torch.testing.assert_close(critic(s, a), before, rtol=1e-4, atol=1e-5)


def test_the_deterministic_actor_stays_in_its_box_and_predicts_with_a_second_head():
    actor = DeterministicActor(S, A, (8,), predictor=True)
    s = torch.randn(50, S) * 100
    assert actor(s).abs().max() <= 1
    assert torch.equal(actor(s), actor.act(s))
    assert actor.predict_next(s).shape == (50, A)
    assert not torch.allclose(actor.predict_next(s), actor(s))
    for plain in (DeterministicActor(S, A, (8,)), GaussianActor(S, A, (8,))):
        with pytest.raises(RuntimeError, match="no predictor of the next action; build it with predictor=True"):
            plain.predict_next(s)
    assert GaussianActor(S, A, (8,), predictor=True).predict_next(s).abs().max() <= 1


def test_the_log_density_of_a_sample_is_that_of_torch_distributions():
    torch.manual_seed(0)
    actor = GaussianActor(S, A, (8,)).double()
    s = torch.randn(200, S, dtype=torch.float64)
    action, log_density = actor.sample(s, torch.Generator().manual_seed(1))
    mean, log_std = actor(s)
    squashed = TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform())
    torch.testing.assert_close(log_density, squashed.log_prob(action).sum(1), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(actor.log_density(s, torch.atanh(action)), log_density, rtol=1e-7, atol=1e-7)
    assert torch.equal(actor.act(s), torch.tanh(mean))


def test_the_squashed_density_integrates_to_one():
    action = torch.linspace(-1, 1, 200_001, dtype=torch.float64)[1:-1, None]
    mean, log_std = torch.tensor([0.4], dtype=torch.float64), torch.tensor([-0.7], dtype=torch.float64)
    density = squashed_log_density(torch.atanh(action), mean, log_std).exp()
    assert (density.sum() * 1e-5).item() == pytest.approx(1, abs=1e-4)


def test_the_log_density_is_finite_and_has_a_gradient_far_out():
    u = torch.tensor([[30.0], [-30.0], [200.0]], requires_grad=True)
    found = squashed_log_density(u, torch.zeros(3, 1), torch.zeros(3, 1))
    expected = -0.5 * u.detach().square() - 0.9189385 - 2 * (0.6931472 - u.detach().abs())
    torch.testing.assert_close(found.detach()[:, None], expected, rtol=1e-5, atol=1e-4)
    found.sum().backward()
    assert torch.isfinite(u.grad).all()


def test_samples_follow_their_generator_and_carry_the_gradient():
    actor = GaussianActor(S, A, (8,))
    s = torch.randn(10, S)
    one, other = (actor.sample(s, torch.Generator().manual_seed(7))[0] for _ in range(2))
    assert torch.equal(one, other)
    assert not torch.equal(one, actor.sample(s, torch.Generator().manual_seed(8))[0])
    one.sum().backward()
    assert actor.log_std.weight.grad.abs().sum() > 0


def test_the_standard_deviation_is_limited():
    actor = GaussianActor(S, A, (8,))
    with torch.no_grad():
        actor.log_std.bias.copy_(torch.tensor([-100.0, 0.0, 100.0]))
        actor.log_std.weight.zero_()
    assert actor(torch.randn(1, S))[1].tolist() == [[-20.0, 0.0, 2.0]]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: TwinCritic(0, A), "sizes are .*give at least 1 each"),
        (lambda: TwinCritic(S, A, (0,)), "give at least 1"),
        (lambda: TwinCritic(S, A, n_critics=0), "give at least 1"),
        (lambda: TwinCritic(S, A, activation="gelu"), "activation is 'gelu'; choose one of silu, relu, tanh"),
        (lambda: DeterministicActor(S, 0), "give at least 1"),
        (lambda: GaussianActor(S, A, activation="elu"), "activation is 'elu'"),
    ],
)
def test_sizes_and_activations_are_checked(build, message):
    with pytest.raises(ValueError, match=message):
        build()
