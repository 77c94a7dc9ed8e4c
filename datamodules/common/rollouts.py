"""Steps of environments: those that fill a replay buffer, and whole episodes that show what a policy does."""

import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from numpy.typing import NDArray

from fulgurite.datamodules.common.environments import ControlTask, Resumable, as_arrays, as_tensors
from fulgurite.datamodules.common.replay import Batch, Floats, ReplayBuffer

log = logging.getLogger(__name__)


class Collector:
    """Environments that step together and store each transition.

    An environment that ends is reset within the step (gymnasium's SAME_STEP); the transition holds the true last
    observation.

    Args:
        task: the environment.
        n_envs: how many of them.
        buffer: where the transitions go.
        entropy: what the seeds of the environments are made from.
        asynchronous: run each environment in a process of its own.
    """

    def __init__(
        self, task: ControlTask, n_envs: int, buffer: ReplayBuffer, entropy: Sequence[int], asynchronous: bool = False
    ) -> None:
        self.task = task
        self.n_envs = n_envs
        self.buffer = buffer
        self.asynchronous = asynchronous
        self.env_steps = 0
        self._seeds = np.random.SeedSequence(entropy).generate_state(n_envs).tolist()
        self._observation: Floats = np.zeros((n_envs, task.n_observations), np.float32)
        self._previous = self._observation
        self._vector: VectorEnv[Any, Any, Any] | None = None
        self._snapshots: list[dict[str, Any]] | None = None
        self._inside_step = False

    @property
    def observation(self) -> Floats:
        """The present observation (N, S)."""
        self._open()
        return self._observation

    def _open(self) -> VectorEnv[Any, Any, Any]:
        if self._vector is None:
            kind = AsyncVectorEnv if self.asynchronous else SyncVectorEnv
            vector = kind([self.task.open] * self.n_envs, autoreset_mode=AutoresetMode.SAME_STEP)
            observation, _ = vector.reset(seed=self._seeds)
            self._vector = vector
            if self._snapshots is None:
                self._observation = self._previous = observation.astype(np.float32)
            else:
                self._return_to(vector, self._snapshots)
            self._snapshots = None
        return self._vector

    def _return_to(self, vector: VectorEnv[Any, Any, Any], snapshots: list[dict[str, Any]]) -> None:
        if snapshots:
            vector.set_attr("snapshot", snapshots)  # type: ignore[attr-defined]
        if not snapshots or any(snapshot["simulator"] is None for snapshot in snapshots):
            log.info("the state of %s cannot be restored: its episodes begin anew", self.task.env_id)
            seeds = None if snapshots else (np.array(self._seeds) ^ (self.env_steps & 0xFFFFFFFF)).tolist()
            observation, _ = vector.reset(seed=seeds)
            self._observation = self._previous = observation.astype(np.float32)

    def step(self, action: NDArray[Any]) -> None:
        """Take one step in each environment.

        Args:
            action: (N, A) in [-1, 1].

        Raises:
            ValueError: an action is not finite.
            RuntimeError: an environment gave an observation or a reward that is not.
        """
        if not np.isfinite(action).all():
            raise ValueError(f"an action for {self.task.env_id} is not finite after {self.env_steps} steps")
        vector, before = self._open(), self._observation
        self._inside_step = True
        after, reward, terminated, truncated, info = vector.step(self.task.scaled(action))
        after = after.astype(np.float32)
        done = terminated | truncated
        following = after
        if done.any():
            following = after.copy()
            for env in np.flatnonzero(done):
                following[env] = info["final_obs"][env]
        if not (np.isfinite(following).all() and np.isfinite(reward).all()):
            raise RuntimeError(
                f"{self.task.env_id} gave an observation or a reward that is not finite after {self.env_steps} steps"
            )
        self.buffer.add(
            previous_observation=self._previous,
            observation=before,
            action=np.clip(action, -1, 1),
            reward=reward,
            next_observation=following,
            terminated=terminated,
        )
        self._previous = np.where(done[:, None], after, before)
        self._observation = after
        self.env_steps += self.n_envs
        self._inside_step = False

    def state_dict(self) -> dict[str, Any]:
        """Counter, observations and, but in the middle of a step that failed, snapshots of the environments."""
        snapshots = self._snapshots
        if self._inside_step:
            snapshots = []
        elif self._vector is not None:
            snapshots = list(self._vector.get_attr("snapshot"))  # type: ignore[attr-defined]
        return {
            "env_id": self.task.env_id,
            "n_envs": self.n_envs,
            "env_steps": self.env_steps,
            "observation": torch.from_numpy(self._observation),
            "previous_observation": torch.from_numpy(self._previous),
            "environments": as_tensors(snapshots),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned.

        Raises:
            ValueError: those were other environments, or another number of them.
        """
        for name, own in (("env_id", self.task.env_id), ("n_envs", self.n_envs)):
            if state_dict[name] != own:
                raise ValueError(
                    f"the checkpoint was written with {name} {state_dict[name]!r}, and it is {own!r} now; "
                    "resume with the same"
                )
        self.close()
        self.env_steps = state_dict["env_steps"]
        self._observation = state_dict["observation"].numpy().copy()
        self._previous = state_dict["previous_observation"].numpy().copy()
        self._snapshots = as_arrays(state_dict["environments"])

    def close(self) -> None:
        """Close the environments; the next step opens them again where they were."""
        if self._vector is not None:
            self._snapshots = as_arrays(self.state_dict()["environments"])
            self._vector.close()
            self._vector, self._inside_step = None, False


def film(task: ControlTask, act: Callable[[Floats], NDArray[Any]], seed: int = 0) -> list[NDArray[np.uint8]]:
    """The pictures (H, W, 3) of one episode.

    Args:
        task: the environment.
        act: observations (1, S) -> actions (1, A) in [-1, 1].
        seed: of the episode.
    """
    env = task.open(render_mode="rgb_array")
    observation, _ = env.reset(seed=seed)
    pictures, ended = [env.render()], False
    while not ended:
        action = task.scaled(act(observation[None].astype(np.float32)))[0]
        observation, _, terminated, truncated, _ = env.step(action)
        pictures.append(env.render())
        ended = terminated or truncated
    env.close()
    return pictures  # type: ignore[return-value]


class Episodes:
    """Whole episodes with fixed seeds, played side by side.

    Args:
        task: the environment.
        entropy: what the seeds of the episodes are made from.
        n_episodes: how many there are in all.
        indices: those to play here.
    """

    def __init__(self, task: ControlTask, entropy: Sequence[int], n_episodes: int, indices: Sequence[int]) -> None:
        self.task = task
        self.indices = indices
        self.seeds = np.random.SeedSequence(entropy).generate_state(n_episodes)[list(indices)].tolist()

    @cached_property
    def _envs(self) -> list[Resumable]:
        return [self.task.open() for _ in self.indices]

    def close(self) -> None:
        for env in self.__dict__.pop("_envs", []):
            env.close()

    def play(self, act: Callable[[Floats], NDArray[Any]]) -> list[Batch]:
        """One dict for each episode, of T steps.

        Args:
            act: observations (N, S) -> actions (N, A) in [-1, 1].

        Returns:
            ``observation`` (T, S), what the action was chosen for; ``action`` (T, A) as the environment got it, in its
            units; ``reward`` (T,); ``terminated`` (), false where the time limit ended it; ``index`` ().
        """
        pairs = zip(self._envs, self.seeds, strict=True)
        observation = np.stack([env.reset(seed=seed)[0] for env, seed in pairs]).astype(np.float32)
        steps: list[dict[str, list[Any]]] = [{"observation": [], "action": [], "reward": []} for _ in self.indices]
        running, terminated = {*range(len(self.indices))}, np.zeros(len(self.indices), bool)
        while running:
            # Rows of episodes that have ended stay in: the result of a row may depend on the number of rows.
            action = self.task.scaled(act(observation))
            for row in sorted(running):
                steps[row]["observation"].append(observation[row].copy())
                steps[row]["action"].append(action[row].copy())
                observation[row], reward, terminated[row], truncated, _ = self._envs[row].step(action[row])
                steps[row]["reward"].append(float(reward))
                if terminated[row] or truncated:
                    running.discard(row)
        return [
            {
                **{name: torch.as_tensor(np.array(values, np.float32)) for name, values in fields.items()},
                "terminated": torch.tensor(bool(terminated[row])),
                "index": torch.tensor(index),
            }
            for row, (index, fields) in enumerate(zip(self.indices, steps, strict=True))
        ]
