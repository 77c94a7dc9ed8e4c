from pathlib import Path

import pytest

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
    "python tag": "model: !!python/object/apply:os.system ['touch evil_was_here']\n",
}


@pytest.fixture
def evil(workspace, monkeypatch):
    Path("evil.py").write_text(EVIL)
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


def test_a_checkpoint_that_holds_code_is_refused(fulgurite_cli):
    import torch

    class Bomb:
        def __reduce__(self):
            return Path.touch, (Path("evil_was_here"),)

    torch.save({"state_dict": {}, "bomb": Bomb()}, "bomb.ckpt")
    outcome = fulgurite_cli("test", *SMOKE, "--ckpt_path", "bomb.ckpt")
    assert outcome.code == 2
    assert "bomb.ckpt" in outcome.err
    assert "objects other than tensors and plain values, which are not loaded" in outcome.err
    assert not Path("evil_was_here").exists()
