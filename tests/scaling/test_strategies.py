"""What a method says of itself decides the strategy; what does not fit is refused before anything is started."""

import jsonargparse
import pytest
import yaml

from fulgurite.command_line.strategies import strategy_of
from fulgurite.modules import Classifier

METHODS = '''
from torch import nn

from fulgurite.modules import Classifier


class Alone(Classifier):
    ddp = None
    fsdp = False


class Copied(Classifier):
    fsdp = False


class Sharded(Classifier):
    ddp = None


class Players(Classifier):
    """The second player takes no part: what plain DDP refuses."""

    ddp = "ddp_find_unused_parameters_true"
    fsdp = False

    def __init__(self, n_classes: int, n_features: int) -> None:
        super().__init__(n_classes=n_classes, n_features=n_features)
        self.second = nn.Linear(2, 2)
'''
TWO_DEVICES = ("--trainer.accelerator", "cpu", "--trainer.devices", "2")
DDP = "lightning.pytorch.strategies.DDPStrategy"


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of methods, on the path."""
    (tmp_path / "own_methods.py").write_text(METHODS)
    monkeypatch.syspath_prepend(tmp_path)
    return ("--trust", "own_methods", "--data", "DigitsHazard", "--trainer.max_epochs", "1")


@pytest.mark.parametrize(
    ("name", "arguments", "supported", "remedy"),
    [
        ("Alone", ("--config", "trainer/ddp"), "in one process only", "give --trainer.devices 1"),
        ("Alone", TWO_DEVICES, "in one process only", "give --trainer.devices 1"),
        ("Alone", ("--config", "trainer/fsdp"), "in one process only", "give --trainer.devices 1"),
        ("Copied", ("--config", "trainer/fsdp"), "in one process and under ddp", "--config trainer/ddp last"),
        ("Sharded", ("--config", "trainer/ddp"), "in one process and under fsdp", "--config trainer/fsdp last"),
    ],
)
def test_a_strategy_that_a_method_does_not_run_under_is_refused(fulgurite_cli, own, name, arguments, supported, remedy):
    outcome = fulgurite_cli("fit", "--model", f"own_methods.{name}", *own, *arguments)
    assert outcome.code == 2
    assert outcome.err.startswith(f"error: {name} cannot ")
    assert f"; it runs {supported}\n" in outcome.err
    assert remedy in outcome.err
    assert len(outcome.err.splitlines()) <= 3
    assert "run folder" not in outcome.out


def test_such_a_method_runs_in_one_process(fulgurite_cli, own):
    for arguments in ((), ("--config", "trainer/ddp", "--trainer.devices", "1", "--trainer.strategy", "auto")):
        outcome = fulgurite_cli("fit", "--model", "own_methods.Alone", *own, "--config", "trainer/cpu", *arguments)
        assert outcome.code == 0, outcome.err
        assert "effective batch" not in outcome.out


@pytest.mark.slow
def test_several_players_train_where_auto_means_ddp(launch, own, tmp_path):
    launch("fit", "--model", "own_methods.Players", *own, *TWO_DEVICES, folder=tmp_path, PYTHONPATH=str(tmp_path))


class Players(Classifier):
    ddp = "ddp_find_unused_parameters_true"


def test_ddp_means_the_method_s_own_kind_of_it():
    for given in ("ddp", "ddp_spawn"):
        assert strategy_of(Players, given) == f"{given}_find_unused_parameters_true"
        assert strategy_of(Classifier, given) == given
        assert strategy_of(object, given) == given
    for kept in ("auto", "ddp_find_unused_parameters_false", "fsdp"):
        assert strategy_of(Players, kept) == kept
    options = {"find_unused_parameters": False, "process_group_backend": "gloo"}
    for method, expected in ((Players, True), (Classifier, False)):
        given = jsonargparse.Namespace(class_path=DDP, init_args=jsonargparse.Namespace(**options))
        chosen = strategy_of(method, given)
        assert chosen["init_args"]["find_unused_parameters"] is expected
        assert chosen["init_args"]["process_group_backend"] == "gloo"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--trainer.devices", "4"), "data_parallel_size is 2, but there are 4 processes (4 devices x 1 node)"),
        (("--trainer.num_nodes", "2"), "--trainer.strategy.init_args.data_parallel_size 4"),
        (("--trainer.strategy.data_parallel_size", "auto"), "data_parallel_size is 1, but there are 2 processes"),
        (("--trainer.strategy.tensor_parallel_size", "2"), "tensor_parallel_size is 2; give 1"),
        (("--trainer.strategy.tensor_parallel_size", "auto"), "tensor_parallel_size is auto; give 1"),
    ],
)
def test_sizes_that_do_not_fit_name_the_option(fulgurite_cli, arguments, message):
    outcome = fulgurite_cli("fit", "--config", "rocp/smoke", "--config", "trainer/fsdp", *arguments)
    assert outcome.code == 2
    assert "error: trainer.strategy.init_args." in outcome.err
    assert message in outcome.err
    assert len(outcome.err.splitlines()) <= 3


def test_a_launcher_and_a_trainer_that_disagree_are_told_so(fulgurite_cli, monkeypatch):
    srun = {"NTASKS": "4", "NTASKS_PER_NODE": "4", "NNODES": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}
    for name, value in {**srun, "JOB_ID": "7", "JOB_NAME": "x"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    base = ("fit", "--config", "rocp/smoke", "--config", "trainer/ddp", "--config", "trainer/slurm")
    outcome = fulgurite_cli(*base)
    assert outcome.code == 2
    assert "error: trainer.devices is 2, trainer.num_nodes is 1" in outcome.err
    assert "--ntasks-per-node=4" in outcome.err

    for name in ("PROCID", "NODEID", "NTASKS", "LOCALID"):
        monkeypatch.delenv(f"SLURM_{name}")
    outcome = fulgurite_cli(*base)
    assert outcome.code == 2
    assert "start the command with srun" in outcome.err
    assert "--trainer.plugins null" in outcome.err


def test_the_stored_config_names_the_strategy_that_was_asked_for(fulgurite_cli, workspace):
    outcome = fulgurite_cli("fit", "--config", "rocp/smoke", "--config", "trainer/cpu", "--trainer.max_epochs", "1")
    assert outcome.code == 0, outcome.err
    (stored,) = workspace.rglob("config.yaml")
    assert yaml.safe_load(stored.read_text())["trainer"]["strategy"] == "auto"
