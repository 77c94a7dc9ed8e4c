"""The three losses: on quadratic critics by hand, by their invariants, and against what is easily done instead."""

import itertools

import pytest
import torch

from fulgurite.modules.pave.functional import (
    action_gradient,
    check_smooth_activation,
    check_weights,
    curvature_loss,
    draw_noise,
    draw_rademacher,
    gradient_penalty_loss,
    pave_losses,
)
from fulgurite.modules.pave.functional_hessian import action_hessian, mixed_hessian
from fulgurite.modules.pave.functional_mlp import pave_losses_mlp
from fulgurite.modules.pave.networks import DeterministicActor, TwinCritic

B, S, A = 24, 4, 3


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


@pytest.fixture
def batch():
    return {"s": normal(B, S, seed=1), "a": normal(B, A, seed=2).tanh(), "s_next": normal(B, S, seed=3)}


@pytest.fixture
def draws():
    s, a = torch.empty(B, S, dtype=torch.float64), torch.empty(B, A, dtype=torch.float64)
    return {"eps": draw_noise(s, 0.3, seeded(4)), "v": draw_rademacher(a, seeded(5))}


class Quadratic:
    """``Q_i = -1/2 a' A_i a + a' B_i s + sum sin(s)``; A_i positive definite."""

    def __init__(self, n_critics=2):
        root = normal(n_critics, A, A, seed=6)
        self.a = root @ root.mT + 0.5 * torch.eye(A, dtype=torch.float64)
        self.b = normal(n_critics, A, S, seed=7)

    def __call__(self, s, a):
        s, a = (x.expand(len(self.a), *x.shape[-2:]) for x in (s, a))
        return -0.5 * (a * (a @ self.a)).sum(-1) + (a * (s @ self.b.mT)).sum(-1) + s.sin().sum(-1)


def mlp(activation="silu", **options):
    with torch.random.fork_rng():
        torch.manual_seed(8)
        critic = TwinCritic(S, A, (11, 7), activation, **options).double()
    with torch.no_grad():
        for p in critic.parameters():
            p.mul_(2.5)  # so that the activations bend
    return critic


def both_forms(critic):
    """The losses by a second differentiation and in closed form."""
    return (
        lambda *args, **options: pave_losses(critic, *args, **options),
        lambda *args, **options: pave_losses_mlp(critic.weights(), critic.activation, *args, **options),
    )


def test_the_gradients_of_quadratic_critics_are_those_by_hand(batch):
    q = Quadratic()
    expected = torch.stack([batch["s"] @ b.T - batch["a"] @ a for a, b in zip(q.a, q.b, strict=True)])
    torch.testing.assert_close(action_gradient(q, batch["s"], batch["a"]), expected, rtol=0, atol=1e-12)
    each = batch["a"].expand(2, B, A)
    torch.testing.assert_close(action_gradient(q, batch["s"].expand(2, B, S), each), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n_critics", [1, 2, 3])
def test_the_losses_of_quadratic_critics_are_sums_over_critics_of_the_means_by_hand(batch, draws, n_critics):
    q = Quadratic(n_critics)
    eps, v = draws["eps"], draws["v"]
    delta = ((v @ q.a[0]) * v).sum(1).mean().item()  # open for some samples, closed for others
    found = pave_losses(q, **batch, **draws, delta=delta)
    mpr = sum((eps @ b.T).square().mean() for b in q.b)
    vfc = sum(((batch["s_next"] - batch["s"]) @ b.T).square().mean() for b in q.b)
    curv = sum(torch.relu(delta - torch.stack([x @ a @ x for x in v])).mean() for a in q.a)
    assert curv > 0
    for name, expected in (("mpr", mpr), ("vfc", vfc), ("curv", curv)):
        assert found[name].item() == pytest.approx(expected.item(), rel=1e-12)


def test_critics_that_cancel_in_their_sum_are_penalised_each(batch, draws):
    q = Quadratic()
    q.b = torch.stack([q.b[0], -q.b[0]])
    found = pave_losses(q, **batch, **draws)
    assert found["mpr"].item() == pytest.approx(2 * (draws["eps"] @ q.b[0].T).square().mean().item(), rel=1e-12)
    assert found["mpr"] > 0.01


def test_each_sample_has_a_sign_vector_and_a_perturbation_of_its_own(batch):
    assert len(draw_rademacher(torch.empty(200, 4), seeded(0)).unique(dim=0)) == 16
    assert len(draw_noise(torch.empty(200, 2), 1.0, seeded(0)).unique(dim=0)) == 200
    with pytest.raises(ValueError, match=r"v is \(3,\); give \(24, 3\)"):
        pave_losses(Quadratic(), **batch, v=torch.ones(A), mpr=False)
    with pytest.raises(ValueError, match=r"eps is \(1, 4\); give \(24, 4\)"):
        pave_losses(Quadratic(), **batch, eps=torch.ones(1, S), curv=False)


def test_signs_are_fair_and_draws_follow_the_generator():
    a = torch.empty(10_000, 2)
    v = draw_rademacher(a, seeded(1))
    assert set(v.flatten().tolist()) == {-1.0, 1.0}
    assert abs(v.mean().item()) < 0.02
    assert abs((v[:, 0] * v[:, 1]).mean().item()) < 0.03
    assert torch.equal(v, draw_rademacher(a, seeded(1)))
    assert torch.equal(draw_noise(a, 0.5, seeded(2)), 0.5 * draw_noise(a, 1.0, seeded(2)))


def test_noise_has_the_standard_deviation_of_its_dimension():
    s = torch.empty(50_000, 3, dtype=torch.float64)
    for sigma in ([0.1, 1.0, 20.0], torch.tensor([0.1, 1.0, 20.0])):
        ratio = draw_noise(s, sigma, seeded(0)).std(0) / torch.tensor([0.1, 1.0, 20.0])
        torch.testing.assert_close(ratio, torch.ones(3, dtype=torch.float64), rtol=0, atol=0.02)


def test_mpr_expects_the_squared_norm_of_the_mixed_partials_by_action_component():
    n, sigma, q = 20_000, 0.1, Quadratic()
    s, a = normal(n, S, seed=9), normal(n, A, seed=10)
    found = pave_losses(q, s, a, s, eps=draw_noise(s, sigma, seeded(11)), vfc=False, curv=False)["mpr"]
    assert found.item() == pytest.approx(sigma**2 * q.b.square().sum().item() / A, rel=0.03)


@pytest.mark.parametrize("sigma", [1e-2, 1e-3])
def test_mpr_of_a_perceptron_tends_to_its_mixed_partials(sigma):
    n, critic = 16_384, mlp()
    s, a = normal(1, S, seed=12), normal(1, A, seed=13).tanh()
    expected = sum(mixed_hessian(lambda s, a, i=i: critic(s, a)[i], s, a).square().sum() for i in (0, 1)) / A
    s, a = s.expand(n, S), a.expand(n, A)
    eps = draw_noise(s, sigma, seeded(14))
    found = pave_losses(critic, s, a, s, eps=eps, vfc=False, curv=False)["mpr"] / sigma**2
    assert found.item() == pytest.approx(expected.item(), rel=0.02)


def test_curvature_averages_to_the_trace_over_all_sign_vectors():
    critic = mlp()
    s, a = normal(1, S, seed=15), normal(1, A, seed=16).tanh()
    hessians = [action_hessian(lambda s, a, i=i: critic(s, a)[i], s, a)[0] for i in (0, 1)]
    signs = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=A)), dtype=torch.float64)
    many = {"s": s.expand(8, S), "a": a.expand(8, A), "s_next": s.expand(8, S)}
    # With this delta the relu is open for every sign vector.
    wide = pave_losses(critic, **many, v=signs, delta=50.0, mpr=False, vfc=False)["curv"]
    assert wide.item() == pytest.approx(sum(h.trace().item() + 50 for h in hessians), rel=1e-12)


def test_the_relu_is_inside_the_mean_over_sign_vectors():
    hessian = torch.tensor([[-1.0, 3.0, 0.0], [3.0, -1.0, 0.0], [0.0, 0.0, -1.0]], dtype=torch.float64)
    signs = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=A)), dtype=torch.float64)
    tau = torch.einsum("ni,ij,nj->n", signs, hessian, signs)[None]
    assert tau.mean().item() == pytest.approx(-3)
    assert curvature_loss(tau, 1.0).item() == pytest.approx(0.5 * (-3 + 6 + 1))


def test_concave_critics_have_no_curvature_loss_without_a_floor(batch, draws):
    assert pave_losses(Quadratic(), **batch, **draws, delta=0.0)["curv"] == 0


def test_with_a_diagonal_hessian_every_sign_vector_gives_the_trace(batch, draws):
    q = Quadratic()
    q.a = torch.diag_embed(q.a.diagonal(dim1=1, dim2=2))
    g = action_gradient(q, batch["s"], batch["a"])
    assert g.requires_grad
    delta = 50.0
    expected = sum(delta - a.trace().item() for a in q.a)
    assert pave_losses(q, **batch, **draws, delta=delta)["curv"].item() == pytest.approx(expected, rel=1e-12)


def test_a_separable_critic_is_free_of_the_field_terms_and_still_bent(batch, draws):
    bend = torch.tensor([0.3, -0.2], dtype=torch.float64, requires_grad=True)

    def critics(s, a):
        s, a = (x.expand(2, *x.shape[-2:]) for x in (s, a))
        return s.exp().sum(-1) + bend[:, None] * a.square().sum(-1)

    found = pave_losses(critics, **batch, **draws)
    assert found["mpr"].abs() < 1e-10
    assert found["vfc"].abs() < 1e-10
    (gradient,) = torch.autograd.grad(found["curv"], bend)
    torch.testing.assert_close(gradient, torch.tensor([6.0, 0.0], dtype=torch.float64))  # tau = 6 b: open, closed


@pytest.mark.parametrize("form", [0, 1], ids=["autograd", "closed"])
@pytest.mark.parametrize("name", ["mpr", "vfc", "curv"])
def test_the_gradient_in_the_weights_is_that_of_finite_differences(batch, draws, name, form):
    """A side that is detached, or a target that is used instead, changes the gradient and not the value."""
    critic = mlp()
    losses = both_forms(critic)[form]
    parameters = list(critic.parameters())
    directions = [normal(*p.shape, seed=20 + i) for i, p in enumerate(parameters)]
    losses(**batch, **draws, delta=3.0)[name].backward()
    along = sum((p.grad * d).sum() for p, d in zip(parameters, directions, strict=True) if p.grad is not None)

    def moved(step):
        with torch.no_grad():
            for p, d in zip(parameters, directions, strict=True):
                p.add_(d, alpha=step)
        value = losses(**batch, **draws, delta=3.0)[name].item()
        with torch.no_grad():
            for p, d in zip(parameters, directions, strict=True):
                p.sub_(d, alpha=step)
        return value

    expected = (moved(1e-5) - moved(-1e-5)) / 2e-5
    assert abs(expected) > 1e-4
    assert along.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("form", [0, 1], ids=["autograd", "closed"])
def test_the_gradient_reaches_the_critic_alone_and_the_batch_stays_as_it_was(batch, draws, form):
    critic, actor = mlp(), DeterministicActor(S, A, (5,)).double()
    target = mlp()
    given = {**batch, "a": actor(batch["s"])}
    before = {name: value.detach().clone() for name, value in {**given, **draws}.items()}
    losses = both_forms(critic)[form](**given, **draws)
    sum(losses.values()).backward()
    assert all(p.grad is None for p in [*actor.parameters(), *target.parameters()])
    assert all(p.grad is not None for p in list(critic.parameters())[:3])
    assert not any(batch[name].requires_grad for name in batch)
    for name, value in {**given, **draws}.items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("form", [0, 1], ids=["autograd", "closed"])
def test_no_order_of_the_batch_or_the_critics_matters(batch, draws, form):
    critic = mlp()
    plain = both_forms(critic)[form](**batch, **draws)
    order = torch.randperm(B, generator=seeded(0))
    shuffled = both_forms(critic)[form](
        **{k: x[order] for k, x in batch.items()}, **{k: x[order] for k, x in draws.items()}
    )
    swapped = mlp()
    with torch.no_grad():
        for p in swapped.parameters():
            p.copy_(p.flip(0))
    exchanged = both_forms(swapped)[form](**batch, **draws)
    for name, value in plain.items():
        assert shuffled[name].item() == pytest.approx(value.item(), rel=1e-12)
        assert exchanged[name].item() == pytest.approx(value.item(), rel=1e-12)


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3)))
def test_a_term_that_is_not_asked_for_costs_no_rows_and_needs_no_draw(batch, draws, wanted):
    flags = dict(zip(("mpr", "vfc", "curv"), wanted, strict=True))
    q, rows = Quadratic(), []

    def counting(s, a):
        rows.append(s.shape[-2])
        return q(s, a)

    counting.n_critics = 2
    needed = {"eps": draws["eps"] if flags["mpr"] else None, "v": draws["v"] if flags["curv"] else None}
    found = pave_losses(counting, **batch, **needed, **flags)
    assert set(found) == {name for name, flag in flags.items() if flag}
    assert sum(rows) == (B * (1 + flags["mpr"] + flags["vfc"]) if any(wanted) else 0)
    every = pave_losses(q, **batch, **draws)
    assert all(found[name] == every[name] for name in found)


def test_no_random_number_is_drawn_by_the_losses(batch, draws):
    before = torch.get_rng_state()
    for losses in both_forms(mlp()):
        losses(**batch, **draws)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_piecewise_linear_critic_has_a_constant_curvature_loss_and_is_refused(batch, draws):
    critic = mlp("relu")
    found = pave_losses(critic, **batch, **draws, delta=1.5)["curv"]
    assert found.item() == 3.0
    gradients = torch.autograd.grad(found, list(critic.parameters()), allow_unused=True)
    assert all(g is None or not g.any() for g in gradients)
    with pytest.raises(ValueError, match=r"'relu'.*no gradient; choose 'silu' or 'tanh'"):
        check_smooth_activation("relu")
    with pytest.raises(ValueError, match=r"'relu'.*no gradient"):
        pave_losses_mlp(critic.weights(), "relu", **batch, **draws)
    with pytest.raises(ValueError, match="knows 'silu' and 'tanh', pave_losses any"):
        pave_losses_mlp(critic.weights(), "relu", **batch, eps=draws["eps"], curv=False)
    check_smooth_activation("silu")


def test_a_critic_that_is_linear_in_the_action_is_refused_with_a_hint(batch, draws):
    weight = normal(2, A, 1).requires_grad_()
    with pytest.raises(RuntimeError, match=r"no second derivative in the action.*smooth activations"):
        pave_losses(lambda s, a: (a @ weight).squeeze(-1) + s.sum(-1), **batch, **draws)


def test_half_precision_is_switched_off_inside(batch, draws):
    critic = mlp().float()
    given = {name: value.float() for name, value in {**batch, **draws}.items()}
    for losses in both_forms(critic):
        plain = losses(**given)
        with torch.autocast("cpu", torch.bfloat16):
            cast = losses(**given)
        assert {n: x.item() for n, x in plain.items()} == {n: x.item() for n, x in cast.items()}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_way_out_is_named(batch, draws, mode):
    with mode(), pytest.raises(RuntimeError, match=r"inference_mode\(False\) and torch.enable_grad"):
        pave_losses(mlp(), **batch, **draws)


def test_the_gradient_penalty_is_the_mean_square_norm_summed_over_critics():
    g = normal(2, B, A)
    expected = sum((row @ row).item() for critic in g for row in critic) / B
    assert gradient_penalty_loss(g).item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"s": torch.zeros(S)}, r"s is \(4,\)"),
        ({"a": torch.zeros(B - 1, A)}, r"a is \(23, 3\).*of one batch"),
        ({"s_next": torch.zeros(B, S + 1)}, r"s_next is \(24, 5\), but s is \(24, 4\)"),
        ({"eps": None}, r"eps is missing; give draw_noise"),
        ({"v": None}, r"v is missing; give draw_rademacher"),
        ({"delta": -0.1}, "delta is -0.1; give a curvature floor of at least 0"),
        ({"delta": float("nan")}, "delta is nan"),
    ],
)
def test_bad_input_is_refused_by_both_forms(batch, draws, change, message):
    for losses in both_forms(mlp()):
        with pytest.raises(ValueError, match=message):
            losses(**{**batch, **draws, **change})


@pytest.mark.parametrize(
    ("sigma", "message"),
    [
        (0.0, "sigma is 0.0; give standard deviations above 0"),
        (-1.0, "sigma is -1.0"),
        (float("nan"), "sigma is nan"),
        ([0.1, 0.0, 0.1], "standard deviations above 0"),
        ([0.1, 0.1], r"sigma has shape \(2,\); give a number, or one per dimension: 3"),
    ],
)
def test_a_sigma_that_is_no_standard_deviation_is_refused(sigma, message):
    with pytest.raises(ValueError, match=message):
        draw_noise(torch.zeros(5, 3), sigma)


def test_weights_are_at_least_zero():
    check_weights(0.0, 0.005, 2.0)
    for name in ("mpr", "vfc", "curv"):
        with pytest.raises(ValueError, match=f"the weight of {name} is -1.0"):
            check_weights(**{"mpr": 0.0, "vfc": 0.0, "curv": 0.0, name: -1.0})
    with pytest.raises(ValueError, match="the weight of vfc is inf"):
        check_weights(0.0, float("inf"), 0.0)


def test_critics_that_give_no_value_per_sample_are_refused(batch):
    with pytest.raises(ValueError, match=r"the critics returned \(2,\), not \(critics, batch\)"):
        action_gradient(lambda s, a: Quadratic()(s, a).sum(1), batch["s"], batch["a"])
