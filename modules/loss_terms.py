"""Losses that are added from outside: the one contract by which a callback reaches the loss of a LightningModule.

A host holds ``self.loss_terms = LossTerms("critic", "actor")`` and adds what is registered to each player's loss in its
``training_step``, under automatic and manual optimisation alike. The terms are submodules of the host, so that their
parameters are in its optimiser, in DDP's reducer and in its ``state_dict``.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger(__name__)

Terms = dict[str, Tensor]
CHECKPOINT_KEY = "loss_terms"  # the names of the terms that a run was trained with


@dataclass
class LossContext:
    """What a term may read.

    Args:
        batch: the batch of the step.
        outputs: what the host computed for its own loss, by name.
        networks: networks and functions of the host, by name.
        step: optimiser steps taken so far.
        generator: for the term's random draws; None means torch's global one.
    """

    batch: Any
    outputs: Mapping[str, Any] = field(default_factory=dict)
    networks: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    step: int = 0
    generator: torch.Generator | None = None


class LossTerm(nn.Module):
    """A loss that is added to somebody's.

    A term runs its own forward passes; it does not change what the host computes.

    Attributes:
        name: an identifier, unique among the terms of a player.
        needs_double_backward: whether the term differentiates a gradient.
    """

    name: str = ""
    needs_double_backward: bool = False

    def forward(self, context: LossContext) -> Terms:
        """The parts of the loss by name: scalars, already weighted; an empty dict adds nothing."""
        raise NotImplementedError


class LossTerms(nn.Module):
    """The terms of a host, by player: whoever has a loss of its own, such as a critic and an actor.

    Args:
        *players: their names.

    Raises:
        ValueError: there is no player, or a name cannot be used.
    """

    def __init__(self, *players: str) -> None:
        super().__init__()
        if not players:
            raise ValueError('LossTerms needs the name of each loss, such as LossTerms("model")')
        self.players = players
        for player in players:
            _check_name(player, "player")
            self.add_module(player, nn.ModuleDict())

    def add(self, player: str, term: LossTerm) -> None:
        """Register a term.

        Raises:
            ValueError: there is no such player, or it has a term of that name.
        """
        terms = self._of(player)
        _check_name(term.name, "term")
        if term.name in terms:
            raise ValueError(f"the {player} has a term {term.name!r} already; give one of them another name")
        terms[term.name] = term

    def remove(self, player: str, name: str) -> None:
        """Take a term out.

        Raises:
            ValueError: there is no such player, or no such term.
        """
        terms = self._of(player)
        if name not in terms:
            raise ValueError(f"the {player} has no term {name!r}, it has {', '.join(terms) or 'none'}")
        del terms[name]

    def names(self) -> list[str]:
        """All terms as ``player.name``, sorted."""
        return sorted(f"{player}.{name}" for player in self.players for name in self._of(player))

    def parameters_of(self, player: str) -> Iterator[nn.Parameter]:
        """The parameters of a player's terms, for the optimiser that trains the player."""
        return self._of(player).parameters()

    def forward(self, player: str, context: LossContext) -> Terms:
        """The parts of all terms of a player, as ``<term>_<part>``.

        Raises:
            TypeError: a term returned something else than scalar tensors by name.
        """
        parts: Terms = {}
        for name, term in self._of(player).items():
            given = term(context)
            if not isinstance(given, dict):
                raise TypeError(f"term {name!r} returned a {type(given).__name__}; return a dict of scalar tensors")
            for part, value in given.items():
                if not isinstance(value, Tensor) or value.numel() != 1:
                    what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                    raise TypeError(f"part {part!r} of term {name!r} is no scalar tensor but {what}; reduce it")
                parts[f"{name}_{part}"] = value.reshape(())
        return parts

    def add_to(
        self, player: str, loss: Tensor, context: LossContext, log: Callable[[str, Tensor], Any] | None = None
    ) -> Tensor:
        """A player's loss with its terms; the very tensor that was given where there are none.

        Args:
            player: whose loss.
            loss: the loss, a scalar.
            context: what the terms may read.
            log: called with ``train/<term>_<part>`` and the value of each part, such as a module's ``self.log``.
        """
        for name, value in self(player, context).items():
            loss = loss + value
            if log:
                log(f"train/{name}", value.detach())
        return loss

    def shard(self, mesh: "DeviceMesh") -> None:
        """Shard every term that has parameters with FSDP2; the ranks hold the same weights already.

        Raises:
            ValueError: a term differentiates a gradient, which sharded parameters do not support.
        """
        from torch.distributed.fsdp import fully_shard

        for player in self.players:
            for name, term in self._of(player).items():
                assert isinstance(term, LossTerm)
                if term.needs_double_backward:
                    raise ValueError(
                        f"term {name!r} differentiates a gradient, which FSDP2 does not support; use strategy: ddp"
                    )
                if next(term.parameters(), None) is not None:
                    fully_shard(term, mesh=mesh)

    def _of(self, player: str) -> nn.ModuleDict:
        if player not in self.players:
            raise ValueError(f"there is no player {player!r}, there are {', '.join(self.players)}")
        terms = self.get_submodule(player)
        assert isinstance(terms, nn.ModuleDict)
        return terms

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Drop the state of terms that are not registered: what was trained with a callback is tested without it."""
        there = set()
        for key in list(state_dict):
            player, _, rest = key.removeprefix(prefix).partition(".")
            if key.startswith(prefix) and player in self.players and rest:
                there.add(f"{player}.{rest.partition('.')[0]}")
                if rest.partition(".")[0] not in self._of(player):
                    del state_dict[key]
        dropped = sorted(there.difference(self.names()))
        if dropped:
            log.info("the checkpoint's state of the loss terms %s is left out: there is no such term here", dropped)
        new = [name for name in self.names() if self.get_submodule(name).state_dict() and name not in there]
        if new and strict:
            error_msgs.append(f"the checkpoint has no state for the loss terms {new}; it was trained without them")
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def refuse_other_terms(terms: LossTerms, trained_with: list[str] | None) -> None:
    """Refuse to resume a run with other terms.

    Raises:
        ValueError: they differ from those of the checkpoint.
    """
    if trained_with is not None and trained_with != terms.names():
        raise ValueError(
            f"the checkpoint was trained with the loss terms {trained_with or 'none'}, this run has "
            f"{terms.names() or 'none'}; resume with the same callbacks"
        )


def _check_name(name: str, what: str) -> None:
    """A name becomes the name of a submodule, and part of a metric's."""
    if not name.isidentifier() or hasattr(nn.ModuleDict, name) or hasattr(LossTerms, name):
        raise ValueError(f"{name!r} cannot name a {what}: give a Python identifier that is no method of a module")
