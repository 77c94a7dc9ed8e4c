"""Whole training of TD3 and SAC: ours in the Trainer with its guards, and stable-baselines3's, at equal settings.

One environment, one update a step (TD3) or rounds of 50 (SAC), one thread each; a repetition is a fresh training of N
steps. The second table is the collection of transitions alone, by the number of environments.

Run: python benchmarks/pave_training.py [--steps 3000]
"""

import argparse
import logging
import warnings
from collections.abc import Callable

import gymnasium
import numpy as np
import torch
from harness import describe_machine, measure, print_comparison

from fulgurite.callbacks import FiniteGuard, Preemption, RandomState
from fulgurite.datamodules import ContinuousControl
from fulgurite.datamodules.common.environments import control_task
from fulgurite.datamodules.common.replay import ReplayBuffer
from fulgurite.datamodules.common.rollouts import Collector
from fulgurite.modules import SAC, TD3

ROUND = {"td3": 1, "sac": 50}
BATCH = {"td3": 256, "sac": 100}
WARM_UP = 500


def ours(algorithm: str, env_id: str, hidden: tuple[int, ...], steps: int) -> Callable[[], object]:
    """Our training."""
    from lightning.pytorch import Trainer

    quiet()

    def run() -> None:
        data = ContinuousControl(
            env_id=env_id,
            batch_size=BATCH[algorithm],
            learning_starts=WARM_UP,
            train_freq=ROUND[algorithm],
            gradient_steps=ROUND[algorithm],
            updates_per_epoch=steps,
            seed=0,
        )
        kind = TD3 if algorithm == "td3" else SAC
        trainer = Trainer(
            max_epochs=1,
            accelerator="cpu",
            limit_val_batches=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[RandomState(), FiniteGuard(), Preemption()],
        )
        trainer.fit(kind(data.n_observations, data.n_actions, hidden), datamodule=data)

    return run


def peer(algorithm: str, env_id: str, hidden: tuple[int, ...], steps: int) -> Callable[[], object]:
    """stable-baselines3's training."""
    import stable_baselines3
    from stable_baselines3.common.noise import NormalActionNoise

    quiet()

    def run() -> None:
        environment = gymnasium.make(env_id)
        size = environment.action_space.shape
        options = {
            "learning_rate": 1e-3,
            "buffer_size": 200_000,
            "batch_size": BATCH[algorithm],
            "learning_starts": WARM_UP,
            "train_freq": ROUND[algorithm],
            "gradient_steps": ROUND[algorithm],
            "policy_kwargs": {"net_arch": list(hidden), "activation_fn": torch.nn.SiLU},
            "device": "cpu",
            "seed": 0,
        }
        if algorithm == "td3":
            noise = NormalActionNoise(np.zeros(size), 0.1 * np.ones(size))
            model = stable_baselines3.TD3("MlpPolicy", environment, action_noise=noise, **options)
        else:
            model = stable_baselines3.SAC("MlpPolicy", environment, ent_coef=0.2, **options)
        model.learn(steps + WARM_UP)

    return run


def collection(env_id: str, n_envs: int, steps: int) -> Callable[[], object]:
    """Steps of environments with random actions, into a buffer."""
    task = control_task(env_id)

    def run() -> None:
        buffer = ReplayBuffer(steps + n_envs, task.n_observations, task.n_actions)
        collector = Collector(task, n_envs, buffer, (0,))
        actions = np.random.default_rng(0).uniform(-1, 1, (steps // n_envs, n_envs, task.n_actions))
        for action in actions:
            collector.step(action)
        collector.close()

    return run


def quiet() -> None:
    """One thread, and no talk."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    print(describe_machine())
    for algorithm, env_id, hidden in (
        ("td3", "Pendulum-v1", (64, 64)),
        ("td3", "Hopper-v5", (400, 300)),
        ("sac", "Pendulum-v1", (64, 64)),
        ("sac", "Hopper-v5", (256, 256)),
    ):
        arguments = (algorithm, env_id, hidden, steps)
        own, other = measure([(ours, arguments), (peer, arguments)], repeats=3)
        title = f"{algorithm.upper()}, {env_id}, {list(hidden)}, {steps} steps"
        print_comparison(title, own, other, "stable-baselines3")
        print(
            f"{'':<44} ours {steps / own.median:6.0f} steps/s   stable-baselines3 {steps / other.median:6.0f} steps/s"
        )
    for env_id in ("Pendulum-v1", "Hopper-v5"):
        counts = (1, 4, 16)
        results = measure([(collection, (env_id, count, 8000)) for count in counts], repeats=3)
        rates = ", ".join(f"{count}: {8000 / one.median:.0f}" for count, one in zip(counts, results, strict=True))
        print(f"{env_id}, steps a second of the collection alone, by number of environments: {rates}")


if __name__ == "__main__":
    main()
