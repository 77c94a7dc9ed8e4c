import csv
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

SMOKE = ("--config", "rocp/smoke")
SHORT = (*SMOKE, "--trainer.max_epochs", "1")


def latest(name="smoke"):
    return Path("runs/rocp") / name / "latest"


def results(folder):
    return json.loads((folder / "results.json").read_text())


def only(folder, pattern):
    (found,) = folder.glob(pattern)
    return found


@pytest.fixture
def fitted(fulgurite_cli):
    """A short run in the working folder; returns its command line."""
    assert fulgurite_cli("fit", *SHORT).code == 0
    return fulgurite_cli


def test_a_fit_leaves_its_config_metrics_events_and_checkpoints(fulgurite_cli):
    outcome = fulgurite_cli("fit", *SMOKE, "--trainer.max_epochs", "2")
    assert outcome.code == 0, outcome.err
    run = latest().resolve()
    assert run.name.endswith("-0"), "the seed is part of the name"
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))

    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"]["class_path"] == "fulgurite.modules.Classifier"
    assert config["trainer"]["max_epochs"] == 2
    assert config["data"]["init_args"]["seed"] == 0, "the run's seed is made explicit"
    assert "n_classes" not in config["model"]["init_args"], "sizes come from the data"
    assert "ckpt_path" not in config
    assert str(Path.home()) not in (run / "config.yaml").read_text()

    rows = list(csv.DictReader((run / "metrics.csv").open()))
    assert [row["epoch"] for row in rows] == ["0", "1"]
    found = results(run)
    assert found["metrics"]["val/accuracy"] == pytest.approx(float(rows[-1]["val/accuracy"]))
    assert found["epochs"] == 2
    assert found["steps"] == 16
    assert found["best_checkpoint"]["metric"] == "val/accuracy"
    assert (run / found["best_checkpoint"]["file"]).is_file()
    assert (run / found["last_checkpoint"]).is_file()
    assert found["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert found["peak_memory_mib"] > 100
    assert len(found["code_hash"]) == len(found["config_hash"]) == 16


def test_the_end_of_a_fit_shows_the_metrics_and_the_best_checkpoint(fulgurite_cli):
    outcome = fulgurite_cli("fit", *SHORT)
    assert "val/accuracy" in outcome.out
    assert f"best checkpoint {latest().parent}" in outcome.out
    for advertisement in ("litlogger", "GPU available", "Tip"):
        assert advertisement not in outcome.out + outcome.err


def test_a_test_writes_below_the_run_it_tests(fitted):
    outcome = fitted("test", *SMOKE, "--ckpt_path", "best")
    assert outcome.code == 0, outcome.err
    folder = only(latest(), "test/*")
    assert results(folder)["metrics"]["test/accuracy"] > 0.4
    assert {path.name for path in (folder / "figures").iterdir()} == {"test_confusion.png", "test_reliability.png"}
    assert "test/accuracy" in outcome.out
    assert f"figure {folder.resolve().relative_to(Path.cwd())}" in outcome.out


def test_a_checkpoint_alone_is_enough_to_test_it_from_another_folder(fitted, monkeypatch, tmp_path):
    with_config = fitted("test", *SMOKE, "--ckpt_path", "best")
    checkpoint = (latest() / "checkpoints" / "best.ckpt").resolve()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    alone = fitted("test", "--ckpt_path", str(checkpoint))
    assert alone.code == 0, alone.err
    folders = sorted((checkpoint.parent.parent / "test").iterdir())
    assert len(folders) == 2
    assert results(folders[0])["metrics"] == results(folders[1])["metrics"]
    assert "test/accuracy" in with_config.out


def test_a_checkpoint_outside_a_run_gets_a_run_of_its_own(fitted):
    loose = Path("loose.ckpt")
    loose.write_bytes((latest() / "checkpoints" / "best.ckpt").read_bytes())
    assert fitted("test", "--ckpt_path", "loose.ckpt").code == 0
    assert only(Path("runs/rocp/run"), "*/results.json")


def test_values_of_the_command_line_beat_the_checkpoint_and_are_named(fitted):
    outcome = fitted("test", *SMOKE, "--ckpt_path", "best", "--data.noise", "6", "--data.seed", "0")
    assert outcome.code == 0, outcome.err
    assert "data.noise: 6.0 here, 3.0 in the checkpoint" in outcome.out
    assert outcome.out.count(" in the checkpoint") == 1
    assert yaml.safe_load(only(latest(), "test/*/config.yaml").read_text())["data"]["init_args"]["noise"] == 6.0


def test_a_new_config_file_beats_the_checkpoint(fitted):
    Path("noisy.yaml").write_text("data:\n  class_path: fulgurite.datamodules.DigitsHazard\n  init_args: {noise: 6}\n")
    outcome = fitted("test", *SMOKE, "--config", "noisy.yaml", "--ckpt_path", "best")
    assert "data.noise: 6.0 here, 3.0 in the checkpoint" in outcome.out


def test_the_config_that_the_run_was_made_from_does_not_undo_its_command_line(fulgurite_cli):
    changed = ("--model.hidden", "[16]", "--seed_everything", "5")
    assert fulgurite_cli("fit", *SHORT, *changed).code == 0
    outcome = fulgurite_cli("test", *SMOKE, "--ckpt_path", "best")
    assert outcome.code == 0, outcome.err
    assert "in the checkpoint" not in outcome.out
    config = yaml.safe_load(only(latest(), "test/*/config.yaml").read_text())
    assert config["model"]["init_args"]["hidden"] == [16]
    assert config["data"]["init_args"]["seed"] == config["seed_everything"] == 5


def test_a_checkpoint_of_another_width_is_refused_in_a_few_lines(fitted):
    outcome = fitted("test", *SMOKE, "--ckpt_path", "best", "--model.hidden", "[16]")
    assert outcome.code == 2
    assert "best.ckpt does not fit this model" in outcome.err
    assert "size mismatch" in outcome.err
    assert len(outcome.err.splitlines()) <= 10


def test_a_checkpoint_of_another_class_is_refused_by_name(fitted):
    demo = "lightning.pytorch.demos.boring_classes.BoringModel"
    checkpoint = str(latest() / "checkpoints" / "best.ckpt")
    outcome = fitted("test", "--trust", "lightning.pytorch.demos", "--model", demo, "--ckpt_path", checkpoint)
    assert outcome.code == 2
    assert "holds fulgurite.modules.Classifier" in outcome.err
    assert "BoringModel" in outcome.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"random bytes", "is truncated, or not a checkpoint"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "is truncated, or not a checkpoint"),
    ],
    ids=["empty", "text", "png"],
)
def test_a_broken_checkpoint_is_named_with_its_size_and_a_whole_one_beside_it(fitted, content, message):
    broken = latest() / "checkpoints" / "broken.ckpt"
    broken.write_bytes(content)
    os.utime(latest() / "checkpoints" / "last.ckpt")
    outcome = fitted("test", "--ckpt_path", str(broken))
    assert outcome.code == 2
    assert f"broken.ckpt ({len(content)} bytes) {message}" in outcome.err
    assert "last.ckpt" in outcome.err


def test_half_a_checkpoint_is_refused(fitted):
    whole = (latest() / "checkpoints" / "best.ckpt").read_bytes()
    Path("half.ckpt").write_bytes(whole[: len(whole) // 2])
    outcome = fitted("test", "--ckpt_path", "half.ckpt")
    assert outcome.code == 2
    assert "truncated" in outcome.err


def test_a_folder_is_not_a_checkpoint(fitted):
    outcome = fitted("test", "--ckpt_path", str(latest() / "checkpoints"))
    assert outcome.code == 2
    assert "is a folder; give the .ckpt file in it" in outcome.err


def test_tensors_that_are_no_checkpoint_are_refused(fulgurite_cli):
    torch.save({"weights": torch.zeros(3)}, "other.ckpt")
    outcome = fulgurite_cli("test", *SMOKE, "--ckpt_path", "other.ckpt")
    assert outcome.code == 2
    assert "it has no state_dict" in outcome.err


def test_last_is_missing_until_a_run_has_written_it(fulgurite_cli):
    assert fulgurite_cli("fit", *SHORT, "--trainer.enable_checkpointing", "false").code == 0
    outcome = fulgurite_cli("test", *SMOKE, "--ckpt_path", "last")
    assert outcome.code == 2
    assert "has no such checkpoint; it wrote none before it ended" in outcome.err


def test_predict_writes_every_sample_once_and_says_where(fitted):
    outcome = fitted("predict", *SMOKE, "--ckpt_path", "best")
    assert outcome.code == 0, outcome.err
    file = only(latest(), "predict/*/predictions.npz")
    assert f"predictions {file.resolve().relative_to(Path.cwd())}" in outcome.out
    fields = np.load(file, allow_pickle=False)
    assert fields["probabilities"].shape == (600, 4)
    assert np.allclose(fields["probabilities"].sum(axis=1), 1, atol=1e-5)
    assert len(np.unique(fields["index"])) == 600
    fitted("test", *SMOKE, "--ckpt_path", "best")
    accuracy = (fields["prediction"] == fields["label"]).mean()
    assert results(only(latest(), "test/*"))["metrics"]["test/accuracy"] == pytest.approx(accuracy, abs=1e-6)


def test_a_test_without_a_checkpoint_says_that_nothing_was_trained(fulgurite_cli):
    outcome = fulgurite_cli("test", *SMOKE)
    assert outcome.code == 0
    assert "no --ckpt_path: these are the weights the model starts with" in outcome.out


def test_validate_runs_on_a_checkpoint(fitted):
    outcome = fitted("validate", *SMOKE, "--ckpt_path", "best")
    assert outcome.code == 0, outcome.err
    best = results(latest())["best_checkpoint"]["value"]
    assert results(only(latest(), "validate/*"))["metrics"]["val/accuracy"] == pytest.approx(best)


def test_fast_dev_run_leaves_nothing_on_disk(fulgurite_cli):
    assert fulgurite_cli("fit", *SMOKE, "--trainer.fast_dev_run", "true").code == 0
    assert list(Path().iterdir()) == []


def test_two_runs_in_one_second_have_folders_of_their_own(fulgurite_cli):
    for _ in range(3):
        assert fulgurite_cli("fit", *SHORT).code == 0
    runs = {path for path in latest().parent.iterdir() if not path.is_symlink()}
    assert len(runs) == 3
    assert latest().resolve() in {run.resolve() for run in runs}


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(fulgurite_cli):
    metrics = []
    for seed in ("3", "3", "4"):
        assert fulgurite_cli("fit", *SHORT, "--seed_everything", seed).code == 0
        metrics.append((latest() / "metrics.csv").read_text())
    assert metrics[0] == metrics[1] != metrics[2]


def test_no_step_to_take_is_said_and_overwrites_nothing(fitted):
    before = results(latest())
    outcome = fitted("fit", *SMOKE, "--ckpt_path", "last")
    assert outcome.code == 0
    assert "nothing was trained" in outcome.out
    assert results(latest()) == before


def test_a_checkpoint_beyond_the_limit_is_a_usage_error(fulgurite_cli):
    assert fulgurite_cli("fit", *SMOKE, "--trainer.max_epochs", "3").code == 0
    config = (latest() / "config.yaml").read_text()
    outcome = fulgurite_cli("fit", *SMOKE, "--ckpt_path", "last", "--trainer.max_epochs", "1")
    assert outcome.code == 2
    assert (latest() / "config.yaml").read_text() == config


def test_a_module_of_ones_own_runs_when_trusted_and_names_its_best_metric(fresh_process, workspace):
    Path("mine.py").write_text(
        "import torch\nfrom lightning.pytorch import LightningModule\nfrom torch.utils.data import DataLoader\n"
        "class Net(LightningModule):\n    monitor = 'val/loss'\n    def __init__(self, width: int = 2):\n"
        "        super().__init__()\n        self.layer = torch.nn.Linear(3, width)\n"
        "    def training_step(self, batch, batch_idx):\n        return self.layer(batch).square().mean()\n"
        "    def validation_step(self, batch, batch_idx):\n"
        "        self.log('val/loss', self.layer(batch).square().mean())\n"
        "    def train_dataloader(self):\n        return DataLoader(torch.randn(8, 3))\n"
        "    val_dataloader = train_dataloader\n"
        "    def configure_optimizers(self):\n        return torch.optim.SGD(self.parameters(), lr=0.1)\n"
    )
    Path("mine.yaml").write_text("model: {class_path: mine.Net, init_args: {width: 4}}\ntrainer: {max_epochs: 2}\n")
    fit = ("fit", "--config", "mine.yaml", "--trust", "mine", "--trainer.accelerator", "cpu")
    outcome = fresh_process(*fit, PYTHONPATH=str(workspace))
    assert outcome.code == 0, outcome.err
    assert {path.name for path in Path("runs/net/mine/latest/checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}


def test_a_module_that_is_not_on_the_path_is_named(fulgurite_cli):
    outcome = fulgurite_cli("fit", "--trust", "nowhere_at_all", "--model", "nowhere_at_all.Net")
    assert outcome.code == 2
    assert "there is no module 'nowhere_at_all'" in outcome.err
    assert "PYTHONPATH=. fulgurite" in outcome.err


def test_a_saved_config_is_a_config_of_the_same_experiment(fitted):
    outcome = fitted("fit", "--config", str(latest() / "config.yaml"))
    assert outcome.code == 0, outcome.err
    assert len([path for path in latest().parent.iterdir() if not path.is_symlink()]) == 2


def test_going_on_from_an_older_state_starts_a_run_of_its_own(fulgurite_cli):
    assert fulgurite_cli("fit", *SMOKE, "--trainer.max_epochs", "3").code == 0
    run = latest().resolve()
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    outcome = fulgurite_cli("fit", *SMOKE, "--ckpt_path", "best", "--trainer.max_epochs", "4")
    assert outcome.code == 0, outcome.err
    assert "is not the newest state of its run: this goes on in a run of its own" in outcome.out
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert latest().resolve() != run
    assert (latest() / "checkpoints" / "best.ckpt").is_file()


def test_two_fits_cannot_go_on_in_one_run(fitted):
    import fcntl

    with (latest() / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        outcome = fitted("fit", *SMOKE, "--ckpt_path", "last", "--trainer.max_epochs", "2")
    assert outcome.code == 2
    assert "is in use: another fit goes on in it" in outcome.err
    assert fitted("fit", *SMOKE, "--ckpt_path", "last", "--trainer.max_epochs", "2").code == 0


def test_a_run_cut_short_by_its_steps_goes_on_with_the_rest_of_the_epoch(fulgurite_cli):
    for workers in ("0", "2"):
        base = ("fit", *SMOKE, "--data.num_workers", workers, "--trainer.default_root_dir", f"cut{workers}")
        assert fulgurite_cli(*base, "--trainer.max_steps", "19").code == 0
        assert fulgurite_cli(*base, "--ckpt_path", "last", "--trainer.max_steps", "-1").code == 0
    assert fulgurite_cli("fit", *SMOKE, "--trainer.default_root_dir", "whole").code == 0
    states = [
        torch.load(Path(root) / "rocp/smoke/latest/checkpoints/last.ckpt", weights_only=True)
        for root in ("whole", "cut0", "cut2")
    ]
    for state in states[1:]:
        assert state["global_step"] == states[0]["global_step"] == 48
        assert all(torch.equal(state["state_dict"][name], value) for name, value in states[0]["state_dict"].items())


def test_a_users_own_checkpoint_of_our_kind_stands_beside_ours(fulgurite_cli):
    own = ("--trainer.callbacks+=RunCheckpoint", "--trainer.callbacks.dirpath=own", "--trainer.callbacks.name=mine")
    outcome = fulgurite_cli("fit", *SHORT, *own, "--trainer.callbacks.every_n_train_steps=5")
    assert outcome.code == 0, outcome.err
    assert Path("own/mine.ckpt").is_file()
    assert {path.name for path in (latest() / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}


def test_a_section_may_be_a_file_beside_the_config(fulgurite_cli):
    Path("sub").mkdir()
    Path("sub/model.yaml").write_text("class_path: fulgurite.modules.Classifier\ninit_args: {hidden: [5]}\n")
    Path("sub/experiment.yaml").write_text(
        "model: model.yaml\ndata: {class_path: fulgurite.datamodules.DigitsHazard}\nckpt_path: null\n"
    )
    short = ("--trainer.max_epochs", "1", "--trainer.accelerator", "cpu")
    assert fulgurite_cli("fit", "--config", "sub/experiment.yaml", *short).code == 0
    assert latest("experiment").is_dir(), "the method is known by its class"
    assert fulgurite_cli("test", "--config", "sub/experiment.yaml", "--ckpt_path", "last").code == 0
    outcome = fulgurite_cli("fit", "--model", "sub/model.yaml", "--data", "DigitsHazard", *short)
    assert outcome.code == 0, outcome.err
    assert latest("run").is_dir()


def test_no_seed_is_recorded_where_seeding_is_off(fulgurite_cli):
    assert fulgurite_cli("fit", *SHORT, "--seed_everything", "false").code == 0
    assert results(latest())["seed"] is None
    assert latest().resolve().name.endswith("-unseeded")


def test_a_slurm_job_names_its_run_and_a_requeued_one_finds_it(fulgurite_cli, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    for _ in range(2):
        assert fulgurite_cli("fit", *SHORT).code == 0
    assert [path.name for path in latest().parent.iterdir() if not path.is_symlink()] == ["4711"]


def test_a_later_layer_that_changes_the_class_leaves_nothing_of_the_first(fulgurite_cli):
    demo = "lightning.pytorch.demos.boring_classes.BoringDataModule"
    outcome = fulgurite_cli("fit", *SMOKE, "--trust", "lightning.pytorch.demos", "--data", demo, "--print_config")
    assert outcome.code == 0, outcome.err
    assert yaml.safe_load(outcome.out.partition("\n")[2])["data"] == {"class_path": demo}


def test_a_plain_run_prints_about_ten_epochs(fulgurite_cli):
    outcome = fulgurite_cli(
        "fit",
        *SMOKE,
        "--trainer.max_epochs",
        "50",
        "--trainer.limit_train_batches",
        "1",
        "--trainer.limit_val_batches",
        "1",
    )
    lines = [line for line in outcome.out.splitlines() if line.startswith("epoch ")]
    assert len(lines) == 10
    assert lines[-1].startswith("epoch 50/50")


def test_a_precision_of_bfloat16_runs(fulgurite_cli):
    outcome = fulgurite_cli("fit", *SHORT, "--trainer.precision", "bf16-mixed")
    assert outcome.code == 0, outcome.err
    assert fulgurite_cli("predict", *SMOKE, "--ckpt_path", "best", "--trainer.precision", "bf16-true").code == 0
    fields = np.load(only(latest(), "predict/*/predictions.npz"))
    assert fields["probabilities"].dtype == np.float32
