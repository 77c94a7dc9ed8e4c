"""Data for smooth policies: transitions that the policy in training collects, and a one-step problem in closed form."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from fulgurite.datamodules.base import Split
from fulgurite.datamodules.common.replay import Batch, Floats, OneByOne, ReplayBuffer, ReplayData, loader_of

if TYPE_CHECKING:
    from fulgurite.datamodules.common.rollouts import Collector, Episodes

# The last number of each seed: no two sources of randomness share a stream.
ENVIRONMENTS, SAMPLING, EXPLORATION, VALIDATION, TESTING, PROBLEM, SAMPLES = range(1, 8)


class Policy(Protocol):
    """What a module needs to be trained on :class:`ContinuousControl`."""

    def explore(self, observation: Tensor, generator: torch.Generator) -> Tensor:
        """An exploring action (N, A) in [-1, 1] for observations (N, S); the generator is on the CPU."""

    def act(self, observation: Tensor) -> Tensor:
        """The deterministic action (N, A) in [-1, 1] for observations (N, S)."""


class ContinuousControl(ReplayData):
    """A gymnasium environment with a continuous action, explored by the policy that is being trained.

    For each update the environments take steps with the module's ``explore`` where they are due, the transitions enter
    a replay buffer, and a batch is drawn from it: ``previous_observation``, ``observation``, ``next_observation``
    (B, S), ``action`` (B, A) in [-1, 1], ``reward`` and ``terminated`` (B,). ``next_observation`` is the true last
    observation of an episode, and ``terminated`` is 0 where only a time limit ended it.

    Validation, test and prediction play whole episodes with the module's ``act``, from fixed seeds; a batch is one
    episode: ``observation`` (T, S), ``action`` (T, A) in the environment's units, ``reward`` (T,), ``terminated`` (),
    ``index`` (). They leave the training environments, the buffer and all random states alone.

    Each rank has environments and a buffer of its own, seeded by (seed, rank): the effective batch is the sum over the
    ranks. A checkpoint holds the buffer, the counters, the random states and the state of the environments, and a
    resumed run equals the uninterrupted one. Environments other than gymnasium's own classic control and MuJoCo cannot
    be kept in the middle of an episode: theirs begin anew.

    Args:
        root: unused; the environments are simulated.
        batch_size: transitions per batch on each rank.
        seed: seed of environments, exploration and sampling; None means the run's ``seed_everything``.
        env_id: id of an installed environment.
        n_envs: environments that step together on each rank.
        env_options: arguments of ``gymnasium.make``.
        asynchronous: run each training environment in a process of its own; pays off where a step is slow.
        buffer_size: transitions that are kept.
        learning_starts: steps, of all environments together, with uniformly random actions before the first update.
        train_freq: steps of each environment between two rounds of updates.
        gradient_steps: updates in a round.
        updates_per_epoch: updates in an epoch.
        evaluation_episodes: episodes to validate and to test on, in all.
        evaluation_seed: seed of these; validation and test have different ones.
        keep_buffer: keep the buffer in checkpoints; such a run can be resumed.

    Raises:
        ValueError: an argument is out of range, or the environment is no continuous control.
        ModuleNotFoundError: gymnasium, or a package that the environment needs, is not installed.
    """

    def __init__(
        self,
        root: str | Path = "data",
        batch_size: int = 256,
        seed: int | None = None,
        env_id: str = "Pendulum-v1",
        n_envs: int = 1,
        env_options: dict[str, Any] | None = None,
        asynchronous: bool = False,
        buffer_size: int = 200_000,
        learning_starts: int = 1000,
        train_freq: int = 1,
        gradient_steps: int = 1,
        updates_per_epoch: int = 1000,
        evaluation_episodes: int = 10,
        evaluation_seed: int = 0,
        keep_buffer: bool = True,
    ) -> None:
        super().__init__(root=root, batch_size=batch_size, seed=seed, updates_per_epoch=updates_per_epoch)
        at_least_one = {
            "n_envs": n_envs,
            "train_freq": train_freq,
            "gradient_steps": gradient_steps,
            "evaluation_episodes": evaluation_episodes,
        }
        for name, value in at_least_one.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; give at least 1")
        for name, value in (("learning_starts", learning_starts), ("evaluation_seed", evaluation_seed)):
            if value < 0:
                raise ValueError(f"{name} is {value}; give 0 or more")
        if buffer_size < n_envs:
            raise ValueError(f"buffer_size is {buffer_size}; give at least one transition for each of n_envs {n_envs}")
        self.n_envs = n_envs
        self.asynchronous = asynchronous
        self.buffer_size = buffer_size
        self.learning_starts = learning_starts
        self.train_freq = train_freq
        self.gradient_steps = gradient_steps
        self.evaluation_episodes = evaluation_episodes
        self.evaluation_seed = evaluation_seed
        self.keep_buffer = keep_buffer
        try:
            from fulgurite.datamodules.common.environments import control_task
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"ContinuousControl needs gymnasium: pip install fulgurite[rl]\n{error}"
            ) from error
        self.task = control_task(env_id, env_options)
        self.buffer: ReplayBuffer | None = None
        self._collector: Collector | None = None
        self._episodes: dict[str, Episodes] = {}

    @property
    def n_observations(self) -> int:
        return self.task.n_observations

    @property
    def n_actions(self) -> int:
        return self.task.n_actions

    @property
    def action_low(self) -> Tensor:
        """The lowest action (A,) in the environment's units."""
        return torch.from_numpy(self.task.action_low.copy())

    @property
    def action_high(self) -> Tensor:
        """The highest action (A,) in the environment's units."""
        return torch.from_numpy(self.task.action_high.copy())

    @property
    def env_steps(self) -> int:
        """Steps taken so far for training, of all environments of this rank together."""
        return self._collector.env_steps if self._collector else 0

    def begin(self, rank: int) -> None:
        from fulgurite.datamodules.common.rollouts import Collector

        if self._collector:
            self._collector.close()
        self.buffer = ReplayBuffer(self.buffer_size, self.n_observations, self.n_actions)
        entropy = (self.seed, rank, ENVIRONMENTS)
        self._collector = Collector(self.task, self.n_envs, self.buffer, entropy, self.asynchronous)
        self._sampling = seeded_generator(self.seed, rank, SAMPLING)
        self._exploration = seeded_generator(self.seed, rank, EXPLORATION)
        self._steps_due = self._updates_due = 0

    def draw(self) -> Batch:
        assert self.buffer is not None
        if not self._updates_due:
            self._collect()
            self._updates_due = self.gradient_steps
        self._updates_due -= 1
        return self.buffer.sample(self.batch_size, self._sampling)

    def _collect(self) -> None:
        """Warm up where that is still to do, then take the steps of one round."""
        assert self._collector is not None
        while self._collector.env_steps < self.learning_starts:
            uniform = torch.rand(self.n_envs, self.n_actions, generator=self._exploration)
            self._collector.step(2 * uniform.numpy() - 1)
        self._steps_due = self._steps_due or self.train_freq
        while self._steps_due:
            self._collector.step(self._ask("explore", self._collector.observation, self._exploration))
            self._steps_due -= 1

    @torch.no_grad()
    def _ask(self, method: Literal["explore", "act"], observation: Floats, *arguments: Any) -> NDArray[Any]:
        """The action (N, A) of the module for observations (N, S)."""
        module: Any = self.trainer.lightning_module if self.trainer else None
        policy: Callable[..., Tensor] | None = getattr(module, method, None)
        if policy is None:
            signature = "explore(observation, generator)" if method == "explore" else "act(observation)"
            raise TypeError(
                f"{type(module).__name__ if module is not None else 'no module'} has no method {signature}; "
                "ContinuousControl asks the module that is trained for its actions: observations (N, S) -> actions "
                "(N, A) in [-1, 1], see fulgurite.datamodules.pave.Policy"
            )
        action = policy(torch.as_tensor(observation, dtype=module.dtype, device=module.device), *arguments)
        if action.shape != (len(observation), self.n_actions):
            raise ValueError(
                f"{type(module).__name__}.{method} gave actions of shape {tuple(action.shape)} for observations of "
                f"shape {observation.shape}; {self.task.env_id} needs {(len(observation), self.n_actions)}"
            )
        return action.float().cpu().numpy()

    def progress(self) -> dict[str, Any]:
        assert self._collector is not None
        assert self.buffer is not None
        return {
            "collector": self._collector.state_dict(),
            "buffer": self.buffer.state_dict() if self.keep_buffer else None,
            "sampling": self._sampling.get_state(),
            "exploration": self._exploration.get_state(),
            "steps_due": self._steps_due,
            "updates_due": self._updates_due,
        }

    def go_on(self, progress: dict[str, Any]) -> None:
        assert self._collector is not None
        assert self.buffer is not None
        if progress["buffer"] is None:
            raise ValueError(
                "the checkpoint was written with keep_buffer false and holds no replay buffer, so that its run cannot "
                "be resumed; it can be tested. Train with --data.keep_buffer true to resume"
            )
        self._collector.load_state_dict(progress["collector"])
        self.buffer.load_state_dict(progress["buffer"])
        self._sampling.set_state(progress["sampling"])
        self._exploration.set_state(progress["exploration"])
        self._steps_due, self._updates_due = progress["steps_due"], progress["updates_due"]

    def _evaluation_loader(self, split: Split) -> DataLoader[Any]:
        from fulgurite.datamodules.common.rollouts import Episodes

        replicas, rank = self._share()
        if self.evaluation_episodes % replicas:
            raise ValueError(
                f"evaluation_episodes is {self.evaluation_episodes}, which {replicas} processes cannot share equally; "
                f"give a multiple of {replicas}"
            )
        kind = "val" if split == "val" else "test"
        own = range(rank, self.evaluation_episodes, replicas)
        episodes = self._episodes.get(kind)
        if episodes is None or episodes.indices != own:
            # Nothing to do with the training seed: all runs are measured on the same episodes.
            entropy = (self.evaluation_seed, 0, VALIDATION if kind == "val" else TESTING)
            episodes = self._episodes[kind] = Episodes(self.task, entropy, self.evaluation_episodes, own)
        played: list[Batch] = []

        def episode(place: int) -> Batch:
            if place == 0:
                played[:] = episodes.play(lambda observation: self._ask("act", observation))
            return played[place]

        return loader_of(OneByOne(episode, len(episodes.indices)))

    def film(self) -> list[NDArray[Any]]:
        """The pictures (H, W, 3) of an episode that the module plays with ``act``."""
        from fulgurite.datamodules.common.rollouts import film

        return film(self.task, lambda observation: self._ask("act", observation), self.evaluation_seed)

    def teardown(self, stage: str) -> None:
        for episodes in self._episodes.values():
            episodes.close()
        self._episodes = {}
        if self._collector:
            self._collector.close()


def seeded_generator(*entropy: int) -> torch.Generator:
    """A generator on the CPU whose stream depends on all the numbers."""
    mixed = np.random.SeedSequence(entropy).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(mixed[0]))


class OneStepControl(ReplayData):
    """Control in one step, with few and noisy samples: where a plain critic overfits, and the best action is known.

    States s ~ N(0, I) in R^3 have the best action g(s) = 0.7 tanh(s W), W (3, 2) ~ 0.6 N(0, 1). A sample is an action
    a ~ U(-1, 1)^2 with the reward r = -||a - g(s)||^2 + noise, and a state beside s in place of a next one. The samples
    are fixed; a training batch is drawn from them with replacement and has the fields of :class:`ContinuousControl`.
    Every step ends its episode: ``terminated`` is 1, whatever the discount, and ``previous_observation`` is s.

    Validation, test and prediction are one batch each: ``observation`` (N, 3), fresh states; ``optimal_action`` (N, 2),
    g of them; ``path`` (T, 3), a smooth closed curve of states with unit variance, observed with noise; ``index`` (N,).
    Each rank has all of it, and batches of its own.

    Args:
        root: unused; the samples are generated.
        batch_size: transitions per batch on each rank.
        seed: seed of W and of everything else; None means the run's ``seed_everything``.
        n_samples: samples in all.
        reward_noise: standard deviation of the noise on the reward.
        next_noise: standard deviation of the next state around the state.
        updates_per_epoch: updates in an epoch.
        n_evaluation: fresh states N.
        path_length: states T of the path.
        observation_noise: standard deviation of the noise on the path.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        root: str | Path = "data",
        batch_size: int = 64,
        seed: int | None = None,
        n_samples: int = 96,
        reward_noise: float = 1.0,
        next_noise: float = 0.15,
        updates_per_epoch: int = 500,
        n_evaluation: int = 200,
        path_length: int = 256,
        observation_noise: float = 0.05,
    ) -> None:
        super().__init__(root=root, batch_size=batch_size, seed=seed, updates_per_epoch=updates_per_epoch)
        for name, size in (("n_samples", n_samples), ("n_evaluation", n_evaluation), ("path_length", path_length)):
            if size < 1:
                raise ValueError(f"{name} is {size}; give at least 1")
        noises = {"reward_noise": reward_noise, "next_noise": next_noise, "observation_noise": observation_noise}
        for name, noise in noises.items():
            if not 0 <= noise < float("inf"):
                raise ValueError(f"{name} is {noise}; give a standard deviation of 0 or more")
        self.n_samples = n_samples
        self.reward_noise, self.next_noise, self.observation_noise = reward_noise, next_noise, observation_noise
        self.n_evaluation, self.path_length = n_evaluation, path_length
        self.weight = 0.6 * torch.randn(3, 2, generator=seeded_generator(self.seed, 0, PROBLEM))
        self.samples = self._samples()

    @property
    def n_observations(self) -> int:
        return 3

    @property
    def n_actions(self) -> int:
        return 2

    def optimal_action(self, state: Tensor) -> Tensor:
        """g(s) = 0.7 tanh(s W): (N, 3) -> (N, 2)."""
        return 0.7 * torch.tanh(state @ self.weight)

    def _samples(self) -> ReplayBuffer:
        generator = seeded_generator(self.seed, 0, SAMPLES)
        state, beside = (torch.randn(self.n_samples, 3, generator=generator) for _ in range(2))
        action = 2 * torch.rand(self.n_samples, 2, generator=generator) - 1
        noise = torch.randn(self.n_samples, generator=generator)
        reward = -(action - self.optimal_action(state)).square().sum(-1) + self.reward_noise * noise
        samples = ReplayBuffer(self.n_samples, 3, 2)
        samples.add(
            previous_observation=state.numpy(),
            observation=state.numpy(),
            action=action.numpy(),
            reward=reward.numpy(),
            next_observation=(state + self.next_noise * beside).numpy(),
            terminated=np.ones(self.n_samples),
        )
        return samples

    def begin(self, rank: int) -> None:
        self._sampling = seeded_generator(self.seed, rank, SAMPLING)

    def draw(self) -> Batch:
        return self.samples.sample(self.batch_size, self._sampling)

    def progress(self) -> dict[str, Any]:
        return {"sampling": self._sampling.get_state()}

    def go_on(self, progress: dict[str, Any]) -> None:
        self._sampling.set_state(progress["sampling"])

    def _evaluation_loader(self, split: Split) -> DataLoader[Any]:
        generator = seeded_generator(self.seed, 0, VALIDATION if split == "val" else TESTING)
        state = torch.randn(self.n_evaluation, 3, generator=generator)
        phase = torch.rand(3, generator=generator)
        turns = torch.arange(self.path_length).unsqueeze(-1) / self.path_length * torch.tensor([1.0, 2.0, 3.0])
        path = 2**0.5 * torch.sin(2 * torch.pi * (turns + phase))
        path += self.observation_noise * torch.randn(path.shape, generator=generator)
        batch = {
            "observation": state,
            "optimal_action": self.optimal_action(state),
            "path": path,
            "index": torch.arange(self.n_evaluation),
        }
        return loader_of(OneByOne([batch].__getitem__, 1))
