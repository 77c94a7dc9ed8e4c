"""Getting the samples of a calibration or a test together: each once, in a fixed order, on any number of ranks."""

import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Calibration:
    """What is kept of a pass over the calibration data.

    Args:
        logits: (N, K) float32.
        labels: (N,).
        fingerprint: of the weights that gave the logits.
    """

    logits: Tensor
    labels: Tensor
    fingerprint: Tensor


def weights_fingerprint(module: LightningModule) -> Tensor:
    """Two sums over every parameter and floating-point buffer, (2 P,): they tell other weights from the same ones."""
    sums = []
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        if tensor.is_floating_point():
            whole: Any = tensor.detach()
            whole = (whole.full_tensor() if hasattr(whole, "full_tensor") else whole).double()
            sums += [whole.sum().cpu(), whole.abs().sum().cpu()]
    return torch.stack(sums) if sums else torch.empty(0, dtype=torch.float64)


def gather_in_order(
    trainer: Trainer, positions: Tensor, logits: Tensor, labels: Tensor, limit: int | None
) -> tuple[Tensor, Tensor]:
    """The samples of all ranks in the order of their positions, each once.

    A distributed sampler that is not ours repeats samples to give all ranks equally many: the positions from ``limit``
    on are that padding.
    """
    parts = [(positions, logits, labels)]
    if trainer.world_size > 1:
        parts = [(positions, logits, labels)] * trainer.world_size
        torch.distributed.all_gather_object(parts, (positions, logits, labels))
    positions, logits, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    order = positions.argsort(stable=True)
    positions = positions[order]
    kept = torch.ones(len(order), dtype=torch.bool)
    kept[1:] = positions[1:] != positions[:-1]
    if limit is not None:
        kept &= positions < limit
    return logits[order][kept], labels[order][kept]


def gather_shards(trainer: Trainer, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The samples of ranks that no distributed sampler split: every rank has all of them, or a part of its own."""
    parts = [(logits, labels)] * trainer.world_size
    torch.distributed.all_gather_object(parts, (logits, labels))
    same = all(torch.equal(part[1], labels) and torch.allclose(part[0], logits, atol=1e-4) for part in parts)
    # The answer must be every rank's, and each compares with its own part.
    answers = [same] * trainer.world_size
    torch.distributed.all_gather_object(answers, same)
    if all(answers):
        return parts[0]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def calibration_loader(trainer: Trainer, warn: bool = True) -> tuple[DataLoader[Any], list[int]]:
    """The loader of the calibration data, and the indices of its samples in a fixed order.

    Where the data module has no ``calibration_dataloader()`` the validation data take its place.

    Args:
        trainer: with its data module, or with validation loaders.
        warn: say so.

    Raises:
        ValueError: there are no such data, or they cannot be passed in a fixed order.
    """
    data: Any = getattr(trainer, "datamodule", None)
    train: Any = getattr(trainer, "train_dataloader", None)
    if hasattr(data, "calibration_dataloader"):
        loader = only_loader(data.calibration_dataloader())
    else:
        source: Any = trainer.val_dataloaders
        if source is None and data is not None and is_overridden("val_dataloader", data):
            source = data.val_dataloader()
        loader = only_loader(source)
        if loader is None:
            raise ValueError(
                "there are no calibration data: give the data module a calibration_dataloader() with labelled "
                "samples that trained nothing"
            )
        if warn:
            log.warning("no calibration_dataloader(): calibrating on the validation data, which chose the checkpoint")
    if not isinstance(loader, DataLoader):
        raise ValueError(f"calibration_dataloader() gives a {type(loader).__name__}; give one DataLoader")
    if train is not None and getattr(train, "dataset", None) is loader.dataset:
        log.warning("the calibration data are the training data: the coverage will fall short of 1 - alpha")
    indices = fixed_indices(loader)
    if not indices:
        raise ValueError("the calibration set is empty")
    return loader, indices


def checked_logits(logits: Tensor) -> Tensor:
    """Logits (B, K), or an error that says what they are.

    Raises:
        ValueError: the shape is another, or a value is not finite.
    """
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise ValueError(
            f"the logits have shape {tuple(logits.shape)}, expected (samples, labels) with at least 2 labels; for one "
            "logit z give two, such as stack([zeros, z], 1)"
        )
    if not torch.isfinite(logits).all():
        raise ValueError("the model's logits are not finite; look at the inputs and the weights")
    return logits


def only_loader(loaders: Any) -> Any:
    """The loader in a collection of one, or what was given."""
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    return loaders[0] if isinstance(loaders, list | tuple) and len(loaders) == 1 else loaders


def batch_field(batch: Any, key: str, position: int, argument: str) -> Tensor:
    """The entry of a dict batch under ``key``, or of a tuple at ``position``.

    Raises:
        ValueError: the batch has none; names the callback's ``argument`` to change.
    """
    if isinstance(batch, Mapping):
        if key not in batch:
            raise ValueError(f"the batch has no field {key!r}, it has {', '.join(batch)}; name it by {argument}")
        value = batch[key]
    elif isinstance(batch, tuple | list) and len(batch) > position:
        value = batch[position]
    elif isinstance(batch, Tensor) and position == 0:
        value = batch
    else:
        raise ValueError(f"a batch is a {type(batch).__name__}; give a dict or a tuple (inputs, labels)")
    return torch.as_tensor(value)


def share_of(trainer: Trainer) -> tuple[int, int]:
    """Into how many shares the data are split, and which this rank takes: r, r + shares, r + 2 shares, ...

    So do the Trainer's samplers and :class:`fulgurite.datamodules.base.EvaluationSampler`. Ranks that hold parts of one
    model (tensor parallelism) take the same share.
    """
    share: Any = trainer.distributed_sampler_kwargs
    return (share["num_replicas"], share["rank"]) if share else (1, 0)


def sampler_of_test(trainer: Trainer) -> DistributedSampler[Any] | None:
    """The sampler that splits the test data over the ranks, if one does."""
    sampler = getattr(only_loader(trainer.test_dataloaders), "sampler", None)
    return sampler if isinstance(sampler, DistributedSampler) else None


def fixed_indices(loader: DataLoader[Any]) -> list[int]:
    """The indices of the samples that a loader would give, without drawing from its sampler.

    Raises:
        ValueError: the loader cannot be passed in a fixed order.
    """
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        raise ValueError(
            "calibration_dataloader() needs a data set with a length and a batch size: its samples are passed in a "
            "fixed order and shared between ranks"
        )
    if isinstance(loader.sampler, SubsetRandomSampler):
        return sorted(loader.sampler.indices)
    if isinstance(loader.sampler, SequentialSampler | RandomSampler | DistributedSampler):
        return list(range(len(loader.dataset)))  # type: ignore[arg-type]
    raise ValueError(
        f"calibration_dataloader() has a {type(loader.sampler).__name__}; give it a torch.utils.data.Subset of the "
        "data instead, whose samples can be passed in a fixed order"
    )
