"""The base of every data module: splits, loaders, and the position that makes a resumed run exact."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, count, cycle, islice, repeat
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate

Split = Literal["train", "calibration", "val", "test", "predict"]


class EpochSampler(DistributedSampler[Any]):
    """A training order that is a function of (seed, epoch, rank) and can start in the middle of an epoch.

    Being a DistributedSampler, it is left in place by the Trainer, which tells it the epoch. It yields indices, or, to
    a data set whose attribute ``needs_epoch`` is true, (epoch, index): so its loader processes know the epoch, too.

    Args:
        dataset: the training set.
        seed: seed of the permutations.
        epoch: the epoch that the first iteration belongs to.
        start: number of this rank's samples to skip in that epoch.
        num_replicas: number of ranks.
        rank: this rank.
    """

    def __init__(
        self, dataset: Dataset[Any], seed: int, epoch: int = 0, start: int = 0, num_replicas: int = 1, rank: int = 0
    ) -> None:
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=True, seed=seed)
        self.epoch = epoch
        self.start = start

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch``; the start position holds only for the epoch it was given for."""
        if epoch != self.epoch:
            self.start = 0
        super().set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        # torch seeds with seed + epoch, so that two seeds would share their orders, one epoch apart.
        mixed = np.random.SeedSequence((self.seed, self.epoch)).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(mixed[0]))
        order = torch.randperm(len(self.dataset), generator=generator).tolist()  # type: ignore[arg-type]
        padded = islice(cycle(order), self.total_size)
        own = islice(padded, self.rank + self.start * self.num_replicas, None, self.num_replicas)
        return zip(repeat(self.epoch), own, strict=False) if getattr(self.dataset, "needs_epoch", False) else own


class EvaluationSampler(DistributedSampler[Any]):
    """Every sample once, in order, split over the ranks: rank r takes r, r + W, r + 2 W, ...

    Unlike its parent it never repeats a sample to make the shares equal, so that a metric over all ranks is that of one
    process. Being a DistributedSampler, it is left in place by the Trainer.

    Args:
        dataset: the evaluation set, of n samples.
        num_replicas: number of ranks W.
        rank: this rank.

    Raises:
        ValueError: there are fewer samples than ranks.
    """

    def __init__(self, dataset: Dataset[Any], num_replicas: int = 1, rank: int = 0) -> None:
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=False)
        self.total_size = len(dataset)  # type: ignore[arg-type]
        if self.total_size < num_replicas:
            raise ValueError(
                f"{self.total_size} samples cannot be split over {num_replicas} processes; evaluate more of them, "
                f"or on fewer processes: --trainer.devices {max(self.total_size, 1)}"
            )
        self.num_samples = len(range(rank, self.total_size, num_replicas))

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, self.total_size, self.num_replicas))


def even_batch_size(n: int, ranks: int, batch_size: int) -> int:
    """The largest batch size up to ``batch_size`` with which every rank has as many batches; else the next larger one.

    The shares are those of :class:`EvaluationSampler`: they differ by one sample at most. A rank with one batch more
    than another would wait for it forever wherever a forward pass is a collective (FSDP2, the buffers of DDP).

    Args:
        n: samples in total, at least one for each rank.
        ranks: number of ranks.
        batch_size: samples per batch that are wanted.
    """
    smallest, largest = n // ranks, -(-n // ranks)

    def is_even(size: int) -> bool:
        return -(-smallest // size) == -(-largest // size)

    return next(size for size in chain(range(batch_size, 0, -1), count(batch_size + 1)) if is_even(size))


def end_without(parent: int, _: int) -> None:
    """End a loader process whose parent was killed while it started.

    torch looks from then on whether the parent changes; one that was gone before, it never misses.
    """
    if os.getppid() != parent:
        os._exit(1)


def collate_fields(samples: Any) -> Any:
    """Collate a list of samples; a batch that the data set has already assembled (a dict of tensors) passes through."""
    return samples if isinstance(samples, dict) else default_collate(samples)


class DataModule(LightningDataModule):
    """A data module whose loaders are seeded, and whose checkpoint state makes resuming exact.

    A subclass implements :meth:`split` and exposes the sizes of ``fulgurite.datamodules.SIZES`` as properties that are
    known at construction. A batch is a dict with named fields; ``index`` (B,) identifies the sample in the whole data.

    Args:
        root: folder for files that are read or generated.
        batch_size: samples per batch on each rank; evaluated on several, a little fewer where the last batch would else
            be missing on some.
        num_workers: loader processes.
        seed: seed of splits, noise and order; None means the run's ``seed_everything`` (0 without a command line).

    Attributes:
        deals_out: whether the training samples are dealt out to the ranks, so that two of them with half the batch take
            the steps of one; otherwise each rank has samples of its own.

    Raises:
        ValueError: ``batch_size``, ``num_workers`` or ``seed`` is out of range.
    """

    deals_out: ClassVar[bool] = True
    collate: Callable[[Any], Any] = staticmethod(collate_fields)

    def __init__(
        self, root: str | Path = "data", batch_size: int = 64, num_workers: int = 0, seed: int | None = None
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; give at least 1")
        if num_workers < 0:
            raise ValueError(f"num_workers is {num_workers}; give 0 (load in the main process) or more")
        if seed is not None and seed < 0:
            raise ValueError(f"seed is {seed}; give 0 or more")
        self.root = Path(root).expanduser()
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.seed = 0 if seed is None else seed
        self._resume_at: tuple[int, int] | None = None

    def __str__(self) -> str:
        # Lightning's own builds every loader, and the parser asks for it with each size that the class does not have.
        return type(self).__name__

    def split(self, name: Split) -> Dataset[Any]:
        """The samples of one split, in a fixed order.

        Raises:
            ValueError: the data have no such split.
        """
        raise ValueError(f"{type(self).__name__} has no split {name!r}")

    def train_dataloader(self) -> DataLoader[Any]:
        dataset = self.split("train")
        epoch, batch = self._start_position()
        replicas, rank = self._share()
        sampler = EpochSampler(dataset, self.seed, epoch, batch * self.batch_size, num_replicas=replicas, rank=rank)
        return self._loader(dataset, sampler)

    def calibration_dataloader(self) -> DataLoader[Any]:
        """Held-out samples for conformal calibration, in a fixed order and without augmentation."""
        return self._loader(self.split("calibration"))

    def val_dataloader(self) -> DataLoader[Any]:
        return self._evaluation_loader("val")

    def test_dataloader(self) -> DataLoader[Any]:
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> DataLoader[Any]:
        return self._evaluation_loader("predict")

    def _evaluation_loader(self, split: Split) -> DataLoader[Any]:
        """Every sample of a split once, on any number of ranks, and as many batches on each."""
        dataset = self.split(split)
        replicas, rank = self._share()
        if replicas == 1:
            return self._loader(dataset)
        sampler = EvaluationSampler(dataset, replicas, rank)
        return self._loader(dataset, sampler, even_batch_size(sampler.total_size, replicas, self.batch_size))

    def _share(self) -> tuple[int, int]:
        """The number of shares that the data are split into, and which of them this process takes."""
        # Not the world size: processes that hold parts of one model (tensor parallelism) take the same share.
        share: Any = self.trainer.distributed_sampler_kwargs if self.trainer else None
        return (share["num_replicas"], share["rank"]) if share else (1, 0)

    def _loader(
        self, dataset: Dataset[Any], sampler: DistributedSampler[Any] | None = None, batch_size: int | None = None
    ) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            batch_size=batch_size or self.batch_size,
            sampler=sampler,
            num_workers=self.num_workers,
            collate_fn=self.collate,
            worker_init_fn=partial(end_without, os.getpid()) if self.num_workers else None,
            pin_memory=torch.cuda.is_available(),
            # Its own generator: making an iterator would otherwise draw from the global one and shift every later draw.
            generator=torch.Generator().manual_seed(self.seed),
        )

    def _start_position(self) -> tuple[int, int]:
        """(epoch, batch) of the first batch of the loader that is about to be built."""
        if self._resume_at is not None:
            position, self._resume_at = self._resume_at, None
            return position
        return (self.trainer.current_epoch if self.trainer else 0), 0

    def state_dict(self) -> dict[str, Any]:
        """(epoch, batch) of the next training batch.

        The loader is rebuilt at this place when a run resumes: loader processes draw their first batches before the
        Trainer can tell the sampler its epoch.
        """
        if self.trainer is None:
            return {}
        progress: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
        # Not `ready`: a batch in which the run failed is taken again.
        epoch, batch = self.trainer.current_epoch, progress.processed
        if batch >= self.trainer.num_training_batches:
            epoch, batch = epoch + 1, 0
        return {"epoch": epoch, "batch": batch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict:
            self._resume_at = (state_dict["epoch"], state_dict["batch"])
