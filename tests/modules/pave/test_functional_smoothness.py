"""Smoothness of actions on signals with a known spectrum, the actor-side losses, and the published settings."""

import numpy as np
import pytest
import torch

from fulgurite.modules.pave.functional_smoothness import (
    ASAP_WEIGHTS,
    CAPS_WEIGHTS,
    ENVIRONMENTS,
    GRAD_WEIGHT,
    L2C2_SETTINGS,
    PAVE_WEIGHTS,
    action_fluctuation,
    action_spectrum,
    asap_losses,
    caps_losses,
    grad_loss,
    l2c2_gaussian_distance,
    l2c2_mix,
    l2c2_policy_distance,
    l2c2_value_distance,
    l2c2_weights,
    spectral_smoothness,
)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("n", "k", "height"), [(100, 3, 0.7), (101, 49, 2.0), (64, 31, 1.0), (9, 1, 0.5)])
def test_a_sine_scores_its_height_times_its_frequency(n, k, height):
    wave = height * np.sin(2 * np.pi * k * np.arange(n) / n)
    assert spectral_smoothness(wave).item() == pytest.approx(height * k / n, abs=1e-12)
    both = np.stack([wave, np.zeros(n)], 1)
    assert spectral_smoothness(both).item() == pytest.approx(height * k / n / 2, abs=1e-12)


def test_the_score_is_the_sum_over_a_discrete_fourier_transform_by_hand():
    actions = normal(23, 2).numpy()
    n, total = len(actions), 0.0
    for k in range(n // 2):
        for column in actions.T:
            amplitude = abs(sum(x * np.exp(-2j * np.pi * k * t / n) for t, x in enumerate(column)))
            total += 2 / n * (k / n) * amplitude / 2
    assert spectral_smoothness(actions).item() == pytest.approx(total, abs=1e-12)


def test_the_score_ignores_offsets_and_the_sampling_rate_and_scales_with_the_actions():
    actions = normal(50, 3)
    score = spectral_smoothness(actions).item()
    assert spectral_smoothness(actions + 7).item() == pytest.approx(score)
    assert spectral_smoothness(actions, fs=20).item() == pytest.approx(score)
    assert spectral_smoothness(actions * -4).item() == pytest.approx(4 * score)
    assert spectral_smoothness(torch.full((50, 3), 0.8)).item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("n", [0, 1])
def test_episodes_without_a_second_step_score_zero(n):
    assert spectral_smoothness(torch.ones(n, 2)) == 0
    assert action_fluctuation(torch.ones(n, 2)) == 0


def test_an_alternating_action_fluctuates_by_two():
    assert action_fluctuation([1.0, -1.0] * 5) == 2
    assert action_fluctuation(torch.tensor([[0.0, 1.0], [1.0, 1.0], [3.0, 1.0]])) == pytest.approx(0.75)


def test_the_spectrum_peaks_at_the_frequency_of_the_signal():
    t = np.arange(200) / 20
    frequencies, amplitudes = action_spectrum(np.sin(2 * np.pi * 3 * t), fs=20)
    assert frequencies[amplitudes[:, 0].argmax()].item() == pytest.approx(3)
    assert amplitudes.shape == (100, 1)
    assert amplitudes.max().item() == pytest.approx(100)


@pytest.mark.reference
def test_scores_are_those_of_the_authors_code(reference_folder):
    stored = np.load(reference_folder("pave") / "metrics.npz")
    for k in range(4):
        actions = stored[f"actions_{k}"]
        assert spectral_smoothness(actions).item() == pytest.approx(float(stored[f"sm_{k}"]), abs=1e-10)
        assert spectral_smoothness(actions, 20).item() == pytest.approx(float(stored[f"sm_fs20_{k}"]), abs=1e-10)
        assert action_fluctuation(actions).item() == pytest.approx(float(stored[f"osc_{k}"]), abs=1e-10)


@pytest.mark.reference
def test_actor_losses_are_those_of_the_authors_code(reference_folder):
    stored = {k: torch.from_numpy(x) for k, x in np.load(reference_folder("pave") / "metrics.npz").items()}
    now, after, before, bar = (stored[f"a_{k}"] for k in ("now", "next", "prev", "bar"))
    temporal, spatial = caps_losses(now, after, bar)
    assert temporal.item() == pytest.approx(stored["caps_temporal"].item(), abs=1e-10)
    assert spatial.item() == pytest.approx(stored["caps_spatial"].item(), abs=1e-10)
    assert grad_loss(before, now, after).item() == pytest.approx(stored["grad_loss"].item(), abs=1e-10)


@pytest.mark.reference
@pytest.mark.parametrize("name", ["default", "pendulum"])
def test_l2c2_is_that_of_the_authors_code(reference_folder, name):
    stored = {k: torch.from_numpy(x) for k, x in np.load(reference_folder("pave") / "metrics.npz").items()}
    s, after = stored["l2c2_obs"], stored["l2c2_next"]
    given = L2C2_SETTINGS[name]
    bar = l2c2_mix(s, after, stored["l2c2_u01"], given.sigma, given.lower, given.upper)
    policy, value = l2c2_weights(s, after, bar, given.sigma, given.lower, given.upper, given.beta)
    for found, key in ((bar, "sbar"), (policy, "lam_pi"), (value, "lam_v")):
        torch.testing.assert_close(found, stored[f"l2c2_{name}_{key}"], rtol=0, atol=1e-10)


def test_the_weights_of_l2c2_run_from_its_upper_to_its_lower_limit():
    s, after = torch.zeros(2, 1, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)
    u = torch.tensor([[0.5], [1.0]], dtype=torch.float64)  # no distance, and the largest
    bar = l2c2_mix(s, after, u, 1.0, 0.1, 10.0)
    policy, value = l2c2_weights(s, after, bar, 1.0, 0.1, 10.0, 0.1)
    torch.testing.assert_close(policy, torch.tensor([10.0, 0.1], dtype=torch.float64), rtol=1e-6, atol=0)
    torch.testing.assert_close(value, 0.1 * policy / torch.tensor([1 / 99, 100 / 99]), rtol=1e-6, atol=0)


def test_l2c2_mixes_with_a_width_that_its_sigma_sets():
    s, after = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    offset = 0.5 * 0.1 / (10 - 0.05)
    for u, sign in ((0.0, -1), (1.0, 1)):
        bar = l2c2_mix(s, after, torch.full_like(s, u), 0.5, 0.1, 10.0)
        assert bar.item() == pytest.approx(sign * (0.5 - 0.5 * offset))


def test_the_gradient_of_caps_flows_through_both_actions():
    one, two, three = (normal(4, 2, seed=i).requires_grad_() for i in range(3))
    temporal, spatial = caps_losses(one, two, three)
    assert temporal.item() == pytest.approx(0.5 * ((one - two) ** 2).mean().item())
    (temporal + spatial).backward()
    torch.testing.assert_close(two.grad, (two - one).detach() / 8)
    torch.testing.assert_close(three.grad, (three - one).detach() / 8)
    torch.testing.assert_close(one.grad, -(two.grad + three.grad))


def test_the_weight_of_grad_is_a_constant_for_its_gradient():
    before, now, after = (normal(4, 2, seed=i).requires_grad_() for i in range(3))
    grad_loss(before, now, after).backward()
    weight = torch.tanh((1 / (after - before + 1e-4)) ** 2).detach()
    inner = (2 * now - after - before).detach() * weight / 8
    torch.testing.assert_close(now.grad, 2 * inner)
    torch.testing.assert_close(before.grad, -inner)
    torch.testing.assert_close(after.grad, -inner)


def test_grad_is_zero_on_a_line_and_finite_where_the_ends_meet():
    line = torch.linspace(0, 1, 9, dtype=torch.float64)[:, None]
    assert grad_loss(line[:-2], line[1:-1], line[2:]).item() == pytest.approx(0, abs=1e-20)
    same = torch.zeros(3, 1)
    assert grad_loss(same, same + 1, same).item() == pytest.approx(2)
    assert torch.isfinite(grad_loss(same + 1e-4, same, same))


def test_asap_stops_the_gradient_at_its_targets():
    after, predicted, slow = (normal(4, 2, seed=i).requires_grad_() for i in range(3))
    spatial, prediction = asap_losses(after, predicted, slow)
    spatial.backward()
    torch.testing.assert_close(after.grad, (after - slow).detach() / 8)
    assert slow.grad is None
    after.grad = None
    prediction.backward()
    torch.testing.assert_close(predicted.grad, (predicted - after).detach() / 8)
    assert after.grad is None


def test_distances_of_l2c2_are_per_sample():
    one, other = normal(5, 3), normal(5, 3, seed=1)
    expected = [0.5 * float((x - y) @ (x - y)) for x, y in zip(one, other, strict=True)]
    assert l2c2_policy_distance(one, other).tolist() == pytest.approx(expected)
    q, bar = normal(2, 5), normal(2, 5, seed=1)
    expected = [0.5 * abs(min(x) - min(y)) for x, y in zip(q.T.tolist(), bar.T.tolist(), strict=True)]
    assert l2c2_value_distance(q, bar).tolist() == pytest.approx(expected)


def test_the_distance_of_gaussians_estimates_the_squared_hellinger_distance():
    a = normal(400_000, 1, seed=3)
    normal_at = torch.distributions.Normal
    found = l2c2_gaussian_distance(normal_at(0.0, 1.0).log_prob(a), normal_at(0.7, 1.3).log_prob(a))
    exact = 1 - (2 * 1.3 / (1 + 1.3**2)) ** 0.5 * np.exp(-0.25 * 0.49 / (1 + 1.3**2))
    assert found.item() == pytest.approx(exact, abs=3e-3)
    assert l2c2_gaussian_distance(torch.zeros(4, 2), torch.tensor([[100.0, -100.0]] * 4)).tolist() == pytest.approx(
        [0, 1 - np.exp(-5)]
    )


def test_published_weights_are_those_of_the_table():
    rows = [
        ("td3", "lunar reacher walker", 0.1, 0.1, 0.01),
        ("td3", "ant hopper humanoid", 0.1, 0.005, 0.5),
        ("td3", "pendulum", 2.0, 0.005, 2.0),
        ("sac", "ant humanoid reacher", 0.1, 0.0005, 1.0),
        ("sac", "hopper", 2.0, 0.0005, 3.0),
        ("sac", "lunar", 0.1, 0.5, 0.05),
        ("sac", "pendulum", 0.1, 0.005, 0.5),
        ("sac", "walker", 2.0, 0.005, 2.0),
    ]
    expected = {(alg, env): (m, v, c, 0.01, 1.0) for alg, envs, m, v, c in rows for env in envs.split()}
    found = {
        (alg, env): (w.mpr, w.vfc, w.curv, w.sigma, w.delta)
        for alg, weights in PAVE_WEIGHTS.items()
        for env, w in weights.items()
    }
    assert found == expected
    assert set(ENVIRONMENTS.values()) == set(PAVE_WEIGHTS["td3"]) == set(PAVE_WEIGHTS["sac"])


def test_published_settings_of_the_other_methods():
    def values(settings):
        return tuple(vars(settings).values())

    assert values(CAPS_WEIGHTS["default"]) == (0.1, 0.5, 0.2)
    assert values(CAPS_WEIGHTS["pendulum"]) == (1.0, 5.0, 0.2)
    assert values(L2C2_SETTINGS["default"]) == (1.0, 0.1, 10.0, 0.1)
    assert values(L2C2_SETTINGS["pendulum"]) == (1.0, 1.0, 100.0, 0.1)
    assert GRAD_WEIGHT == 1.0
    td3 = {name: values(w) for name, w in ASAP_WEIGHTS["td3"].items()}
    assert td3 == {
        "default": (0.05, 0.3, 2.0, 0.01),
        "hopper": (0.07, 0.3, 2.0, 0.01),
        "lunar": (0.005, 0.03, 2.0, 0.01),
        "pendulum": (0.005, 0.03, 2.0, 0.01),
        "reacher": (0.1, 0.1, 2.0, 0.01),
    }
    assert values(ASAP_WEIGHTS["sac"]["default"]) == (0.5, 5.0, 2.0, 0.01)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: spectral_smoothness(torch.zeros(2, 3, 4)), r"actions have shape \(2, 3, 4\); give \(steps"),
        (lambda: spectral_smoothness(torch.zeros(5, 0)), r"actions have shape \(5, 0\)"),
        (lambda: action_fluctuation(torch.zeros(())), r"actions have shape \(\)"),
        (lambda: action_spectrum(torch.zeros(5, 1), 0.0), "fs is 0.0"),
        (lambda: l2c2_mix(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1), 1.0, 10.0, 1.0), "upper > sigma"),
        (
            lambda: l2c2_weights(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1), 1.0, 0.0, 1.0, 0.1),
            "lower 0.0",
        ),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
