import copy

import numpy as np
import pytest
import torch

from fulgurite.modules.pave.functional_smoothness import action_fluctuation, spectral_smoothness
from fulgurite.modules.pave.metrics import ActionFluctuation, SpectralSmoothness

EPISODES = [np.random.default_rng(k).normal(size=(n, 2)) for k, n in enumerate((10, 33, 1, 80))]


@pytest.mark.parametrize(
    ("metric", "score"), [(SpectralSmoothness(), spectral_smoothness), (ActionFluctuation(), action_fluctuation)]
)
def test_a_metric_is_the_mean_over_episodes_whatever_their_length(metric, score):
    for episode in EPISODES:
        metric.update(torch.from_numpy(episode))
    assert metric.compute().item() == pytest.approx(np.mean([score(e).item() for e in EPISODES]), rel=1e-12)
    metric.reset()
    metric.update(EPISODES[0])
    assert metric.compute().item() == pytest.approx(score(EPISODES[0]).item(), rel=1e-12)


@pytest.mark.parametrize("metric", [SpectralSmoothness(), ActionFluctuation()])
def test_two_processes_sum_to_the_mean_over_all_their_episodes(metric):
    whole, parts = copy.deepcopy(metric), [copy.deepcopy(metric) for _ in range(2)]
    for k, episode in enumerate(EPISODES):
        whole.update(episode)
        parts[int(k > 0)].update(episode)  # one episode here, three there
    reduced = copy.deepcopy(metric)
    reduced.total = sum(part.total for part in parts)
    reduced.episodes = sum(part.episodes for part in parts)
    reduced._update_count = 1
    assert all(reduction is torch.sum or "sum" in str(reduction) for reduction in metric._reductions.values())
    assert reduced.compute().item() == pytest.approx(whole.compute().item(), rel=1e-12)


def test_forward_gives_the_episode_and_keeps_the_mean():
    metric = SpectralSmoothness()
    values = [metric(episode).item() for episode in EPISODES]
    assert values == pytest.approx([spectral_smoothness(e).item() for e in EPISODES])
    assert metric.compute().item() == pytest.approx(np.mean(values))


def test_a_sampling_rate_of_zero_is_refused():
    with pytest.raises(ValueError, match="fs is 0; give a sampling rate above 0"):
        SpectralSmoothness(fs=0)
