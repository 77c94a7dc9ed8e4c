"""Scores by hand, by brute force, against stored vectors and other packages; thresholds of split conformal sets."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch

from fulgurite.modules.rocp.functional_scores import (
    aps_scores,
    check_every_label_present,
    conformal_threshold,
    lac_scores,
    ranks,
    raps_scores,
    score_thresholds,
    socop_scores,
)

RAPS_PENALTY, RAPS_FREE_RANK = 0.05, 1


def probabilities(n, k, seed=0, concentration=1.0):
    return torch.tensor(np.random.default_rng(seed).dirichlet(np.full(k, concentration), n))


def scores_of(name, p):
    if name == "raps":
        return raps_scores(p, RAPS_PENALTY, RAPS_FREE_RANK)
    return {"lac": lac_scores, "aps": aps_scores, "socop": socop_scores}[name](p)


@pytest.fixture
def vectors(reference_folder):
    return np.load(reference_folder("rocp") / "rocp_reference.npz")


def levels_of(vectors, name):
    return sorted(key.removeprefix(f"{name}_q_") for key in vectors if key.startswith(f"{name}_q_"))


def test_scores_of_one_row_by_hand():
    p = torch.tensor([[0.2, 0.5, 0.3]], dtype=torch.float64)
    np.testing.assert_allclose(lac_scores(p), [[0.8, 0.5, 0.7]], atol=1e-15)
    np.testing.assert_allclose(aps_scores(p), [[1.0, 0.5, 0.8]], atol=1e-15)
    np.testing.assert_allclose(raps_scores(p, 0.1, 1), [[1.2, 0.5, 0.9]], atol=1e-15)
    np.testing.assert_allclose(raps_scores(p, 0.1, 0), [[1.3, 0.6, 1.0]], atol=1e-15)
    assert ranks(p).tolist() == [[3, 1, 2]]


def test_equal_probabilities_are_ranked_by_label():
    p = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.1, 0.4, 0.1, 0.4]], dtype=torch.float64)
    assert ranks(p).tolist() == [[1, 2, 3, 4], [3, 1, 4, 2]]
    np.testing.assert_allclose(aps_scores(p), [[0.25, 0.5, 0.75, 1], [0.9, 0.4, 1, 0.8]], atol=1e-15)


def test_ties_keep_their_order_in_long_rows():
    # Sorting routines switch to unstable algorithms only beyond a few dozen elements.
    p = torch.full((2, 500), 1 / 500, dtype=torch.float64)
    assert torch.equal(ranks(p), torch.arange(1, 501).double().expand(2, 500))
    assert (aps_scores(p).diff(dim=1) > 0).all()


def test_aps_equals_a_loop_over_the_labels():
    p = probabilities(100, 6, seed=1)
    expected = [[sum(v for v in row if v >= row[y]) for y in range(6)] for row in p.tolist()]
    np.testing.assert_allclose(aps_scores(p), expected, rtol=0, atol=1e-14)


def test_randomised_scores_lose_a_uniform_share_of_the_own_probability():
    p = probabilities(50, 5, seed=2)
    u = torch.rand(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(aps_scores(p, u), aps_scores(p) - u[:, None] * p)
    torch.testing.assert_close(raps_scores(p, 0.2, 2, u), raps_scores(p, 0.2, 2) - u[:, None] * p)
    assert torch.equal(aps_scores(p, torch.zeros(50)), aps_scores(p))


def test_without_penalty_raps_is_aps():
    p = probabilities(50, 5, seed=3)
    torch.testing.assert_close(raps_scores(p, 0.0, 1), aps_scores(p), rtol=0, atol=1e-15)
    torch.testing.assert_close(raps_scores(p, 3.0, 5), aps_scores(p), rtol=0, atol=1e-15)


@pytest.mark.parametrize("penalty", [0.001, 0.1, 0.7, 10.0])
@pytest.mark.parametrize("n_labels", [2, 3, 6, 11])
def test_socop_is_the_slope_of_the_lower_hull(n_labels, penalty):
    p = torch.cat([probabilities(9, n_labels, seed=4), probabilities(9, n_labels, seed=5, concentration=0.3)])
    p = torch.cat([p, torch.full((1, n_labels), 1 / n_labels, dtype=torch.float64)])
    got = socop_scores(p, penalty)
    for row, scores in zip(p.tolist(), got.tolist(), strict=True):
        order = sorted(range(n_labels), key=lambda y: (-row[y], y))
        mass = list(itertools.accumulate((Fraction(row[y]) for y in order), initial=Fraction(0)))
        cost = [Fraction(penalty) * j + (j >= 2) for j in range(n_labels + 1)]
        for rank, label in enumerate(order, start=1):
            # Slope of the greatest convex minorant before `rank`: max over earlier points, min over the others.
            slope = max(
                min((cost[j] - cost[i]) / (mass[j] - mass[i]) for j in range(rank, n_labels + 1)) for i in range(rank)
            )
            assert scores[label] == pytest.approx(float(slope), rel=1e-9)


def test_socop_scores_rise_with_the_rank_and_are_never_undefined():
    p = probabilities(200, 8, seed=6, concentration=0.1)
    p = torch.cat([p, torch.eye(8, dtype=torch.float64)])
    scores = socop_scores(p)
    assert not scores.isnan().any()
    ordered = scores.gather(1, ranks(p).argsort(1))
    assert (ordered[:, 1:] >= ordered[:, :-1] * (1 - 1e-12)).all()


@pytest.mark.parametrize("name", ["lac", "aps", "raps", "socop"])
def test_permuting_the_labels_permutes_the_scores(name):
    p = probabilities(30, 6, seed=7)
    permutation = torch.tensor([3, 1, 5, 0, 4, 2])
    torch.testing.assert_close(scores_of(name, p[:, permutation]), scores_of(name, p)[:, permutation])


@pytest.mark.parametrize("name", ["lac", "aps", "raps", "socop"])
def test_scores_of_a_row_do_not_depend_on_the_other_rows(name):
    p = probabilities(61, 9, seed=8)
    whole = scores_of(name, p)
    for size in (1, 7, 64):
        assert torch.equal(torch.cat([scores_of(name, part) for part in p.split(size)]), whole)


def test_the_threshold_is_an_order_statistic_of_n_plus_one():
    scores = torch.tensor([9.0, 1, 5, 3, 7, 2, 8, 4, 6], dtype=torch.float64)
    assert conformal_threshold(scores, 0.1) == 9
    assert conformal_threshold(scores, 0.2) == 8
    assert conformal_threshold(scores, 0.5) == 5
    assert conformal_threshold(scores, 0.9) == 1
    assert conformal_threshold(scores, 0.09) == torch.inf
    assert conformal_threshold(scores[:8], 0.1) == torch.inf


def test_class_conditional_thresholds_are_those_of_each_label_alone():
    p = probabilities(60, 3, seed=9)
    labels = torch.tensor(np.random.default_rng(9).integers(0, 3, 60))
    scores = lac_scores(p)
    got = score_thresholds(scores, labels, 0.2, class_conditional=True)
    for label in range(3):
        own = scores[labels == label, label]
        assert got[label] == conformal_threshold(own, 0.2)
    common = score_thresholds(scores, labels, 0.2)
    assert common.tolist() == [conformal_threshold(scores[torch.arange(60), labels], 0.2)] * 3


def test_a_label_with_too_few_samples_is_in_every_set():
    p = probabilities(40, 3, seed=10)
    labels = torch.tensor([0] * 20 + [1] * 18 + [2] * 2)
    thresholds = score_thresholds(lac_scores(p), labels, 0.1, class_conditional=True)
    assert thresholds.isinf().tolist() == [False, False, True]


def test_bad_arguments_are_refused():
    p = probabilities(4, 3)
    with pytest.raises(ValueError, match="penalty and free_rank are -1 and 1"):
        raps_scores(p, -1)
    with pytest.raises(ValueError, match=r"penalty and free_rank are 0\.1 and -2"):
        raps_scores(p, 0.1, -2)
    for penalty in (0, -0.1):
        with pytest.raises(ValueError, match="SOCOP needs a value above 0"):
            socop_scores(p, penalty)
    with pytest.raises(ValueError, match="alpha is 1"):
        conformal_threshold(torch.ones(3), 1)
    with pytest.raises(ValueError, match="calibration set is empty"):
        score_thresholds(torch.empty(0, 3), torch.empty(0, dtype=torch.long), 0.1)
    with pytest.raises(ValueError, match=r"labels run from 0 to 3"):
        score_thresholds(lac_scores(p), torch.tensor([0, 1, 2, 3]), 0.1)
    with pytest.raises(ValueError, match=r"no sample of the labels \[1, 3\]"):
        check_every_label_present(torch.tensor([0, 2, 2]), 4)
    with pytest.raises(ValueError, match=r"no sample of the labels \[2\]"):
        score_thresholds(lac_scores(p), torch.tensor([0, 1, 1, 0]), 0.1, class_conditional=True)
    for function in (lac_scores, aps_scores, raps_scores, socop_scores):
        with pytest.raises(ValueError, match=r"row 0 sum to 0\.5"):
            function(torch.tensor([[0.25, 0.25]]))


@pytest.mark.reference
@pytest.mark.parametrize(("name", "tolerance"), [("lac", 1e-12), ("aps", 1e-12), ("raps", 1e-8)])
def test_scores_thresholds_and_sets_equal_the_stored_ones(vectors, name, tolerance):
    # The stored RAPS scores carry a float32 penalty.
    calibration = scores_of(name, torch.tensor(vectors["P_cal"]))
    test = scores_of(name, torch.tensor(vectors["P_test"]))
    labels = torch.tensor(vectors["y_cal"])
    own = calibration[torch.arange(len(labels)), labels]
    np.testing.assert_allclose(own, vectors[f"{name}_cal_scores"], rtol=0, atol=tolerance)
    np.testing.assert_allclose(test, vectors[f"{name}_test_scores"], rtol=0, atol=tolerance)
    assert levels_of(vectors, name)
    for level in levels_of(vectors, name):
        thresholds = score_thresholds(calibration, labels, float(level))
        np.testing.assert_allclose(thresholds, vectors[f"{name}_q_{level}"], rtol=0, atol=tolerance)
        np.testing.assert_array_equal(test <= thresholds, vectors[f"{name}_sets_{level}"])


def lac_problem(vectors):
    """Stored data, then random data; alpha (n + 1) is never whole: crepes keeps labels whose p-value equals alpha."""
    yield torch.tensor(vectors["P_cal"]), torch.tensor(vectors["y_cal"]), torch.tensor(vectors["P_test"])
    for seed, (n, k) in enumerate([(20, 3), (60, 5), (200, 10)]):
        y = torch.tensor(np.random.default_rng(seed).permutation(np.arange(n) % k))
        yield probabilities(n, k, seed=20 + seed), y, probabilities(50, k, seed=30 + seed)


@pytest.mark.reference
@pytest.mark.parametrize("alpha", [0.1, 0.2])
def test_lac_sets_equal_those_of_crepes(vectors, alpha):
    crepes = pytest.importorskip("crepes", reason="crepes is a test-only package: pip install crepes")
    for p_cal, y_cal, p_test in lac_problem(vectors):
        scores = lac_scores(p_cal)
        ours = lac_scores(p_test) <= score_thresholds(scores, y_cal, alpha)
        classifier = crepes.ConformalClassifier().fit(scores[torch.arange(len(y_cal)), y_cal].numpy())
        theirs = classifier.predict_set(lac_scores(p_test).numpy(), confidence=1 - alpha, smoothing=False)
        np.testing.assert_array_equal(ours.numpy(), np.asarray(theirs).astype(bool))


@pytest.mark.reference
@pytest.mark.parametrize("alpha", [0.1, 0.2])
@pytest.mark.filterwarnings("ignore")
def test_lac_sets_equal_those_of_mapie(vectors, alpha):
    mapie = pytest.importorskip("mapie.classification", reason="mapie is a test-only package: pip install mapie")
    base = pytest.importorskip("sklearn.base", reason="mapie wraps estimators of scikit-learn")

    class Given(base.ClassifierMixin, base.BaseEstimator):
        """A fitted classifier whose inputs are the probabilities."""

        def __init__(self, n_labels=2):
            self.n_labels = n_labels

        def fit(self, x, y):
            self.classes_ = np.arange(self.n_labels)
            self.fitted_ = True
            return self

        def predict_proba(self, x):
            return np.asarray(x)

        def predict(self, x):
            return np.asarray(x).argmax(1)

    for p_cal, y_cal, p_test in lac_problem(vectors):
        ours = lac_scores(p_test) <= score_thresholds(lac_scores(p_cal), y_cal, alpha)
        estimator = Given(p_cal.shape[1]).fit(None, None)
        model = mapie.SplitConformalClassifier(
            estimator, confidence_level=1 - alpha, conformity_score="lac", prefit=True
        )
        _, theirs = model.conformalize(p_cal.numpy(), y_cal.numpy()).predict_set(p_test.numpy())
        np.testing.assert_array_equal(ours.numpy(), np.asarray(theirs)[:, :, 0])
