"""Exact second derivatives of one critic, the geometry they describe, and how far the best action moves with the state.

Notation: B batch, S observation size, A action size. A critic here is a single one, ``critic(s, a)`` with s (B, S) and
a (B, A) -> values (B,), such as ``lambda s, a: critics(s, a)[0]``.

Lightning validates under ``torch.inference_mode`` or ``torch.no_grad``. The functions of this file leave that mode,
switch gradients on and clone what they are given, so that they can be called there and give ordinary tensors back.
Plain autograd, as in ``functional.action_gradient``, needs its caller to do so; ``torch.enable_grad`` alone fails.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.func import grad, vjp, vmap

Critic = Callable[[Tensor, Tensor], Tensor]
CHUNK = 4096  # samples whose Hessians are computed at once


@dataclass(frozen=True)
class CriticGeometry:
    """Scalars that describe the action gradient of a critic on visited pairs (s, a).

    Attributes:
        mixed_mean: mean of ``M = |Q_as|_2``, the largest singular value of the mixed partials.
        mixed_sup: the largest M.
        negative_definite_rate: share of pairs at which every eigenvalue of ``Q_aa`` is below 0.
        concavity_rate: share of pairs with ``tr Q_aa < -delta``.
        flip_rate: share of consecutive steps of an episode whose gradients have a negative cosine; NaN without any.
        gradient_cosine: mean cosine of consecutive gradients; NaN without any.
    """

    mixed_mean: float
    mixed_sup: float
    negative_definite_rate: float
    concavity_rate: float
    flip_rate: float
    gradient_cosine: float


def mixed_hessian(critic: Critic, s: Tensor, a: Tensor) -> Tensor:
    """``Q_as`` (B, A, S): how the action gradient at (s, a) changes with the state.

    Args:
        critic: a single critic.
        s: (B, S).
        a: (B, A).
    """
    return _derivatives(critic, s, a)[1]


def action_hessian(critic: Critic, s: Tensor, a: Tensor) -> Tensor:
    """``Q_aa`` (B, A, A), symmetric.

    Args:
        critic: a single critic.
        s: (B, S).
        a: (B, A).
    """
    return _derivatives(critic, s, a)[2]


def critic_geometry(
    critic: Critic, s: Tensor, a: Tensor, delta: float, episode: Tensor | None = None
) -> CriticGeometry:
    """Measure a critic on the pairs that a policy visits.

    Args:
        critic: a single critic.
        s: (B, S), in the order in which they were visited.
        a: (B, A), the deterministic actions there.
        delta: floor of the curvature, for the concavity rate.
        episode: (B,), the number of the episode of each row; neighbours with the same number are consecutive steps.
            None leaves the two numbers of consecutive steps NaN.

    Raises:
        ValueError: there is no pair, or sizes do not fit.
    """
    if s.ndim != 2 or a.ndim != 2 or len(s) != len(a) or len(s) == 0:
        raise ValueError(
            f"s is {tuple(s.shape)} and a is {tuple(a.shape)}; give (visited pairs, size) each, at least one"
        )
    if episode is not None and episode.shape != s.shape[:1]:
        raise ValueError(f"episode is {tuple(episode.shape)}; give the number of the episode of each of {len(s)} pairs")
    g, mixed, hessian = _derivatives(critic, s, a)
    m = torch.linalg.matrix_norm(mixed, 2)
    largest = torch.linalg.eigvalsh(hessian)[:, -1]
    trace = hessian.diagonal(dim1=1, dim2=2).sum(1)
    cosine = torch.cosine_similarity(g[:-1], g[1:])
    cosine = cosine[:0] if episode is None else cosine[(episode[1:] == episode[:-1]).to(cosine.device)]
    return CriticGeometry(
        mixed_mean=float(m.mean()),
        mixed_sup=float(m.max()),
        negative_definite_rate=float((largest < 0).double().mean()),
        concavity_rate=float((trace < -delta).double().mean()),
        flip_rate=float((cosine < 0).double().mean()),
        gradient_cosine=float(cosine.mean()),
    )


@dataclass(frozen=True)
class ArgmaxJacobian:
    """How the best action ``a*(s) = argmax_a Q(s, a)`` moves with the state; NaN where a state does not qualify.

    Attributes:
        action: (B, A), the best action in the box.
        qualifies: (B,), whether it is an interior strict maximum, at s and a step away, and on one branch.
        jumps: (B,), whether another maximum overtakes it within a step, so that ``a*`` is not continuous there.
        jacobian: (B, A, S), ``da*/ds`` as central differences of the argmax.
        norm: (B,), its spectral norm.
        formula: (B, A, S), ``-Q_aa^-1 Q_as`` at (s, a*), by the implicit function theorem.
        bound: (B,), ``M / mu`` there: ``|Q_as|_2`` over the smallest ``|eigenvalue|`` of ``Q_aa``.
    """

    action: Tensor
    qualifies: Tensor
    jumps: Tensor
    jacobian: Tensor
    norm: Tensor
    formula: Tensor
    bound: Tensor

    @property
    def share(self) -> float:
        """Share of the states that qualify."""
        return float(self.qualifies.double().mean())


def argmax_jacobian(
    critic: Critic,
    s: Tensor,
    n_actions: int,
    step: float = 1e-4,
    n_starts: int = 32,
    n_kept: int = 4,
    margin: float = 1e-3,
    least_curvature: float = 1e-4,
    generator: torch.Generator | None = None,
) -> ArgmaxJacobian:
    """Measure ``da*/ds`` by moving the state and maximising again; the implicit formula is reported beside it.

    The best of ``n_starts`` random actions in [-1, 1]^A are climbed by projected Newton steps and the highest end is
    ``a*``. At ``s +- step e_j`` all ends are climbed again; if another end is then the highest, the argmax jumps and
    the state does not qualify.

    Args:
        critic: a single critic in float64, twice differentiable.
        s: (B, S) in float64.
        n_actions: A.
        step: of the central differences, in raw observation units.
        n_starts: random actions looked at per state.
        n_kept: how many of them are climbed.
        margin: distance from the bounds below which a maximum is not interior.
        least_curvature: mu below which a maximum is not strict.
        generator: for the random actions; None is torch's global one.

    Raises:
        ValueError: the states are not (B, S) in float64, or a number is out of range.
    """
    if s.ndim != 2 or s.dtype != torch.float64:
        raise ValueError(
            f"s is {tuple(s.shape)} in {s.dtype}; differences of an argmax need (B, S) and a critic in torch.float64, "
            "such as copy.deepcopy(critic).double()"
        )
    if not (step > 0 and 1 <= n_kept <= n_starts and margin > 0 and least_curvature > 0):
        raise ValueError(
            f"step {step}, n_starts {n_starts}, n_kept {n_kept}, margin {margin}, least_curvature {least_curvature}: "
            "give numbers above 0, and n_kept up to n_starts"
        )
    with torch.inference_mode(False), torch.enable_grad():
        s = s.clone()
        starts = _starts(critic, s, n_actions, n_starts, n_kept, generator)
        ends = climb(critic, s[:, None], starts)
        best = _values(critic, s[:, None], ends).argmax(1)
        action = ends[torch.arange(len(s)), best]
        followed, jumps = _follow(critic, s, ends, best, step, margin)
        g, mixed, hessian = _derivatives(critic, s, action)
        mu = -torch.linalg.eigvalsh(hessian)[:, -1]
        inside = torch.cat([action[:, None], followed], 1).abs().flatten(1).amax(1) < 1 - margin
        qualifies = inside & (mu > least_curvature) & (g.abs().amax(1) < 1e-6 * (1 + mu)) & ~jumps
        plus, minus = followed.unflatten(1, (2, -1)).unbind(1)
        jacobian = ((plus - minus) / (2 * step)).mT
        formula = -torch.linalg.lstsq(hessian, mixed).solution
        undefined = ~qualifies
        jacobian, formula = (x.masked_fill(undefined[:, None, None], torch.nan) for x in (jacobian, formula))
        norm = torch.full_like(mu, torch.nan)
        norm[qualifies] = torch.linalg.matrix_norm(jacobian[qualifies], 2)
        bound = (torch.linalg.matrix_norm(mixed, 2) / mu).masked_fill(undefined, torch.nan)
    return ArgmaxJacobian(action, qualifies, jumps, jacobian, norm, formula, bound)


def climb(critic: Critic, s: Tensor, a: Tensor, n_steps: int = 60, tolerance: float = 1e-10) -> Tensor:
    """Maximise ``Q(s, .)`` over [-1, 1]^A from the actions a (..., A) by projected Newton steps.

    Components at a bound that the gradient pushes out are held. On the others the step is ``|H|^-1 g``, the Newton
    step with the absolute eigenvalues, which ascends wherever Q is smooth; it is taken in full if Q does not fall, or
    else the best of its halvings is.

    Args:
        critic: a single critic.
        s: (..., S), broadcastable with a.
        a: (..., A), the starts.
        n_steps: the most steps.
        tolerance: of the projected gradient's largest component.
    """
    rows = s.expand(*a.shape[:-1], s.shape[-1]).reshape(-1, s.shape[-1])
    found = a.reshape(-1, a.shape[-1]).clone()
    active = torch.arange(len(found), device=found.device)
    for _ in range(n_steps):
        states, actions = rows[active], found[active]
        g, _, hessian = _derivatives(critic, states, actions, mixed=False)
        held = ((actions >= 1) & (g > 0)) | ((actions <= -1) & (g < 0))
        g = g.masked_fill(held, 0.0)
        hessian = hessian.masked_fill(held[:, :, None] | held[:, None, :], 0.0)
        unfinished = g.abs().amax(1) > tolerance
        if not unfinished.any():
            break
        active, states, actions, g, hessian = (x[unfinished] for x in (active, states, actions, g, hessian))
        values, vectors = torch.linalg.eigh(hessian)
        scale = values.abs().clamp(min=1e-6 * (1 + values.abs().amax(1, keepdim=True)))
        direction = (vectors @ ((vectors.mT @ g[:, :, None]) / scale[:, :, None])).squeeze(2).clamp(-2, 2)
        found[active] = _line_search(critic, states, actions, direction)
        active = active[(found[active] != actions).any(1)]
    return found.reshape(a.shape)


def _follow(critic: Critic, s: Tensor, ends: Tensor, best: Tensor, step: float, margin: float) -> tuple[Tensor, Tensor]:
    """Where the best of the ends (B, K, A) moves to (B, 2S, A) at ``s +- step e_j``, first all +; and who jumps.

    A state jumps (B,) if another end, more than ``margin`` apart, is the highest at one of them.
    """
    offsets = step * torch.eye(s.shape[1], dtype=s.dtype, device=s.device)
    moved = torch.stack([s[:, None] + offsets, s[:, None] - offsets], 1).flatten(1, 2)  # (B, 2S, S)
    ends = climb(critic, moved[:, :, None], ends[:, None].expand(-1, moved.shape[1], -1, -1))
    values = _values(critic, moved[:, :, None], ends)
    followed = ends.take_along_dim(best[:, None, None, None], 2).squeeze(2)
    own = values.take_along_dim(best[:, None, None], 2)
    apart = (ends - followed[:, :, None]).abs().amax(-1) > margin
    return followed, (apart & (values > own)).flatten(1).any(1)


def _derivatives(critic: Critic, s: Tensor, a: Tensor, mixed: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """``Q_a`` (B, A), ``Q_as`` (B, A, S; not computed and empty without ``mixed``) and ``Q_aa`` (B, A, A), detached."""

    def total(states: Tensor, actions: Tensor) -> Tensor:
        return critic(states, actions).sum()

    with torch.inference_mode(False), torch.enable_grad():
        found = []
        for states, actions in zip(s.detach().clone().split(CHUNK), a.detach().clone().split(CHUNK), strict=True):
            # A sample's value depends on no other sample, so that one pass back per action component serves all.
            rows = torch.eye(a.shape[1], dtype=a.dtype, device=a.device)[:, None].expand(-1, len(actions), -1)
            if mixed:
                value, back = vjp(grad(total, argnums=1), states, actions)[:2]
                cross, hessian = vmap(back)(rows)
            else:
                value, back = vjp(partial(grad(total, argnums=1), states), actions)[:2]
                (hessian,) = vmap(back)(rows)
                cross = hessian.new_empty(*hessian.shape[:2], 0)
            found.append((value.detach(), cross.transpose(0, 1).detach(), hessian.transpose(0, 1).detach()))
        g, cross, hessian = (torch.cat(parts) for parts in zip(*found, strict=True))
        return g, cross, hessian


def _line_search(critic: Critic, s: Tensor, a: Tensor, direction: Tensor) -> Tensor:
    """The actions after the full step, or after the best of its halvings, or where they are."""
    full = (a + direction).clamp(-1, 1)
    before, after = _values(critic, s, a), _values(critic, s, full)
    # Near the top the values are equal up to rounding; there the full step is right.
    falls = after < before - 1e-13 * (1 + before.abs())
    if falls.any():
        halves = 0.5 ** torch.arange(1, 13, dtype=a.dtype, device=a.device)
        tries = (a[falls, None] + halves[:, None] * direction[falls, None]).clamp(-1, 1)
        heights, best = _values(critic, s[falls, None], tries).max(1)
        chosen = tries[torch.arange(len(tries)), best]
        full[falls] = torch.where((heights > before[falls])[:, None], chosen, a[falls])
    return full


def _starts(
    critic: Critic, s: Tensor, n_actions: int, n_starts: int, n_kept: int, generator: torch.Generator | None
) -> Tensor:
    """The best ``n_kept`` (B, K, A) of random actions."""
    device = generator.device if generator is not None else s.device
    unit = torch.rand(len(s), n_starts, n_actions, generator=generator, dtype=s.dtype, device=device).to(s.device)
    tries = unit * 2 - 1
    order = _values(critic, s[:, None], tries).topk(n_kept, 1).indices
    return tries.take_along_dim(order[:, :, None], 1)


def _values(critic: Critic, s: Tensor, a: Tensor) -> Tensor:
    """Q (...) for s (..., S) broadcast to a (..., A)."""
    with torch.no_grad():
        rows = s.expand(*a.shape[:-1], s.shape[-1]).reshape(-1, s.shape[-1])
        return critic(rows, a.reshape(-1, a.shape[-1])).reshape(a.shape[:-1])
