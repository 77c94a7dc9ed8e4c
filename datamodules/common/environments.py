"""Gymnasium's continuous-control environments: opened with checked arguments, scaled, and with a state to keep."""

import difflib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit
from numpy.typing import NDArray
from torch import Tensor

EXTRA = "pip install fulgurite[rl]"
SUPPORTED = (
    "supported are an observation that is a Box of one axis, and an action that is a finite float Box of one axis"
)
# Environments whose whole state is known; their wrappers may be these.
KNOWN_MODULES = ("gymnasium.envs.classic_control.", "gymnasium.envs.mujoco.")
KNOWN_WRAPPERS = (OrderEnforcing, PassiveEnvChecker, TimeLimit)
# What MuJoCo derived from the state before the newest one: the reward of some environments begins from it.
MUJOCO_DERIVED = (
    *("xpos", "xquat", "xmat", "xipos", "ximat", "geom_xpos", "geom_xmat", "site_xpos", "site_xmat", "subtree_com"),
    *("cinert", "cvel", "cacc", "cfrc_int", "cfrc_ext", "qacc", "qfrc_actuator", "qfrc_constraint", "sensordata"),
    *("actuator_force", "actuator_length", "actuator_velocity", "ten_length", "ten_velocity"),
)


@dataclass(frozen=True)
class ControlTask:
    """A continuous-control environment that can be opened any number of times.

    Args:
        env_id: its id in gymnasium's registry.
        options: arguments of ``gymnasium.make``.
        n_observations: size S of an observation.
        action_low: lowest action (A,).
        action_high: highest action (A,).
    """

    env_id: str
    options: Mapping[str, Any] = field(repr=False)
    n_observations: int
    action_low: NDArray[Any]
    action_high: NDArray[Any]

    @property
    def n_actions(self) -> int:
        return len(self.action_low)

    def scaled(self, action: NDArray[Any]) -> NDArray[Any]:
        """Actions in [-1, 1] (..., A) in the units of the environment: low + (a + 1) / 2 (high - low)."""
        low, high = self.action_low.astype(np.float64), self.action_high.astype(np.float64)
        unit = (np.clip(action, -1, 1).astype(np.float64) + 1) / 2
        scaled = (low + unit * (high - low)).astype(self.action_low.dtype)
        within: NDArray[Any] = np.clip(scaled, self.action_low, self.action_high)  # rounding may have left them
        return within

    def open(self, **options: Any) -> "Resumable":
        return Resumable(gymnasium.make(self.env_id, disable_env_checker=True, **{**self.options, **options}))


def control_task(env_id: str, options: Mapping[str, Any] | None = None) -> ControlTask:
    """Open an environment once to check it and to learn its sizes.

    Raises:
        ValueError: there is no such environment, it refuses the options, or it is no continuous control.
        ModuleNotFoundError: a package that it needs is not installed.
    """
    options = dict(options or {})
    if ":" in env_id:
        raise ValueError(
            f"env_id is {env_id!r}; a module to import cannot be given here: import it yourself, and give the id that "
            "it registers"
        )
    if env_id not in gymnasium.registry:
        near = difflib.get_close_matches(env_id, [*gymnasium.registry], n=4, cutoff=0.4)
        raise ValueError(f"env_id is {env_id!r}, which gymnasium does not know; near are {', '.join(near) or 'none'}")
    try:
        env = gymnasium.make(env_id, disable_env_checker=True, **options)
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        raise ModuleNotFoundError(
            f"{env_id} needs what is not installed: {EXTRA}, for Box2D fulgurite[box2d]\ngymnasium says: {error}"
        ) from error
    except (gymnasium.error.Error, TypeError, ValueError) as error:
        raise ValueError(f"{env_id} cannot be made with env_options {options}: {error}") from error
    try:
        return _checked(env, env_id, options)
    finally:
        env.close()


def _checked(env: gymnasium.Env[Any, Any], env_id: str, options: Mapping[str, Any]) -> ControlTask:
    observation, action = env.observation_space, env.action_space
    if not isinstance(observation, spaces.Box) or len(observation.shape) != 1 or not observation.shape[0]:
        raise ValueError(f"{env_id} has the observation space {observation}; {SUPPORTED}")
    if (
        not isinstance(action, spaces.Box)
        or len(action.shape) != 1
        or not action.shape[0]
        or not np.issubdtype(action.dtype, np.floating)
        or not (np.isfinite(action.low).all() and np.isfinite(action.high).all())
    ):
        hint = "; some become continuous by an option: env_options {continuous: true}"
        raise ValueError(
            f"{env_id} has the action space {action}; {SUPPORTED}{hint if isinstance(action, spaces.Discrete) else ''}"
        )
    if env.spec is None or env.spec.max_episode_steps is None:
        raise ValueError(
            f"{env_id} has no time limit, so that an evaluation might never end; "
            "give one: env_options {max_episode_steps: 1000}"
        )
    return ControlTask(env_id, options, observation.shape[0], action.low, action.high)


class Resumable(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment whose ``snapshot`` can be read and set; it reports no ``info``, which would only cost time."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self.env.reset(seed=seed, options=options)[0], {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, _ = self.env.step(action)
        return observation, reward, terminated, truncated, {}

    @property
    def snapshot(self) -> dict[str, Any]:
        """The state of its random generator, steps of the episode so far, and that of the simulator, None if unknown.

        What is kept suffices for the next step to be the same to the last bit.
        """
        return {
            "random": self.env.unwrapped.np_random.bit_generator.state,
            "elapsed": next((limit._elapsed_steps for limit in self._layers() if isinstance(limit, TimeLimit)), 0),
            "simulator": self._simulator(),
        }

    @snapshot.setter
    def snapshot(self, value: dict[str, Any]) -> None:
        # After a reset: only then does the environment take steps.
        self.env.unwrapped.np_random.bit_generator.state = value["random"]
        if value["simulator"] is None:
            return
        for layer in self._layers():
            if isinstance(layer, TimeLimit):
                layer._elapsed_steps = value["elapsed"]
        base: Any = self.env.unwrapped
        if "state" in value["simulator"]:
            base.state = value["simulator"]["state"].copy()
            return
        mujoco = sys.modules["mujoco"]
        state = value["simulator"]["integration"]
        mujoco.mj_setState(base.model, base.data, state, mujoco.mjtState.mjSTATE_INTEGRATION)
        for name, array in value["simulator"]["derived"].items():
            getattr(base.data, name)[...] = array

    def _layers(self) -> list[Any]:
        layers, env = [], self.env
        while isinstance(env, gymnasium.Wrapper):
            layers.append(env)
            env = env.env
        return layers

    def _simulator(self) -> dict[str, Any] | None:
        base: Any = self.env.unwrapped
        if not f"{type(base).__module__}.".startswith(KNOWN_MODULES):
            return None
        if not all(type(layer) in KNOWN_WRAPPERS for layer in self._layers()):
            return None
        if hasattr(base, "state"):
            return {"state": np.array(base.state)}
        mujoco = sys.modules["mujoco"]  # the environment has imported it
        integration = np.empty(mujoco.mj_stateSize(base.model, mujoco.mjtState.mjSTATE_INTEGRATION))
        mujoco.mj_getState(base.model, base.data, integration, mujoco.mjtState.mjSTATE_INTEGRATION)
        derived = {name: getattr(base.data, name).copy() for name in MUJOCO_DERIVED}
        return {"integration": integration, "derived": derived}


def as_tensors(tree: Any) -> Any:
    """A nest of dicts and lists with its arrays as tensors, which a checkpoint may hold."""
    if isinstance(tree, Mapping):
        return {name: as_tensors(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [as_tensors(value) for value in tree]
    return torch.from_numpy(tree) if isinstance(tree, np.ndarray) else tree


def as_arrays(tree: Any) -> Any:
    """The reverse of :func:`as_tensors`."""
    if isinstance(tree, Mapping):
        return {name: as_arrays(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [as_arrays(value) for value in tree]
    return tree.numpy() if isinstance(tree, Tensor) else tree
