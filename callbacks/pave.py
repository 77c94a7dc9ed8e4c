"""PAVE: three critic losses that keep the action gradient of Q smooth in the state and Q concave in the action."""

import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from lightning.pytorch import LightningModule

from fulgurite.callbacks.loss_term import LossTermCallback
from fulgurite.modules.loss_terms import LossContext, LossTerm, Terms
from fulgurite.modules.pave.functional import (
    check_smooth_activation,
    check_weights,
    draw_noise,
    draw_rademacher,
    pave_losses,
)
from fulgurite.modules.pave.functional_mlp import pave_losses_mlp
from fulgurite.modules.pave.functional_smoothness import ENVIRONMENTS, PAVE_WEIGHTS, PaveWeights

log = logging.getLogger(__name__)

CLOSED_FORM = ("silu", "tanh")


class PaveTerm(LossTerm):
    """The three losses as a term of the critic.

    Args:
        weights: of the losses, with the noise and the floor; a loss of weight 0 costs nothing and draws nothing.
        closed_form: compute the derivatives of the perceptrons ``critics.weights()`` in closed form.
    """

    name = "pave"

    def __init__(self, weights: PaveWeights, closed_form: bool) -> None:
        super().__init__()
        self.weights = weights
        self.closed_form = closed_form
        self.needs_double_backward = not closed_form

    def forward(self, context: LossContext) -> Terms:
        batch, weights = context.batch, self.weights
        s, a, s_next = batch["observation"], batch["action"], batch["next_observation"]
        # The order of the draws is the official code's.
        eps = draw_noise(s, weights.sigma, context.generator) if weights.mpr else None
        v = draw_rademacher(a, context.generator) if weights.curv else None
        wanted = {"mpr": weights.mpr > 0, "vfc": weights.vfc > 0, "curv": weights.curv > 0}
        critics: Any = context.networks["critics"]
        if self.closed_form:
            losses = pave_losses_mlp(
                critics.weights(), critics.activation, s, a, s_next, eps=eps, v=v, delta=weights.delta, **wanted
            )
        else:
            losses = pave_losses(critics, s, a, s_next, eps=eps, v=v, delta=weights.delta, **wanted)
        return {name: getattr(weights, name) * loss for name, loss in losses.items()}


class PAVE(LossTermCallback):
    """Regularise the critic of ``TD3``, ``SAC``, or of a module of your own (paper, Section 4 and its public code).

    A host has ``loss_terms`` with the player ``critic`` and gives, in the context, the batch's ``observation`` (B, S),
    ``action`` (B, A) in [-1, 1] and ``next_observation`` (B, S), and its twin critics as ``networks["critics"]``:
    s (B, S) or (C, B, S) and a (B, A) or (C, B, A) -> values (C, B).

    Args:
        mpr: weight of the mixed-partial loss; None means the preset's.
        vfc: weight of the field-consistency loss; None means the preset's.
        curv: weight of the curvature loss; None means the preset's.
        sigma: standard deviation of the mixed-partial loss's noise, in raw observation units; None: the preset's 0.01.
        delta: floor of the curvature; None: the preset's 1.
        preset: the published weights of an environment (``pendulum``, ``hopper``, ...); ``auto`` takes those of the
            data's environment, if it has some, and else the defaults 0.1, 0.1, 0.01.
        closed_form: derivatives in closed form, for critics that offer ``weights()`` and ``activation``; None: where
            possible. Without it a gradient is differentiated.

    Raises:
        ValueError: a weight is negative, the preset is unknown, or the critic has no curvature to hold up.
    """

    player = "critic"

    def __init__(
        self,
        mpr: float | None = None,
        vfc: float | None = None,
        curv: float | None = None,
        sigma: float | None = None,
        delta: float | None = None,
        preset: str = "auto",
        closed_form: bool | None = None,
    ) -> None:
        super().__init__()
        self.given = {"mpr": mpr, "vfc": vfc, "curv": curv, "sigma": sigma, "delta": delta}
        check_weights(*(self.given[name] or 0.0 for name in ("mpr", "vfc", "curv")))
        if sigma is not None and not sigma > 0:
            raise ValueError(f"sigma is {sigma}; give a standard deviation above 0, or the weight mpr 0")
        if delta is not None and not delta >= 0:
            raise ValueError(f"delta is {delta}; give a floor of 0 or more")
        known = sorted({name for table in PAVE_WEIGHTS.values() for name in table})
        if preset not in ("auto", "default", *known):
            raise ValueError(f"preset is {preset!r}; choose auto, default, {', '.join(known)}")
        self.preset = preset
        self.closed_form = closed_form

    def build_term(self, module: LightningModule) -> PaveTerm:
        preset = preset_of(self.preset, module, PAVE_WEIGHTS) or PaveWeights()
        weights = replace(preset, **{name: value for name, value in self.given.items() if value is not None})
        critics = getattr(module, "critic", None)
        activation = getattr(critics, "activation", None)
        if weights.curv > 0 and isinstance(activation, str):
            check_smooth_activation(activation)
        possible = hasattr(critics, "weights") and activation in CLOSED_FORM
        if self.closed_form and not possible:
            raise ValueError(
                "closed_form is true, but the critic is no perceptron with weights() and a silu or tanh activation; "
                "leave closed_form out"
            )
        log.info("PAVE with %s", ", ".join(f"{name} {value:g}" for name, value in asdict(weights).items()))
        return PaveTerm(weights, possible if self.closed_form is None else self.closed_form)


def preset_of(preset: str, module: LightningModule, tables: Mapping[str, Mapping[str, Any]]) -> Any:
    """The published setting of an environment for the module's algorithm; None where there is none.

    Args:
        preset: a name of the table, ``auto`` or ``default``.
        module: the host; its ``algorithm`` chooses the table, the first one where it has none.
        tables: algorithm -> environment -> setting.
    """
    table = tables.get(getattr(module, "algorithm", ""), next(iter(tables.values())))
    if preset == "auto":
        task = getattr(getattr(module.trainer, "datamodule", None), "task", None)
        preset = ENVIRONMENTS.get(getattr(task, "env_id", ""), "default")
    return table.get(preset, table.get("default"))
