"""The three critic losses of PAVE: mixed partials, field consistency and curvature of Q, for any critic.

Notation: B batch, S observation size, A action size, C critics. Actions are the normalised ones, in [-1, 1], of the
replay buffer; the critics are the current ones, never the targets. ``g_i = grad_a Q_i(s, a)``.

Source: Lee, Kwak, Kim and Hwang, "Stabilizing the Q-Gradient Field for Policy Smoothness in Actor-Critic Methods",
ICML 2026, arXiv 2601.22970; the normalisation is that of the authors' public code, because the published weights belong
to it.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Critics = Callable[[Tensor, Tensor], Tensor]
"""``critics(s, a)``: s (B, S) or (C, B, S) and a (B, A) or (C, B, A) -> values (C, B), critic by critic."""

SIGMA = 0.01  # standard deviation of MPR's noise in raw observation units, all environments (paper and code)
DELTA = 1.0  # floor of the curvature, all environments (paper and code)
PIECEWISE_LINEAR = ("relu", "leaky_relu", "prelu", "relu6", "hardtanh", "identity")


def action_gradient(critics: Critics, s: Tensor, a: Tensor) -> Tensor:
    """``grad_a Q_i(s, a)`` (C, B, A) of each critic at every sample, with the graph kept for a second derivative.

    Every critic has an action leaf of its own: the gradient of ``Q_1 + Q_2`` in a shared leaf is their sum.

    Args:
        critics: the critics.
        s: (B, S) or (C, B, S).
        a: (B, A) or (C, B, A).

    Raises:
        RuntimeError: gradients are switched off, see :func:`check_gradients_are_on`.
    """
    leaf = _action_leaf(critics, s, a)
    (g,) = torch.autograd.grad(_checked(critics(s, leaf), leaf).sum(), leaf, create_graph=True)
    return g


def mixed_partial_loss(g: Tensor, g_noisy: Tensor) -> Tensor:
    """MPR, a scalar: ``sum_i mean_{b,k} (g_i(s + eps, a) - g_i(s, a))^2``, about ``sigma^2 |Q_as|_F^2 / A`` per critic.

    The mean runs over batch and action components as in the official code; the paper's value is A times as large. Both
    gradients carry the graph.

    Args:
        g: (C, B, A) at (s, a).
        g_noisy: (C, B, A) at (s + eps, a).
    """
    return (g_noisy - g).square().mean((1, 2)).sum()


def field_consistency_loss(g: Tensor, g_next: Tensor) -> Tensor:
    """VFC, a scalar: ``sum_i mean_{b,k} (g_i(s, a) - g_i(s', a))^2``, the same action at both states.

    Terminal transitions count like all others: s' is the observation that was reached, not the one after the reset.

    Args:
        g: (C, B, A) at (s, a).
        g_next: (C, B, A) at (s', a).
    """
    return (g - g_next).square().mean((1, 2)).sum()


def curvature_loss(tau: Tensor, delta: float) -> Tensor:
    """Curv, a scalar: ``sum_i mean_b relu(tau_i + delta)`` with ``tau_i = v' Q_aa v``.

    ``E_v tau = tr Q_aa`` (Hutchinson), so that it controls the trace and not each eigenvalue. The relu is inside the
    expectation over v: the term is at least ``relu(tr + delta)`` and zero only if every sign vector stays below.

    Args:
        tau: (C, B).
        delta: the floor, at least 0.
    """
    return torch.relu(tau + delta).mean(1).sum()


def gradient_penalty_loss(g: Tensor) -> Tensor:
    """The control GP-Critic, a scalar: ``sum_i mean_b |g_i|_2^2``; it flattens Q, and its curvature with it.

    Args:
        g: (C, B, A).
    """
    return g.square().sum(2).mean(1).sum()


def draw_noise(s: Tensor, sigma: float | Sequence[float] | Tensor, generator: torch.Generator | None = None) -> Tensor:
    """The perturbation ``eps ~ N(0, sigma^2 I)`` (B, S) of MPR: fresh per sample, shared by the critics.

    Args:
        s: (B, S).
        sigma: in raw observation units; one for all dimensions (the paper's) or one per dimension (S,).
        generator: None is torch's global one.

    Raises:
        ValueError: a sigma is not above 0, or there is not one per dimension.
    """
    scale = sigma if isinstance(sigma, (int, float)) else torch.as_tensor(sigma, dtype=s.dtype, device=s.device)
    if isinstance(scale, Tensor) and scale.shape not in ((), s.shape[-1:]):
        raise ValueError(f"sigma has shape {tuple(scale.shape)}; give a number, or one per dimension: {s.shape[-1]}")
    if not (bool((scale > 0).all()) if isinstance(scale, Tensor) else scale > 0):
        raise ValueError(f"sigma is {sigma}; give standard deviations above 0, or switch the mixed-partial term off")
    device = generator.device if generator is not None else s.device
    return torch.randn(s.shape, generator=generator, dtype=s.dtype, device=device).to(s.device) * scale


def draw_rademacher(a: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Signs v (B, A), -1 or 1 with equal probability: fresh per sample, shared by the critics.

    Args:
        a: (B, A).
        generator: None is torch's global one.
    """
    device = generator.device if generator is not None else a.device
    coins = torch.empty(a.shape, dtype=a.dtype, device=device).bernoulli_(0.5, generator=generator)
    return coins.mul_(2).sub_(1).to(a.device)


def pave_losses(
    critics: Critics,
    s: Tensor,
    a: Tensor,
    s_next: Tensor,
    *,
    eps: Tensor | None = None,
    v: Tensor | None = None,
    delta: float = DELTA,
    mpr: bool = True,
    vfc: bool = True,
    curv: bool = True,
) -> dict[str, Tensor]:
    """The losses that are asked for by name, ``mpr``, ``vfc`` and ``curv``: scalars, not weighted.

    One gradient call serves all terms. The samples at s have an action leaf of their own, so that the second gradient,
    the Hessian-vector product, runs through B rows and not through the 3B of ``[s; s + eps; s']``. A term that is not
    asked for costs no work, and its draw may be None. Draw eps before v, as the official code does. Autocast is
    switched off: second derivatives underflow in half precision.

    Args:
        critics: the current critics, twice differentiable in the action.
        s: (B, S).
        a: (B, A), the actions of the replay buffer.
        s_next: (B, S), the observations that were reached.
        eps: (B, S) of :func:`draw_noise`, for MPR.
        v: (B, A) of :func:`draw_rademacher`, for Curv.
        delta: floor of the curvature.
        mpr: whether to compute the mixed-partial loss.
        vfc: whether to compute the field-consistency loss.
        curv: whether to compute the curvature loss.

    Raises:
        ValueError: a draw is missing or has another shape, or delta is negative.
        RuntimeError: gradients are switched off, or the critics have no second derivative.
    """
    check_draws(s, a, s_next, eps if mpr else None, v if curv else None, delta, mpr, vfc, curv)
    if not (mpr or vfc or curv):
        return {}
    with torch.autocast(s.device.type, enabled=False):
        s, s_next = s.detach(), s_next.detach()
        leaf = _action_leaf(critics, s, a)
        parts = [(s, leaf)]
        if (others := shifted_states(s, s_next, eps, mpr, vfc)) is not None:
            parts.append((others, leaf.detach().repeat(1, len(others) // len(s), 1).requires_grad_()))
        values = [_checked(critics(states, actions), actions) for states, actions in parts]
        gradients = torch.autograd.grad([q.sum() for q in values], [leaf for _, leaf in parts], create_graph=True)
        tau = _curvature(gradients[0], leaf, v) if curv and v is not None else None
        return losses_of(gradients, tau, len(s), delta, mpr, vfc)


def shifted_states(s: Tensor, s_next: Tensor, eps: Tensor | None, mpr: bool, vfc: bool) -> Tensor | None:
    """The states beside s whose gradients the terms need: ``[s + eps; s']`` (2B, S), one of them (B, S), or None."""
    parts = [s + eps] if mpr and eps is not None else []
    parts += [s_next] if vfc else []
    return torch.cat(parts) if parts else None


def losses_of(
    gradients: Sequence[Tensor], tau: Tensor | None, n: int, delta: float, mpr: bool, vfc: bool
) -> dict[str, Tensor]:
    """The losses by name from the gradients at s and at the shifted states.

    Args:
        gradients: (C, B, A) at s, and (C, kB, A) in the order of :func:`shifted_states` where there are any.
        tau: (C, B), or None without the curvature term.
        n: B.
        delta: floor of the curvature.
        mpr: whether there are the rows of s + eps.
        vfc: whether there are the rows of s'.
    """
    losses = {}
    g, *shifted = (part for group in gradients for part in group.split(n, 1))
    if mpr:
        losses["mpr"] = mixed_partial_loss(g, shifted[0])
    if vfc:
        losses["vfc"] = field_consistency_loss(g, shifted[-1])
    if tau is not None:
        losses["curv"] = curvature_loss(tau, delta)
    return losses


def check_draws(
    s: Tensor,
    a: Tensor,
    s_next: Tensor,
    eps: Tensor | None,
    v: Tensor | None,
    delta: float,
    mpr: bool,
    vfc: bool,
    curv: bool,
) -> None:
    """Check what :func:`pave_losses` was given.

    Raises:
        ValueError: shapes do not fit, a draw is missing, or delta is negative.
    """
    if s.ndim != 2 or a.ndim != 2 or len(s) != len(a) or len(s) == 0:
        raise ValueError(f"s is {tuple(s.shape)} and a is {tuple(a.shape)}; give (batch, size) each, of one batch")
    if vfc and s_next.shape != s.shape:
        raise ValueError(f"s_next is {tuple(s_next.shape)}, but s is {tuple(s.shape)}")
    for wanted, name, draw, like, maker in (
        (mpr, "eps", eps, s, "draw_noise(s, sigma)"),
        (curv, "v", v, a, "draw_rademacher(a)"),
    ):
        if wanted and draw is None:
            raise ValueError(f"{name} is missing; give {maker}, or leave its term out")
        if draw is not None and draw.shape != like.shape:
            raise ValueError(f"{name} is {tuple(draw.shape)}; give {tuple(like.shape)}, a draw of its own per sample")
    if not delta >= 0:
        raise ValueError(f"delta is {delta}; give a curvature floor of at least 0, such as {DELTA:g}")


def check_weights(mpr: float, vfc: float, curv: float) -> None:
    """Check the weights of the three terms.

    Raises:
        ValueError: one is negative or not finite.
    """
    for name, weight in (("mpr", mpr), ("vfc", vfc), ("curv", curv)):
        if not 0 <= weight < float("inf"):
            raise ValueError(f"the weight of {name} is {weight}; give a finite number of at least 0")


def check_smooth_activation(activation: str) -> None:
    """Check that a critic with this activation has curvature.

    Raises:
        ValueError: the activation is piecewise linear: ``Q_aa`` is 0 almost everywhere, so that the curvature loss is
            the constant delta per critic and has no gradient.
    """
    if activation.lower() in PIECEWISE_LINEAR:
        raise ValueError(
            f"the critic's activation is {activation!r}: its action Hessian is 0 almost everywhere and the curvature "
            "term has no gradient; choose 'silu' or 'tanh', or set the curvature weight to 0"
        )


def check_gradients_are_on() -> None:
    """Check that derivatives can be taken here.

    Raises:
        RuntimeError: under ``torch.inference_mode`` or ``torch.no_grad``, as in validation.
    """
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        raise RuntimeError(
            "gradients are switched off here; wrap the call in torch.inference_mode(False) and torch.enable_grad(), "
            "and clone tensors that were made under inference mode"
        )


def _action_leaf(critics: Critics, s: Tensor, a: Tensor) -> Tensor:
    """A leaf (C, B, A) of the actions, one slice per critic."""
    check_gradients_are_on()
    if a.ndim == 3:
        return a.detach().clone().requires_grad_()
    n_critics = getattr(critics, "n_critics", None)
    if n_critics is None:
        with torch.no_grad():
            n_critics = len(critics(s[..., :1, :], a[:1]))
    return a.detach().repeat(n_critics, 1, 1).requires_grad_()


def _checked(q: Tensor, actions: Tensor) -> Tensor:
    """The values, if there is one of each critic at each sample."""
    if q.shape != actions.shape[:2]:
        raise ValueError(f"the critics returned {tuple(q.shape)}, not (critics, batch) = {tuple(actions.shape[:2])}")
    return q


def _curvature(g: Tensor, leaf: Tensor, v: Tensor) -> Tensor:
    """``v' Q_aa v`` (C, B) of the gradient g (C, B, A) in the leaf."""
    try:
        (hv,) = torch.autograd.grad((g * v).sum(), leaf, create_graph=True)
    except RuntimeError as error:
        raise RuntimeError(
            "the critics have no second derivative in the action: they are linear in it, or hold an operation without "
            f"a double backward ({str(error).splitlines()[0]}); use smooth activations and no fused kernels"
        ) from error
    return (hv * v).sum(2)
