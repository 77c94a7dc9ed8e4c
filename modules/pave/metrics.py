"""torchmetrics of an agent's actions; each ``update`` takes the actions of one whole episode."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from fulgurite.modules.pave.functional_smoothness import action_fluctuation, spectral_smoothness


class EpisodeMean(Metric):
    """Mean over episodes of a score of the episode."""

    higher_is_better = False
    full_state_update = False
    total: Tensor
    episodes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("episodes", torch.tensor(0), dist_reduce_fx="sum")

    def score(self, actions: Any) -> Tensor:
        """The score of the actions (T, A) of an episode."""
        raise NotImplementedError

    def update(self, actions: Any) -> None:
        self.total += self.score(actions).to(self.total)
        self.episodes += 1

    def compute(self) -> Tensor:
        return self.total / self.episodes


class SpectralSmoothness(EpisodeMean):
    """Mean over episodes of ``functional_smoothness.spectral_smoothness``.

    Args:
        fs: sampling rate.

    Raises:
        ValueError: ``fs`` is not above 0.
    """

    def __init__(self, fs: float = 1.0) -> None:
        super().__init__()
        if not fs > 0:
            raise ValueError(f"fs is {fs}; give a sampling rate above 0")
        self.fs = fs

    def score(self, actions: Any) -> Tensor:
        return spectral_smoothness(actions, self.fs)


class ActionFluctuation(EpisodeMean):
    """Mean over episodes of ``functional_smoothness.action_fluctuation``."""

    def score(self, actions: Any) -> Tensor:
        return action_fluctuation(actions)
