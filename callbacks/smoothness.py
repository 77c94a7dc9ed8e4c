"""What PAVE is compared with: regularisers of the actor (CAPS, GRAD, L2C2, ASAP), a gradient penalty of the critic.

Each adds a term to a host whose ``loss_terms`` have the players ``actor`` and ``critic``; they work together, and with
PAVE. Spectral normalisation of the critic changes its forward pass, so it is the argument ``spectral_norm`` of
``TD3`` and ``SAC``. Formulas: ``fulgurite.modules.pave.functional_smoothness``.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from fulgurite.callbacks.loss_term import LossTermCallback
from fulgurite.callbacks.pave import preset_of
from fulgurite.modules.loss_terms import LossContext, LossTerm, Terms
from fulgurite.modules.pave.functional import action_gradient, gradient_penalty_loss
from fulgurite.modules.pave.functional_smoothness import (
    ASAP_WEIGHTS,
    CAPS_WEIGHTS,
    GRAD_WEIGHT,
    L2C2_DRAWS,
    L2C2_SETTINGS,
    AsapWeights,
    CapsWeights,
    L2c2Settings,
    asap_losses,
    caps_losses,
    grad_loss,
    l2c2_gaussian_distance,
    l2c2_mix,
    l2c2_policy_distance,
    l2c2_value_distance,
    l2c2_weights,
)


class CapsTerm(LossTerm):
    """CAPS as a term of the actor."""

    name = "caps"

    def __init__(self, weights: CapsWeights) -> None:
        super().__init__()
        self.weights = weights

    def forward(self, context: LossContext) -> Terms:
        s, policy = context.batch["observation"], context.networks["policy"]
        noise = self.weights.sigma * normal_like(s, context)
        temporal, spatial = caps_losses(policy(s), policy(context.batch["next_observation"]), policy(s + noise))
        return {"temporal": self.weights.temporal * temporal, "spatial": self.weights.spatial * spatial}


class CAPS(LossTermCallback):
    """Conditioning for action policy smoothness (Mysore et al. 2021), in the form of PAVE's authors.

    Args:
        temporal: weight of the change to the next state; None means the preset's.
        spatial: weight of the change under noise; None means the preset's.
        sigma: standard deviation of the noise in raw observation units; None means the preset's.
        preset: ``pendulum`` or ``default``; ``auto`` goes by the data's environment.

    Raises:
        ValueError: an argument is negative.
    """

    player = "actor"

    def __init__(
        self,
        temporal: float | None = None,
        spatial: float | None = None,
        sigma: float | None = None,
        preset: str = "auto",
    ) -> None:
        super().__init__()
        self.given = {"temporal": temporal, "spatial": spatial, "sigma": sigma}
        refuse_negative(self.given)
        self.preset = known_preset(preset, CAPS_WEIGHTS)

    def build_term(self, module: LightningModule) -> CapsTerm:
        preset = preset_of(self.preset, module, {"": CAPS_WEIGHTS})
        return CapsTerm(replace(preset, **without_none(self.given)))


class GradTerm(LossTerm):
    """GRAD as a term of the actor."""

    name = "grad"

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, context: LossContext) -> Terms:
        batch, policy = context.batch, context.networks["policy"]
        names = ("previous_observation", "observation", "next_observation")
        return {"temporal": self.weight * grad_loss(*(policy(batch[name]) for name in names))}


class GRAD(LossTermCallback):
    """A second difference of the actions in time, weighted down where the action moves on.

    Args:
        weight: of the loss.

    Raises:
        ValueError: the weight is negative.
    """

    player = "actor"

    def __init__(self, weight: float = GRAD_WEIGHT) -> None:
        super().__init__()
        refuse_negative({"weight": weight})
        self.weight = weight

    def build_term(self, module: LightningModule) -> GradTerm:
        return GradTerm(self.weight)


class L2c2ActorTerm(LossTerm):
    """L2C2's distance of the policies, as a term of the actor."""

    name = "l2c2"

    def __init__(self, settings: L2c2Settings) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, context: LossContext) -> Terms:
        s, s_bar, weight, _ = l2c2_states(context, self.settings)
        actor: Any = context.networks["actor"]
        if hasattr(actor, "log_density"):
            with torch.no_grad():
                mean, log_std = actor(s)
                u = mean + log_std.exp() * normal_like(mean.expand(L2C2_DRAWS, *mean.shape), context)
            distance = l2c2_gaussian_distance(actor.log_density(s, u), actor.log_density(s_bar, u))
        else:
            policy = context.networks["policy"]
            distance = l2c2_policy_distance(policy(s), policy(s_bar))
        return {"policy": (weight * distance).mean()}


class L2c2CriticTerm(LossTerm):
    """L2C2's distance of the values, as a term of the critic."""

    name = "l2c2"

    def __init__(self, settings: L2c2Settings) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, context: LossContext) -> Terms:
        _, s_bar, _, weight = l2c2_states(context, self.settings)
        q_bar = context.networks["critics"](s_bar, context.batch["action"])
        return {"value": (weight * l2c2_value_distance(context.outputs["q"], q_bar)).mean()}


def l2c2_states(context: LossContext, settings: L2c2Settings) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The states, those beside them (B, S), and the weights of the policy's and the value's distance (B,)."""
    s, s_next = context.batch["observation"], context.batch["next_observation"]
    u = torch.rand(s.shape, generator=context.generator, dtype=s.dtype, device=s.device)
    limits = (settings.sigma, settings.lower, settings.upper)
    s_bar = l2c2_mix(s, s_next, u, *limits)
    policy, value = l2c2_weights(s, s_next, s_bar, *limits, settings.beta)
    return s, s_bar, policy, value


class L2C2(LossTermCallback):
    """Locally Lipschitz continuous constraint (Kobayashi 2022), on the actor and on the critic.

    Args:
        sigma: width of the mixture of a state and its next; None means the preset's.
        lower: weight at the largest distance; None means the preset's.
        upper: weight at distance 0; None means the preset's.
        beta: share of the critic's loss; None means the preset's.
        preset: ``pendulum`` or ``default``; ``auto`` goes by the data's environment.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        sigma: float | None = None,
        lower: float | None = None,
        upper: float | None = None,
        beta: float | None = None,
        preset: str = "auto",
    ) -> None:
        super().__init__()
        self.given = {"sigma": sigma, "lower": lower, "upper": upper, "beta": beta}
        refuse_negative(self.given)
        self.preset = known_preset(preset, L2C2_SETTINGS)

    def build_terms(self, module: LightningModule) -> dict[str, LossTerm]:
        settings = replace(preset_of(self.preset, module, {"": L2C2_SETTINGS}), **without_none(self.given))
        # Refuses limits that do not fit, before the first batch.
        state = torch.zeros(1, 1)
        l2c2_mix(state, state, state, settings.sigma, settings.lower, settings.upper)
        return {"actor": L2c2ActorTerm(settings), "critic": L2c2CriticTerm(settings)}


class AsapTerm(LossTerm):
    """ASAP as a term of the actor, with a slow copy of the actor for its predictor.

    Args:
        weights: of the losses.
        actor: with a head ``predict_next``.
    """

    name = "asap"

    def __init__(self, weights: AsapWeights, actor: Any) -> None:
        super().__init__()
        self.weights = weights
        self.slow = copy.deepcopy(actor).requires_grad_(False)

    def forward(self, context: LossContext) -> Terms:
        batch, policy = context.batch, context.networks["policy"]
        actor: Any = context.networks["actor"]
        slow: Any = self.slow
        s = batch["observation"]
        pi_next = policy(batch["next_observation"])
        spatial, prediction = asap_losses(pi_next, actor.predict_next(s), slow.predict_next(s))
        temporal = grad_loss(policy(batch["previous_observation"]), policy(s), pi_next)
        weights = self.weights
        return {
            "temporal": weights.temporal * temporal,
            "spatial": weights.spatial * spatial,
            "prediction": weights.prediction * prediction,
        }


class ASAP(LossTermCallback):
    """Smoothness by agreement with a prediction of the next action; the actor needs ``predict_next: true``.

    Args:
        temporal: weight of the second difference in time; None means the preset's.
        spatial: weight of the agreement; None means the preset's.
        prediction: weight of the predictor's own loss; None means the preset's.
        tau: share of the new weights in each update of the predictor's target; None means the preset's.
        preset: ``pendulum``, ``hopper``, ``lunar``, ``reacher``, ``default``; ``auto`` goes by the data's environment.

    Raises:
        ValueError: an argument is negative, or the actor has no predictor.
    """

    player = "actor"

    def __init__(
        self,
        temporal: float | None = None,
        spatial: float | None = None,
        prediction: float | None = None,
        tau: float | None = None,
        preset: str = "auto",
    ) -> None:
        super().__init__()
        self.given = {"temporal": temporal, "spatial": spatial, "prediction": prediction, "tau": tau}
        refuse_negative(self.given)
        if tau is not None and tau > 1:
            raise ValueError(f"tau is {tau}; give a share from 0 to 1")
        self.preset = known_preset(preset, ASAP_WEIGHTS["td3"])

    def build_term(self, module: LightningModule) -> AsapTerm:
        actor: Any = getattr(module, "actor", None)
        if getattr(actor, "next_head", None) is None:
            raise ValueError("ASAP needs an actor that predicts the next action; give the module predict_next: true")
        weights = replace(preset_of(self.preset, module, ASAP_WEIGHTS), **without_none(self.given))
        return AsapTerm(weights, actor)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        term = self.terms["actor"]
        assert isinstance(term, AsapTerm)
        actor: Any = pl_module.actor
        with torch.no_grad():
            torch._foreach_lerp_([*term.slow.parameters()], [*actor.parameters()], term.weights.tau)


class GradientPenaltyTerm(LossTerm):
    """A penalty on the size of the action gradient, as a term of the critic."""

    name = "gradient_penalty"
    needs_double_backward = True

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, context: LossContext) -> Terms:
        critics: Any = context.networks["critics"]
        g = action_gradient(critics, context.batch["observation"], context.batch["action"])
        return {"critic": self.weight * gradient_penalty_loss(g)}


class GradientPenalty(LossTermCallback):
    """A control of the paper: make the action gradient small, which flattens Q instead of keeping it concave.

    Args:
        weight: of the penalty.

    Raises:
        ValueError: the weight is negative.
    """

    player = "critic"

    def __init__(self, weight: float = 0.1) -> None:
        super().__init__()
        refuse_negative({"weight": weight})
        self.weight = weight

    def build_term(self, module: LightningModule) -> GradientPenaltyTerm:
        return GradientPenaltyTerm(self.weight)


def normal_like(values: Tensor, context: LossContext) -> Tensor:
    """Standard normal draws of the shape of ``values``."""
    return torch.randn(values.shape, generator=context.generator, dtype=values.dtype, device=values.device)


def known_preset(preset: str, table: Mapping[str, Any]) -> str:
    """The name of a preset.

    Raises:
        ValueError: there is none of that name.
    """
    if preset not in ("auto", "default", *table):
        raise ValueError(f"preset is {preset!r}; choose {', '.join(dict.fromkeys(['auto', 'default', *table]))}")
    return preset


def without_none(values: dict[str, float | None]) -> dict[str, float]:
    """What was given."""
    return {name: value for name, value in values.items() if value is not None}


def refuse_negative(values: dict[str, float | None]) -> None:
    """Refuse a number below 0.

    Raises:
        ValueError: a value is negative or not finite.
    """
    for name, value in values.items():
        if value is not None and not 0 <= value < float("inf"):
            raise ValueError(f"{name} is {value}; give a finite number of 0 or more")
