"""An environment that is poorer than ours: no reader, no home, no network, another alphabet, narrow rights."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fulgurite.cli import main

SMOKE = ("--config", "rocp/smoke")
SHORT = ("fit", *SMOKE, "--trainer.max_epochs", "1")


@pytest.fixture
def stdout(workspace, monkeypatch, capfd):
    """Put another standard output in the place of this process's."""
    opened = []

    def replace(stream):
        opened.append(stream)
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "argv", ["fulgurite"])

    yield replace
    monkeypatch.undo()
    for stream in opened:
        if stream is not None:
            stream.close()


def opened(path, **options):
    return Path(path).open("w", **options)


def broken_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w", buffering=1)


def test_a_fit_goes_on_when_nobody_reads_its_output_any_more(stdout, capfd):
    """``fulgurite fit ... | head -1``"""
    stdout(broken_pipe())
    assert main(SHORT) == 0
    assert capfd.readouterr().err == ""
    assert list(Path("runs").rglob("results.json"))


def test_a_fit_goes_on_when_the_disk_of_its_output_is_full(stdout, capfd):
    stdout(opened("/dev/full", buffering=1))
    assert main(SHORT) == 0
    assert capfd.readouterr().err.count("\n") == 1, "said once"
    assert list(Path("runs").rglob("results.json"))


def test_a_fit_runs_without_a_standard_output(stdout, capfd):
    stdout(None)
    assert main(SHORT) == 0
    assert capfd.readouterr().err == ""
    assert list(Path("runs").rglob("results.json"))


def test_names_that_the_terminal_cannot_show_are_escaped(stdout, capfd):
    stdout(opened("shown.txt", encoding="ascii"))
    Path("é").mkdir()
    assert main([*SHORT, "--trainer.default_root_dir", "é/läufe"]) == 0
    assert capfd.readouterr().err == ""
    sys.stdout.flush()
    assert "run folder \\xe9/l\\xe4ufe/rocp" in Path("shown.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("command", ["list", "--version", "--help"])
def test_a_light_command_into_a_closed_pipe_ends_quietly(workspace, command):
    reader, writer = os.pipe()
    os.close(reader)
    line = [sys.executable, "-m", "fulgurite.cli", command]
    done = subprocess.run(line, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert done.returncode == 0
    assert done.stderr == ""


def test_without_a_network_published_weights_say_at_once_what_to_do(fulgurite_cli, assert_short_error):
    outcome = fulgurite_cli(*SHORT, "--model.backbone", "resnet18", "--model.weights", "hub")
    assert_short_error(outcome, "weights 'hub' cannot be fetched from", "give the path of a weights file")
    assert not list(Path("runs").rglob("*"))


def test_a_user_without_a_home_runs(fulgurite_cli, monkeypatch):
    """As in a container that runs under a number without an entry in the list of users."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    with pytest.raises(RuntimeError):
        Path.home()
    outcome = fulgurite_cli(*SHORT, "--data.root", "/somewhere/data")
    assert outcome.code == 0, outcome.err


ENVIRONMENTS = {
    "no temporary folder": {"TMPDIR": "/nowhere"},
    "a home that is not there": {"HOME": "/nowhere"},
    "plain C": {"LANG": "C", "LC_ALL": "C"},
    "ASCII output": {"PYTHONIOENCODING": "ascii"},
    "without assertions": {"PYTHONOPTIMIZE": "2"},
}


@pytest.mark.fault
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_run_in_a_poor_environment_is_complete(fresh_process, name):
    Path("é").mkdir()
    Path("é/ñ.yaml").write_text("trainer: {max_epochs: 1}\n")
    outcome = fresh_process("fit", *SMOKE, "--config", "é/ñ.yaml", "--trainer.default_root_dir", "é/läufe",
                            **ENVIRONMENTS[name])  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert outcome.err == ""
    (run,) = Path("é/läufe/rocp/smoke").glob("2*")
    assert {path.name for path in run.iterdir()} >= {"config.yaml", "metrics.csv", "results.json", "checkpoints"}


@pytest.mark.fault
def test_narrow_rights_are_kept(background):
    command = background(*SHORT, preexec_fn=lambda: os.umask(0o077))
    assert command.finish()[0] == 0
    for path in Path("runs").rglob("*"):
        if not path.is_symlink():
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
