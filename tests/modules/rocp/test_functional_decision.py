"""The object over arrays: coverage, every score with every rule, arguments, types, and bad input."""

import itertools
import pickle

import numpy as np
import pytest
import torch

from fulgurite.modules.rocp import functional, functional_curve, functional_scores
from fulgurite.modules.rocp.functional_decision import ConformalDecision, conformal_decision

SCORES = ("rocp", "rac", "lac", "aps", "raps", "socop")
RULES = ("minimax", "maxmin", "best_response", "plug_in")
PAIRS = [pair for pair in itertools.product(SCORES, RULES) if pair[1] != "plug_in" or pair[0] in ("rocp", "rac")]
VARIANTS = [
    *({"score": score} for score in SCORES),
    {"score": "aps", "randomized": True},
    {"score": "raps", "randomized": True},
    {"score": "lac", "allow_empty": False},
]
LOSS = np.array([[0.0, 4, 6], [12, 1, 5], [20, 9, 2]])


def name_of(variant):
    return "-".join(str(value) for value in variant.values())


def population(n, seed=0, temperature=0.5):
    """Three Gaussian classes; probabilities that are over-confident and off by a shift."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, n)
    centres = np.array([[0, 0], [1.5, 0.3], [0.4, 1.4]])
    x = centres[labels] + rng.normal(size=(n, 2))
    logits = -((x[:, None] - centres - 0.2) ** 2).sum(2) / (2 * temperature)
    return np.exp(logits) / np.exp(logits).sum(1, keepdims=True), labels


@pytest.fixture(scope="module")
def data():
    p, y = population(140)
    return p[:80], y[:80], p[80:], y[80:]


# --- Coverage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", [{"score": score} for score in SCORES], ids=name_of)
def test_averaged_over_all_orders_of_the_points_coverage_is_at_least_the_level(variant):
    """Each of the n + 1 points is the test point equally often: calibration does not see the order of the others."""
    support = np.array([[0.5, 0.3, 0.2], [0.2, 0.6, 0.2], [1, 0, 0], [0.1, 0.1, 0.8], [0.3, 0.3, 0.4]])
    rng = np.random.default_rng(1)
    for n_points, alpha, _ in itertools.product((2, 3, 4, 5), (0.2, 0.25, 0.4, 0.5), range(2)):
        p, y = support[rng.integers(0, 5, n_points)], rng.integers(0, 3, n_points)
        loss = rng.integers(0, 8, (3, 3))
        covered = []
        for test in range(n_points):
            rest = np.arange(n_points) != test
            decision = ConformalDecision(loss, alpha, **variant).fit(p[rest], y[rest])
            sets, _ = decision.decide(torch.tensor(p[test : test + 1]))
            covered.append(bool(sets[0, y[test]]))
        assert np.mean(covered) >= 1 - alpha - 1e-12, (n_points, alpha)


def test_all_permutations_of_four_points_give_what_each_test_point_gives():
    p, y = population(4, seed=5)
    covered = {}
    for order in itertools.permutations(range(4)):
        *rest, test = order
        sets = ConformalDecision(LOSS, 0.4).fit(p[rest], y[rest]).predict_sets(p[[test]])
        assert covered.setdefault(test, sets.tolist()) == sets.tolist()
    assert np.mean([covered[i][0][y[i]] for i in range(4)]) >= 0.6


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_coverage_over_random_splits_is_between_its_bounds(variant):
    n, alpha, splits = 39, 0.1, 500
    p, y = population(1500)
    loss = np.array([[0.0, 4, 6], [12, 1, 5], [20, 9, 2]])
    coverage = np.empty(splits)
    rng = np.random.default_rng(0)
    for split in range(splits):
        chosen = rng.choice(len(p), n + 25, replace=False)
        decision = ConformalDecision(loss, alpha, seed=split, **variant).fit(p[chosen[:n]], y[chosen[:n]])
        sets = decision.predict_sets(p[chosen[n:]])
        coverage[split] = sets[np.arange(25), y[chosen[n:]]].mean()
    error = coverage.std() / splits**0.5
    assert 1 - alpha - 3 * error <= coverage.mean() <= 1 - alpha + 1 / (n + 1) + 0.05


@pytest.mark.parametrize("score", SCORES)
def test_class_conditional_coverage_holds_for_every_label(score):
    n, alpha, splits = 39, 0.2, 150
    p, y = population(1500)
    hits, counts = np.zeros((splits, 3)), np.zeros((splits, 3))
    rng = np.random.default_rng(1)
    for split in range(splits):
        chosen = rng.choice(len(p), n + 60, replace=False)
        decision = ConformalDecision(LOSS, alpha, score, class_conditional=True).fit(p[chosen[:n]], y[chosen[:n]])
        labels = y[chosen[n:]]
        covered = decision.predict_sets(p[chosen[n:]])[np.arange(60), labels]
        hits[split] = np.bincount(labels, covered, 3)
        counts[split] = np.bincount(labels, minlength=3)
    rate = hits.sum(0) / counts.sum(0)
    error = (hits - rate * counts).std(0) / counts.mean(0) / splits**0.5
    assert (rate >= 1 - alpha - 3 * error).all()
    if score != "rac":  # whose sets hold label 0, which has an action without loss, at any price
        assert (rate <= 1 - alpha + 1 / (n / 3 + 1) + 0.05 + 3 * error).all()


def test_randomised_sets_of_samples_that_come_one_at_a_time_cover_as_those_of_a_batch():
    """All labels are equally likely, so that the draw alone decides on the last one."""
    p, y = np.full((800, 4), 0.25), np.random.default_rng(0).integers(0, 4, 800)
    decision = ConformalDecision(alpha=0.1, score="aps", randomized=True).fit(p[:400], y[:400])
    together = decision.predict_sets(p[400:])
    assert together[np.arange(400), y[400:]].mean() == pytest.approx(0.9, abs=0.06)
    singly = np.concatenate([decision.predict_sets(row[None], [i]) for i, row in enumerate(p[400:])])
    np.testing.assert_array_equal(singly, together)
    assert singly[np.arange(400), y[400:]].mean() == pytest.approx(0.9, abs=0.06)


# --- What it computes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("score", "rule"), PAIRS)
def test_every_score_and_rule_equals_its_parts(data, score, rule):
    p_cal, y_cal, p_test, _ = (torch.tensor(part) for part in data)
    loss, alpha = torch.tensor(LOSS), 0.15
    decision = ConformalDecision(loss, alpha, score, rule).fit(p_cal, y_cal)
    sets, actions = decision.decide(p_test)
    if score in ("rocp", "rac"):
        test = functional_curve.selector_hulls(p_test, loss, score)
        calibration = functional_curve.calibrate(
            functional_curve.selector_hulls(p_cal, loss, score), y_cal, loss, alpha
        )
        expected = functional_curve.price_sets(test, loss, calibration)
    else:
        function = {
            "lac": functional_scores.lac_scores,
            "aps": functional_scores.aps_scores,
            "raps": lambda q: functional_scores.raps_scores(q, 0.05, 1),
            "socop": lambda q: functional_scores.socop_scores(q, 0.1),
        }[score]
        own = function(p_cal)[torch.arange(len(y_cal)), y_cal]
        expected = function(p_test) <= own.sort().values[int(np.ceil(0.85 * 81)) - 1]
    assert torch.equal(sets, expected)
    assert torch.equal(decision.predict_sets(p_test), expected)
    expected_actions = {
        "minimax": lambda: functional.minimax_action(sets, loss, alpha),
        "maxmin": lambda: functional.minimax_action(sets, loss, 0),
        "best_response": lambda: (p_test @ loss).argmin(1),
        "plug_in": lambda: functional_curve.selected_action(test, calibration.price),
    }[rule]()
    assert torch.equal(actions, expected_actions)
    assert torch.equal(decision.predict(p_test), actions)
    assert sets.shape == (60, 3)
    assert 0 < sets.float().mean() < 1


def test_the_worked_example_is_decided_as_by_hand():
    """Ten calibration points of the example's probabilities: nine of label 0, one of label 2."""
    p = np.tile([0.7, 0.2, 0.1], (10, 1))
    labels = np.array([0] * 9 + [2])
    decision = ConformalDecision(LOSS, alpha=0.2).fit(p, labels)  # k = 9: price 0 is enough, the set is {0, 1}
    assert decision.predict_sets(p[:1]).tolist() == [[True, True, False]]
    assert decision.predict(p[:1]).tolist() == [1]
    assert decision.calibrations_[0].price == 0
    strict = decision.recalibrate(alpha=0.1)  # k = 10: all labels, from 15 on
    assert strict.predict_sets(p[:1]).all()
    assert strict.predict(p[:1]).tolist() == [2]
    assert strict.calibrations_[0].price == pytest.approx(15)


@pytest.mark.parametrize(("score", "rule"), PAIRS)
def test_the_plain_function_equals_the_object(data, score, rule):
    p_cal, y_cal, p_test, _ = data
    sets, actions = conformal_decision(p_cal, y_cal, p_test, LOSS, 0.2, score, rule)
    decision = ConformalDecision(LOSS, 0.2, score, rule).fit(p_cal, y_cal)
    assert isinstance(sets, np.ndarray)
    assert isinstance(actions, np.ndarray)
    np.testing.assert_array_equal(sets, decision.predict_sets(p_test))
    np.testing.assert_array_equal(actions, decision.predict(p_test))


@pytest.mark.parametrize("score", SCORES)
def test_numpy_gives_numpy_and_tensors_give_tensors(data, score):
    p_cal, y_cal, p_test, _ = data
    decision = ConformalDecision(LOSS, score=score).fit(p_cal, y_cal)
    sets, actions = decision.predict_sets(p_test), decision.predict(p_test)
    assert (sets.dtype, actions.dtype) == (np.dtype(bool), np.dtype(np.int64))
    as_tensor = ConformalDecision(torch.tensor(LOSS), score=score).fit(torch.tensor(p_cal), torch.tensor(y_cal))
    tensors = as_tensor.predict_sets(torch.tensor(p_test)), as_tensor.predict(torch.tensor(p_test))
    assert all(isinstance(part, torch.Tensor) for part in tensors)
    np.testing.assert_array_equal(tensors[0].numpy(), sets)
    np.testing.assert_array_equal(tensors[1].numpy(), actions)


@pytest.mark.parametrize("score", ["lac", "rocp"])
def test_lists_are_read_in_full_precision(data, score):
    p_cal, y_cal, _, _ = data
    decision = ConformalDecision(LOSS, score=score).fit(p_cal, y_cal)
    # Calibration rows lie exactly on the threshold.
    np.testing.assert_array_equal(decision.predict_sets(p_cal.tolist()), decision.predict_sets(p_cal))
    from_lists = ConformalDecision(LOSS.tolist(), score=score).fit(p_cal.tolist(), y_cal.tolist())
    np.testing.assert_array_equal(from_lists.predict_sets(p_cal), decision.predict_sets(p_cal))


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_sets_alone_and_sets_with_actions_are_the_same_sets(variant):
    """Also for rows that lie exactly on the threshold."""
    for seed in range(30):
        p, y = population(19, seed=seed)
        decision = ConformalDecision(LOSS, 0.1, **variant).fit(p, y)
        np.testing.assert_array_equal(decision.decide(torch.tensor(p))[0], decision.predict_sets(p))


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_recalibration_equals_a_fresh_fit(variant):
    other_loss = LOSS[::-1] + 1
    for seed in range(20):
        p, y = population(30, seed=seed)
        first = ConformalDecision(LOSS, 0.1, **variant).fit(p, y)
        before = first.predict_sets(p)
        again = first.recalibrate(alpha=0.25, loss=other_loss)
        fresh = ConformalDecision(other_loss, 0.25, **variant).fit(p, y)
        np.testing.assert_array_equal(again.predict_sets(p), fresh.predict_sets(p))
        np.testing.assert_array_equal(again.predict(p), fresh.predict(p))
        np.testing.assert_array_equal(first.predict_sets(p), before)
        assert first.alpha == 0.1


def test_another_score_can_be_taken_by_recalibration(data):
    p_cal, y_cal, p_test, _ = data
    decision = ConformalDecision(LOSS, 0.2, "rocp").fit(p_cal, y_cal)
    for score in SCORES:
        fresh = ConformalDecision(LOSS, 0.2, score).fit(p_cal, y_cal)
        np.testing.assert_array_equal(decision.recalibrate(score=score).predict(p_test), fresh.predict(p_test))


@pytest.mark.parametrize("variant", [{"score": score} for score in SCORES], ids=name_of)
@pytest.mark.parametrize("conditional", [False, True])
def test_results_do_not_depend_on_how_samples_are_batched(data, variant, conditional):
    p_cal, y_cal, p_test, _ = data
    decision = ConformalDecision(LOSS, 0.2, class_conditional=conditional, **variant).fit(p_cal, y_cal)
    sets, actions = decision.predict_sets(p_test), decision.predict(p_test)
    for size in (1, 7, 64):
        starts = range(0, len(p_test), size)
        np.testing.assert_array_equal(
            np.concatenate([decision.predict_sets(p_test[i : i + size]) for i in starts]), sets
        )
        np.testing.assert_array_equal(np.concatenate([decision.predict(p_test[i : i + size]) for i in starts]), actions)


@pytest.mark.parametrize("score", SCORES)
def test_no_samples_give_no_decisions(data, score):
    decision = ConformalDecision(LOSS, score=score).fit(*data[:2])
    assert decision.predict_sets(np.empty((0, 3))).shape == (0, 3)
    assert decision.predict(np.empty((0, 3))).shape == (0,)


@pytest.mark.parametrize("score", ["aps", "raps"])
def test_randomised_sets_depend_on_the_seed_alone(data, score):
    p_cal, y_cal, p_test, _ = data

    def sets(seed):
        return (
            ConformalDecision(alpha=0.2, score=score, randomized=True, seed=seed).fit(p_cal, y_cal).predict_sets(p_test)
        )

    torch.manual_seed(1)
    first = sets(0)
    torch.manual_seed(2)
    np.random.seed(3)
    torch.rand(5)
    np.testing.assert_array_equal(sets(0), first)
    assert any((sets(seed) != first).any() for seed in range(1, 5))
    plain = ConformalDecision(alpha=0.2, score=score).fit(p_cal, y_cal).predict_sets(p_test)
    assert (plain != first).any()


def test_calibration_and_test_samples_are_randomised_by_different_draws():
    p, y = np.full((50, 4), 0.25), np.zeros(50, int)
    decision = ConformalDecision(alpha=0.5, score="aps", randomized=True).fit(p, y)
    own = functional_scores.aps_scores(torch.tensor(p))[:, 0]
    draws = [decision._scores(torch.tensor(p), stream)[:, 0] for stream in (0, 1)]
    assert ((own - draws[0]) / 0.25 >= 0).all()
    assert (draws[0] != draws[1]).sum() > 40


def test_a_predictor_need_not_forget_the_state_of_the_global_generators(data):
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    ConformalDecision(alpha=0.2, score="aps", randomized=True).fit(*data[:2]).predict_sets(data[2])
    assert torch.equal(torch.rand(1), expected)


def test_empty_sets_are_kept_unless_told_otherwise():
    p, y = population(60, temperature=2.0)
    p[:50] = np.eye(3)[y[:50]]  # confident and right: the threshold of LAC is 0
    empty = ConformalDecision(LOSS, 0.3, "lac").fit(p[:50], y[:50])
    filled = empty.recalibrate(allow_empty=False)
    sets, more = empty.predict_sets(p[50:]), filled.predict_sets(p[50:])
    assert (sets.sum(1) == 0).all()
    np.testing.assert_array_equal(more, np.eye(3, dtype=bool)[p[50:].argmax(1)])
    # An action for an empty set is that for the worst label.
    assert (empty.predict(p[50:]) == LOSS.max(0).argmin()).all()
    # Sets that are not empty are left alone.
    np.testing.assert_array_equal(filled.predict_sets(p[:50]), empty.predict_sets(p[:50]))


@pytest.mark.parametrize("score", SCORES)
def test_too_few_samples_give_all_labels(score):
    p, y = population(40)
    decision = ConformalDecision(LOSS, 0.1, score).fit(p[:8], y[:8])  # rank 9 of 8
    assert decision.predict_sets(p).all()
    assert (decision.predict(p) == LOSS.max(0).argmin()).all()


def test_the_penalties_have_their_defaults_and_are_used(data):
    p_cal, y_cal, p_test, _ = data
    for score, default in (("raps", 0.05), ("socop", 0.1)):
        sets = [
            ConformalDecision(alpha=0.2, score=score, penalty=penalty).fit(p_cal, y_cal).predict_sets(p_test)
            for penalty in (None, default, default / 100)
        ]
        np.testing.assert_array_equal(sets[0], sets[1])
        assert (sets[0] != sets[2]).any()
    aps = ConformalDecision(alpha=0.2, score="aps").fit(p_cal, y_cal).predict_sets(p_test)
    raps = ConformalDecision(alpha=0.2, score="raps", free_rank=3).fit(p_cal, y_cal).predict_sets(p_test)
    np.testing.assert_array_equal(aps, raps)


@pytest.mark.parametrize("curve", ["rocp", "rac"])
def test_modes_are_passed_on_and_exact_holds_plus(data, curve):
    p_cal, y_cal, p_test, _ = data
    p_cal, y_cal = p_cal[:14], y_cal[:14]
    sets = {
        mode: ConformalDecision(LOSS, 0.25, curve, mode=mode).fit(p_cal, y_cal).predict_sets(p_test)
        for mode in ("exact", "plus", "global")
    }
    assert (sets["exact"] >= sets["plus"]).all()
    assert (sets["plus"] != sets["global"]).any()


@pytest.mark.parametrize("score", SCORES)
def test_class_conditional_calibration_is_each_label_alone(data, score):
    p_cal, y_cal, p_test, _ = data
    sets = ConformalDecision(LOSS, 0.2, score, class_conditional=True).fit(p_cal, y_cal).predict_sets(p_test)
    for label in range(3):
        own = y_cal == label
        alone = ConformalDecision(LOSS, 0.2, score).fit(p_cal[own], y_cal[own]).predict_sets(p_test)
        np.testing.assert_array_equal(sets[:, label], alone[:, label])


@pytest.mark.parametrize("score", SCORES)
def test_float32_logits_with_ties_give_what_their_float64_softmax_gives(score):
    """Logits on a coarse grid: many equal rows and equal probabilities."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-2, 3, (300, 3), generator=generator).float()
    y = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    p = logits.double().softmax(1)
    decision = ConformalDecision(LOSS, 0.15, score).fit(p[:200], y[:200])
    sets, actions = decision.decide(p[200:])
    _, group = logits[200:].unique(dim=0, return_inverse=True)
    for i in group.unique():
        assert len(sets[group == i].unique(dim=0)) == 1, "equal rows have equal sets"
        assert len(actions[group == i].unique()) == 1
    assert sets.gather(1, y[200:, None]).double().mean() >= 0.75
    # In float32 equal scores may part in the last bits, but equal rows stay equal and coverage holds.
    single = ConformalDecision(LOSS, 0.15, score).fit(logits[:200].softmax(1), y[:200])
    rough = single.predict_sets(logits[200:].softmax(1))
    for i in group.unique():
        assert len(rough[group == i].unique(dim=0)) == 1
    assert rough.gather(1, y[200:, None]).double().mean() >= 0.75


def test_logits_in_half_precision_can_be_used_after_a_softmax_in_double(data):
    logits = torch.tensor(data[0]).log().bfloat16()
    decision = ConformalDecision(LOSS).fit(logits.double().softmax(1), data[1])
    assert decision.predict_sets(logits.double().softmax(1)).shape == (80, 3)


@pytest.mark.parametrize("score", ["lac", "rocp"])
def test_a_fitted_object_survives_pickling(data, score):
    decision = ConformalDecision(LOSS, 0.2, score).fit(*data[:2])
    copy = pickle.loads(pickle.dumps(decision))
    np.testing.assert_array_equal(copy.predict_sets(data[2]), decision.predict_sets(data[2]))


def test_fitting_again_forgets_the_first_data(data):
    p, y = population(50, seed=9)
    decision = ConformalDecision(LOSS, 0.2).fit(*data[:2])
    decision.predict(data[2])
    np.testing.assert_array_equal(
        decision.fit(p, y).predict(data[2]), ConformalDecision(LOSS, 0.2).fit(p, y).predict(data[2])
    )


def test_inputs_are_not_changed(data):
    p_cal, y_cal, p_test = (part.copy() for part in data[:3])
    loss = LOSS.copy()
    ConformalDecision(loss, 0.2, "lac", allow_empty=False).fit(p_cal, y_cal).predict(p_test)
    for before, after in zip(data[:3], (p_cal, y_cal, p_test), strict=True):
        np.testing.assert_array_equal(before, after)
    np.testing.assert_array_equal(loss, LOSS)


def test_a_thousand_labels_are_no_trouble():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.full(1000, 0.05), 120)
    y = np.array([rng.choice(1000, p=row) for row in p])
    decision = ConformalDecision(rng.random((1000, 4)) * 9, 0.2).fit(p[:100], y[:100])
    sets, actions = decision.decide(torch.tensor(p[100:]))
    assert sets.any(1).all()
    assert actions.max() < 4


# --- Bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alpha": 0}, "alpha is 0"),
        ({"alpha": 1.0}, "alpha is 1.0"),
        ({"score": "thr"}, "score is 'thr'; choose one of rocp, rac, lac, aps, raps, socop"),
        ({"rule": "bayes"}, "rule is 'bayes'; choose one of minimax, maxmin, best_response, plug_in"),
        ({"mode": "fast"}, "mode is 'fast'; choose one of exact, plus, global"),
        ({"loss": None}, "score 'rocp' needs a loss matrix"),
        ({"loss": None, "score": "rac"}, "score 'rac' needs a loss matrix"),
        ({"loss": [1, 2, 3]}, "rows are true labels, columns are actions"),
        ({"loss": [[1, -2]]}, "holds -2; losses are at least 0"),
        ({"loss": [[1, float("nan")]]}, "not finite"),
        ({"rule": "plug_in", "score": "lac"}, "'plug_in' is ROCP's or RAC's own action; score is 'lac'"),
        ({"rule": "plug_in", "class_conditional": True}, "'plug_in' needs one price for all labels"),
        ({"randomized": True}, "randomized is for the scores aps and raps; score is 'rocp'"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ConformalDecision(**{"loss": LOSS, **arguments})


@pytest.mark.parametrize("score", SCORES)
def test_bad_calibration_data_are_refused(data, score):
    p, y = data[:2]
    decision = ConformalDecision(LOSS, score=score)
    for wrong_p, wrong_y, message in (
        (p[:0], y[:0], "calibration set is empty"),
        (p[:5], y[:4], "5 rows of probabilities and 4 labels"),
        (p * 2, y, "sum to 2"),
        (np.where(p == p[3, 1], np.nan, p), y, "row 3 .*finite"),
        (p, y + 1, r"labels run from 1 to 3; with 3 labels they are 0..2"),
        (p, y - 1, "labels run from -1 to 1"),
        (p, np.eye(3)[y], "labels have shape"),
        (p[0], y[:1], "probabilities have shape"),
        (np.full((5, 4), 0.25), y[:5], r"expected \(4, actions\): rows are true labels, columns are actions"),
    ):
        with pytest.raises(ValueError, match=message):
            decision.fit(wrong_p, wrong_y)


@pytest.mark.parametrize("score", SCORES)
def test_a_missing_label_is_refused_by_class_conditional_calibration(data, score):
    p, y = data[:2]
    decision = ConformalDecision(LOSS, score=score, class_conditional=True).fit(p, y)
    assert decision.predict_sets(p).shape == p.shape
    with pytest.raises(ValueError, match=r"no sample of the labels \[2\]"):
        ConformalDecision(LOSS, score=score, class_conditional=True).fit(p[y != 2], y[y != 2])


@pytest.mark.parametrize("score", SCORES)
def test_bad_test_data_and_a_missing_fit_are_refused(data, score):
    p, y = data[:2]
    decision = ConformalDecision(LOSS, score=score)
    for use in (decision.predict_sets, decision.predict, lambda q: decision.recalibrate(alpha=0.2)):
        with pytest.raises(ValueError, match="call fit"):
            use(p)
    decision.fit(p, y)
    with pytest.raises(ValueError, match="4 labels here, and 3 in the calibration data"):
        decision.predict_sets(np.full((2, 4), 0.25))
    with pytest.raises(ValueError, match="sum to"):
        decision.predict_sets(p / 2)
    with pytest.raises(ValueError, match="finite"):
        decision.predict(np.array([[np.inf, 0, 0]]))
    with pytest.raises(TypeError):
        decision.recalibrate(level=0.2)


def test_sets_need_no_loss_matrix_but_actions_do(data):
    for score in ("lac", "aps", "raps", "socop"):
        decision = ConformalDecision(score=score).fit(*data[:2])
        assert decision.predict_sets(data[2]).shape == (60, 3)
        with pytest.raises(ValueError, match="needs a loss matrix"):
            decision.predict(data[2])


@pytest.mark.parametrize(
    ("score", "penalty", "message"),
    [("raps", -0.1, "penalty and free_rank"), ("socop", 0.0, "SOCOP needs a value above 0")],
)
def test_a_penalty_out_of_range_is_refused(data, score, penalty, message):
    with pytest.raises(ValueError, match=message):
        ConformalDecision(score=score, penalty=penalty).fit(*data[:2])
