"""Smoothness of actions, the actor-side losses that PAVE is compared with, and the published settings of all of them.

Notation: T steps of an episode, B batch, S observation size, A action size, C critics; ``pi`` is the deterministic
action in [-1, 1] (SAC: tanh of the mean). Normalisation as in the public code of PAVE's authors, who re-implemented the
other methods.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fulgurite.modules.pave.functional import DELTA, SIGMA


@dataclass(frozen=True)
class PaveWeights:
    """Weights of the critic's three terms; the official code calls them lamS, lamT and lamC, in this order."""

    mpr: float = 0.1
    vfc: float = 0.1
    curv: float = 0.01
    sigma: float = SIGMA
    delta: float = DELTA


@dataclass(frozen=True)
class CapsWeights:
    """Weights of CAPS, and the standard deviation of its noise in raw observation units."""

    temporal: float = 0.1
    spatial: float = 0.5
    sigma: float = 0.2


@dataclass(frozen=True)
class L2c2Settings:
    """Settings of L2C2: width of the mixture, lower and upper limit of the weight, share of the critic's term."""

    sigma: float = 1.0
    lower: float = 0.1
    upper: float = 10.0
    beta: float = 0.1


@dataclass(frozen=True)
class AsapWeights:
    """Weights of ASAP, and the share of the new weights in each update of its predictor's target."""

    temporal: float = 0.05
    spatial: float = 0.3
    prediction: float = 2.0
    tau: float = 0.01


ENVIRONMENTS: Mapping[str, str] = {
    "Pendulum-v1": "pendulum",
    "LunarLander-v3": "lunar",
    "Reacher-v5": "reacher",
    "Ant-v5": "ant",
    "Hopper-v5": "hopper",
    "Walker2d-v5": "walker",
    "Humanoid-v5": "humanoid",
}
"""Gymnasium's identifiers -> the names of the tables below."""

# The public code's values per algorithm and environment (method description, section 2).
PAVE_WEIGHTS: Mapping[str, Mapping[str, PaveWeights]] = {
    "td3": {
        "lunar": PaveWeights(0.1, 0.1, 0.01),
        "reacher": PaveWeights(0.1, 0.1, 0.01),
        "walker": PaveWeights(0.1, 0.1, 0.01),
        "ant": PaveWeights(0.1, 0.005, 0.5),
        "hopper": PaveWeights(0.1, 0.005, 0.5),
        "humanoid": PaveWeights(0.1, 0.005, 0.5),
        "pendulum": PaveWeights(2.0, 0.005, 2.0),
    },
    "sac": {
        "ant": PaveWeights(0.1, 0.0005, 1.0),
        "humanoid": PaveWeights(0.1, 0.0005, 1.0),
        "reacher": PaveWeights(0.1, 0.0005, 1.0),
        "hopper": PaveWeights(2.0, 0.0005, 3.0),
        "lunar": PaveWeights(0.1, 0.5, 0.05),
        "pendulum": PaveWeights(0.1, 0.005, 0.5),
        "walker": PaveWeights(2.0, 0.005, 2.0),
    },
}

# The public code's values; an environment that is not named has the defaults.
CAPS_WEIGHTS: Mapping[str, CapsWeights] = {"default": CapsWeights(), "pendulum": CapsWeights(1.0, 5.0)}
L2C2_SETTINGS: Mapping[str, L2c2Settings] = {
    "default": L2c2Settings(),
    "pendulum": L2c2Settings(lower=1.0, upper=100.0),
}
GRAD_WEIGHT = 1.0
L2C2_DRAWS = 4  # actions per state in the distance of Gaussian policies

# SAC's spatial weight is between 5 and 30 in the public code, by environment; the smallest stands for all here.
ASAP_WEIGHTS: Mapping[str, Mapping[str, AsapWeights]] = {
    "td3": {
        "default": AsapWeights(),
        "hopper": AsapWeights(temporal=0.07),
        "lunar": AsapWeights(temporal=0.005, spatial=0.03),
        "pendulum": AsapWeights(temporal=0.005, spatial=0.03),
        "reacher": AsapWeights(temporal=0.1, spatial=0.1),
    },
    "sac": {"default": AsapWeights(temporal=0.5, spatial=5.0)},
}


def action_spectrum(actions: Any, fs: float = 1.0) -> tuple[Tensor, Tensor]:
    """Frequencies (F,) and amplitudes ``|FFT|`` (F, A) of an episode's actions, F = floor(T / 2), in float64.

    As in the official code, an odd T loses its highest frequency.

    Args:
        actions: (T, A) or (T,).
        fs: sampling rate; the frequencies are ``k fs / T``.

    Raises:
        ValueError: the actions have another shape, or ``fs`` is not above 0.
    """
    signal = _episode(actions)
    if not fs > 0:
        raise ValueError(f"fs is {fs}; give a sampling rate above 0")
    n = len(signal)
    if n < 2:
        return signal.new_zeros(0), signal.new_zeros(0, signal.shape[1])
    frequencies = torch.arange(n // 2, dtype=signal.dtype, device=signal.device) * (fs / n)
    return frequencies, torch.fft.rfft(signal, dim=0)[: n // 2].abs()


def spectral_smoothness(actions: Any, fs: float = 1.0) -> Tensor:
    """The smoothness score sm, a float64 scalar, lower is smoother: ``mean_dims 2 / (T fs) sum_k f_k |FFT_k|``.

    It scales with the actions: give them in the units that the environment gets, for all methods alike, and report the
    return beside it, because a constant policy scores 0. An episode below 2 steps scores 0.

    Args:
        actions: (T, A) or (T,), of one episode.
        fs: sampling rate; it cancels, as in the official code.

    Raises:
        ValueError: the actions have another shape, or ``fs`` is not above 0.
    """
    frequencies, amplitudes = action_spectrum(actions, fs)
    n = len(_episode(actions))
    return (2 / (max(n, 1) * fs) * (frequencies @ amplitudes)).mean()


def action_fluctuation(actions: Any) -> Tensor:
    """The fluctuation osc, a float64 scalar: ``mean_{t,dims} |a_{t+1} - a_t|``; 0 below 2 steps.

    Args:
        actions: (T, A) or (T,), of one episode.

    Raises:
        ValueError: the actions have another shape.
    """
    signal = _episode(actions)
    return signal.diff(dim=0).abs().mean() if len(signal) > 1 else signal.new_zeros(())


def caps_losses(pi_s: Tensor, pi_next: Tensor, pi_noisy: Tensor) -> tuple[Tensor, Tensor]:
    """CAPS (Mysore et al. 2021), temporal and spatial, scalars: ``0.5 mean (pi(s) - pi(.))^2``.

    The gradient flows through both arguments. CAPS' own paper takes distances that are not squared.

    Args:
        pi_s: (B, A).
        pi_next: (B, A) at s'.
        pi_noisy: (B, A) at ``s + sigma n``, ``n ~ N(0, I)``.
    """
    return 0.5 * (pi_s - pi_next).square().mean(), 0.5 * (pi_s - pi_noisy).square().mean()


def grad_loss(pi_prev: Tensor, pi_now: Tensor, pi_next: Tensor) -> Tensor:
    """GRAD, a scalar: the mean of ``0.5 (2 pi_t - pi_{t+1} - pi_{t-1})^2 w``, a second difference.

    ``w = tanh((pi_{t+1} - pi_{t-1} + 1e-4)^-2)`` is a constant for the gradient: it is small where the action moves on.

    Args:
        pi_prev: (B, A) at s_{t-1} of the same episode; at its first step, at s_t.
        pi_now: (B, A) at s_t.
        pi_next: (B, A) at s_{t+1}.
    """
    weight = torch.tanh((pi_next - pi_prev + 1e-4).detach().square().reciprocal())
    return (0.5 * (2 * pi_now - pi_next - pi_prev).square() * weight).mean()


def asap_losses(pi_next: Tensor, predicted: Tensor, predicted_by_target: Tensor) -> tuple[Tensor, Tensor]:
    """ASAP's spatial loss and that of its predictor, scalars; its temporal loss is :func:`grad_loss`.

    ``0.5 mean (pi(s') - sg[p_target(s)])^2`` and ``0.5 mean (p(s) - sg[pi(s')])^2``.

    Args:
        pi_next: (B, A) at s'.
        predicted: (B, A), the predictor p at s.
        predicted_by_target: (B, A), the slow copy of the predictor at s.
    """
    spatial = 0.5 * (pi_next - predicted_by_target.detach()).square().mean()
    return spatial, 0.5 * (predicted - pi_next.detach()).square().mean()


def l2c2_mix(s: Tensor, s_next: Tensor, u: Tensor, sigma: float, lower: float, upper: float) -> Tensor:
    """L2C2's state (B, S) between s and s', and beyond: ``s + (s' - s) w (2u - 1)``, ``w = sigma + (sigma - 1) e``.

    Args:
        s: (B, S).
        s_next: (B, S).
        u: (B, S), uniform in [0, 1).
        sigma: width of the mixture.
        lower: see :func:`l2c2_weights`.
        upper: see :func:`l2c2_weights`.

    Raises:
        ValueError: the limits do not fit.
    """
    width = sigma + (sigma - 1) * _l2c2_offset(sigma, lower, upper)
    return s + (s_next - s) * (width * (2 * u - 1))


def l2c2_weights(
    s: Tensor, s_next: Tensor, s_bar: Tensor, sigma: float, lower: float, upper: float, beta: float
) -> tuple[Tensor, Tensor]:
    """L2C2's weights per sample (Kobayashi 2022), of the policy's and the value's distance, (B,) each.

    ``e = sigma lower / (upper - sigma lower)``, ``d = max_j |(s_bar - s)_j / ((s' - s)_j + 1e-8)| + e``,
    ``lam_pi = e upper / d`` and ``lam_V = beta lam_pi / d``; constants for the gradient.

    Args:
        s: (B, S).
        s_next: (B, S).
        s_bar: (B, S) of :func:`l2c2_mix`.
        sigma: width of the mixture.
        lower: the weight at the largest distance.
        upper: the weight at distance 0.
        beta: share of the value's term.

    Raises:
        ValueError: the limits do not fit.
    """
    offset = _l2c2_offset(sigma, lower, upper)
    ratio = (s_bar - s) / (s_next - s + 1e-8)
    distance = ratio.detach().abs().amax(1) + offset
    policy = offset * upper / distance
    return policy, beta * policy / distance


def l2c2_policy_distance(pi_s: Tensor, pi_bar: Tensor) -> Tensor:
    """L2C2's distance (B,) of deterministic policies: ``0.5 |pi(s) - pi(s_bar)|_2^2``.

    Args:
        pi_s: (B, A).
        pi_bar: (B, A) at s_bar.
    """
    return 0.5 * (pi_s - pi_bar).square().sum(1)


def l2c2_gaussian_distance(log_density: Tensor, log_density_bar: Tensor) -> Tensor:
    """L2C2's distance (B,) of random policies, an estimate of the squared Hellinger distance.

    ``max(0, 1 - mean_k exp(0.5 clip(log pi(a_k | s_bar) - log pi(a_k | s), -10, 10)))`` over K actions drawn at s.

    Args:
        log_density: (K, B), of the actions at s.
        log_density_bar: (K, B), of the same actions at s_bar.
    """
    ratio = (log_density_bar - log_density).clamp(-10, 10)
    return (1 - torch.exp(0.5 * ratio).mean(0)).clamp(min=0)


def l2c2_value_distance(q: Tensor, q_bar: Tensor) -> Tensor:
    """L2C2's distance (B,) of the values: ``0.5 |min_i Q_i(s, a) - min_i Q_i(s_bar, a)|``.

    Args:
        q: (C, B).
        q_bar: (C, B) at s_bar.
    """
    return 0.5 * (q.amin(0) - q_bar.amin(0)).abs()


def _episode(actions: Any) -> Tensor:
    """Actions (T, A) in float64."""
    values = actions if isinstance(actions, Tensor) else torch.from_numpy(np.asarray(actions, dtype=np.float64))
    signal = values.detach().double()
    if signal.ndim == 1:
        signal = signal[:, None]
    if signal.ndim != 2 or signal.shape[1] == 0:
        raise ValueError(f"actions have shape {tuple(signal.shape)}; give (steps, action size) of one episode")
    return signal


def _l2c2_offset(sigma: float, lower: float, upper: float) -> float:
    if not (sigma > 0 and lower > 0 and upper > sigma * lower):
        raise ValueError(
            f"sigma {sigma}, lower {lower}, upper {upper}: give numbers above 0 with upper > sigma * lower"
        )
    return sigma * lower / (upper - sigma * lower)
