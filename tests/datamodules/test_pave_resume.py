"""A resumed run equals the uninterrupted one: weights, optimisers, buffer, environments and random states."""

import logging

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from fulgurite.callbacks.reproducibility import RandomState, RunCheckpoint
from fulgurite.datamodules import ContinuousControl, OneStepControl

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*`IterableDataset` has `__len__` defined.*"),
    pytest.mark.filterwarnings("ignore:.*your dataloader is not resumable.*"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory .* exists and is not empty.*"),
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint.*"),
    pytest.mark.filterwarnings("ignore:.*ModelCheckpoint with manual optimization.*"),
]
UPDATES, EPOCHS = 11, 4


class ActorCritic(LightningModule):
    """A critic that fits r + gamma Q', and an actor that ascends it; target noise comes from the global generator."""

    def __init__(self, n_observations, n_actions, fails_at=None):
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(n_observations + n_actions, 16), nn.SiLU(), nn.Linear(16, 1))
        self.actor = nn.Sequential(nn.Linear(n_observations, 16), nn.SiLU(), nn.Linear(16, n_actions), nn.Tanh())
        self.fails_at = fails_at
        self.asked = 0

    def act(self, observation):
        return self.actor(observation)

    def explore(self, observation, generator):
        self.asked += len(observation)
        action = self.act(observation)
        return (action + 0.3 * torch.randn(action.shape, generator=generator)).clamp(-1, 1)

    def value(self, observation, action):
        return self.critic(torch.cat([observation, action], -1)).squeeze(-1)

    def training_step(self, batch, batch_idx):
        if self.fails_at == (self.current_epoch, batch_idx):
            raise RuntimeError("the machine broke")
        critic_optimizer, actor_optimizer = self.optimizers()
        with torch.no_grad():
            action = self.act(batch["next_observation"]) + 0.2 * torch.randn_like(batch["action"])
            following = self.value(batch["next_observation"], action)
            target = batch["reward"] + 0.9 * (1 - batch["terminated"]) * following
        loss = (self.value(batch["observation"], batch["action"]) - target).square().mean()
        critic_optimizer.zero_grad()
        self.manual_backward(loss)
        critic_optimizer.step()
        loss = -self.value(batch["observation"], self.act(batch["observation"])).mean()
        actor_optimizer.zero_grad()
        self.manual_backward(loss)
        actor_optimizer.step()

    def validation_step(self, batch, batch_idx):
        self.log("val/return", batch["reward"].sum() if "reward" in batch else batch["path"].mean(), batch_size=1)

    test_step = validation_step

    def configure_optimizers(self):
        networks = (self.critic, self.actor)
        return [torch.optim.Adam(network.parameters(), lr=3e-3) for network in networks]


def control(**arguments):
    # Episodes end around the places where the runs are cut.
    options = {"max_episode_steps": 13}
    small = {"batch_size": 8, "learning_starts": 25, "updates_per_epoch": UPDATES, "evaluation_episodes": 2}
    return ContinuousControl(**{"buffer_size": 60, "env_options": options, "seed": 1, **small, **arguments})


def fit(data, folder, resume=None, fails_at=None, callbacks=(), **arguments):
    seed_everything(0)
    module = ActorCritic(data.n_observations, data.n_actions, fails_at)
    if resume:
        torch.rand(7)  # a new process has drawn something else
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[RandomState(), RunCheckpoint(folder, "last"), *callbacks],
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        **{"max_epochs": EPOCHS, **arguments},
    )
    trainer.fit(module, datamodule=data, ckpt_path=resume, weights_only=True)
    return module


def assert_same(one, other, where=""):
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for place, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{where}.{place}")
    else:
        assert one == other, where


def assert_same_end(one, other):
    states = [torch.load(folder / "last.ckpt", weights_only=True) for folder in (one, other)]
    data = "ContinuousControl" if "ContinuousControl" in states[0] else "OneStepControl"
    for part in ("state_dict", "optimizer_states", "random_state", data, "epoch", "global_step"):
        assert_same(states[0][part], states[1][part], part)


VARIANTS = {
    "pendulum": {},
    "pendulum, 3": {"n_envs": 3},
    "pendulum, rounds": {"n_envs": 2, "train_freq": 3, "gradient_steps": 4},
    "inverted pendulum": {"env_id": "InvertedPendulum-v5"},
    "inverted pendulum, 3": {"env_id": "InvertedPendulum-v5", "n_envs": 3},
    "reacher": {"env_id": "Reacher-v5"},
    "processes": {"n_envs": 2, "asynchronous": True},
}


@pytest.mark.parametrize("arguments", VARIANTS.values(), ids=VARIANTS)
def test_resumed_at_an_epoch_end_and_in_the_middle(tmp_path, arguments):
    every = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2 * 7, save_top_k=-1, save_on_train_epoch_end=False)
    fit(control(**arguments), tmp_path / "whole", callbacks=[every])

    fit(control(**arguments), tmp_path / "halves", max_epochs=2)
    module = fit(control(**arguments), tmp_path / "halves", resume=tmp_path / "halves" / "last.ckpt")
    assert_same_end(tmp_path / "whole", tmp_path / "halves")
    n_envs, freq = arguments.get("n_envs", 1), arguments.get("train_freq", 1)
    rounds = 2 * UPDATES / arguments.get("gradient_steps", 1)
    assert module.asked <= (rounds + 1) * n_envs * freq, "no warm-up"

    for updates in (7, 21, 28):  # of 11 in each epoch
        fit(control(**arguments), tmp_path / "rest", resume=tmp_path / f"step={2 * updates}.ckpt")
        assert_same_end(tmp_path / "whole", tmp_path / "rest")


def test_resumed_after_the_middle_that_max_steps_cut(tmp_path):
    fit(control(n_envs=2), tmp_path / "whole")
    fit(control(n_envs=2), tmp_path / "parts", max_steps=2 * 18)
    fit(control(n_envs=2), tmp_path / "parts", resume=tmp_path / "parts" / "last.ckpt", max_steps=-1)
    assert_same_end(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("resumed_twice", [False, True])
def test_a_batch_that_failed_is_taken_again(tmp_path, resumed_twice):
    fit(control(), tmp_path / "whole")
    for _ in range(1 + resumed_twice):
        last = tmp_path / "parts" / "last.ckpt"
        with pytest.raises(RuntimeError, match="the machine broke"):
            fit(control(), tmp_path / "parts", resume=last if last.exists() else None, fails_at=(1, 6))
    fit(control(), tmp_path / "parts", resume=last)
    assert_same_end(tmp_path / "whole", tmp_path / "parts")


def test_an_environment_that_failed_leaves_a_state_to_go_on_from(tmp_path, monkeypatch):
    from gymnasium.envs.classic_control.pendulum import PendulumEnv

    step, taken = PendulumEnv.step, []

    def breaks(self, action):
        taken.append(action)
        if len(taken) == 45:
            raise RuntimeError("the cord is cut")
        return step(self, action)

    monkeypatch.setattr(PendulumEnv, "step", breaks)
    with pytest.raises(RuntimeError, match="the cord is cut"):
        fit(control(), tmp_path, limit_val_batches=0)
    data = control()
    fit(data, tmp_path, resume=tmp_path / "last.ckpt", limit_val_batches=0)
    assert data.env_steps == 25 + EPOCHS * UPDATES


def test_one_step_control_resumes_exactly(tmp_path):
    def data():
        return OneStepControl(updates_per_epoch=UPDATES, seed=3)

    fit(data(), tmp_path / "whole")
    fit(data(), tmp_path / "halves", max_epochs=2)
    fit(data(), tmp_path / "halves", resume=tmp_path / "halves" / "last.ckpt")
    assert_same_end(tmp_path / "whole", tmp_path / "halves")
    fit(data(), tmp_path / "parts", max_steps=2 * 18)
    fit(data(), tmp_path / "parts", resume=tmp_path / "parts" / "last.ckpt", max_steps=-1)
    assert_same_end(tmp_path / "whole", tmp_path / "parts")


def test_without_its_buffer_a_run_is_tested_but_not_resumed(tmp_path):
    fit(control(keep_buffer=False), tmp_path, max_epochs=1)
    checkpoint = tmp_path / "last.ckpt"
    assert torch.load(checkpoint, weights_only=True)["ContinuousControl"]["ranks"][0]["progress"]["buffer"] is None
    with pytest.raises(ValueError, match=r"keep_buffer false .* cannot be resumed; it can be tested"):
        fit(control(), tmp_path, resume=checkpoint)
    data, module = control(), ActorCritic(3, 1)
    Trainer(accelerator="cpu", logger=False, enable_progress_bar=False).test(
        module, datamodule=data, ckpt_path=checkpoint, verbose=False, weights_only=True
    )
    assert data._loaded is None


def test_weights_that_go_on_with_new_data_are_warned_of(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("fulgurite"), "propagate", True)  # the command line turns it off
    fit(OneStepControl(updates_per_epoch=UPDATES), tmp_path, max_epochs=1)
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)
    del state["OneStepControl"]
    torch.save(state, tmp_path / "other.ckpt")
    with caplog.at_level("WARNING", logger="fulgurite"):
        fit(OneStepControl(updates_per_epoch=UPDATES), tmp_path, resume=tmp_path / "other.ckpt", max_epochs=2)
    messages = {record.getMessage() for record in caplog.records if record.name.startswith("fulgurite")}
    assert messages == {"the checkpoint holds no replay for OneStepControl: it begins from nothing"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_envs": 2}, "written with n_envs 1, and it is 2 now"),
        (
            {"env_id": "Reacher-v5"},
            "written with env_id 'Pendulum-v1', and it is 'Reacher-v5' now; resume with the same",
        ),
        ({"buffer_size": 70}, "room for 60 transitions, this one for 70; resume with the same buffer_size"),
    ],
)
def test_a_resume_with_other_data_is_refused(tmp_path, arguments, message):
    source = control()
    fit(source, tmp_path, max_epochs=1)
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["ContinuousControl"]
    other = control(**arguments)
    other.load_state_dict(state)
    with pytest.raises(ValueError, match=message):
        other.train_dataloader()


def test_a_resume_on_another_number_of_processes_is_refused(tmp_path):
    fit(control(), tmp_path, max_epochs=1)
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["ContinuousControl"]
    state["ranks"] *= 2
    data = control()
    data.load_state_dict(state)
    with pytest.raises(ValueError, match=r"the replay of 2 processes, and this run has 1; .* --trainer.devices 2"):
        data.train_dataloader()
