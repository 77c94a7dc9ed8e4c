import pytest
import torch
from torch.utils.data import DataLoader

from fulgurite.datamodules.base import DataModule, EpochSampler
from fulgurite.datamodules.common.tensors import TensorFields


class Numbers(DataModule):
    def split(self, name):
        if name == "calibration":
            return super().split(name)
        return TensorFields({"x": torch.arange(103)})


def seen(loader):
    return torch.cat([batch["x"] for batch in loader])


def test_the_training_order_is_a_permutation_that_depends_on_seed_and_epoch_only():
    orders = {}
    for seed in (0, 1):
        for epoch in (0, 1):
            sampler = EpochSampler(range(103), seed=seed, epoch=epoch)
            orders[seed, epoch] = list(sampler)
            assert sorted(orders[seed, epoch]) == list(range(103))
            assert list(sampler) == orders[seed, epoch]
    assert len({tuple(order) for order in orders.values()}) == 4
    later = EpochSampler(range(103), seed=1, epoch=0)
    later.set_epoch(1)
    assert list(later) == orders[1, 1]


def test_a_sampler_starts_in_the_middle_of_its_first_epoch_only():
    whole = list(EpochSampler(range(50), seed=3, epoch=2))
    sampler = EpochSampler(range(50), seed=3, epoch=2, start=20)
    assert list(sampler) == whole[20:]
    sampler.set_epoch(2)
    assert list(sampler) == whole[20:], "the Trainer names the epoch again before it begins"
    sampler.set_epoch(3)
    assert list(sampler) == list(EpochSampler(range(50), seed=3, epoch=3))


def test_the_ranks_share_one_permutation():
    parts = [list(EpochSampler(range(100), seed=0, epoch=4, num_replicas=2, rank=rank)) for rank in (0, 1)]
    assert sorted(parts[0] + parts[1]) == list(range(100))
    single = list(EpochSampler(range(100), seed=0, epoch=4))
    assert [index for pair in zip(*parts, strict=True) for index in pair] == single


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_the_order_is_the_same_for_any_number_of_workers(workers):
    reference = seen(Numbers(batch_size=10, seed=5).train_dataloader())
    assert torch.equal(seen(Numbers(batch_size=10, seed=5, num_workers=workers).train_dataloader()), reference)


def test_making_an_iterator_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    list(Numbers(seed=1).train_dataloader())
    assert torch.equal(torch.get_rng_state(), before)


def test_evaluation_loaders_keep_the_order():
    data = Numbers(batch_size=10)
    for loader in (data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()):
        assert torch.equal(seen(loader), torch.arange(103))


def test_a_loaded_position_is_used_once():
    data = Numbers(batch_size=10, seed=2)
    data.load_state_dict({"epoch": 3, "batch": 4})
    first, second = data.train_dataloader(), data.train_dataloader()
    whole = torch.tensor(list(EpochSampler(range(103), seed=2, epoch=3)))
    assert torch.equal(seen(first), whole[40:])
    assert torch.equal(seen(second), torch.tensor(list(EpochSampler(range(103), seed=2, epoch=0))))
    assert len(first) == 11, "the Trainer counts the batches of the whole epoch"


def test_a_data_module_without_a_split_says_so():
    with pytest.raises(ValueError, match="Numbers has no split 'calibration'"):
        Numbers().calibration_dataloader()


@pytest.mark.parametrize(("argument", "value"), [("batch_size", 0), ("num_workers", -1)])
def test_out_of_range_arguments_are_refused(argument, value):
    with pytest.raises(ValueError, match=f"{argument} is {value}"):
        Numbers(**{argument: value})


def test_tensor_fields_batch_like_single_items():
    fields = TensorFields({"x": torch.arange(12).reshape(6, 2), "y": torch.arange(6)})
    assert len(fields) == 6
    batch = fields.__getitems__([4, 1])
    for position, index in enumerate((4, 1)):
        for name, value in fields[index].items():
            assert torch.equal(batch[name][position], value)
    assert [len(batch["y"]) for batch in DataLoader(fields, batch_size=4, collate_fn=Numbers.collate)] == [4, 2]


@pytest.mark.parametrize("fields", [{}, {"x": torch.zeros(3), "y": torch.zeros(4)}])
def test_tensor_fields_need_one_length(fields):
    with pytest.raises(ValueError, match="one common length"):
        TensorFields(fields)
