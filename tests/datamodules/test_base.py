import subprocess
import sys
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from fulgurite.datamodules.base import DataModule, EpochSampler, EvaluationSampler, even_batch_size
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


def cases():
    """Every n up to 40 on up to 8 ranks, with every batch size that can matter, and some larger ones."""
    for ranks in range(1, 9):
        for n in (*range(ranks, 41), 601, 1000, 4097):
            for batch_size in (*range(1, 12), 32, 64, 1000):
                yield n, ranks, batch_size


def test_evaluation_takes_every_sample_once_in_as_many_batches_on_every_rank():
    for n, ranks, batch_size in cases():
        shares = [list(EvaluationSampler(range(n), ranks, rank)) for rank in range(ranks)]
        assert sorted(chain.from_iterable(shares)) == list(range(n))
        assert [len(EvaluationSampler(range(n), ranks, rank)) for rank in range(ranks)] == [len(s) for s in shares]
        size = even_batch_size(n, ranks, batch_size)
        assert len({-(-len(share) // size) for share in shares}) == 1, (n, ranks, batch_size)


def test_the_batch_size_is_the_largest_that_is_even_and_not_above_the_wanted_one():
    def is_even(n, ranks, size):
        return len({-(-len(range(rank, n, ranks)) // size) for rank in range(ranks)}) == 1

    for n, ranks, batch_size in cases():
        fitting = [size for size in range(1, n + 2) if is_even(n, ranks, size)]
        expected = batch_size
        if not is_even(n, ranks, batch_size):
            smaller = [size for size in fitting if size < batch_size]
            expected = max(smaller) if smaller else min(fitting)
        assert even_batch_size(n, ranks, batch_size) == expected, (n, ranks, batch_size)


def test_a_share_keeps_the_order_and_starts_at_its_rank():
    assert list(EvaluationSampler(range(11), 3, 1)) == [1, 4, 7, 10]
    assert list(EvaluationSampler(range(11), 3, 2)) == [2, 5, 8]


@pytest.mark.parametrize(("n", "devices"), [(1, 1), (3, 3), (0, 1)])
def test_fewer_samples_than_ranks_say_what_to_do(n, devices):
    with pytest.raises(
        ValueError, match=f"{n} samples cannot be split over 4 processes; .* --trainer.devices {devices}$"
    ):
        EvaluationSampler(range(n), 4, 0)


def ranks_of(**arguments):
    """The data modules of three ranks. What a Trainer of several processes says of itself is all that they ask."""
    for rank in range(3):
        data = Numbers(**arguments)
        data.trainer = SimpleNamespace(
            world_size=3,
            global_rank=rank,
            current_epoch=0,
            distributed_sampler_kwargs={"num_replicas": 3, "rank": rank},
        )
        yield data


@pytest.mark.parametrize("loader", ["val_dataloader", "test_dataloader", "predict_dataloader"])
@pytest.mark.parametrize("batch_size", [1, 17, 34, 35])
def test_the_evaluation_loaders_of_three_ranks(loader, batch_size):
    loaders = [getattr(data, loader)() for data in ranks_of(batch_size=batch_size)]
    assert len({len(one) for one in loaders}) == 1
    assert len({len(list(one)) for one in loaders}) == 1
    assert torch.equal(torch.cat([seen(one) for one in loaders]).sort().values, torch.arange(103))


def test_the_training_loaders_of_three_ranks_take_equally_many():
    loaders = [data.train_dataloader() for data in ranks_of(batch_size=10, seed=4)]
    parts = [seen(one) for one in loaders]
    assert [len(part) for part in parts] == [35, 35, 35]
    assert set(torch.cat(parts).tolist()) == set(range(103))


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


def test_to_be_named_builds_no_loader():
    class Counted(DataModule):
        def split(self, name):
            raise AssertionError("nobody asked for data")

    assert str(Counted()) == "Counted"


def test_a_loader_process_whose_parent_is_gone_ends():
    program = (
        "import os; from fulgurite.datamodules.base import end_without; end_without({parent}, 0); print('goes on')"
    )
    for parent, said in (("os.getppid()", "goes on\n"), ("os.getppid() + 1", "")):
        command = [sys.executable, "-c", program.format(parent=parent)]
        assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout == said
