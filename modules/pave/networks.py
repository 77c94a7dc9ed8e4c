"""Twin critics evaluated as one, and the actors of TD3 and SAC."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

Activation = Literal["silu", "relu", "tanh"]
ACTIVATIONS: dict[str, type[nn.Module]] = {"silu": nn.SiLU, "relu": nn.ReLU, "tanh": nn.Tanh}
LOG_STD_RANGE = (-20.0, 2.0)  # of SAC's authors and of stable-baselines3


class TwinCritic(nn.Module):
    """C perceptrons over ``[s, a]`` with one output each, evaluated together by batched matrix products.

    The value, the gradients and the initial weights are those of C separate stacks of ``nn.Linear``, built one after
    the other. PAVE needs a smooth activation: the default is the paper's SiLU.

    Args:
        n_observations: S.
        n_actions: A.
        hidden: widths of the hidden layers.
        activation: between the layers.
        n_critics: C.
        spectral_norm: divide every weight of every critic by its largest singular value. It is computed exactly, from
            the eigenvectors of the smaller Gram matrix, on each call: nothing is kept between calls that a target
            network, a checkpoint or torch.func would have to know of, at the price of an eigendecomposition per layer.

    Raises:
        ValueError: a size is below 1, or the activation is unknown.
    """

    def __init__(
        self,
        n_observations: int,
        n_actions: int,
        hidden: Sequence[int] = (256, 256),
        activation: Activation = "silu",
        n_critics: int = 2,
        spectral_norm: bool = False,
    ) -> None:
        super().__init__()
        _check_sizes([n_observations, n_actions, *hidden, n_critics], activation)
        self.n_critics, self.activation, self.spectral_norm = n_critics, activation, spectral_norm
        sizes = list(pairwise([n_observations + n_actions, *hidden, 1]))
        critics = [[nn.Linear(*size) for size in sizes] for _ in range(n_critics)]
        layers = list(zip(*critics, strict=True))
        self.weight = nn.ParameterList(torch.stack([x.weight.detach().T for x in layer]) for layer in layers)
        self.bias = nn.ParameterList(torch.stack([x.bias.detach() for x in layer]) for layer in layers)
        self._activate = {"silu": functional.silu, "relu": torch.relu, "tanh": torch.tanh}[activation]

    def weights(self) -> list[tuple[Tensor, Tensor]]:
        """Layer by layer: weight (C, in, out), as it is used, and bias (C, out)."""
        pairs = list(zip(self.weight, self.bias, strict=True))
        return [(_spectrally_normalised(w), b) for w, b in pairs] if self.spectral_norm else pairs

    def forward(self, s: Tensor, a: Tensor) -> Tensor:
        """The values (C, B) at s (B, S) or (C, B, S) and a (B, A) or (C, B, A)."""
        if s.ndim != a.ndim:
            s, a = (x.expand(self.n_critics, *x.shape[-2:]) for x in (s, a))
        x = torch.cat([s, a], -1)
        x = x.expand(self.n_critics, *x.shape[-2:])
        *inner, (last, last_bias) = self.weights()
        for weight, bias in inner:
            x = self._activate(torch.baddbmm(bias[:, None], x, weight))
        return torch.baddbmm(last_bias[:, None], x, last).squeeze(-1)


class DeterministicActor(nn.Module):
    """TD3's policy: a perceptron with a tanh, (B, S) -> (B, A) in [-1, 1].

    Args:
        n_observations: S.
        n_actions: A.
        hidden: widths of the hidden layers.
        activation: between the layers.
        predictor: whether a second head on the last hidden layer predicts the next action (ASAP).

    Raises:
        ValueError: a size is below 1, or the activation is unknown.
    """

    def __init__(
        self,
        n_observations: int,
        n_actions: int,
        hidden: Sequence[int] = (256, 256),
        activation: Activation = "silu",
        predictor: bool = False,
    ) -> None:
        super().__init__()
        self.trunk, width = _trunk(n_observations, n_actions, hidden, activation)
        self.head = nn.Linear(width, n_actions)
        self.next_head = nn.Linear(width, n_actions) if predictor else None

    def forward(self, s: Tensor) -> Tensor:
        return torch.tanh(self.head(self.trunk(s)))

    def act(self, s: Tensor) -> Tensor:
        """The action (B, A), as of every actor here."""
        action: Tensor = self(s)
        return action

    def predict_next(self, s: Tensor) -> Tensor:
        """The action (B, A) that is predicted for the next state.

        Raises:
            RuntimeError: the actor was built without the predictor.
        """
        return _predict_next(self.next_head, self.trunk(s))


class GaussianActor(nn.Module):
    """SAC's policy: a Gaussian before a tanh.

    Args:
        n_observations: S.
        n_actions: A.
        hidden: widths of the hidden layers.
        activation: between the layers.
        predictor: whether a third head on the last hidden layer predicts the next action (ASAP).

    Raises:
        ValueError: a size is below 1, or the activation is unknown.
    """

    def __init__(
        self,
        n_observations: int,
        n_actions: int,
        hidden: Sequence[int] = (256, 256),
        activation: Activation = "silu",
        predictor: bool = False,
    ) -> None:
        super().__init__()
        self.trunk, width = _trunk(n_observations, n_actions, hidden, activation)
        self.mean = nn.Linear(width, n_actions)
        self.log_std = nn.Linear(width, n_actions)
        self.next_head = nn.Linear(width, n_actions) if predictor else None

    def forward(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and logarithm of the standard deviation, both (B, A), of the Gaussian before the tanh."""
        features = self.trunk(s)
        return self.mean(features), self.log_std(features).clamp(*LOG_STD_RANGE)

    def act(self, s: Tensor) -> Tensor:
        """The deterministic action ``tanh(mean)`` (B, A)."""
        return torch.tanh(self.mean(self.trunk(s)))

    def predict_next(self, s: Tensor) -> Tensor:
        """The action (B, A) that is predicted for the next state.

        Raises:
            RuntimeError: the actor was built without the predictor.
        """
        return _predict_next(self.next_head, self.trunk(s))

    def sample(self, s: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """A reparametrised action (B, A) and its log-density (B,)."""
        mean, log_std = self(s)
        device = generator.device if generator is not None else mean.device
        noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=device).to(mean.device)
        u = mean + log_std.exp() * noise
        return torch.tanh(u), squashed_log_density(u, mean, log_std)

    def log_density(self, s: Tensor, u: Tensor) -> Tensor:
        """The log-density (..., B) at s (B, S) of the actions ``tanh(u)``, u (..., B, A) before the tanh."""
        mean, log_std = self(s)
        return squashed_log_density(u, mean, log_std)


def squashed_log_density(u: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """``log N(u; mean, std) - sum log(1 - tanh(u)^2)`` (..., B): the log-density of ``tanh(u)``, u (..., B, A).

    The second part is ``2 (log 2 - u - softplus(-2u))`` per component, exact for any u. stable-baselines3 takes
    ``log(1 - tanh(u)^2 + 1e-6)``, which differs where an action is within 1e-3 or so of its bound.
    """
    z = (u - mean) * torch.exp(-log_std)
    gaussian = -0.5 * z.square() - log_std - 0.5 * math.log(2 * math.pi)
    squash = 2 * (math.log(2) - u - functional.softplus(-2 * u))
    return (gaussian - squash).sum(-1)


def _trunk(n_observations: int, n_actions: int, hidden: Sequence[int], activation: str) -> tuple[nn.Sequential, int]:
    """The hidden layers, activations included, and the last width."""
    _check_sizes([n_observations, n_actions, *hidden], activation)
    widths = [n_observations, *hidden]
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise(widths):
        layers += [nn.Linear(width_in, width_out), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers), widths[-1]


def _predict_next(head: nn.Linear | None, features: Tensor) -> Tensor:
    if head is None:
        raise RuntimeError("this actor has no predictor of the next action; build it with predictor=True")
    return torch.tanh(head(features))


def _spectrally_normalised(weight: Tensor) -> Tensor:
    """``W / sigma(W)`` of each critic (C, in, out); ``sigma = x' W y`` has the exact gradient with fixed x and y."""
    with torch.no_grad():
        fixed = weight.detach()
        tall = weight.shape[1] > weight.shape[2]
        gram = fixed.mT @ fixed if tall else fixed @ fixed.mT
        short = torch.linalg.eigh(gram).eigenvectors[..., -1:]  # of the largest eigenvalue
        long = fixed @ short if tall else fixed.mT @ short
        long = long / torch.linalg.vector_norm(long, dim=1, keepdim=True)
        left, right = (long, short) if tall else (short, long)
    largest: Tensor = left.mT @ weight @ right
    return weight / largest


def _check_sizes(sizes: Sequence[int], activation: str) -> None:
    if min(sizes) < 1:
        raise ValueError(f"sizes are {list(sizes)}; give at least 1 each")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; choose one of {', '.join(ACTIVATIONS)}")
