"""Experience replay: transitions in a ring, batches drawn from them one by one, and the state that resumes both."""

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.trainer.states import TrainerFn
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from fulgurite.datamodules.base import DataModule, collate_fields

Batch = dict[str, Tensor]
Floats = NDArray[np.float32]

log = logging.getLogger(__name__)


class ReplayBuffer:
    """The newest transitions (s_{t-1}, s_t, a_t, r_t, s_{t+1}, terminated) in a ring of preallocated arrays.

    Each row stands for itself, so that no episode leaks into another: ``previous_observation`` is s_t at the first step
    of an episode, ``next_observation`` the terminal observation at its last one.

    Args:
        capacity: transitions kept.
        n_observations: size S of an observation.
        n_actions: size A of an action.

    Raises:
        ValueError: ``capacity`` is below 1.
    """

    def __init__(self, capacity: int, n_observations: int, n_actions: int) -> None:
        if capacity < 1:
            raise ValueError(f"the capacity of a replay buffer is {capacity}; give at least 1 transition")
        self.capacity = capacity
        widths = {"previous_observation": n_observations, "observation": n_observations, "action": n_actions}
        self.fields: dict[str, Floats] = {
            # Zeros cost no memory before they are written to.
            **{name: np.zeros((capacity, width), np.float32) for name, width in widths.items()},
            "reward": np.zeros(capacity, np.float32),
            "next_observation": np.zeros((capacity, n_observations), np.float32),
            "terminated": np.zeros(capacity, np.float32),
        }
        self._position = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, **transitions: NDArray[Any]) -> None:
        """Store N transitions, over the oldest ones where the ring is full.

        Args:
            **transitions: ``previous_observation``, ``observation``, ``next_observation`` (N, S); ``action`` (N, A) in
                [-1, 1]; ``reward`` (N,); ``terminated`` (N,), true where the episode ended by itself: a time limit is
                no end, the value goes on behind it.

        Raises:
            ValueError: a field is missing, or N exceeds the capacity.
        """
        if transitions.keys() != self.fields.keys():
            raise ValueError(f"a transition has the fields {sorted(self.fields)}, got {sorted(transitions)}")
        n = len(transitions["reward"])
        if n > self.capacity:
            raise ValueError(f"{n} transitions at once do not fit into a replay buffer of {self.capacity}")
        rows = (self._position + np.arange(n)) % self.capacity
        for name, values in transitions.items():
            self.fields[name][rows] = values
        self._position = (self._position + n) % self.capacity
        self._size = min(self._size + n, self.capacity)

    def sample(self, batch_size: int, generator: torch.Generator) -> Batch:
        """Transitions drawn uniformly with replacement.

        Args:
            batch_size: number B of transitions.
            generator: for the draw; on the CPU.

        Returns:
            The fields of :meth:`add`, (B, S), (B, A) or (B,), as float32.

        Raises:
            ValueError: the buffer is empty.
        """
        if not self._size:
            raise ValueError("the replay buffer is empty; add transitions before sampling")
        rows = torch.randint(self._size, (batch_size,), generator=generator).numpy()
        return {name: torch.from_numpy(values[rows]) for name, values in self.fields.items()}

    def state_dict(self) -> dict[str, Any]:
        """The part that is filled. The tensors share its memory, as those of a module do."""
        filled = {name: torch.from_numpy(values[: self._size]) for name, values in self.fields.items()}
        return {"capacity": self.capacity, "position": self._position, "fields": filled}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned.

        Raises:
            ValueError: that was a buffer of another capacity, or for other sizes.
        """
        if state_dict["capacity"] != self.capacity:
            raise ValueError(
                f"the stored replay buffer has room for {state_dict['capacity']} transitions, this one for "
                f"{self.capacity}; resume with the same buffer_size"
            )
        stored: Batch = state_dict["fields"]
        for name, values in self.fields.items():
            if stored[name].shape[1:] != values.shape[1:]:
                raise ValueError(
                    f"{name} of the stored replay buffer has the shape {(*stored[name].shape[1:],)}, "
                    f"here it is {values.shape[1:]}; resume with the same environment"
                )
        for name, values in self.fields.items():
            values[: len(stored[name])] = stored[name].numpy()
        self._size = len(stored["reward"])
        self._position = state_dict["position"]


class OneByOne(IterableDataset[Any]):
    """Items made when they are asked for, of a length known before.

    Args:
        make: makes the item at a place, in the order of the places.
        length: items of one pass.
        start: where the first pass begins; later ones begin at 0.
    """

    def __init__(self, make: Callable[[int], Any], length: int, start: int = 0) -> None:
        self.make = make
        self.length = length
        self.start = start

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        # Runs at the first item, not when the Trainer makes the iterator: it makes some that it never uses.
        start, self.start = self.start, 0
        for place in range(start, self.length):
            yield self.make(place)


def loader_of(dataset: IterableDataset[Any]) -> DataLoader[Any]:
    """A loader that hands on what the data set makes as it is.

    In this process: what is made depends on the module that is trained. And with none made ahead: Lightning fetches no
    batch before its turn where the length is known.
    """
    return DataLoader(
        dataset,
        batch_size=None,
        num_workers=0,
        collate_fn=collate_fields,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator().manual_seed(0),  # else making an iterator would draw from the global one
    )


class ReplayData(DataModule):
    """A data module whose training batches are drawn anew for each update, and that resumes where it was.

    An epoch is a number of updates. A subclass implements :meth:`begin`, :meth:`draw` and the two halves of its state.
    All of it is a function of (seed, rank) and of what the module does.

    Args:
        root: folder for files that are read or generated.
        batch_size: transitions per batch on each rank.
        seed: seed of everything random; None means the run's ``seed_everything``.
        updates_per_epoch: batches in an epoch.

    Raises:
        ValueError: an argument is out of range.
    """

    deals_out = False

    def __init__(self, root: str | Path, batch_size: int, seed: int | None, updates_per_epoch: int) -> None:
        super().__init__(root=root, batch_size=batch_size, seed=seed)
        if updates_per_epoch < 1:
            raise ValueError(f"updates_per_epoch is {updates_per_epoch}; give at least 1 batch")
        self.updates_per_epoch = updates_per_epoch
        self._begun = False
        self._begun_for: Any = None
        self._loaded: list[dict[str, Any]] | None = None
        self._last: Batch | None = None
        self._again: Batch | None = None

    @abstractmethod
    def begin(self, rank: int) -> None:
        """Start from nothing, as the given rank."""

    @abstractmethod
    def draw(self) -> Batch:
        """The batch of the next update."""

    @abstractmethod
    def progress(self) -> dict[str, Any]:
        """The state of what :meth:`draw` uses, as tensors and plain values."""

    @abstractmethod
    def go_on(self, progress: dict[str, Any]) -> None:
        """Take over what :meth:`progress` returned, after :meth:`begin`.

        Raises:
            ValueError: it does not fit.
        """

    def train_dataloader(self) -> DataLoader[Any]:
        _, batch = self._start_position()
        if self._loaded is None and not self._is_under_way() and self.trainer and self.trainer.global_step:
            log.warning("the checkpoint holds no replay for %s: it begins from nothing", type(self).__name__)
        if self._loaded is not None or not self._is_under_way():
            self.begin(self._share()[1])
            self._begun, self._begun_for = True, self.trainer
            self._last = self._again = None
        if self._loaded is not None:
            own = self._own_part(self._loaded)
            self.go_on(own["progress"])
            self._again, self._loaded = own["again"], None
        return loader_of(OneByOne(self._next_batch, self.updates_per_epoch, start=batch))

    def _is_under_way(self) -> bool:
        """Whether the present Trainer has trained: it goes on when it fits again or renews its loaders."""
        return self._begun and self._begun_for is self.trainer

    def _next_batch(self, place: int) -> Batch:
        batch = self.draw() if self._again is None else self._again
        self._last, self._again = batch, None
        return batch

    def _own_part(self, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        n, rank = (self.trainer.world_size, self.trainer.global_rank) if self.trainer else (1, 0)
        if len(ranks) != n:
            raise ValueError(
                f"the checkpoint holds the replay of {len(ranks)} processes, and this run has {n}; "
                f"resume with as many: --trainer.devices {len(ranks)}"
            )
        return ranks[rank]

    def state_dict(self) -> dict[str, Any]:
        """The position, and for each rank what it draws from.

        A batch that was drawn and not finished is kept: it is taken again.
        """
        state = super().state_dict()
        if not self._is_under_way():
            return state  # nothing was trained, so that nothing goes on
        again = self._again
        if again is None and self.trainer is not None:
            count: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
            again = self._last if count.ready > count.processed else None
        own = {"progress": self.progress(), "again": again}
        ranks: list[Any] = [own]
        if self.trainer is not None and self.trainer.world_size > 1:
            ranks = [None] * self.trainer.world_size
            first = self.trainer.global_rank == 0  # it writes the file
            torch.distributed.gather_object(own, ranks if first else None)
        return {**state, "ranks": ranks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.trainer is not None and self.trainer.state.fn != TrainerFn.FITTING:
            return  # evaluation needs none of it
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "ranks"})
        self._loaded = state_dict.get("ranks")
