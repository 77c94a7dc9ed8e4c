"""Every command of docs/scaling.md is one that the command line takes."""

import re
import shlex
from pathlib import Path

import pytest

import fulgurite

PAGE = Path(fulgurite.__file__).parent / "docs" / "scaling.md"
COMMANDS = [
    shlex.split(line, comments=True)
    for line in PAGE.read_text().splitlines()
    if re.match(r"    (srun |torchrun .*)?(fulgurite|cli\.py|torchrun)\b", line)
]


def test_there_are_commands_of_every_kind():
    assert {command[0] for command in COMMANDS} == {"fulgurite", "torchrun", "srun"}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_of_the_page_is_accepted(fulgurite_cli, command):
    start = next(position for position, word in enumerate(command) if word in ("fit", "test"))
    arguments = command[start:]
    if "--ckpt_path" in arguments:  # there is no run here
        at = arguments.index("--ckpt_path")
        arguments = [*arguments[:at], "--config", "rocp/cpu", *arguments[at + 2 :]]
    outcome = fulgurite_cli(*arguments, "--print_config")
    assert outcome.code == 0, outcome.err
