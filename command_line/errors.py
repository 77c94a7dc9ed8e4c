"""Errors of a few lines: where (file, line, key), what is wrong, and the nearest right name."""

import difflib
import inspect
import re
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import fulgurite
from fulgurite.callbacks import CLASSES as CALLBACKS
from fulgurite.command_line.configs import Layer, imported_object

MAXIMUM_LINES = 10
TRACEBACK_VARIABLE = "FULGURITE_TRACEBACK"
PACKAGE_ROOT = Path(fulgurite.__file__).resolve().parent


class UsageError(Exception):
    """The user's command or config is wrong; the message is all that is shown."""


def print_error(message: str) -> None:
    """Print an error to stderr, at most ``MAXIMUM_LINES`` lines of it."""
    lines = message.splitlines()
    print("\n".join(["error: " + lines[0], *("  " + line for line in lines[1:MAXIMUM_LINES])]), file=sys.stderr)


def nearest(name: str, candidates: Iterable[str], remedy: str = "") -> str:
    """The end of a sentence about an unknown ``name``: the nearest candidates, or ``remedy`` where none is near."""
    near = difflib.get_close_matches(name, sorted(candidates), n=3, cutoff=0.6)
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return f"; {remedy}" if remedy else ""


def explain_parse_error(text: str, layers: Sequence[Layer], argv: Sequence[str], option_names: Iterable[str]) -> str:
    """Turn a message of jsonargparse (up to 60 lines of union sub-types) into the one thing that is wrong.

    Args:
        text: the message.
        layers: the config files, in order.
        argv: the command line.
        option_names: dotted names of all options outside model and data.
    """
    path = list(re.findall(r'Parser key "([^"]+)"', text))
    class_path = _last(r"Problem with given class_path '([^']+)'", text)

    # Of the branches of a union the parser also tries names that nobody wrote.
    written = " ".join([*argv, *(layer.text for layer in layers)])
    denied = [name for name in re.findall(r"Importing '([^']+)' is not allowed", text) if name in written]
    if denied:
        name = denied[0]
        if name.endswith((".yaml", ".yml")):
            return place(path, layers, argv) + f"there is no file {name!r}; it is looked for beside the config"
        return place(path, layers, argv) + (
            f"{name!r} is outside the packages that a config may name\n"
            f"a config is code: if you trust this one, add --trust {name.rpartition('.')[0]}"
        )
    if refused := re.search(r"Option '([^']+)' is not accepted", text):
        # The first is the one of the class that the user named; the base class of a union comes after it.
        option = refused[1]
        owner = _class_with_option_error(text) or _last(
            r"Problem with given class_path '([^']+)'", text[: refused.start()]
        )
        return place([*path, option], layers, argv) + (
            f"{_short(owner)} has no argument {option!r}{nearest(option.partition('.')[0], _arguments_of(owner))}"
        )
    if option := _last(r"does not accept option '([^']+)'", text):
        return place(option.split("."), layers, argv) + f"there is no {option!r}{nearest(option, option_names)}"
    if unknown := re.search(r"[Uu]nrecognized arguments: (\S+)", text):
        name = unknown[1].lstrip("-").partition("=")[0]
        return f"command line: there is no {unknown[1].partition('=')[0]}{nearest(name, option_names)}"
    undotted = re.search(r"Expected a dot import path string: (\S+)", text)
    if undotted and not re.search(r"Expected an? <class '(?:int|float|bool)'>", text):
        known = [*CALLBACKS, *(name for name in _lightning_callbacks() if path[-1:] == ["trainer.callbacks"])]
        return (
            place(path, layers, argv)
            + f"there is no class {undotted[1]!r}{nearest(undotted[1], known, 'give its path')}"
        )
    if attribute := re.search(r"module '([^']+)' has no attribute '([^']+)'", text):
        known = dir(import_module(attribute[1])) if attribute[1].startswith("fulgurite") else []
        return place(path, layers, argv) + f"{attribute[1]} has no {attribute[2]!r}{nearest(attribute[2], known)}"
    if missing := re.search(r"the following arguments are required: (.+)", text):
        names = ", ".join(name.rpartition(".")[2] for name in missing[1].split(", "))
        if not set(names.split(", ")) <= {"model", "data"}:
            return place(path, layers, argv) + f"{names} not given"
        return f"{names} not given; name a --config (`fulgurite list` shows them), or --model and --data"
    if absent := re.search(r"No module named '([^']+)'", text):
        return place(path, layers, argv) + (
            f"there is no module {absent[1]!r}\n"
            "a module of your own must be installed, or on the path: PYTHONPATH=. fulgurite ..."
        )
    if required := _last(r"Key \"?'?([\w.]+)\"?'? is required", text):
        return place([*path, required], layers, argv) + f"{_short(class_path)} needs {required.rpartition('.')[2]!r}"
    if not_of := re.search(r"(?:Import path|Expected) '?([\w.]+?)'? (?:does not correspond|to be a subclass)", text):
        kind = _last(r"to (?:a subclass of|be a subclass of <class) '?(\w+)", text)
        return place(path, layers, argv) + f"{not_of[1]} is no {kind or 'class of the kind that stands here'}"
    if wrong := _wrong_value(text):
        return place(path, layers, argv) + wrong
    meaningful = [
        line.strip(" -")
        for line in text.splitlines()
        if line.strip(" -") and not re.search(r"Union subtypes|Subtypes:|Errors:|NoneType|Given value", line)
    ]
    return place(path, layers, argv) + "\n".join(meaningful[:6])


def _wrong_value(text: str) -> str | None:
    """What is wrong with a value of a simple type, or with one that stands in the place of a class."""
    given = re.search(r"(?:Got value|Given value): (.+?)(?:\. Got value: .*)?$", text, re.MULTILINE)
    if given is None:
        return None
    choices = [word.strip("'") for one in re.findall(r"typing\.Literal\[(.+?)\]", text) for word in one.split(", ")]
    kinds = [kind for kind in re.findall(r"Expected an? <class '([^']+)'>", text) if kind != "NoneType"]
    if choices:
        kinds = [kind for kind in kinds if kind != "int" or "Subtypes: [<class 'int'>" in text]  # of Literal[64, 32]
        others = f" and no {' or '.join(dict.fromkeys(kinds))}" if kinds else ""
        return f"{given[1]!r} is none of {', '.join(dict.fromkeys(choices))}{others}{nearest(given[1], choices)}"
    if "Expected a dot import path string" in text:
        kinds = [kind for kind in kinds if kind in ("int", "float", "bool")]
    if kinds:
        names = dict.fromkeys(kind.removeprefix("collections.abc.").replace("Sequence", "list") for kind in kinds)
        return f"expected {' or '.join(names)}, got {given[1]}"
    if kind := re.search(r"Import path does not correspond to a subclass of (\w+)", text):
        return f"{given[1]} is no {kind[1]}"
    if kind := re.search(r"Not a valid subclass of (\w+)", text):
        return f"expected the path of a {kind[1]} class, got {given[1]}"
    if "Expected an import path or a subclass spec" in text:
        return f"expected the path of a class, got {given[1]}"
    return None


def explain_construction_error(
    error: BaseException, config: Mapping[str, Any], layers: Sequence[Layer], argv: Sequence[str]
) -> str:
    """Say where the argument was set whose value a constructor refused; its message begins with the argument's name."""
    # The parser wraps what a constructor raised: what was raised deliberately says most, else what came first.
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    ours = next((one for one in chain if one.__traceback__ and is_deliberate(one)), None)
    cause = ours or chain[-1]
    text = str(cause) or type(cause).__name__
    if ours is None:
        text += f"\n{TRACEBACK_VARIABLE}=1 shows where this {type(cause).__name__} was raised"
    name = text.partition(" ")[0]
    for section in ("model", "data"):
        group = config.get(section) or {}
        if name in group.get("init_args", {}):
            return place([section, name], layers, argv) + text
    return text


def is_deliberate(error: BaseException, packages: Sequence[Path] = ()) -> bool:
    """Whether an error was raised by a ``raise`` statement of this package: its message then says what to do.

    Any other error is a surprise, which only its trace explains.

    Args:
        error: the error.
        packages: folders of other packages whose messages are trusted to explain themselves.
    """
    innermost = traceback.extract_tb(error.__traceback__)[-1]
    file = Path(innermost.filename)
    # An environment may lie in a checkout's root, which is this package.
    ours = file.is_relative_to(PACKAGE_ROOT) and "site-packages" not in file.relative_to(PACKAGE_ROOT).parts
    ours |= any(file.is_relative_to(package) for package in packages)
    return ours and (innermost.line or "").startswith("raise ")


def explain_load_error(text: str, checkpoint: Path | None) -> str:
    """Turn torch's list of all keys that do not fit into a few lines."""
    lines = [line.strip() for line in text.splitlines()[1:] if line.strip()]
    shapes = [line for line in lines if line.startswith("size mismatch")]
    keys = [line if len(line) < 200 else f"{line[:200]}..." for line in lines if not line.startswith("size mismatch")]
    more = f"\n... and {len(shapes) - 2} more" if len(shapes) > 2 else ""
    return f"{checkpoint} does not fit this model\n" + "\n".join([*keys[:2], *shapes[:2]]) + more


def _lightning_callbacks() -> list[str]:
    from lightning.pytorch import callbacks

    return list(callbacks.__all__)


def _last(pattern: str, text: str) -> str | None:
    found = re.findall(pattern, text)
    return found[-1] if found else None


def _class_with_option_error(text: str) -> str | None:
    """The class that refused an option inside a callable, whose path jsonargparse gives only in the value."""
    found = re.search(r"Option '[^']+' is not accepted\. Got value: Namespace\(class_path='([^']+)'", text)
    return found[1] if found else None


def _short(class_path: str | None) -> str:
    return (class_path or "it").rpartition(".")[2]


def _arguments_of(class_path: str | None) -> list[str]:
    """The constructor arguments of a class that jsonargparse has already been allowed to import."""
    if class_path is None:
        return []
    return [*inspect.signature(imported_object(class_path)).parameters, "class_path", "init_args"]


def place(path: Sequence[str], layers: Sequence[Layer], argv: Sequence[str]) -> str:
    """Where the value at ``path`` was set: the command line beats the files, a later file an earlier one.

    Returns:
        The beginning of a message, such as ``"mine.yaml, line 3, model.dropout: "``.
    """
    if not path:
        return ""
    keys = [key for part in path for key in part.split(".")]
    shown = ".".join(keys)
    flags = [word.partition("=")[0].lstrip("-").rstrip("+") for word in argv if word.startswith("--")]
    for flag in flags:
        names_key = flag.startswith(f"{keys[0]}.") and flag.endswith(keys[-1])
        holds_key = "." in flag and shown.startswith(f"{flag}.")
        if flag == keys[0] or names_key or holds_key:
            return f"command line, {shown}: "
    for layer in reversed(layers):
        if line := layer.line_of(keys):
            return f"{layer.name}, line {line}, {shown}: "
    return f"{shown}: "
