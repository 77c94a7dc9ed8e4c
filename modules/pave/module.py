"""TD3 and SAC, the hosts of PAVE: actor-critic methods whose critic and actor losses are open to terms from outside.

Paper: Jeong Woon Lee, Kyoleen Kwak, Daeho Kim, Hyoseok Hwang, "Stabilizing the Q-Gradient Field for Policy
Smoothness in Actor-Critic", ICML 2026 (arXiv 2601.22970); code at github.com/AIRLABkhu/PAVE. The regulariser itself is
the callback ``fulgurite.callbacks.PAVE``. TD3: Fujimoto et al. 2018; SAC: Haarnoja et al. 2018, 2019.

Deviations: SAC's log-probability uses the softplus form of the tanh correction instead of log(1 - a^2 + 1e-6).
"""

import copy
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn

from fulgurite.modules.base import Method
from fulgurite.modules.loss_terms import LossContext, LossTerms
from fulgurite.modules.pave.figures import action_figure
from fulgurite.modules.pave.functional_smoothness import action_fluctuation, spectral_smoothness
from fulgurite.modules.pave.networks import DeterministicActor, GaussianActor, TwinCritic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Batch = dict[str, Tensor]
Activation = Literal["silu", "relu", "tanh"]


class ActorCritic(Method):
    """What TD3 and SAC share: twin critics, targets, the order of the updates, deterministic evaluation.

    A training batch holds ``observation`` and ``next_observation`` (B, S), ``action`` (B, A) in [-1, 1], ``reward`` and
    ``terminated`` (B,). A validation or test batch is an episode: ``action`` (T, A) as the environment got them and
    ``reward`` (T,); or states with their ``optimal_action`` (N, A) and a ``path`` of states (T, S).

    Args:
        n_observations: size S of an observation.
        n_actions: size A of an action.
        hidden: units of the hidden layers, of actor and critics alike.
        activation: of actor and critics; PAVE's curvature needs a smooth one.
        gamma: discount.
        tau: share of the new weights in each update of the targets.
        spectral_norm: divide each critic layer by its spectral norm (a baseline of the paper).
        predict_next: give the actor a second head that predicts the next action (for ``ASAP``).
        actor_optimizer: of the actor.
        critic_optimizer: of both critics.

    Raises:
        ValueError: ``gamma`` or ``tau`` is out of range.
    """

    monitor = "val/return"
    mode = "max"
    ddp = "ddp_find_unused_parameters_true"
    fsdp = False
    algorithm: ClassVar[str]
    actor: nn.Module

    def __init__(
        self,
        n_observations: int,
        n_actions: int,
        hidden: Sequence[int],
        activation: Activation,
        gamma: float,
        tau: float,
        spectral_norm: bool,
        actor_optimizer: OptimizerCallable,
        critic_optimizer: OptimizerCallable,
    ) -> None:
        super().__init__()
        for name, value in (("gamma", gamma), ("tau", tau)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}; give a number from 0 to 1")
        self.automatic_optimization = False
        self.gamma, self.tau = gamma, tau
        self.actor_optimizer, self.critic_optimizer = actor_optimizer, critic_optimizer
        self.critic = TwinCritic(n_observations, n_actions, hidden, activation, spectral_norm=spectral_norm)
        self.target_critic = frozen_copy(self.critic)
        self.loss_terms = LossTerms("critic", "actor")
        self.updates: Tensor
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))
        self._episode: Batch = {}
        self._sums: dict[str, tuple[Any, int]] = {}

    @abstractmethod
    def act(self, observation: Tensor) -> Tensor:
        """The deterministic action (..., A) in [-1, 1] for observations (..., S)."""

    @abstractmethod
    def explore(self, observation: Tensor, generator: torch.Generator) -> Tensor:
        """An exploring action (N, A) in [-1, 1]."""

    @abstractmethod
    def target(self, batch: Batch) -> Tensor:
        """The target (B,) of both critics."""

    @abstractmethod
    def actor_loss(self, observation: Tensor) -> Tensor:
        """The actor's own loss, a scalar."""

    temporal_difference_weight: ClassVar[float] = 1.0
    policy_delay: int = 1

    def configure_optimizers(self) -> Any:
        critic = [*self.critic.parameters(), *self.loss_terms.parameters_of("critic")]
        actor = [*self.actor.parameters(), *self.loss_terms.parameters_of("actor")]
        return [self.critic_optimizer(critic), self.actor_optimizer(actor)]

    def on_fit_start(self) -> None:
        super().on_fit_start()
        if self.trainer.world_size > 1 and not self.trainer.ckpt_path:
            # All ranks were seeded alike; their noise must differ from here on.
            torch.manual_seed(torch.initial_seed() + self.global_rank)

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        critic_optimizer, actor_optimizer, *others = optimizers
        self.updates += 1
        self._update_critic(batch, critic_optimizer)
        if int(self.updates) % self.policy_delay == 0:
            self._update_actor(batch, actor_optimizer)
            for optimizer in others:
                self._update_alpha(optimizer)
            self.update_targets()
        self._log_records()

    def _update_critic(self, batch: Batch, optimizer: Any) -> None:
        with torch.no_grad():
            target = self.target(batch)
        q = self.critic(batch["observation"], batch["action"])
        temporal_difference = self.temporal_difference_weight * (q - target).square().mean(1).sum()
        context = self._context(batch, {"q": q, "target": target})
        loss = self.loss_terms.add_to("critic", temporal_difference, context, self._record)
        optimizer.zero_grad(set_to_none=True)
        self.manual_backward(loss)
        optimizer.step()
        self._record("train/td_loss", temporal_difference)
        self._record("train/critic_loss", loss)
        self._record("train/q_mean", q.mean())

    def _update_actor(self, batch: Batch, optimizer: Any) -> None:
        with frozen(self.critic):
            plain = self.actor_loss(batch["observation"])
            loss = self.loss_terms.add_to("actor", plain, self._context(batch, {}), self._record)
            optimizer.zero_grad(set_to_none=True)
            self.manual_backward(loss)
        optimizer.step()
        self._record("train/actor_loss", loss)

    def _update_alpha(self, optimizer: Any) -> None:
        """Train what has the third optimiser, where there is one."""

    def _context(self, batch: Batch, outputs: dict[str, Tensor]) -> LossContext:
        networks: dict[str, Any] = {"critics": self.critic, "policy": self.act, "actor": self.actor}
        return LossContext(batch, outputs, networks, step=self.global_step)

    def update_targets(self) -> None:
        """Move the targets towards the networks."""
        polyak(self.target_critic, self.critic, self.tau)

    def _record(self, name: str, value: Tensor) -> None:
        """Add to a mean over the epoch: to log in every update would cost as much as the update of a small network."""
        total, number = self._sums.get(name, (0.0, 0))
        self._sums[name] = (total + value.detach(), number + 1)

    def _log_records(self) -> None:
        """Log the means, with the epoch's last batch."""
        if self.trainer.is_last_batch:
            for name, (total, number) in self._sums.items():
                self.log(name, total / number, on_step=False, on_epoch=True, batch_size=1, sync_dist=True)
            self._sums.clear()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate("test", batch)

    def predict_step(self, batch: Batch, batch_idx: int) -> Batch:
        return {"action": self.act(batch["observation"])}

    def _evaluate(self, stage: str, batch: Batch) -> None:
        if "optimal_action" in batch:
            regret = (self.act(batch["observation"]) - batch["optimal_action"]).square().sum(-1).mean()
            path = self.act(batch["path"])
            self.log_epoch(f"{stage}/regret", regret, 1)
            self.log_epoch(f"{stage}/return", -regret, 1)
        else:
            path = batch["action"]
            self.log_epoch(f"{stage}/return", batch["reward"].sum(), 1)
            self.log_epoch(f"{stage}/length", torch.as_tensor(float(len(path))), 1)
        self.log_epoch(f"{stage}/sm", spectral_smoothness(path), 1)
        self.log_epoch(f"{stage}/osc", action_fluctuation(path), 1)
        self._episode = {"action": path}

    def figures(self, stage: str) -> "dict[str, Figure]":
        return {"actions": action_figure(self._episode["action"].cpu().numpy())} if self._episode else {}


class TD3(ActorCritic):
    """Twin delayed deterministic policy gradient.

    Args:
        n_observations: size S of an observation.
        n_actions: size A of an action.
        hidden: units of the hidden layers, of actor and critics alike.
        activation: of actor and critics.
        gamma: discount.
        tau: share of the new weights in each update of the targets.
        policy_delay: critic updates per update of actor and targets.
        target_noise: standard deviation of the noise on the target's action.
        noise_clip: bound of that noise.
        exploration_noise: standard deviation of the noise on exploring actions.
        spectral_norm: divide each critic layer by its spectral norm.
        predict_next: give the actor a second head that predicts the next action.
        actor_optimizer: of the actor.
        critic_optimizer: of both critics.

    Raises:
        ValueError: an argument is out of range.
    """

    algorithm = "td3"
    actor: DeterministicActor

    def __init__(
        self,
        n_observations: int,
        n_actions: int,
        hidden: Sequence[int] = (400, 300),
        activation: Activation = "silu",
        gamma: float = 0.99,
        tau: float = 0.005,
        policy_delay: int = 2,
        target_noise: float = 0.2,
        noise_clip: float = 0.5,
        exploration_noise: float = 0.1,
        spectral_norm: bool = False,
        predict_next: bool = False,
        actor_optimizer: OptimizerCallable = lambda parameters: torch.optim.Adam(parameters, lr=1e-3, fused=True),
        critic_optimizer: OptimizerCallable = lambda parameters: torch.optim.Adam(parameters, lr=1e-3, fused=True),
    ) -> None:
        super().__init__(
            n_observations, n_actions, hidden, activation, gamma, tau, spectral_norm, actor_optimizer, critic_optimizer
        )
        if policy_delay < 1:
            raise ValueError(f"policy_delay is {policy_delay}; give 1 or more critic updates per actor update")
        for name, value in (
            ("target_noise", target_noise),
            ("noise_clip", noise_clip),
            ("exploration_noise", exploration_noise),
        ):
            if not value >= 0:
                raise ValueError(f"{name} is {value}; give 0 or more")
        self.policy_delay = policy_delay
        self.target_noise, self.noise_clip, self.exploration_noise = target_noise, noise_clip, exploration_noise
        self.actor = DeterministicActor(n_observations, n_actions, hidden, activation, predictor=predict_next)
        self.target_actor = frozen_copy(self.actor)

    def act(self, observation: Tensor) -> Tensor:
        return self.actor.act(observation)

    def explore(self, observation: Tensor, generator: torch.Generator) -> Tensor:
        action = self.act(observation)
        noise = torch.randn(action.shape, generator=generator, device=generator.device).to(action)
        return (action + self.exploration_noise * noise).clamp(-1, 1)

    def target(self, batch: Batch) -> Tensor:
        following = batch["next_observation"]
        noise = (self.target_noise * torch.randn_like(batch["action"])).clamp(-self.noise_clip, self.noise_clip)
        action = (self.target_actor(following) + noise).clamp(-1, 1)
        value: Tensor = self.target_critic(following, action).amin(0)
        return batch["reward"] + self.gamma * (1 - batch["terminated"]) * value

    def actor_loss(self, observation: Tensor) -> Tensor:
        value: Tensor = self.critic(observation, self.actor(observation))[0]
        return -value.mean()

    def update_targets(self) -> None:
        super().update_targets()
        polyak(self.target_actor, self.actor, self.tau)


class SAC(ActorCritic):
    """Soft actor-critic with a tanh-squashed Gaussian actor.

    Args:
        n_observations: size S of an observation.
        n_actions: size A of an action.
        hidden: units of the hidden layers, of actor and critics alike.
        activation: of actor and critics.
        gamma: discount.
        tau: share of the new weights in each update of the targets.
        alpha: weight of the entropy; the paper's 0.2 is fixed.
        target_entropy: learn ``alpha`` so that the entropy becomes this; None keeps it fixed. Usual is -A.
        spectral_norm: divide each critic layer by its spectral norm.
        predict_next: give the actor a second head that predicts the next action.
        actor_optimizer: of the actor (and of ``alpha``).
        critic_optimizer: of both critics.

    Raises:
        ValueError: an argument is out of range.
    """

    algorithm = "sac"
    actor: GaussianActor
    temporal_difference_weight = 0.5

    def __init__(
        self,
        n_observations: int,
        n_actions: int,
        hidden: Sequence[int] = (256, 256),
        activation: Activation = "silu",
        gamma: float = 0.99,
        tau: float = 0.005,
        alpha: float = 0.2,
        target_entropy: float | None = None,
        spectral_norm: bool = False,
        predict_next: bool = False,
        actor_optimizer: OptimizerCallable = lambda parameters: torch.optim.Adam(parameters, lr=1e-3, fused=True),
        critic_optimizer: OptimizerCallable = lambda parameters: torch.optim.Adam(parameters, lr=1e-3, fused=True),
    ) -> None:
        super().__init__(
            n_observations, n_actions, hidden, activation, gamma, tau, spectral_norm, actor_optimizer, critic_optimizer
        )
        if not alpha > 0:
            raise ValueError(f"alpha is {alpha}; give a positive weight of the entropy")
        if target_entropy is not None and not math.isfinite(target_entropy):
            raise ValueError(f"target_entropy is {target_entropy}; give a finite number, such as minus the action size")
        self.target_entropy = target_entropy
        self.actor = GaussianActor(n_observations, n_actions, hidden, activation, predictor=predict_next)
        learned = target_entropy is not None
        self.log_alpha = nn.Parameter(torch.tensor(float(alpha)).log(), requires_grad=learned)

    def configure_optimizers(self) -> Any:
        critic, actor = super().configure_optimizers()
        if self.target_entropy is None:
            return [critic, actor]
        return [critic, actor, self.actor_optimizer([self.log_alpha])]

    def _update_alpha(self, optimizer: Any) -> None:
        assert self.target_entropy is not None
        loss = -self.log_alpha * (self._log_probability + self.target_entropy)
        optimizer.zero_grad(set_to_none=True)
        self.manual_backward(loss)
        optimizer.step()
        self._record("train/alpha", self.log_alpha.exp())

    def act(self, observation: Tensor) -> Tensor:
        return self.actor.act(observation)

    def explore(self, observation: Tensor, generator: torch.Generator) -> Tensor:
        action, _ = self.actor.sample(observation, generator)
        return action

    def target(self, batch: Batch) -> Tensor:
        action, log_probability = self.actor.sample(batch["next_observation"])
        value: Tensor = self.target_critic(batch["next_observation"], action).amin(0)
        value = value - self.log_alpha.exp() * log_probability
        return batch["reward"] + self.gamma * (1 - batch["terminated"]) * value

    def actor_loss(self, observation: Tensor) -> Tensor:
        action, log_probability = self.actor.sample(observation)
        self._log_probability = log_probability.detach().mean()
        value: Tensor = self.critic(observation, action).amin(0)
        return (self.log_alpha.detach().exp() * log_probability - value).mean()


def frozen_copy(network: nn.Module) -> Any:
    """A copy that no optimiser trains."""
    return copy.deepcopy(network).requires_grad_(False)


@contextmanager
def frozen(network: nn.Module) -> Iterator[None]:
    """Leave the parameters of a network out of the gradients."""
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@torch.no_grad()
def polyak(target: nn.Module, source: nn.Module, tau: float) -> None:
    """Move the parameters of ``target`` towards those of ``source`` by the share ``tau``."""
    own: list[Tensor] = [*target.parameters()]
    torch._foreach_lerp_(own, [*source.parameters()], tau)
