from pathlib import Path

import pytest
import torch
import yaml

SMOKE = ("--config", "rocp/smoke")
EVIL = """\
from pathlib import Path
Path("evil_was_here").touch()
from lightning.pytorch import Callback
class Harm(Callback): pass
"""

HOSTILE = {
    "callback": "trainer:\n  callbacks:\n    - class_path: evil.Harm\n",
    "appended callback": "trainer:\n  callbacks+:\n    - class_path: evil.Harm\n",
    "model": "model:\n  class_path: evil.Harm\n",
    "data": "data:\n  class_path: evil.Harm\n",
    "logger": "trainer:\n  logger:\n    class_path: evil.Harm\n",
    "optimizer": "model:\n  class_path: fulgurite.modules.Classifier\n  init_args:\n    optimizer: evil.Harm\n",
    "two levels deep": (
        "trainer:\n  strategy:\n    class_path: lightning.pytorch.strategies.DDPStrategy\n    init_args:\n"
        "      checkpoint_io:\n        class_path: evil.Harm\n"
    ),
    "os.system": "trainer:\n  callbacks: {class_path: os.system, init_args: {command: touch evil_was_here}}\n",
    "subprocess": (
        "trainer:\n  logger:\n    class_path: subprocess.Popen\n    init_args: {args: [touch, evil_was_here]}\n"
    ),
    "torch.hub": "model:\n  class_path: fulgurite.modules.Classifier\n  init_args:\n    optimizer: torch.hub.load\n",
    "function of an allowed package": (
        "trainer:\n  callbacks:\n    - class_path: lightning.pytorch.callbacks.LambdaCallback\n"
        "      init_args: {on_fit_start: lightning.pytorch.callbacks.model_checkpoint.warnings.warn}\n"
    ),
    "function of this package": (
        "trainer:\n  callbacks:\n    - class_path: lightning.pytorch.callbacks.LambdaCallback\n      init_args:\n"
        "        on_fit_start: {class_path: fulgurite.storage.write_text, init_args: {path: evil_was_here, text: x}}\n"
    ),
    "free-form value": (
        "model:\n  class_path: fulgurite.modules.Classifier\n  init_args:\n    backbone: resnet18\n"
        "    backbone_options:\n      x: {class_path: fulgurite.storage.write_text,"
        " init_args: {path: evil_was_here, text: x}}\n"
    ),
    "loader of Lightning": (
        "model:\n  class_path: fulgurite.modules.Classifier\n  init_args:\n    backbone: resnet18\n"
        "    backbone_options:\n      x: {class_path: lightning.fabric.utilities.cloud_io._load,"
        " init_args: {path_or_url: bomb.ckpt, weights_only: false}}\n"
    ),
    "python tag": "model: !!python/object/apply:os.system ['touch evil_was_here']\n",
}


class Bomb:
    def __reduce__(self):
        return Path.touch, (Path("evil_was_here"),)


@pytest.fixture
def evil(workspace, monkeypatch):
    Path("evil.py").write_text(EVIL)
    torch.save({"state_dict": {}, "bomb": Bomb()}, "bomb.ckpt")
    monkeypatch.syspath_prepend(str(workspace))


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_config_is_refused_before_anything_of_it_is_imported(fulgurite_cli, evil, text):
    Path("hostile.yaml").write_text(text)
    outcome = fulgurite_cli("fit", *SMOKE, "--config", "hostile.yaml")
    assert outcome.code == 2
    assert len(outcome.err.splitlines()) <= 10
    assert not Path("evil_was_here").exists()


def test_the_refusal_says_how_to_trust_a_package(fulgurite_cli, evil):
    outcome = fulgurite_cli("fit", *SMOKE, "--trainer.callbacks+=evil.Harm")
    assert outcome.code == 2
    assert "'evil.Harm' is outside the packages that a config may name" in outcome.err
    assert "--trust evil" in outcome.err


@pytest.mark.slow
@pytest.mark.parametrize("way", ["option", "environment"])
def test_trust_widens_the_list_and_says_so(fresh_process, evil, workspace, way):
    arguments = ["--trust", "evil"] if way == "option" else []
    environment = {"PYTHONPATH": str(workspace)} | ({} if arguments else {"FULGURITE_TRUST": "evil"})
    outcome = fresh_process(
        "fit", *SMOKE, *arguments, "--trainer.callbacks+=evil.Harm", "--trainer.fast_dev_run=true", **environment
    )
    assert outcome.code == 0, outcome.err
    assert "trusted beyond the allow-list: evil" in outcome.out
    assert Path("evil_was_here").exists()


def test_a_checkpoint_that_holds_code_is_refused(fulgurite_cli, evil):
    outcome = fulgurite_cli("test", *SMOKE, "--ckpt_path", "bomb.ckpt")
    assert outcome.code == 2
    assert "bomb.ckpt" in outcome.err
    assert "objects other than tensors and plain values, which are not loaded" in outcome.err
    assert not Path("evil_was_here").exists()


@pytest.mark.parametrize("name", ["callback", "free-form value", "function of this package"])
def test_a_checkpoint_with_a_hostile_config_is_refused(fulgurite_cli, evil, name):
    assert fulgurite_cli("fit", *SMOKE, "--trainer.max_epochs", "1").code == 0
    (path,) = Path("runs").rglob("best.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    stored = yaml.safe_load(checkpoint["fulgurite"]["config"])
    for section, values in yaml.safe_load(HOSTILE[name]).items():
        stored[section].update(values)
    checkpoint["fulgurite"]["config"] = yaml.safe_dump(stored)
    torch.save(checkpoint, "innocent.ckpt")
    outcome = fulgurite_cli("test", "--ckpt_path", "innocent.ckpt")
    assert outcome.code == 2
    assert not Path("evil_was_here").exists()


@pytest.mark.parametrize("own", [3, [], {}, {"config": 3, "sources": []}, {"config": "- a", "sources": []}])
def test_a_checkpoint_with_a_malformed_config_is_refused(fulgurite_cli, own):
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2.6.6", "fulgurite": own}, "malformed.ckpt")
    outcome = fulgurite_cli("test", *SMOKE, "--ckpt_path", "malformed.ckpt")
    assert outcome.code == 2
    assert "malformed.ckpt: its 'fulgurite' entry holds no config" in outcome.err


@pytest.mark.parametrize("name", ["*", "a,,b", "my-package", ""])
def test_what_is_no_package_cannot_be_trusted(fulgurite_cli, name):
    outcome = fulgurite_cli("fit", *SMOKE, "--trust", name)
    assert outcome.code == 2
    assert "give the import name of a package" in outcome.err


def test_classes_of_the_allowed_packages_may_be_named(fulgurite_cli):
    outcome = fulgurite_cli(
        "fit", *SMOKE, "--trainer.fast_dev_run=true", "--trainer.callbacks+=lightning.pytorch.callbacks.EarlyStopping",
        "--trainer.callbacks.monitor=val/loss", "--model.optimizer=torch.optim.SGD", "--model.optimizer.lr=0.1",
        "--model.scheduler=lightning.pytorch.cli.ReduceLROnPlateau", "--model.scheduler.monitor=val/loss",
        "--trainer.profiler=lightning.pytorch.profilers.SimpleProfiler",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
