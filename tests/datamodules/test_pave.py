import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from fulgurite.datamodules import SIZES, ContinuousControl, OneStepControl

pytestmark = pytest.mark.filterwarnings("ignore:.*`IterableDataset` has `__len__` defined.*")


class Learner(LightningModule):
    """The least that explores, acts and learns; it keeps what it was given."""

    def __init__(self, n_observations, n_actions):
        super().__init__()
        torch.manual_seed(0)
        self.actor = nn.Sequential(nn.Linear(n_observations, 8), nn.SiLU(), nn.Linear(8, n_actions), nn.Tanh())
        self.batches, self.episodes, self.asked, self.steps_at = [], [], [], []

    def explore(self, observation, generator):
        assert not torch.is_grad_enabled()
        self.asked.append(observation.clone())
        noise = torch.randn(len(observation), self.actor[-2].out_features, generator=generator)
        return (self.act(observation) + 0.3 * noise).clamp(-1, 1)

    def act(self, observation):
        return self.actor(observation)

    def training_step(self, batch, batch_idx):
        self.batches.append(batch)
        self.steps_at.append(self.trainer.datamodule.env_steps)
        return (self.act(batch["observation"]) - batch["reward"].unsqueeze(-1)).square().mean()

    def validation_step(self, batch, batch_idx):
        self.episodes.append(batch)

    def predict_step(self, batch, batch_idx):
        return batch

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def trainer(**arguments):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(**{"max_epochs": 2, "accelerator": "cpu", "enable_model_summary": False, **quiet, **arguments})


def control(**arguments):
    small = {"batch_size": 16, "learning_starts": 30, "updates_per_epoch": 20, "evaluation_episodes": 3}
    return ContinuousControl(**{**small, "env_options": {"max_episode_steps": 12}, **arguments})


def fitted(data, **arguments):
    module = Learner(data.n_observations, data.n_actions)
    trainer(**arguments).fit(module, datamodule=data)
    return module


def transitions(data):
    return {name: values[: len(data.buffer)].copy() for name, values in data.buffer.fields.items()}


def test_sizes_and_bounds_are_known_at_construction():
    data = ContinuousControl(env_id="Humanoid-v5")
    assert (data.n_observations, data.n_actions) == (348, 17)
    assert torch.equal(data.action_low, torch.full((17,), -0.4))
    assert torch.equal(data.action_high, torch.full((17,), 0.4))
    assert (OneStepControl().n_observations, OneStepControl().n_actions) == (3, 2)
    assert {"n_observations", "n_actions"} <= SIZES.keys()
    assert data.env_steps == 0


def test_steps_and_updates_alternate_after_the_warm_up():
    plain = fitted(control())
    assert plain.steps_at == [30 + 1 + k for k in range(40)]
    grouped = fitted(control(n_envs=3, train_freq=4, gradient_steps=5, learning_starts=31))
    assert grouped.steps_at == [33 + 12 * (1 + k // 5) for k in range(40)], "rounds go on over the end of an epoch"
    assert [len(observation) for observation in grouped.asked] == [3] * 4 * 8


def test_the_warm_up_is_uniform_and_asks_nobody():
    data = control(learning_starts=2000, updates_per_epoch=1, n_envs=4)
    module = fitted(data, max_epochs=1)
    assert len(module.asked) == 1
    actions = transitions(data)["action"][:2000]
    counts, _ = np.histogram(actions, bins=10, range=(-1, 1))
    assert ((counts - 200) ** 2 / 200).sum() < 27.9, "the 0.1 % quantile of 9 degrees of freedom"
    assert abs(np.corrcoef(actions[:-4, 0], actions[4:, 0])[0, 1]) < 0.08


def test_the_policy_sees_the_present_observation():
    data = control(n_envs=2, learning_starts=10)
    module = fitted(data)
    observation = transitions(data)["observation"]
    np.testing.assert_array_equal(torch.cat(module.asked), observation[10:])


def test_batches_are_float32_fields_of_the_transitions():
    data = control()
    batch = fitted(data).batches[-1]
    assert {name: tuple(values.shape) for name, values in batch.items()} == {
        "previous_observation": (16, 3),
        "observation": (16, 3),
        "action": (16, 1),
        "reward": (16,),
        "next_observation": (16, 3),
        "terminated": (16,),
    }
    assert all(values.dtype == torch.float32 for values in batch.values())
    assert batch["action"].abs().max() <= 1


def test_the_seed_decides_what_is_collected_and_drawn():
    def run(seed):
        data = control(seed=seed, learning_starts=260)
        return transitions_and_batch(data, fitted(data))

    def transitions_and_batch(data, module):
        return transitions(data), module.batches[7]

    (one, first), (same, again), (other, another) = (run(seed) for seed in (3, 3, 4))
    assert len(one["reward"]) == 300
    assert all(np.array_equal(one[name], same[name]) for name in one)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not np.isin(one["reward"], other["reward"]).any()
    assert not torch.equal(first["reward"], another["reward"])


def test_ranks_have_environments_and_draws_of_their_own():
    data = control(learning_starts=50)
    found = []
    for rank in (0, 1, 0):
        data.begin(rank)
        data.train_freq = 0  # the warm-up only: there is no policy
        batch = data.draw()
        found.append((transitions(data), batch))
    assert not np.isin(found[0][0]["reward"], found[1][0]["reward"]).any()
    assert np.array_equal(found[0][0]["reward"], found[2][0]["reward"])
    assert torch.equal(found[0][1]["reward"], found[2][1]["reward"])


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "Hopper-v5"])
def test_evaluation_leaves_training_and_global_random_states_alone(env_id):
    alone, watched = control(env_id=env_id, n_envs=2), control(env_id=env_id, n_envs=2)
    one = fitted(alone, limit_val_batches=0)
    other = fitted(watched, val_check_interval=3)
    assert len(other.episodes) == 2 + 3 * 12, "two in the sanity check"
    for key, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[key])
    for name, values in transitions(alone).items():
        np.testing.assert_array_equal(values, transitions(watched)[name])
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    trainer().validate(other, datamodule=watched, verbose=False)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])


def test_evaluation_plays_the_present_policy_on_fixed_episodes():
    data = control(evaluation_episodes=4)
    module = fitted(data, limit_val_batches=0)
    module.eval()
    runs = {}
    for name, command in (("val", "validate"), ("again", "validate"), ("test", "test")):
        module.episodes = []
        getattr(trainer(), command)(module, datamodule=data, verbose=False)
        runs[name] = module.episodes
    for episode, again in zip(runs["val"], runs["again"], strict=True):
        assert all(torch.equal(episode[key], again[key]) for key in episode)
    starts = {tuple(e["observation"][0].tolist()) for name in ("val", "test") for e in runs[name]}
    assert len(starts) == 8, "validation and test have different episodes"
    for index, episode in enumerate(runs["val"]):
        assert int(episode["index"]) == index
        assert episode["observation"].shape == (12, 3)
        assert episode["action"].shape == (12, 1)
        assert episode["reward"].shape == (12,)
        assert not episode["terminated"]
        with torch.no_grad():
            torch.testing.assert_close(episode["action"], 2 * module.act(episode["observation"]))


def test_evaluation_does_not_depend_on_the_training_seed():
    episodes = []
    for seed in (1, 2):
        data = control(seed=seed)
        module = Learner(3, 1)
        trainer().validate(module, datamodule=data, verbose=False)
        episodes.append(module.episodes)
    for one, other in zip(*episodes, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_validation_cut_short_is_not_taken_up_with_older_weights():
    data = control(evaluation_episodes=3)
    module = Learner(3, 1)
    data.trainer = trainer()
    data.trainer.strategy.connect(module)
    loader = data.val_dataloader()
    old = next(iter(loader))
    with torch.no_grad():
        module.actor[2].bias += 3
    new = list(loader)
    assert not torch.equal(old["action"], new[0]["action"])
    for episode in new:
        torch.testing.assert_close(episode["action"], 2 * module.act(episode["observation"]).detach())


def test_predictions_are_the_test_episodes():
    data, module = control(), Learner(3, 1)
    trainer().test(module, datamodule=data, verbose=False)
    predicted = trainer().predict(module, datamodule=data)
    assert len(predicted) == len(module.episodes) == 3
    for one, other in zip(predicted, module.episodes, strict=True):
        assert torch.equal(one["reward"], other["reward"])


def test_a_second_trainer_begins_anew_and_the_same_one_goes_on():
    data = control()
    first = fitted(data)
    assert first.steps_at[0] == 31
    again = fitted(data)
    assert again.steps_at == first.steps_at
    assert torch.equal(again.batches[3]["reward"], first.batches[3]["reward"])
    both = Learner(3, 1)
    one = trainer(max_epochs=1)
    one.fit(both, datamodule=data)
    one.fit_loop.max_epochs = 2
    one.fit(both, datamodule=data)
    assert both.steps_at == first.steps_at
    assert torch.equal(both.batches[20]["reward"], first.batches[20]["reward"])


def test_double_precision_reaches_the_policy():
    module = fitted(control(), precision="64-true", max_epochs=1)
    assert module.asked[0].dtype == torch.float64


def test_a_module_that_cannot_explore_or_act_is_named():
    class Silent(Learner):
        explore = None

    class Wrong(Learner):
        def explore(self, observation, generator):
            return observation

    with pytest.raises(TypeError, match=r"Silent has no method explore\(observation, generator\)"):
        trainer().fit(Silent(3, 1), datamodule=control())
    with pytest.raises(ValueError, match=r"Wrong.explore gave actions of shape \(1, 3\).*Pendulum-v1 needs \(1, 1\)"):
        trainer().fit(Wrong(3, 1), datamodule=control())
    with pytest.raises(TypeError, match="no module has no method"):
        next(iter(control().train_dataloader()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_envs": 0}, "n_envs is 0; give at least 1"),
        ({"train_freq": 0}, "train_freq is 0"),
        ({"gradient_steps": -1}, "gradient_steps is -1"),
        ({"updates_per_epoch": 0}, "updates_per_epoch is 0"),
        ({"evaluation_episodes": 0}, "evaluation_episodes is 0"),
        ({"learning_starts": -1}, "learning_starts is -1; give 0 or more"),
        ({"evaluation_seed": -1}, "evaluation_seed is -1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"buffer_size": 3, "n_envs": 4}, "buffer_size is 3; give at least one transition for each of n_envs 4"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ContinuousControl(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_samples": 0}, "n_samples is 0"),
        ({"path_length": 0}, "path_length is 0"),
        ({"n_evaluation": 0}, "n_evaluation is 0"),
        ({"reward_noise": -1.0}, "reward_noise is -1.0"),
        ({"next_noise": float("nan")}, "next_noise is nan"),
        ({"observation_noise": float("inf")}, "observation_noise is inf"),
    ],
)
def test_arguments_of_one_step_control_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        OneStepControl(**arguments)


def test_one_step_samples_follow_their_equations():
    many = {"n_samples": 40_000, "seed": 5}
    noisy, clean = OneStepControl(**many), OneStepControl(**many, reward_noise=0.0)
    fields = {name: torch.from_numpy(values) for name, values in clean.samples.fields.items()}
    state, action = fields["observation"], fields["action"]
    best = 0.7 * torch.tanh(state @ clean.weight)
    torch.testing.assert_close(fields["reward"], -((action - best) ** 2).sum(-1))
    noise = torch.from_numpy(noisy.samples.fields["reward"]) - fields["reward"]
    assert noise.std() == pytest.approx(1.0, abs=0.02)
    assert abs(noise.mean()) < 0.02
    assert abs(torch.corrcoef(torch.stack([noise, state[:, 0], action[:, 0]]))[0, 1:]).max() < 0.02
    assert (fields["next_observation"] - state).std() == pytest.approx(0.15, rel=0.02)
    torch.testing.assert_close(torch.cov(state.T), torch.eye(3), atol=0.04, rtol=0)
    assert action.abs().max() <= 1
    assert action.std() == pytest.approx(3**-0.5, rel=0.02)
    assert torch.equal(fields["previous_observation"], state)
    assert (fields["terminated"] == 1).all()


def test_one_step_batches_come_from_the_fixed_samples():
    data = OneStepControl(seed=2, updates_per_epoch=50)
    batches = list(data.train_dataloader())
    assert len(batches) == 50
    assert batches[0]["action"].shape == (64, 2)
    drawn = {row for batch in batches for row in batch["reward"].tolist()}
    assert drawn == set(data.samples.fields["reward"].tolist()), "all 96, and nothing else"
    again = list(OneStepControl(seed=2, updates_per_epoch=50).train_dataloader())
    other = list(OneStepControl(seed=3, updates_per_epoch=50).train_dataloader())
    assert torch.equal(batches[9]["reward"], again[9]["reward"])
    assert not torch.equal(batches[9]["reward"], other[9]["reward"])
    assert OneStepControl().samples.fields["reward"].shape == (96,)


def test_one_step_evaluation_is_fresh_smooth_and_fixed():
    data = OneStepControl(seed=1)
    (val,), (test,), (again,) = data.val_dataloader(), data.test_dataloader(), data.val_dataloader()
    assert all(torch.equal(val[name], again[name]) for name in val)
    assert not torch.isin(val["observation"], test["observation"]).any()
    assert not torch.isin(val["observation"], torch.from_numpy(data.samples.fields["observation"])).any()
    assert not torch.isin(val["path"], test["path"]).any()
    assert val["observation"].shape == (200, 3)
    assert val["path"].shape == (256, 3)
    torch.testing.assert_close(val["optimal_action"], 0.7 * torch.tanh(val["observation"] @ data.weight))
    (smooth,) = OneStepControl(seed=1, observation_noise=0.0).val_dataloader()
    assert (val["path"] - smooth["path"]).std() == pytest.approx(0.05, rel=0.1)
    path = smooth["path"]
    step = (path.roll(-1, 0) - path).norm(dim=-1)
    assert step.max() < 0.15, "closed, and smooth at the seam too"
    torch.testing.assert_close(path.square().mean(0), torch.ones(3), atol=1e-4, rtol=0)


def test_a_module_trains_and_predicts_on_one_step_control():
    data = OneStepControl(updates_per_epoch=5, seed=0)
    module = Learner(3, 2)
    module.training_step = lambda batch, batch_idx: (module.act(batch["observation"]) - batch["action"]).square().mean()
    trainer().fit(module, datamodule=data)
    assert len(module.episodes) == 3, "the sanity check and two epochs"
    (predicted,) = trainer().predict(module, datamodule=data)
    assert predicted["optimal_action"].shape == (200, 2)
