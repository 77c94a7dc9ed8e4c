import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from fulgurite.datamodules import DigitsHazard

SPLITS = ("train", "calibration", "test", "val")


def fields(data, split):
    return data.split(split).fields


def test_the_splits_are_disjoint_and_cover_all_images():
    data = DigitsHazard(seed=0)
    indices = torch.cat([fields(data, split)["index"] for split in SPLITS])
    assert [len(data.split(split)) for split in SPLITS] == [250, 500, 600, 447]
    assert sorted(indices.tolist()) == list(range(1797))


def test_images_and_labels_are_those_of_scikit_learn():
    data = DigitsHazard(noise=0)
    digits = load_digits()
    condition_of = {digit: c for c, group in enumerate(data.conditions) for digit in group}
    for split in SPLITS:
        part = fields(data, split)
        index = part["index"].numpy()
        np.testing.assert_allclose(part["image"].squeeze(1), digits.images[index] / 16, atol=1e-7)
        assert part["label"].tolist() == [condition_of[digit] for digit in digits.target[index]]
        assert part["fine_label"].tolist() == digits.target[index].tolist(), "the default conditions keep the order"


def test_the_noise_has_the_given_deviation_and_belongs_to_the_image():
    clean, noisy, more = (DigitsHazard(seed=4, noise=noise) for noise in (0.0, 3.0, 6.0))
    difference = fields(noisy, "test")["image"] - fields(clean, "test")["image"]
    assert difference.std() * 16 == pytest.approx(3.0, rel=0.02)
    assert abs(difference.mean() * 16) < 0.05
    torch.testing.assert_close(fields(more, "test")["image"] - fields(clean, "test")["image"], 2 * difference)


def test_the_seed_decides_split_and_noise():
    one, same, other = (fields(DigitsHazard(seed=seed), "calibration") for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["index"], other["index"])


def test_sizes_are_known_at_construction():
    data = DigitsHazard()
    assert (data.n_features, data.in_channels, data.n_classes) == (64, 1, 4)
    assert data.class_names == ["benign", "condition A", "condition B", "condition C"]
    assert data.label_groups == [[0, 1, 2, 3, 4], [5, 6], [7], [8, 9]]


def test_conditions_may_leave_digits_out():
    data = DigitsHazard(conditions=[[3], [8, 1]], condition_names=["a", "b"], n_train=50, n_calibration=50, n_test=50)
    digits = load_digits().target
    kept = torch.cat([fields(data, split)["index"] for split in SPLITS]).numpy()
    assert sorted(kept) == np.flatnonzero(np.isin(digits, [3, 8, 1])).tolist()
    part = fields(data, "test")
    fine = {3: 0, 8: 1, 1: 2}
    assert part["fine_label"].tolist() == [fine[digit] for digit in digits[part["index"].numpy()]]
    assert data.label_groups == [[0], [1, 2]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"noise": -1.0}, "noise is -1.0"),
        ({"noise": float("nan")}, "noise is nan"),
        ({"n_train": 0}, "n_train, n_calibration, n_test are 0, 500, 600"),
        ({"conditions": [[1, 2]], "condition_names": ["a"]}, "at least two non-empty groups"),
        ({"conditions": [[1], []], "condition_names": ["a", "b"]}, "at least two non-empty groups"),
        ({"conditions": [[1], [1]], "condition_names": ["a", "b"]}, "different digits"),
        ({"conditions": [[1], [10]], "condition_names": ["a", "b"]}, "digits 0..9"),
        ({"condition_names": ["a"]}, "condition_names has 1 names for 4 conditions"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        DigitsHazard(**arguments)


def test_sizes_that_leave_nothing_to_validate_on_are_refused():
    with pytest.raises(ValueError, match="is 1797, which leaves nothing to validate on: these conditions have 1797"):
        DigitsHazard(n_train=697).setup("fit")
