"""How a callback brings a loss: it registers a term with the module that it trains with."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from fulgurite.modules.loss_terms import CHECKPOINT_KEY, LossTerm, LossTerms, refuse_other_terms


class LossTermCallback(Callback):
    """Add a loss term to a LightningModule that has ``loss_terms``, of class ``fulgurite.modules.LossTerms``.

    A subclass sets ``player`` and implements :meth:`build_term`, or :meth:`build_terms` to add to several losses.
    The terms take part in training only, and a second fit goes on with the same terms.

    Attributes:
        player: whose loss the term is added to.

    Raises:
        TypeError: the module has no ``loss_terms``.
        ValueError: it has no such player, its optimisers leave out a parameter of a term, or a run is resumed with
            other terms than it was trained with.
    """

    player: str = "model"

    def __init__(self) -> None:
        self.terms: dict[str, LossTerm] = {}
        self._trained_with: list[str] | None = None

    def build_term(self, module: LightningModule) -> LossTerm:
        """Make the term for a module."""
        raise NotImplementedError

    def build_terms(self, module: LightningModule) -> dict[str, LossTerm]:
        """The terms by player."""
        return {self.player: self.build_term(module)}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        registered = loss_terms_of(pl_module, type(self).__name__)
        self.terms = self.terms or self.build_terms(pl_module)
        # Before there are optimisers, so that the host's own configure_optimizers sees the terms' parameters.
        for player, term in self.terms.items():
            registered.add(player, term)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        registered = getattr(pl_module, "loss_terms", None)
        if stage != "fit" or not isinstance(registered, LossTerms):
            return
        for player, term in self.terms.items():
            # Lightning tears down what could not be set up, too.
            name = f"{player}.{term.name}"
            if name in registered.names() and registered.get_submodule(name) is term:
                registered.remove(player, term.name)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for player, term in self.terms.items():
            refuse_left_out(trainer, pl_module, player, term)
            if term.needs_double_backward and getattr(pl_module, "_compiler_ctx", None):
                raise ValueError(
                    f"term {term.name!r} differentiates a gradient, which torch.compile does not support; "
                    "train without compiling the module"
                )
        refuse_other_terms(loss_terms_of(pl_module, type(self).__name__), self._trained_with)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == "fit":
            checkpoint[CHECKPOINT_KEY] = loss_terms_of(pl_module, type(self).__name__).names()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._trained_with = checkpoint.get(CHECKPOINT_KEY, [])


def refuse_left_out(trainer: Trainer, module: LightningModule, player: str, term: LossTerm) -> None:
    """Refuse to train a term whose parameters nobody optimises.

    Raises:
        ValueError: a trainable parameter of the term is in no optimiser.
    """
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    optimised = {id(parameter) for group in groups for parameter in group["params"]}
    own = [(name, parameter) for name, parameter in term.named_parameters() if parameter.requires_grad]
    if left_out := [name for name, parameter in own if id(parameter) not in optimised]:
        raise ValueError(
            f"no optimiser of {type(module).__name__} has the parameters {', '.join(left_out)} of term {term.name!r}; "
            f"add self.loss_terms.parameters_of({player!r}) in its configure_optimizers"
        )


def loss_terms_of(module: LightningModule, who: str) -> LossTerms:
    """The terms of a host.

    Raises:
        TypeError: the module has none.
    """
    terms = getattr(module, "loss_terms", None)
    if not isinstance(terms, LossTerms):
        raise TypeError(
            f"{who} adds a loss to a module that has `self.loss_terms = LossTerms(...)` and calls "
            f"`self.loss_terms.add_to(...)` in its training_step; {type(module).__name__} has no loss_terms"
        )
    return terms
