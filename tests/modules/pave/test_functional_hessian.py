"""Second derivatives against finite differences, and the moving argmax against closed forms."""

import math

import pytest
import torch

from fulgurite.modules.pave.functional_hessian import (
    action_hessian,
    argmax_jacobian,
    climb,
    critic_geometry,
    mixed_hessian,
)
from fulgurite.modules.pave.networks import TwinCritic

S, A = 4, 3


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def critic():
    torch.manual_seed(0)
    twin = TwinCritic(S, A, (16, 12)).double()
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(2.5)
    return lambda s, a: twin(s, a)[1]


def test_hessians_are_those_of_finite_differences(critic):
    s, a, h = normal(5, S, seed=1), normal(5, A, seed=2).tanh(), 1e-4
    mixed, own = mixed_hessian(critic, s, a), action_hessian(critic, s, a)
    assert mixed.shape == (5, A, S)
    assert own.shape == (5, A, A)

    def second(da, ds_or_da, of_state):
        total = 0
        for one in (1, -1):
            for other in (1, -1):
                moved_s = s + other * h * ds_or_da if of_state else s
                moved_a = a + one * h * da + (0 if of_state else other * h * ds_or_da)
                total = total + one * other * critic(moved_s, moved_a)
        return total / (4 * h * h)

    for i, da in enumerate(torch.eye(A, dtype=torch.float64)):
        for j, ds in enumerate(torch.eye(S, dtype=torch.float64)):
            torch.testing.assert_close(mixed[:, i, j], second(da, ds, True), rtol=0, atol=1e-6)
        for j, other in enumerate(torch.eye(A, dtype=torch.float64)):
            torch.testing.assert_close(own[:, i, j], second(da, other, False), rtol=0, atol=1e-6)
    assert mixed.abs().max() > 0.01


def test_many_samples_are_differentiated_in_parts(critic, monkeypatch):
    s, a = normal(10, S, seed=1), normal(10, A, seed=2)
    whole = mixed_hessian(critic, s, a)
    monkeypatch.setattr("fulgurite.modules.pave.functional_hessian.CHUNK", 3)
    torch.testing.assert_close(mixed_hessian(critic, s, a), whole, rtol=1e-12, atol=1e-14)


def test_the_geometry_is_that_of_a_loop(critic):
    s, a = normal(40, S, seed=3), normal(40, A, seed=4).tanh()
    episode = torch.arange(40) // 7
    delta = 0.05
    found = critic_geometry(critic, s, a, delta, episode)
    mixed, own = mixed_hessian(critic, s, a), action_hessian(critic, s, a)
    norms = [torch.linalg.svdvals(m)[0].item() for m in mixed]
    assert found.mixed_mean == pytest.approx(sum(norms) / 40)
    assert found.mixed_sup == pytest.approx(max(norms))
    definite = [bool((torch.linalg.eigvalsh(h) < 0).all()) for h in own]
    concave = [h.trace().item() < -delta for h in own]
    assert found.negative_definite_rate == sum(definite) / 40
    assert found.concavity_rate == sum(concave) / 40
    assert 0 < sum(concave) < 40
    leaf = a.clone().requires_grad_()
    (g,) = torch.autograd.grad(critic(s, leaf).sum(), leaf)
    pairs = [(g[t], g[t + 1]) for t in range(39) if episode[t] == episode[t + 1]]
    cosines = [(x @ y / (x.norm() * y.norm())).item() for x, y in pairs]
    assert len(cosines) == 34
    assert found.flip_rate == pytest.approx(sum(c < 0 for c in cosines) / 34)
    assert found.gradient_cosine == pytest.approx(sum(cosines) / 34)


def test_flips_are_counted_within_episodes_only():
    field = torch.tensor([[1.0, 0], [1, 0], [-1, 0], [1, 0], [0, 1]], dtype=torch.float64)
    zeros = torch.zeros(5, 2, dtype=torch.float64)
    found = critic_geometry(lambda s, a: (s * a).sum(1), field, zeros, 1.0, torch.tensor([0, 0, 0, 1, 1]))
    assert found.flip_rate == pytest.approx(1 / 3)  # +, -, and the border is left out, then a right angle
    assert found.gradient_cosine == pytest.approx(0)
    alone = critic_geometry(lambda s, a: (s * a).sum(1), field, zeros, 1.0)
    assert math.isnan(alone.flip_rate)
    assert math.isnan(alone.gradient_cosine)


def test_a_quadratic_critic_is_measured_exactly():
    root = normal(A, A, seed=5)
    a_matrix = root @ root.T + 0.1 * torch.eye(A, dtype=torch.float64)
    b_matrix = normal(A, S, seed=6)

    def q(s, a):
        return -0.5 * (a * (a @ a_matrix)).sum(1) + (a * (s @ b_matrix.T)).sum(1)

    found = critic_geometry(q, normal(9, S), normal(9, A), a_matrix.trace().item() - 1e-9)
    assert found.mixed_mean == pytest.approx(torch.linalg.matrix_norm(b_matrix, 2).item())
    assert (found.negative_definite_rate, found.concavity_rate) == (1.0, 1.0)
    assert critic_geometry(q, normal(9, S), normal(9, A), a_matrix.trace().item() + 1e-9).concavity_rate == 0.0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_everything_works_where_lightning_validates(critic, mode):
    expected = critic_geometry(critic, normal(6, S, seed=1), normal(6, A, seed=2), 1.0)
    with mode():
        s, a = normal(6, S, seed=1) + 0, normal(6, A, seed=2) + 0
        found = critic_geometry(critic, s, a, 1.0)
        moving = argmax_jacobian(critic, s, A)
        assert s.is_inference() == (mode is torch.inference_mode)
        assert not mixed_hessian(critic, s, a).is_inference()
    assert found.mixed_sup == pytest.approx(expected.mixed_sup, rel=1e-12)
    assert not moving.jacobian.is_inference()
    assert moving.action.shape == (6, A)


def test_the_argmax_of_a_quadratic_critic_moves_as_its_matrices_say():
    root = normal(2, 2, seed=7)
    a_matrix = root @ root.T + torch.eye(2, dtype=torch.float64)
    b_matrix = normal(2, S, seed=8) * 0.5

    def q(s, a):
        return -0.5 * (a * (a @ a_matrix)).sum(1) + (a * (s @ b_matrix.T)).sum(1) + s.exp().sum(1)

    s = normal(100, S, seed=9)
    found = argmax_jacobian(q, s, 2)
    expected = torch.linalg.solve(a_matrix, b_matrix)
    free = s @ expected.T
    interior = (free.abs() < 1 - 1e-2).all(1)
    assert 10 < interior.sum() < 90
    assert found.share == pytest.approx((free.abs() < 1 - 1e-3).all(1).double().mean().item(), abs=0.021)
    assert found.qualifies[interior].all()
    assert not found.qualifies[(free.abs() > 1).any(1)].any()
    torch.testing.assert_close(found.action[interior], free[interior], rtol=0, atol=1e-8)
    n = int(interior.sum())
    torch.testing.assert_close(found.jacobian[interior], expected.expand(n, -1, -1), rtol=0, atol=1e-6)
    torch.testing.assert_close(found.formula[interior], expected.expand(n, -1, -1), rtol=0, atol=1e-10)
    norm = torch.linalg.matrix_norm(expected, 2)
    torch.testing.assert_close(found.norm[interior], norm.expand(n), rtol=0, atol=1e-6)
    bound = torch.linalg.matrix_norm(b_matrix, 2) / torch.linalg.eigvalsh(a_matrix)[0]
    torch.testing.assert_close(found.bound[interior], bound.expand(n), rtol=1e-9, atol=0)
    assert norm <= bound
    assert found.jacobian[~found.qualifies].isnan().all()


def test_the_jacobian_is_a_difference_of_the_argmax_and_not_the_formula():
    h, s = 0.4, torch.linspace(-0.9, 0.9, 7, dtype=torch.float64)[:, None]
    found = argmax_jacobian(lambda s, a: -(a - s.sin()).square().sum(1), s, 1, step=h, margin=1e-6)
    torch.testing.assert_close(found.jacobian[:, 0], s.cos() * math.sin(h) / h, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.formula[:, 0], s.cos(), rtol=0, atol=1e-9)


def test_a_state_at_which_the_argmax_jumps_does_not_qualify():
    s = torch.tensor([[-0.5], [2e-5], [0.5]], dtype=torch.float64)
    found = argmax_jacobian(lambda s, a: (-(a.square() - 0.25).square() + 0.1 * s * a).sum(1), s, 1, step=1e-4)
    assert found.jumps.tolist() == [False, True, False]
    assert found.qualifies.tolist() == [True, False, True]
    assert found.action[0] < -0.4
    assert found.action[2] > 0.4


def test_flat_critics_and_those_that_pull_to_the_border_do_not_qualify():
    s = normal(5, S)
    assert argmax_jacobian(lambda s, a: a.sum(1) + s.sum(1), s, 2).share == 0
    assert argmax_jacobian(lambda s, a: (0 * a).sum(1) + s.sum(1), s, 2).share == 0
    assert argmax_jacobian(lambda s, a: -a.pow(4).sum(1) + 0 * s.sum(1), s, 2).share == 0


def test_the_argmax_of_a_perceptron_is_the_best_of_a_grid(critic):
    torch.manual_seed(1)
    twin = TwinCritic(2, 2, (32, 32)).double()
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(4)

    def one(s, a):
        return twin(s, a)[0]

    s = normal(30, 2, seed=3)
    found = argmax_jacobian(one, s, 2)
    axis = torch.linspace(-1, 1, 101, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    best = torch.stack([one(x.expand(len(grid), 2), grid).max() for x in s])
    values = one(s, found.action)
    assert (values >= best - 1e-9).all()
    assert 0 < found.share < 1
    ok = found.qualifies
    torch.testing.assert_close(found.jacobian[ok], found.formula[ok], rtol=1e-4, atol=1e-5)
    assert (found.norm[ok] <= found.bound[ok] * (1 + 1e-4)).all()


def test_climbing_never_descends_and_ends_where_the_projected_gradient_is_zero(critic):
    s, a = normal(20, S, seed=4), normal(20, A, seed=5).tanh()
    end = climb(critic, s, a)
    assert (critic(s, end) >= critic(s, a)).all()
    leaf = end.clone().requires_grad_()
    (g,) = torch.autograd.grad(critic(s, leaf).sum(), leaf)
    free = ((end < 1) | (g < 0)) & ((end > -1) | (g > 0))
    assert g[free].abs().max() < 1e-6 if free.any() else True
    assert end.abs().max() <= 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q: argmax_jacobian(q, torch.zeros(3, S), A), r"torch.float32; .*deepcopy\(critic\).double\(\)"),
        (lambda q: argmax_jacobian(q, normal(S), A), r"s is \(4,\)"),
        (lambda q: argmax_jacobian(q, normal(3, S), A, step=0.0), r"step 0.0.*give numbers above 0"),
        (lambda q: argmax_jacobian(q, normal(3, S), A, n_starts=2, n_kept=3), "n_kept up to n_starts"),
        (lambda q: critic_geometry(q, normal(0, S), normal(0, A), 1.0), "at least one"),
        (lambda q: critic_geometry(q, normal(3, S), normal(2, A), 1.0), r"s is \(3, 4\) and a is \(2, 3\)"),
        (
            lambda q: critic_geometry(q, normal(3, S), normal(3, A), 1.0, torch.zeros(2)),
            r"episode is \(2,\).*of 3 pairs",
        ),
    ],
)
def test_bad_input_is_refused(critic, call, message):
    with pytest.raises(ValueError, match=message):
        call(critic)
