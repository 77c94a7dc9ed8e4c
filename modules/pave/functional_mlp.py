"""The action gradient and the curvature of a multi-layer perceptron in closed form, for one ordinary backward pass.

For ``z_l = h_{l-1} W_l + b_l``, ``h_l = phi(z_l)``, ``Q = h_L w + b`` and ``h_0 = [s, a]``:

- reverse sweep: ``r_L = w``, ``r_{l-1} = (r_l * phi'(z_l)) W_l'`` with ``r_l = dQ/dh_l``; g is the action part of r_0;
- forward tangent in the direction v: ``t_1 = v W_1[a]``, ``t_{l+1} = (phi'(z_l) * t_l) W_{l+1}``;
- curvature: ``v' Q_aa v = sum_l r_l . (phi''(z_l) * t_l^2)``, because each layer bends the tangent by ``phi'' t^2`` and
  what is bent there reaches Q through r_l.

These are ordinary expressions in the weights, so that no graph is differentiated twice.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fulgurite.modules.pave.functional import DELTA, check_draws, check_smooth_activation, losses_of, shifted_states

Weights = Sequence[tuple[Tensor, Tensor]]
"""Layer by layer: weight (C, in, out) and bias (C, out); the last has out = 1."""


def mlp_action_derivatives(
    weights: Weights, activation: str, s: Tensor, a: Tensor, v: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """``g = grad_a Q`` (C, B, A) and ``tau = v' Q_aa v`` (C, V) of C perceptrons over ``[s, a]``.

    Args:
        weights: of the critics, such as ``TwinCritic.weights()``.
        activation: ``"silu"`` or ``"tanh"``.
        s: (B, S).
        a: (B, A).
        v: (V, A) with V <= B: directions at the first V samples; None leaves tau out.

    Returns:
        g and tau, which can be differentiated once in the weights; tau is None without v.

    Raises:
        ValueError: the activation is another, or sizes do not fit the weights.
    """
    if activation not in ("silu", "tanh"):
        if v is not None:
            check_smooth_activation(activation)
        raise ValueError(f"activation is {activation!r}; the closed form knows 'silu' and 'tanh', pave_losses any")
    n_actions, n_inputs = a.shape[-1], weights[0][0].shape[1]
    if len(weights) < 2:
        raise ValueError("the critics have no hidden layer: they are linear, with a constant gradient and no curvature")
    if s.shape[-1] + n_actions != n_inputs:
        raise ValueError(f"the critics take {n_inputs} inputs, but s and a have {s.shape[-1]} + {n_actions}")
    first_action = n_inputs - n_actions
    into_actions = weights[0][0][:, first_action:]  # (C, A, H)
    n_tangents = 0 if v is None else len(v)

    hidden = torch.cat([s, a], -1)
    slopes, first_slopes, first_bends = [], [], []
    for weight, bias in weights[:-1]:
        z = torch.baddbmm(bias[:, None], hidden.expand(len(weight), *hidden.shape[-2:]), weight)
        hidden, slope, first_slope, first_bend = _Jet.apply(z, activation, n_tangents)
        slopes.append(slope)
        first_slopes.append(first_slope)
        first_bends.append(first_bend)

    tangents = []
    if v is not None:
        tangent = torch.bmm(v.expand(len(into_actions), *v.shape), into_actions)
        for slope, (weight, _) in zip(first_slopes[:-1], weights[1:-1], strict=True):
            tangents.append(tangent)
            tangent = torch.bmm(slope * tangent, weight)
        tangents.append(tangent)

    tau: Tensor | None = None
    reach = weights[-1][0].mT  # (C, 1, H): dQ/dh of the last hidden layer, the same for every sample
    for layer in range(len(slopes) - 1, -1, -1):
        if v is not None:
            tangent = tangents[layer]
            part = torch.linalg.vecdot(reach[:, :n_tangents] * tangent, first_bends[layer] * tangent)
            tau = part if tau is None else tau + part
        into = weights[layer][0].mT if layer else into_actions.mT
        if layer == len(slopes) - 1:  # one row of output weights for all samples: scale the matrix instead
            reach = torch.bmm(slopes[layer], reach.mT * into)
        else:
            reach = torch.bmm(reach * slopes[layer], into)
    return reach, tau


def pave_losses_mlp(
    weights: Weights,
    activation: str,
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
    """The losses of :func:`fulgurite.modules.pave.functional.pave_losses`, at less than half the cost, for perceptrons.

    Args:
        weights: of the critics, such as ``TwinCritic.weights()``.
        activation: ``"silu"`` or ``"tanh"``.
        s: (B, S).
        a: (B, A), the actions of the replay buffer.
        s_next: (B, S), the observations that were reached.
        eps: (B, S) of ``draw_noise``, for MPR.
        v: (B, A) of ``draw_rademacher``, for Curv.
        delta: floor of the curvature.
        mpr: whether to compute the mixed-partial loss.
        vfc: whether to compute the field-consistency loss.
        curv: whether to compute the curvature loss.

    Raises:
        ValueError: a draw is missing or has another shape, delta is negative, or the activation is not supported.
    """
    check_draws(s, a, s_next, eps if mpr else None, v if curv else None, delta, mpr, vfc, curv)
    if not (mpr or vfc or curv):
        return {}
    with torch.autocast(s.device.type, enabled=False):
        s, a, s_next = s.detach(), a.detach(), s_next.detach()
        others = shifted_states(s, s_next, eps, mpr, vfc)
        states = s if others is None else torch.cat([s, others])
        actions = a.repeat(len(states) // len(s), 1)
        g, tau = mlp_action_derivatives(weights, activation, states, actions, v if curv else None)
        return losses_of([g], tau, len(s), delta, mpr, vfc)


class _Jet(torch.autograd.Function):
    """``phi(z)``, ``phi'(z)`` (C, N, H), and ``phi'(z)``, ``phi''(z)`` of the first ``rows`` samples (C, rows, H).

    Their derivatives are the next ones in the row, which are kept, instead of the dozen elementwise nodes and as many
    passes through memory that autograd would need.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, activation: str, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if activation == "tanh":
            value, slope, bend, third = _tanh_jet(z, rows)
        else:
            value, slope, bend, third = _silu_jet(z, rows)
        ctx.save_for_backward(slope, bend, third)
        ctx.rows = rows
        ctx.set_materialize_grads(False)
        return value, slope, slope[:, :rows].clone(), bend[:, :rows]

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        to_value: Tensor | None,
        to_slope: Tensor | None,
        to_first_slope: Tensor | None,
        to_first_bend: Tensor | None,
    ) -> tuple[Tensor, None, None]:
        slope, bend, third = ctx.saved_tensors
        into = torch.zeros_like(bend) if to_slope is None else bend * to_slope
        if to_value is not None:
            into.addcmul_(slope, to_value)
        first = into[:, : ctx.rows]
        if to_first_slope is not None:
            first.addcmul_(bend[:, : ctx.rows], to_first_slope)
        if to_first_bend is not None:
            first.addcmul_(third, to_first_bend)
        return into, None, None


def _silu_jet(z: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``phi = z p`` with ``p = sigmoid(z)``, its first two derivatives, and the third of the first rows.

    With ``q = 1 - p`` and ``m = p (1 - phi)``: ``phi' = p + phi q``, ``phi'' = q (m + phi')`` and
    ``phi''' = q (m (q - p) - 2 p phi' + phi'')``.
    """
    p = torch.sigmoid(z)
    q = 1 - p
    value = z * p
    slope = torch.addcmul(p, value, q)
    m = torch.addcmul(p, p, value, value=-1)
    bend = (m + slope).mul_(q)
    p, q, m, d1, d2 = (x[:, :rows] for x in (p, q, m, slope, bend))
    third = (q - p).mul_(m).addcmul_(p, d1, value=-2).add_(d2).mul_(q)
    return value, slope, bend, third


def _tanh_jet(z: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``phi = tanh(z)``, ``phi' = 1 - phi^2``, ``phi'' = -2 phi phi'``; ``phi''' = phi' (4 - 6 phi')`` of the first."""
    value = torch.tanh(z)
    slope = 1 - value.square()
    bend = (value * slope).mul_(-2)
    first = slope[:, :rows]
    return value, slope, bend, first * (4 - 6 * first)
