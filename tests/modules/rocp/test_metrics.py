import numpy as np
import pytest
import torch
from torchmetrics import MetricCollection

from fulgurite.modules.rocp.functional import robust_risk
from fulgurite.modules.rocp.metrics import (
    CriticalMistakes,
    DecisionLoss,
    MeanRobustRisk,
    SetCoverage,
    SetSize,
    StratifiedCoverage,
)

N, K, A = 157, 4, 3
LOSS = torch.tensor([[0, 4, 6], [12, 1, 5], [20, 9, 2], [7, 7, 7]], dtype=torch.float64)
CRITICAL = [(1, 0), (2, 0), (2, 1)]


@pytest.fixture(scope="module")
def decided():
    generator = torch.Generator().manual_seed(0)
    return {
        "sets": torch.rand(N, K, generator=generator) < 0.4,
        "actions": torch.randint(A, (N,), generator=generator),
        "labels": torch.randint(K, (N,), generator=generator),
    }


@pytest.fixture(params=[1, 10, N])
def computed(request, decided):
    """All metrics in one collection, updated by batches of any size."""
    collection = MetricCollection(
        {
            "coverage": SetCoverage(),
            "size": SetSize(),
            "by_label": StratifiedCoverage(K, "label"),
            "by_size": StratifiedCoverage(K, "size"),
            "loss": DecisionLoss(LOSS, [0.5, 0.95]),
            "critical": CriticalMistakes(K, A, CRITICAL),
            "risk": MeanRobustRisk(LOSS, 0.2),
        },
        compute_groups=False,
    )
    for first in range(0, N, request.param):
        collection.update(**{name: value[first : first + request.param] for name, value in decided.items()})
    return {name: metric.compute() for name, metric in collection.items()}


def test_coverage_and_size_are_counts(computed, decided):
    hits = [bool(row[label]) for row, label in zip(decided["sets"], decided["labels"], strict=True)]
    assert computed["coverage"].item() == pytest.approx(np.mean(hits))
    assert computed["size"].item() == pytest.approx(decided["sets"].sum().item() / N)


@pytest.mark.parametrize("by", ["label", "size"])
def test_strata_are_covered_as_a_loop_counts(computed, decided, by):
    strata = decided["labels"].tolist() if by == "label" else [int(row.sum()) for row in decided["sets"]]
    found = computed[f"by_{by}"].tolist()
    assert len(found) == K + (by == "size")
    for stratum, value in enumerate(found):
        rows = [row for row, own in enumerate(strata) if own == stratum]
        hits = [bool(decided["sets"][row, decided["labels"][row]]) for row in rows]
        assert value == pytest.approx(np.mean(hits) if hits else float("nan"), nan_ok=True)


def test_losses_and_their_quantiles(computed, decided):
    losses = LOSS[decided["labels"], decided["actions"]].numpy()
    assert computed["loss"]["loss"].item() == pytest.approx(losses.mean())
    for level in (0.5, 0.95):
        expected = np.quantile(losses, level, method="higher")
        assert computed["loss"][f"loss_q{100 * level:g}"].item() == expected


def test_critical_mistakes_in_all_and_by_label(computed, decided):
    pairs = list(zip(decided["labels"].tolist(), decided["actions"].tolist(), strict=True))
    wrong = [pair in CRITICAL for pair in pairs]
    assert computed["critical"][0].item() == pytest.approx(np.mean(wrong))
    for label in range(K):
        own = [is_wrong for is_wrong, pair in zip(wrong, pairs, strict=True) if pair[0] == label]
        assert computed["critical"][1 + label].item() == pytest.approx(np.mean(own))


def test_the_robust_risk_is_that_of_the_chosen_actions(computed, decided):
    risks = robust_risk(decided["sets"], LOSS, 0.2)
    expected = risks[torch.arange(N), decided["actions"]].mean().item()
    assert computed["risk"].item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: StratifiedCoverage(K, "colour"), "by is 'colour'"),
        (lambda: DecisionLoss(LOSS, [1.5]), r"quantiles are \[1.5\]"),
        (lambda: DecisionLoss(-LOSS), "losses are at least 0"),
        (lambda: CriticalMistakes(K, A, [(4, 0)]), r"critical pair \(4, 0\)"),
        (lambda: MeanRobustRisk(LOSS, 0.0), "alpha is 0.0"),
    ],
)
def test_arguments_out_of_range_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
