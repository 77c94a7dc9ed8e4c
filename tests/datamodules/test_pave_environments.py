import logging
import re
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from fulgurite.datamodules import ContinuousControl
from fulgurite.datamodules.common.environments import Resumable, as_arrays, as_tensors, control_task
from fulgurite.datamodules.common.replay import ReplayBuffer
from fulgurite.datamodules.common.rollouts import Collector, Episodes

KNOWN = [
    "Pendulum-v1",
    "MountainCarContinuous-v0",
    *(f"{name}-v5" for name in ("Reacher", "Pusher", "InvertedPendulum", "InvertedDoublePendulum", "HalfCheetah")),
    *(f"{name}-v5" for name in ("Hopper", "Swimmer", "Walker2d", "Ant", "Humanoid", "HumanoidStandup")),
]


class FarReset(gymnasium.Env):
    """Step t of episode e is (1000 e + t, the last action's first number); each episode begins far from the last end.

    The actions lie in [-2, 2] x [0, 10]; an episode of even number ends by itself after ``length`` steps.
    """

    def __init__(self, length=3, seen=None):
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
        self.action_space = spaces.Box(np.float32([-2, 0]), np.float32([2, 10]))
        self.length, self.seen, self.episode = length, seen, -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return np.array([1000.0 * self.episode, self.np_random.uniform()]), {"info": 1}

    def step(self, action):
        assert self.action_space.contains(action), action
        if self.seen is not None:
            self.seen.append(action.copy())
        self.t += 1
        ends = self.t == self.length and self.episode % 2 == 0
        return np.array([1000.0 * self.episode + self.t, action[0]]), float(self.t), ends, False, {"info": 2}


class Other(gymnasium.Env):
    """An environment with the given spaces, to be refused."""

    def __init__(self, observation=None, action=None):
        self.observation_space = observation or spaces.Box(-1, 1, (2,))
        self.action_space = action or spaces.Box(-1, 1, (1,))


@pytest.fixture(autouse=True)
def registered():
    gymnasium.register("FarReset-v0", FarReset, max_episode_steps=5)
    gymnasium.register("Other-v0", Other, max_episode_steps=5)
    gymnasium.register("Endless-v0", Other)
    yield
    for name in ("FarReset-v0", "Other-v0", "Endless-v0"):
        del gymnasium.registry[name]


@pytest.fixture
def audible(monkeypatch):
    """The command line turns off the propagation that caplog needs."""
    monkeypatch.setattr(logging.getLogger("fulgurite"), "propagate", True)


def collected(steps=60, n_envs=1, capacity=1000, seed=0, asynchronous=False, env_id="FarReset-v0", **options):
    """The fields of a buffer after some steps with random actions, in the order of storing where it did not wrap."""
    task = control_task(env_id, options)
    buffer = ReplayBuffer(capacity, task.n_observations, task.n_actions)
    collector = Collector(task, n_envs, buffer, (seed, 0, 1), asynchronous)
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        collector.step(rng.uniform(-1, 1, (n_envs, task.n_actions)))
    collector.close()
    return {name: values[: len(buffer)] for name, values in buffer.fields.items()}


@pytest.mark.parametrize(("n_envs", "capacity"), [(1, 1000), (3, 1000), (4, 37)])
def test_no_transition_crosses_the_border_of_an_episode(n_envs, capacity):
    fields = collected(n_envs=n_envs, capacity=capacity)
    episode, step = np.divmod(fields["observation"][:, 0], 1000)
    previous_episode, previous_step = np.divmod(fields["previous_observation"][:, 0], 1000)
    next_episode, next_step = np.divmod(fields["next_observation"][:, 0], 1000)
    assert episode.max() > 10
    np.testing.assert_array_equal(next_episode, episode)
    np.testing.assert_array_equal(next_step, step + 1)
    np.testing.assert_array_equal(previous_episode, episode)
    np.testing.assert_array_equal(previous_step, np.maximum(step - 1, 0))
    first = step == 0
    assert first.sum() > 5
    np.testing.assert_array_equal(fields["previous_observation"][first], fields["observation"][first])


def test_the_last_observation_of_an_episode_is_stored_and_only_termination_counts_as_an_end():
    fields = collected(n_envs=2)
    episode, step = np.divmod(fields["next_observation"][:, 0], 1000)
    np.testing.assert_array_equal(fields["terminated"], (episode % 2 == 0) & (step == 3))
    assert step[episode % 2 == 1].max() == 5, "the time limit's last step is stored, and is no end"


def test_actions_reach_the_environment_in_its_bounds_scaled_once():
    seen = []
    task = control_task("FarReset-v0", {"seen": seen})
    collector = Collector(task, 1, ReplayBuffer(10, 2, 2), (0,))
    given = np.array([[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0], [0.5, -0.5], [3.0, -7.0]])
    for action in given:
        collector.step(action[None])
    np.testing.assert_allclose(seen, [[-2, 0], [0, 5], [2, 10], [1, 2.5], [2, 0]])
    np.testing.assert_allclose(collector.buffer.fields["action"][:5], np.clip(given, -1, 1))
    np.testing.assert_allclose(collector.buffer.fields["next_observation"][:3, 1], [-2, 0, 2])


def test_no_action_leaves_the_bounds_by_rounding():
    task = control_task("FarReset-v0")
    rng = np.random.default_rng(0)
    for _ in range(300):
        low = rng.normal(size=2).astype(np.float32)
        high = low + rng.exponential(size=2).astype(np.float32)
        task = type(task)("FarReset-v0", {}, 2, low, high)
        assert np.array_equal(task.scaled(np.full(2, -1.0)), low)
        assert np.array_equal(task.scaled(np.full(2, 1.0)), high)


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "Hopper-v5"])
def test_the_seed_decides_the_transitions(env_id):
    one, same, other = (collected(steps=100, n_envs=3, seed=seed, env_id=env_id) for seed in (1, 1, 2))
    assert all(np.array_equal(one[name], same[name]) for name in one)
    assert not np.isclose(one["observation"], other["observation"]).any(1).all()
    assert len(np.unique(one["observation"][:3], axis=0)) == 3, "each environment has a seed of its own"


def test_processes_of_their_own_change_nothing():
    one, other = (collected(steps=30, n_envs=2, env_id="Pendulum-v1", asynchronous=flag) for flag in (False, True))
    assert all(np.array_equal(one[name], other[name]) for name in one)


def rolled(env, task, rng, steps):
    """What comes of random actions."""
    result = []
    for _ in range(steps):
        observation, reward, terminated, truncated, _ = env.step(task.scaled(rng.uniform(-1, 1, task.n_actions)))
        result.append((*observation.tolist(), reward, terminated, truncated))
        if terminated or truncated:
            result.append((*env.reset()[0].tolist(), 0.0, False, False))
    return result


@pytest.mark.parametrize("env_id", KNOWN)
def test_a_snapshot_brings_another_environment_to_the_same_bits(env_id, tmp_path):
    task = control_task(env_id, {"max_episode_steps": 60})
    one, other = task.open(), task.open()
    one.reset(seed=3)
    rolled(one, task, np.random.default_rng(0), 37)
    torch.save(as_tensors(one.snapshot), tmp_path / "snapshot")
    other.reset(seed=9)
    rolled(other, task, np.random.default_rng(1), 11)
    other.reset()
    other.snapshot = as_arrays(torch.load(tmp_path / "snapshot", weights_only=True))
    assert rolled(one, task, np.random.default_rng(2), 100) == rolled(other, task, np.random.default_rng(2), 100)


def test_an_environment_with_an_unknown_part_has_no_state_to_keep():
    assert control_task("FarReset-v0").open().snapshot["simulator"] is None
    env = control_task("Pendulum-v1").open()
    env.reset(seed=0)
    assert env.snapshot["simulator"] is not None
    stacked = Resumable(gymnasium.wrappers.TimeAwareObservation(env.env))
    assert stacked.snapshot["simulator"] is None


def test_episodes_of_an_unknown_environment_begin_anew_and_the_log_says_so(caplog, audible):
    task = control_task("FarReset-v0", {"length": 40, "max_episode_steps": 50})
    first = Collector(task, 2, ReplayBuffer(50, 2, 2), (0,))
    for _ in range(4):
        first.step(np.zeros((2, 2)))
    second = Collector(task, 2, ReplayBuffer(50, 2, 2), (0,))
    second.load_state_dict(first.state_dict())
    assert second.env_steps == 8
    with caplog.at_level("INFO", logger="fulgurite"):
        second.step(np.zeros((2, 2)))
    assert set(caplog.messages) == {"the state of FarReset-v0 cannot be restored: its episodes begin anew"}
    fields = second.buffer.fields
    assert np.array_equal(fields["observation"][:2], fields["previous_observation"][:2])
    np.testing.assert_array_equal(fields["observation"][:2, 0] % 1000, 0)
    np.testing.assert_array_equal(fields["next_observation"][:2, 0], fields["observation"][:2, 0] + 1)


def test_closed_environments_go_on_where_they_were():
    task = control_task("Pendulum-v1", {"max_episode_steps": 15})
    straight, closed = (Collector(task, 2, ReplayBuffer(100, 3, 1), (4,)) for _ in range(2))
    for step in range(40):
        if step % 7 == 3:
            closed.close()
        for collector in (straight, closed):
            collector.step(np.full((2, 1), np.sin(step)))
    for name, values in straight.buffer.fields.items():
        assert np.array_equal(values, closed.buffer.fields[name])


def test_a_step_that_failed_is_not_resumed_in_its_middle(caplog, audible):
    task = control_task("Pendulum-v1")
    collector = Collector(task, 2, ReplayBuffer(100, 3, 1), (4,))
    collector.step(np.zeros((2, 1)))
    collector.buffer = None
    with pytest.raises(AttributeError):
        collector.step(np.zeros((2, 1)))
    state = collector.state_dict()
    assert state["environments"] == []
    later = Collector(task, 2, ReplayBuffer(100, 3, 1), (4,))
    later.load_state_dict(state)
    with caplog.at_level("INFO", logger="fulgurite"):
        later.step(np.zeros((2, 1)))
    assert "begin anew" in caplog.text
    assert np.array_equal(later.buffer.fields["observation"][:2], later.buffer.fields["previous_observation"][:2])


def test_episodes_are_whole_and_in_the_units_of_the_environment():
    task = control_task("FarReset-v0", {"length": 3})
    episodes = Episodes(task, (0, 0, 4), 4, range(4))
    for batch, again in zip(
        *(episodes.play(lambda x: np.tile([0.5, 1.0], (len(x), 1))) for _ in range(2)), strict=True
    ):
        number = int(batch["observation"][0, 0]) // 1000
        length = 3 if number % 2 == 0 else 5
        assert bool(batch["terminated"]) == (number % 2 == 0)
        np.testing.assert_array_equal(batch["observation"][:, 0], 1000 * number + np.arange(length))
        np.testing.assert_array_equal(batch["action"], np.tile([1.0, 10.0], (length, 1)))
        np.testing.assert_array_equal(batch["reward"], 1 + np.arange(length))
        assert batch["observation"][0, 1] == again["observation"][0, 1], "the seeds are fixed"
    assert len({float(e["observation"][0, 1]) for e in episodes.play(lambda x: np.zeros((len(x), 2)))}) == 4


def test_the_shares_of_the_ranks_are_the_episodes_of_one_process():
    task = control_task("Pendulum-v1", {"max_episode_steps": 20})

    def play(indices):
        episodes = Episodes(task, (7, 0, 4), 6, indices).play(lambda x: np.tanh(x[:, :1] + x[:, 1:2] * x[:, 2:]))
        return {int(episode["index"]): episode for episode in episodes}

    whole, parts = play(range(6)), play(range(0, 6, 2)) | play(range(1, 6, 2))
    assert whole.keys() == parts.keys() == {*range(6)}
    for index, episode in whole.items():
        torch.testing.assert_close(episode, parts[index])


def test_what_is_not_finite_stops_before_it_is_stored(monkeypatch):
    task = control_task("FarReset-v0")
    collector = Collector(task, 1, ReplayBuffer(10, 2, 2), (0,))
    with pytest.raises(ValueError, match="an action for FarReset-v0 is not finite after 0 steps"):
        collector.step(np.array([[np.nan, 0]]))
    monkeypatch.setattr(FarReset, "step", lambda self, action: (np.array([np.nan, 0]), 0.0, False, False, {}))
    with pytest.raises(RuntimeError, match="FarReset-v0 gave an observation or a reward that is not finite"):
        collector.step(np.zeros((1, 2)))
    assert len(collector.buffer) == 0


@pytest.mark.parametrize(
    ("env_id", "options", "message"),
    [
        ("CartPole-v1", {}, r"CartPole-v1 has the action space Discrete\(2\); supported are .* {continuous: true}"),
        ("Pendulum-v7", {}, "env_id is 'Pendulum-v7', which gymnasium does not know; near are Pendulum-v1"),
        ("nowhere:Pendulum-v1", {}, "a module to import cannot be given here"),
        ("Pendulum-v1", {"gravity": 1}, "Pendulum-v1 cannot be made with env_options {'gravity': 1}.*gravity"),
        ("Endless-v0", {}, "Endless-v0 has no time limit.*max_episode_steps: 1000"),
        ("Other-v0", {"observation": spaces.Dict(a=spaces.Box(-1, 1, (2,)))}, r"the observation space Dict\("),
        ("Other-v0", {"observation": spaces.Box(0, 255, (8, 8, 3), np.uint8)}, r"the observation space Box\(0"),
        ("Other-v0", {"observation": spaces.Discrete(4)}, r"the observation space Discrete\(4\); supported"),
        ("Other-v0", {"action": spaces.Box(-np.inf, np.inf, (1,))}, r"the action space Box\(-inf, inf.*finite float"),
        ("Other-v0", {"action": spaces.Box(np.float32([-1, -1]), np.float32([1, np.inf]))}, "the action space Box"),
        ("Other-v0", {"action": spaces.Box(-1, 1, (2, 2))}, "the action space Box"),
        ("Other-v0", {"action": spaces.Box(0, 3, (1,), np.int64)}, "the action space Box"),
        ("Other-v0", {"action": spaces.MultiDiscrete([2, 2])}, "the action space MultiDiscrete"),
    ],
)
def test_what_is_no_continuous_control_is_refused(env_id, options, message):
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        ContinuousControl(env_id=env_id, env_options=options)


def test_a_time_limit_can_be_given():
    assert ContinuousControl(env_id="Endless-v0", env_options={"max_episode_steps": 9}).n_observations == 2


def test_a_missing_package_names_the_extra():
    def make(**options):
        raise gymnasium.error.DependencyNotInstalled("Box3D is not installed")

    gymnasium.register("Lacking-v0", make, max_episode_steps=3)
    try:
        with pytest.raises(ModuleNotFoundError, match=r"Lacking-v0 needs .*: pip install fulgurite\[rl\].*\n.*Box3D"):
            ContinuousControl(env_id="Lacking-v0")
    finally:
        del gymnasium.registry["Lacking-v0"]


def test_without_gymnasium_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "fulgurite.datamodules.common.environments", None)
    with pytest.raises(ModuleNotFoundError, match=r"ContinuousControl needs gymnasium: pip install fulgurite\[rl\]"):
        ContinuousControl()


def test_ranks_share_the_evaluation_equally_or_are_told():
    data = ContinuousControl(evaluation_episodes=4)
    data.trainer = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 3, "rank": 1})
    with pytest.raises(ValueError, match="evaluation_episodes is 4, which 3 processes cannot share equally"):
        data.val_dataloader()
    data.trainer = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 2, "rank": 1})
    data.val_dataloader()
    assert [*data._episodes["val"].indices] == [1, 3]
