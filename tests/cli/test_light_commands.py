import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import fulgurite
from fulgurite.modules import METHODS


def test_list_shows_every_method_with_its_classes_and_configs(fulgurite_cli):
    outcome = fulgurite_cli("list")
    assert outcome.code == 0
    for record in METHODS.values():
        assert record.slug in outcome.out
        assert next(iter(record.classes)) in outcome.out
        assert "smoke" in outcome.out


@pytest.mark.parametrize("slug", METHODS)
def test_list_of_one_method_tells_how_to_run_it(fulgurite_cli, slug):
    outcome = fulgurite_cli("list", slug)
    assert outcome.code == 0
    assert METHODS[slug].paper in outcome.out
    assert f"fulgurite fit --config {slug}/cpu" in outcome.out


@pytest.mark.parametrize("arguments", [["list"], ["list", "rocp"], ["--version"], ["--help"]])
def test_light_commands_import_neither_torch_nor_lightning(arguments):
    program = (
        "import sys; from fulgurite.cli import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'lightning', 'jsonargparse', 'sklearn'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_version_names_the_stack(fulgurite_cli):
    outcome = fulgurite_cli("--version")
    assert f"fulgurite {fulgurite.__version__}" in outcome.out
    assert f"torch {metadata.version('torch')}" in outcome.out
    assert f"lightning {metadata.version('lightning')}" in outcome.out


def test_the_console_script_and_cli_py_are_the_same(workspace):
    script = Path(sys.executable).with_name("fulgurite")
    file = Path(fulgurite.__file__).with_name("cli.py")
    outputs = [
        subprocess.run(command, cwd=workspace, capture_output=True, text=True, timeout=60, check=True).stdout
        for command in ([script, "--version"], [sys.executable, file, "--version"])
    ]
    assert outputs[0] == outputs[1] != ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fitt"], "'fitt' is not a command; did you mean fit?"),
        (["list", "roc"], "unknown method 'roc'; did you mean rocp?"),
        (["list", "rocp", "more"], "list takes at most one method"),
    ],
)
def test_a_wrong_command_is_a_usage_error_with_the_nearest_right_one(fulgurite_cli, arguments, message):
    outcome = fulgurite_cli(*arguments)
    assert outcome.code == 2
    assert message in outcome.err


def test_no_arguments_print_the_help(fulgurite_cli):
    outcome = fulgurite_cli()
    assert outcome.code == 0
    assert "usage: fulgurite COMMAND" in outcome.out


@pytest.mark.parametrize("command", ["fit", "test"])
def test_help_of_a_run_command_ends_with_code_0(fulgurite_cli, command):
    outcome = fulgurite_cli(command, "--help")
    assert outcome.code == 0
    assert "--trainer.max_epochs" in outcome.out
