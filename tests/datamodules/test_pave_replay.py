import io

import numpy as np
import pytest
import torch

from fulgurite.datamodules.common.replay import OneByOne, ReplayBuffer, loader_of


def transitions(n, start):
    """Rows that can be told apart in each field, n of them."""
    mark = np.arange(start, start + n, dtype=np.float32)
    pair = np.stack([mark, -mark], axis=1)
    return {
        "previous_observation": pair + 0.25,
        "observation": pair,
        "action": mark[:, None] / 1000,
        "reward": 10 * mark,
        "next_observation": pair + 0.5,
        "terminated": mark % 2,
    }


def rows_of(fields):
    columns = [np.asarray(values).reshape(len(values), -1) for values in fields.values()]
    return [tuple(row) for row in np.concatenate(columns, axis=1).tolist()]


@pytest.mark.parametrize("seed", range(6))
def test_the_ring_holds_what_a_plain_list_of_the_newest_would(seed):
    rng = np.random.default_rng(seed)
    capacity, added = int(rng.integers(1, 12)), 0
    buffer, model = ReplayBuffer(capacity, 2, 1), []
    for _ in range(25):
        new = transitions(int(rng.integers(1, capacity + 1)), added)
        buffer.add(**new)
        added += len(new["reward"])
        model = (model + rows_of(new))[-capacity:]
        assert len(buffer) == len(model)
        held = {name: values[: len(buffer)] for name, values in buffer.fields.items()}
        assert sorted(rows_of(held)) == sorted(model)
        drawn = buffer.sample(40, torch.Generator().manual_seed(added))
        assert set(rows_of(drawn)) <= set(model), "the fields of a row stay together"


def test_sampling_is_uniform_with_replacement_over_what_is_there():
    buffer = ReplayBuffer(100, 2, 1)
    buffer.add(**transitions(8, 0))
    drawn = buffer.sample(40_000, torch.Generator().manual_seed(0))
    counts = np.bincount((drawn["reward"] / 10).long().numpy(), minlength=8)
    assert len(counts) == 8
    chi_square = ((counts - 5000) ** 2 / 5000).sum()
    assert chi_square < 24.3, "the 0.1 % quantile of 7 degrees of freedom"
    assert all(values.dtype == torch.float32 for values in drawn.values())
    shapes = {name: tuple(values.shape[1:]) for name, values in drawn.items()}
    assert shapes == {
        "previous_observation": (2,),
        "observation": (2,),
        "action": (1,),
        "reward": (),
        "next_observation": (2,),
        "terminated": (),
    }


def test_a_sample_is_a_copy():
    buffer = ReplayBuffer(4, 2, 1)
    buffer.add(**transitions(4, 1))
    buffer.sample(4, torch.Generator())["reward"].zero_()
    assert buffer.fields["reward"].tolist() == [10, 20, 30, 40]


@pytest.mark.parametrize("n", [3, 5, 7])
def test_a_stored_buffer_goes_on_as_the_first_would(n):
    first = ReplayBuffer(5, 2, 1)
    for start in range(0, n, 1):
        first.add(**transitions(1, start))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert len(state["fields"]["reward"]) == min(n, 5), "only the part that is filled"
    second = ReplayBuffer(5, 2, 1)
    second.load_state_dict(state)
    for buffer in (first, second):
        buffer.add(**transitions(3, 100))
    one, other = (buffer.sample(50, torch.Generator().manual_seed(1)) for buffer in (first, second))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_buffer_that_does_not_fit_is_refused_and_nothing_is_taken_over():
    stored = ReplayBuffer(5, 2, 1)
    stored.add(**transitions(2, 0))
    with pytest.raises(ValueError, match="room for 5 transitions, this one for 6; resume with the same buffer_size"):
        ReplayBuffer(6, 2, 1).load_state_dict(stored.state_dict())
    other = ReplayBuffer(5, 2, 3)
    with pytest.raises(ValueError, match=r"action .* has the shape \(1,\), here it is \(3,\)"):
        other.load_state_dict(stored.state_dict())
    assert len(other) == 0


def test_bad_use_of_a_buffer_says_what_is_wrong():
    with pytest.raises(ValueError, match="capacity of a replay buffer is 0"):
        ReplayBuffer(0, 2, 1)
    buffer = ReplayBuffer(2, 2, 1)
    with pytest.raises(ValueError, match="is empty"):
        buffer.sample(1, torch.Generator())
    with pytest.raises(ValueError, match="3 transitions at once do not fit into a replay buffer of 2"):
        buffer.add(**transitions(3, 0))
    with pytest.raises(ValueError, match="a transition has the fields"):
        buffer.add(reward=np.zeros(1))


def test_items_are_made_when_asked_for_and_only_the_first_pass_starts_late():
    made = []

    def make(place):
        made.append(place)
        return {"place": torch.tensor(place)}

    loader = loader_of(OneByOne(make, 4, start=2))
    assert len(loader) == 4
    unused, used = iter(loader), iter(loader)
    assert made == []
    assert next(used)["place"] == 2
    assert made == [2], "none is made ahead"
    assert [int(item["place"]) for item in used] == [3]
    assert [int(item["place"]) for item in unused] == [0, 1, 2, 3]
    assert [int(item["place"]) for item in loader] == [0, 1, 2, 3]


def test_making_an_iterator_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    list(loader_of(OneByOne(lambda place: {"place": torch.tensor(place)}, 3)))
    assert torch.equal(torch.get_rng_state(), before)
