from pathlib import Path

import pytest

SMOKE = ("--config", "rocp/smoke")

BAD_YAML = {
    "argument": (
        "model:\n  class_path: fulgurite.modules.Classifier\n  init_args:\n    hiden: [3]\n",
        "bad.yaml, line 4, model.hiden: Classifier has no argument 'hiden'; did you mean hidden?",
    ),
    "top key": ("modle: 3\n", "bad.yaml, line 1, modle: there is no 'modle'; did you mean model?"),
    "trainer key": (
        "trainer:\n  max_epoch: 3\n",
        "bad.yaml, line 2, trainer.max_epoch: there is no 'trainer.max_epoch'; did you mean trainer.max_epochs",
    ),
    "callback argument": (
        "trainer:\n  callbacks:\n    - class_path: lightning.pytorch.callbacks.EarlyStopping\n"
        "      init_args: {monitr: val/loss}\n",
        "line 4, trainer.callbacks.monitr: EarlyStopping has no argument 'monitr'; did you mean monitor?",
    ),
    "optimizer argument": (
        "model:\n  class_path: fulgurite.modules.Classifier\n  init_args:\n"
        "    optimizer: {class_path: torch.optim.Adam, init_args: {weight_deca: 3}}\n",
        "bad.yaml, line 4, model.optimizer.weight_deca: Adam has no argument 'weight_deca'; did you mean weight_decay",
    ),
    "type": (
        "model:\n  class_path: fulgurite.modules.Classifier\n  init_args:\n    dropout: four\n",
        "bad.yaml, line 4, model.dropout: expected float, got four",
    ),
    "class": (
        "model:\n  class_path: fulgurite.modules.Clasifier\n",
        "line 1, model: fulgurite.modules has no 'Clasifier'; did you mean Classifier?",
    ),
    "size": (
        "model:\n  class_path: fulgurite.modules.Classifier\n  init_args:\n    n_classes: 7\n",
        "bad.yaml, model.n_classes: DigitsHazard determines n_classes; leave it out",
    ),
    "empty": ("", "bad.yaml: the file is empty"),
    "comment only": ("# nothing\n", "bad.yaml: the file is empty"),
    "list": ("- a\n", "bad.yaml: a config is a mapping"),
    "tab": ("model:\n\tx: 1\n", "bad.yaml, line 2: this is not valid YAML"),
    "bracket": ("model: [1, 2\n", "bad.yaml, line 2: this is not valid YAML"),
}

BAD_ARGUMENTS = {
    "--model.hiden 3": "command line, model.hiden: Classifier has no argument 'hiden'; did you mean hidden?",
    "--model.dropout four": "command line, model.dropout: expected float, got four",
    "--model.dropout 2": "command line, model.dropout: dropout is 2.0; give a rate in [0, 1)",
    "--model.dropout .nan": "dropout is nan; give a rate in [0, 1)",
    "--model.n_classes 7": "command line, model.n_classes: DigitsHazard determines n_classes; leave it out",
    "--model.init_args.n_classes=7": "model.n_classes: DigitsHazard determines n_classes",
    "--model.hidden [0]": "layer widths are [64, 0]",
    "--model.backbone resnet1": "backbone 'resnet1' is neither 'mlp' nor a timm model; near names:",
    "--data.batch_size 0": "command line, data.batch_size: batch_size is 0; give at least 1",
    "--data.num_workers -1": "num_workers is -1",
    "--data.conditions [[1],[1]]": "give at least two non-empty groups of different digits 0..9",
    "--data.noise -1": "noise is -1.0; give a standard deviation of at least 0",
    "--trainer.max_epoch 7": "there is no --trainer.max_epoch; did you mean trainer.max_epochs",
    "--trainr.max_epochs 7": "there is no --trainr.max_epochs; did you mean trainer.max_epochs",
    "--trainer.max_epochs 4.5": "command line, trainer.max_epochs: expected int, got 4.5",
    "--trainer.accelerator tpux": "invalid accelerator name: `accelerator='tpux'`",
    "--trainer.callbacks+=FiniteGard": "there is no class 'FiniteGard'; did you mean FiniteGuard?",
    "--seed_everything x": "command line, seed_everything: expected bool or int, got x",
    "--model Clasifier": "unknown model 'Clasifier'; did you mean Classifier?",
    "--data DigitHazard": "unknown data 'DigitHazard'; did you mean DigitsHazard?",
    "--config rocp/smok": "config 'rocp/smok' is neither a file nor a shipped config; did you mean rocp/smoke",
    "--config .": "config '.' is a folder",
    "--config": "--config needs a value",
    "--ckpt_path nope.ckpt": "--ckpt_path nope.ckpt: there is no such file",
    "--ckpt_path best": "--ckpt_path best: no run in runs/rocp/smoke",
}


def assert_short_usage_error(outcome, message):
    assert outcome.code == 2
    assert message in outcome.err
    assert outcome.err.startswith("error: ")
    assert len(outcome.err.splitlines()) <= 10
    assert "Traceback" not in outcome.err
    assert not list(Path("runs").rglob("config.yaml")), "a command that could not start left a run"


@pytest.mark.parametrize(("text", "message"), BAD_YAML.values(), ids=BAD_YAML)
def test_an_error_in_a_config_names_file_line_and_key(fulgurite_cli, text, message):
    Path("bad.yaml").write_text(text)
    assert_short_usage_error(fulgurite_cli("fit", *SMOKE, "--config", "bad.yaml"), message)


def test_a_config_that_is_not_text_is_named(fulgurite_cli):
    Path("bad.yaml").write_bytes(b"\x89PNG\r\n\x1a\n\xff\xfe")
    assert_short_usage_error(fulgurite_cli("fit", "--config", "bad.yaml"), "bad.yaml: this is not a YAML text file")


@pytest.mark.parametrize(("words", "message"), BAD_ARGUMENTS.items(), ids=BAD_ARGUMENTS)
def test_an_error_on_the_command_line_names_the_key(fulgurite_cli, words, message):
    assert_short_usage_error(fulgurite_cli("fit", *SMOKE, *words.split()), message)


def test_a_missing_model_says_how_to_give_one(fulgurite_cli):
    assert_short_usage_error(fulgurite_cli("fit"), "model not given; name a --config")


def test_a_model_without_its_sizes_names_them(fulgurite_cli):
    message = "Classifier needs n_classes (labels of a classification target), which no data module provides"
    assert_short_usage_error(fulgurite_cli("fit", "--model", "Classifier"), message)


def test_an_incompatible_pairing_names_both_and_the_missing_size(fulgurite_cli):
    demo = "lightning.pytorch.demos.boring_classes.BoringDataModule"
    outcome = fulgurite_cli("fit", "--trust", "lightning.pytorch.demos", "--model", "Classifier", "--data", demo)
    assert_short_usage_error(outcome, "Classifier needs n_classes")
    assert "BoringDataModule does not provide" in outcome.err


def test_the_last_layer_that_sets_a_wrong_value_is_named(fulgurite_cli):
    section = "model:\n  class_path: fulgurite.modules.Classifier\n  init_args:\n    dropout: {}\n"
    Path("good.yaml").write_text(section.format("0.5"))
    Path("bad.yaml").write_text(section.format("four"))
    outcome = fulgurite_cli("fit", *SMOKE, "--config", "good.yaml", "--config", "bad.yaml")
    assert_short_usage_error(outcome, "bad.yaml, line 4, model.dropout")


def test_data_that_do_not_fit_stop_the_run_with_a_short_error(fulgurite_cli):
    outcome = fulgurite_cli("fit", *SMOKE, "--data.n_train", "1797")
    assert outcome.code == 2
    assert "leaves nothing to validate on: these conditions have 1797 images" in outcome.err
    assert "Traceback" not in outcome.err


def test_a_negative_learning_rate_is_refused(fulgurite_cli):
    outcome = fulgurite_cli("fit", *SMOKE, "--model.optimizer.lr", "-1")
    assert outcome.code == 2
    assert "optimizer: Invalid learning rate: -1.0" in outcome.err


def test_an_output_folder_that_cannot_be_made_is_named(fulgurite_cli):
    Path("taken").write_text("a file")
    outcome = fulgurite_cli("fit", *SMOKE, "--trainer.default_root_dir", "taken")
    assert_short_usage_error(outcome, "cannot be made")
    assert "--trainer.default_root_dir" in outcome.err


@pytest.mark.parametrize("name", ["with space/my config.yaml", "été/ñ.yaml"])
def test_a_config_path_may_hold_spaces_and_other_alphabets(fulgurite_cli, name):
    Path(name).parent.mkdir()
    Path(name).write_text("trainer: {max_epochs: 1}\n")
    assert fulgurite_cli("fit", *SMOKE, "--config", name, "--trainer.fast_dev_run", "true").code == 0


def test_an_existing_local_file_wins_over_a_shipped_config(fulgurite_cli):
    Path("rocp").mkdir()
    Path("rocp/smoke").write_text("modle: 3\n")
    assert_short_usage_error(fulgurite_cli("fit", *SMOKE), "rocp/smoke, line 1, modle")
