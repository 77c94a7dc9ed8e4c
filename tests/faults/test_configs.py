"""Configs that a user gets wrong, at every depth: refused before anything is made, with file, line and key."""

from pathlib import Path

import pytest

SMOKE = ("--config", "rocp/smoke")
MODEL = "model:\n  class_path: fulgurite.modules.Classifier\n  init_args:\n"
OPTIMIZER = MODEL + "    optimizer:\n      class_path: torch.optim.Adam\n"
CALIBRATION = "trainer:\n  callbacks:\n    - class_path: fulgurite.callbacks.ConformalCalibration\n      init_args:\n"

WRONG = {
    # Misspelt keys
    "optimizer argument": (OPTIMIZER + "      init_args:\n        lrr: 1\n", "line 7, model.optimizer.lrr", "mean lr?"),
    "init_args of the model": (
        "model:\n  class_path: fulgurite.modules.Classifier\n  init_arg:\n    dropout: 0\n",
        "mean init_args?",
    ),
    "init_args of the optimizer": (OPTIMIZER + "      init_arg:\n        lr: 1\n", "line 7", "did you mean init_args?"),
    "class_path": ("model:\n  clas_path: Classifier\n", "line 2, model.clas_path", "did you mean class_path"),
    "class_path of the optimizer": (
        MODEL + "    optimizer:\n      class_pth: x\n",
        "line 5",
        "did you mean class_path?",
    ),
    "field of an arm": (
        CALIBRATION + "        arms: {a: {scor: rocp}}\n",
        "line 5",
        "Arm has no argument 'scor'; did you",
    ),
    "logger argument": (
        "trainer:\n  logger:\n    class_path: lightning.pytorch.loggers.CSVLogger\n    init_args: {save_dirr: x}\n",
        "line 4, trainer.logger.save_dirr: CSVLogger has no argument 'save_dirr'; did you mean save_dir?",
    ),
    "scheduler argument": (
        MODEL + "    scheduler: {class_path: torch.optim.lr_scheduler.StepLR, init_args: {step_siz: 1}}\n",
        "line 4, model.scheduler.step_siz: StepLR has no argument 'step_siz'; did you mean step_size?",
    ),
    "optimizer": (MODEL + "    optimizer: torch.optim.Adamm\n", "line 4, model.optimizer: torch.optim has no 'Adamm'"),
    # Wrong types
    "number for a class": ("model: 3\n", "line 1, model: expected the path of a LightningModule class, got 3"),
    "list for a class": ("model: [1]\n", "line 1, model: expected the path of a LightningModule class, got [1]"),
    "number for a class path": ("model:\n  class_path: 3\n", "line 2, model.class_path: expected text, got 3"),
    "data for a model": ("model: DigitsHazard\n", "no class 'DigitsHazard'"),
    "model for data": (
        "data: fulgurite.modules.Classifier\n",
        "fulgurite.modules.Classifier is no LightningDataModule",
    ),
    "module for a class": ("model: fulgurite.modules\n", "fulgurite.modules is no LightningModule"),
    "layer for an optimizer": (MODEL + "    optimizer: torch.nn.Linear\n", "line 4", "torch.nn.Linear is no Optimizer"),
    "number for an optimizer": (
        MODEL + "    optimizer: 3\n",
        "line 4, model.optimizer: expected the path of a class, got 3",
    ),
    "null for an optimizer": (
        MODEL + "    optimizer: null\n",
        "line 4, model.optimizer: Classifier needs a class here",
    ),
    "word for a number": (OPTIMIZER + "      init_args: {lr: fast}\n", "model.optimizer.lr: expected float, got fast"),
    "number for a list": (MODEL + "    hidden: 64\n", "line 4, model.hidden: expected list, got 64"),
    "fraction for a width": (MODEL + "    hidden: [1.5]\n", "line 4, model.hidden: expected int, got 1.5"),
    "number for callbacks": ("trainer:\n  callbacks: 3\n", "line 2, trainer.callbacks: expected list, got 3"),
    "null for a callback": ("trainer:\n  callbacks: [null]\n", "expected the path of a Callback class, got None"),
    "number for the trainer": ("trainer: 3\n", "bad.yaml, line 1, trainer: it is a mapping of the Trainer's options"),
    "list for the trainer": ("trainer: [1]\n", "bad.yaml, line 1, trainer: it is a mapping of the Trainer's options"),
    "word for a precision": ("trainer:\n  precision: fp16\n", "'fp16' is none of 64, 32, 16", "16-mixed", "mean bf16"),
    "fraction for a seed": ("seed_everything: 1.5\n", "line 1, seed_everything: expected bool or int, got 1.5"),
    "section in a missing file": ("model: nowhere.yaml\n", "there is no file 'nowhere.yaml'; it is looked for beside"),
    # Missing arguments
    "required argument": (
        MODEL + "    scheduler: torch.optim.lr_scheduler.StepLR\n",
        "line 4, model.scheduler: step_size",
    ),
    # YAML
    "key given twice": ("seed_everything: 1\nseed_everything: 2\n", "the key 'seed_everything' is given twice"),
    "inner key given twice": ("trainer:\n  max_epochs: 1\n  max_epochs: 2\n", "line 2", "'max_epochs' is given twice"),
    "value that contains itself": ("model: &a {x: *a}\n", "bad.yaml, line 1", "a value contains itself"),
    "aliases without end": (
        "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}, *a{i - 1}]\n" for i in range(1, 16)),
        "its aliases make it too large",
    ),
    "unknown alias": ("model: *nope\n", "found undefined alias 'nope'"),
    "second document": ("seed_everything: 1\n---\nseed_everything: 2\n", "line 2", "found another document"),
    "key that is no text": ("1: 2\n", "bad.yaml, line 1", "the key '1' is not text"),
    "null byte": ("seed_everything: 1\n\0", "bad.yaml: this is not a YAML text file"),
    "interpolation": ("trainer:\n  max_steps: ${oc.env:HOME}\n", "trainer.max_steps: expected int, got ${oc.env:HOME}"),
    # Out of range
    "seed": ("seed_everything: -1\n", "-1 is not in bounds"),
    "huge seed": ("seed_everything: 99999999999999999999\n", "is not in bounds"),
    "no number for a learning rate": (
        OPTIMIZER + "      init_args: {lr: .nan}\n",
        "optimizer: Invalid learning rate: nan",
    ),
    "momentum": (OPTIMIZER + "      init_args: {betas: [2, 3]}\n", "optimizer: Invalid beta parameter at index 0: 2.0"),
    "width beyond memory": (MODEL + "    hidden: [100000000000]\n", "can't allocate memory"),
    "checkpoint interval": ("checkpoint_every: 0\n", "bad.yaml, line 1, checkpoint_every"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_config_is_refused_before_anything_is_made(fulgurite_cli, assert_short_error, name):
    text, *messages = WRONG[name]
    Path("bad.yaml").write_text(text)
    outcome = fulgurite_cli("fit", *SMOKE, "--trainer.max_epochs", "1", "--config", "bad.yaml")
    assert_short_error(outcome, *messages)
    assert not list(Path("runs").rglob("*")), "nothing is left of a run that could not start"


OUT_OF_RANGE = {
    "max_epochs": ("-5", "`max_epochs` must be a non-negative integer or -1"),
    "max_steps": ("-7", "`max_steps` must be a non-negative integer or -1"),
    "max_time": ("soon", "is not a valid duration"),
    "limit_train_batches": (".nan", "invalid value nan for limit_train_batches"),
    "limit_val_batches": ("-1", "for limit_val_batches, it has to be in"),
    "val_check_interval": ("0", "command line, trainer.val_check_interval: it is 0; give a positive number of batches"),
    "check_val_every_n_epoch": ("0", "trainer.check_val_every_n_epoch: it is 0; give a positive number of epochs"),
    "accumulate_grad_batches": ("0", "trainer.accumulate_grad_batches: it is 0; give a positive number of batches"),
    "devices": ("0", "value is not a valid input using cpu accelerator"),
    "num_nodes": ("0", "`num_nodes` must be a positive integer, but got 0"),
    "fast_dev_run": ("-1", "It should be >= 0"),
    "strategy": ("nope", "You selected an invalid strategy name"),
    "profiler": ("nope", "it can only be one of ['simple'"),
    "gradient_clip_algorithm": ("nope", "Allowed algorithms: ['value', 'norm']"),
    "reload_dataloaders_every_n_epochs": ("-1", "should be an int >= 0, got -1"),
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_a_trainer_option_out_of_range_is_refused(fulgurite_cli, assert_short_error, name):
    value, message = OUT_OF_RANGE[name]
    outcome = fulgurite_cli("fit", *SMOKE, f"--trainer.{name}={value}")
    assert_short_error(outcome, message)
    assert not list(Path("runs").rglob("*"))


def test_an_interval_beyond_the_epoch_is_refused_and_leaves_nothing(fulgurite_cli, assert_short_error):
    outcome = fulgurite_cli("fit", *SMOKE, "--trainer.val_check_interval", "100")
    assert_short_error(outcome, "must be less than or equal to the number of the training batches (8)")
    assert not list(Path("runs").rglob("*"))


@pytest.mark.parametrize("option", ["--config", "--ckpt_path"])
def test_a_path_of_300_characters_that_is_none_is_refused(fulgurite_cli, assert_short_error, option):
    assert_short_error(fulgurite_cli("fit", *SMOKE, option, "x" * 300), "xxx")


def test_an_error_in_a_file_of_a_section_names_that_file(fulgurite_cli, assert_short_error):
    Path("sub").mkdir()
    Path("sub/model.yaml").write_text("class_path: fulgurite.modules.Classifier\nclass_path: x\n")
    Path("sub/bad.yaml").write_text("model: model.yaml\n")
    assert_short_error(
        fulgurite_cli("fit", *SMOKE, "--config", "sub/bad.yaml"), "sub/model.yaml, line 1", "given twice"
    )


HOSTILE = {
    "callback in a callback": (
        "trainer:\n  callbacks:\n    - class_path: lightning.pytorch.callbacks.LambdaCallback\n      init_args:\n"
        "        on_fit_start: {class_path: evil_module.Harm}\n"
    ),
    "logger in a list": "trainer:\n  logger:\n    - class_path: evil_module.Harm\n",
    "agg function of a logger": (
        "trainer:\n  logger:\n    class_path: lightning.pytorch.loggers.TensorBoardLogger\n    init_args:\n"
        "      save_dir: x\n      sub_dir: {class_path: evil_module.Harm}\n"
    ),
    "optimizer of an optimizer": OPTIMIZER + "      init_args:\n        lr: {class_path: evil_module.Harm}\n",
    "scheduler in a list of schedulers": (
        MODEL + "    scheduler:\n      class_path: torch.optim.lr_scheduler.SequentialLR\n      init_args:\n"
        "        schedulers: [{class_path: evil_module.Harm}]\n        milestones: [1]\n"
    ),
    "lambda of a scheduler": (
        MODEL + "    scheduler:\n      class_path: torch.optim.lr_scheduler.LambdaLR\n      init_args:\n"
        "        lr_lambda: evil_module.harm\n"
    ),
    "plugin of a strategy": (
        "trainer:\n  strategy:\n    class_path: lightning.pytorch.strategies.SingleDeviceStrategy\n    init_args:\n"
        "      precision_plugin: {class_path: lightning.pytorch.plugins.MixedPrecision, init_args:"
        " {precision: bf16-mixed, device: cpu, scaler: {class_path: evil_module.Harm}}}\n"
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_class_two_levels_deep_is_never_imported(fulgurite_cli, trust, monkeypatch, assert_short_error, name):
    trust("evil_module", "from pathlib import Path\nPath('evil_was_here').touch()\nclass Harm: pass\n")
    monkeypatch.delenv("FULGURITE_TRUST")
    Path("bad.yaml").write_text(HOSTILE[name])
    outcome = fulgurite_cli("fit", *SMOKE, "--config", "bad.yaml", "--trainer.fast_dev_run", "true")
    assert_short_error(outcome)
    assert not Path("evil_was_here").exists()


def test_a_config_is_run_from_another_folder_with_spaces_and_other_alphabets(fulgurite_cli, monkeypatch):
    home, elsewhere = Path("mes données/été ñ").resolve(), Path("dossier d'à côté").resolve()
    home.mkdir(parents=True)
    elsewhere.mkdir()
    (home / "modèle.yaml").write_text("class_path: fulgurite.modules.Classifier\ninit_args: {hidden: [5]}\n")
    (home / "essai 1.yaml").write_text(
        "model: modèle.yaml\ndata: DigitsHazard\ntrainer: {max_epochs: 1, accelerator: cpu}\n"
    )
    monkeypatch.chdir(elsewhere)
    outcome = fulgurite_cli("fit", "--config", str(home / "essai 1.yaml"), "--trainer.default_root_dir", "läufe x")
    assert outcome.code == 0, outcome.err
    run = elsewhere / "läufe x/rocp/essai 1/latest"
    assert (run / "results.json").is_file()
    outcome = fulgurite_cli("test", "--ckpt_path", str(run / "checkpoints/best.ckpt"))
    assert outcome.code == 0, outcome.err
    assert len(list(run.glob("test/*/results.json"))) == 1
