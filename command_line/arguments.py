"""What happens to the command line before it is parsed: configs found, short names resolved, checkpoints read."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from fulgurite import callbacks, datamodules, modules
from fulgurite.command_line.checkpoints import StoredConfig, read_stored_config
from fulgurite.command_line.configs import Layer, load_yaml, shipped_configs
from fulgurite.command_line.errors import UsageError, nearest
from fulgurite.command_line.runs import Experiment, slug_of
from fulgurite.storage import exists

TRUST_VARIABLE = "FULGURITE_TRUST"
VALUE_OPTIONS = ("--config", "-c", "--ckpt_path", "--trust", "--model", "--data")
CLASS_TABLES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "--model": ("fulgurite.modules", modules.CLASSES),
    "--data": ("fulgurite.datamodules", datamodules.CLASSES),
    "--model.help": ("fulgurite.modules", modules.CLASSES),
    "--data.help": ("fulgurite.datamodules", datamodules.CLASSES),
    "--trainer.callbacks": ("fulgurite.callbacks", callbacks.CLASSES),
    "--trainer.callbacks+": ("fulgurite.callbacks", callbacks.CLASSES),
}


@dataclass(frozen=True)
class Invocation:
    """A prepared command line.

    Args:
        command: fit, validate, test or predict.
        argv: what the parser gets.
        layers: what the parser reads, in order, the checkpoint's own config first.
        given_layers: the config files of the command line.
        experiment: where its runs lie.
        checkpoint: the checkpoint to start from.
        stored: the config that the checkpoint holds.
        trusted: packages beyond the allow-list that configs may name.
    """

    command: str
    argv: list[str]
    layers: list[Layer]
    given_layers: list[Layer]
    experiment: Experiment
    checkpoint: Path | None
    stored: StoredConfig | None
    trusted: tuple[str, ...]


def prepare(arguments: Sequence[str]) -> Invocation:
    """Read a command line, ``arguments[0]`` being the command.

    Raises:
        UsageError: a config, class or checkpoint cannot be found or read.
    """
    command, *words = arguments
    layers: list[Layer] = []
    rest: list[str] = []
    trusted = [name for name in os.environ.get(TRUST_VARIABLE, "").split(",") if name]
    checkpoint_word: str | None = None
    chosen: dict[str, str] = {}  # --model and --data, as class paths

    position = 0
    while position < len(words):
        option, equals, value = words[position].partition("=")
        takes_value = option in VALUE_OPTIONS or option in CLASS_TABLES
        if not takes_value:
            rest.append(words[position])
            position += 1
            continue
        if not equals:
            position += 1
            if position == len(words):
                raise UsageError(f"{option} needs a value")
            value = words[position]
        position += 1
        if option in ("--config", "-c"):
            layers.append(read_layer(find_config(value)))
        elif option == "--trust":
            trusted += [name.strip() for name in value.split(",")]
        elif option == "--ckpt_path":
            checkpoint_word = value
        else:
            path = resolve_class(option, value)
            if option in ("--model", "--data"):
                is_file = path.endswith((".yaml", ".yml"))
                chosen[option[2:]] = str(read_layer(Path(path)).tree.get("class_path")) if is_file else path
            rest += [option, path] if option.endswith(".help") else [f"{option}={path}"]

    given_layers = list(layers)
    for layer in layers:
        if "ckpt_path" in layer.tree:
            checkpoint_word = checkpoint_word or layer.tree["ckpt_path"]
    layers = [layer.without("ckpt_path") if "ckpt_path" in layer.tree else layer for layer in layers]

    root = _value_of("--trainer.default_root_dir", rest)
    experiment = Experiment.of(layers, chosen.get("model"), root)
    checkpoint = find_checkpoint(checkpoint_word, experiment)
    stored = read_stored_config(checkpoint) if checkpoint else None
    if stored:
        named = chosen.get("model") or _class_path(layers, "model")
        if named and named != stored.class_path("model"):
            raise UsageError(
                f"{checkpoint} holds {stored.class_path('model')}, but {named} is asked for\n"
                "give a checkpoint of that class, or leave the model out"
            )
        layers = [stored.layer(), *(layer for layer in layers if not stored.says_nothing_new(layer))]
        experiment = replace(experiment, slug=slug_of(stored.class_path("model")))
    layers = drop_replaced_classes(layers, chosen)
    argv = [command, *(word for layer in layers for word in ("--config", layer.argument())), *rest]
    return Invocation(command, argv, layers, given_layers, experiment, checkpoint, stored, tuple(trusted))


def find_config(name: str) -> Path:
    """The file of a ``--config``: an existing local file, else a shipped config by its name.

    Raises:
        UsageError: there is neither.
    """
    local = Path(name).expanduser()
    if exists(local) and local.is_file():
        return local
    shipped = shipped_configs()
    key = name.removesuffix(".yaml").removeprefix("configs/")
    if key in shipped:
        return shipped[key]
    what = "is a folder" if exists(local) and local.is_dir() else "is neither a file nor a shipped config"
    raise UsageError(f"config {name!r} {what}{nearest(key, shipped, '`fulgurite list` shows the shipped ones')}")


def read_layer(path: Path) -> Layer:
    """Read a config file.

    Raises:
        UsageError: it is not a YAML mapping; names the file and the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
        tree = load_yaml(text)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UsageError(f"{path}{line}: this is not valid YAML: {error.problem}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: this is not a YAML text file") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    if tree is None:
        raise UsageError(f"{path}: the file is empty; a config needs at least a model and data section")
    if not isinstance(tree, dict):
        raise UsageError(
            f"{path}: a config is a mapping with keys such as model, data and trainer; this is a {type(tree).__name__}"
        )
    layer = Layer(name=str(path), text=text, tree=tree, path=path)
    if not isinstance(tree.get("trainer"), dict | str | None):
        raise UsageError(
            f"{path}, line {layer.line_of(['trainer'])}, trainer: it is a mapping of the Trainer's options"
        )
    for section in ("model", "data"):
        group = tree.get(section)
        if isinstance(group, dict) and not isinstance(group.get("class_path"), str | None):
            number = layer.line_of([section, "class_path"])
            raise UsageError(f"{path}, line {number}, {section}.class_path: expected text, got {group['class_path']!r}")
    sections = inline_sections(tree, path.parent)
    return layer.with_tree({**tree, **sections}) if sections else layer


def inline_sections(tree: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The sections that are given as the path of a file, relative to the config that names it."""
    return {
        section: dict(read_layer(folder / value).tree)
        for section, value in tree.items()
        if isinstance(value, str) and value.endswith((".yaml", ".yml")) and exists(folder / value)
    }


def resolve_class(option: str, name: str) -> str:
    """The class path behind a short name; a name with dots or braces is taken as it is.

    Raises:
        UsageError: the short name is not in the table.
    """
    package, table = CLASS_TABLES[option]
    if name in table:
        return f"{package}.{name}"
    if "." in name or "{" in name or "/" in name or package == "fulgurite.callbacks":
        return name  # a class path, a YAML value, a file, or one of Lightning's own callbacks
    kind = option[2:].removesuffix(".help")
    raise UsageError(f"unknown {kind} {name!r}{nearest(name, table, 'known are ' + ', '.join(sorted(table)))}")


def find_checkpoint(word: str | None, experiment: Experiment) -> Path | None:
    """The file behind ``--ckpt_path``: ``best`` and ``last`` are those of the experiment's latest run.

    Raises:
        UsageError: there is no such run or file.
    """
    if word in (None, "null", ""):
        return None
    if word in ("best", "last"):
        return experiment.latest_checkpoint(word)
    path = Path(str(word)).expanduser()
    if not exists(path):
        raise UsageError(f"--ckpt_path {word}: there is no such file; give best, last, or the path of a .ckpt file")
    return path


def drop_replaced_classes(layers: Sequence[Layer], chosen: Mapping[str, str]) -> list[Layer]:
    """Remove a model or data section whose class a later layer or the command line replaces.

    The parser would keep those of its arguments that the new class happens to share.
    """
    kept = list(layers)
    for section in ("model", "data"):
        classes = [_class_path([layer], section) for layer in kept] + [chosen.get(section)]
        last = next((path for path in reversed(classes) if path), None)
        for position, path in enumerate(classes[:-1]):
            if path and path != last:
                kept[position] = kept[position].without(section)
    return kept


def _class_path(layers: Sequence[Layer], section: str) -> str | None:
    """The class that the last of the layers gives to a section."""
    for layer in reversed(layers):
        group: Any = layer.tree.get(section)
        if isinstance(group, dict) and "class_path" in group:
            return str(group["class_path"])
    return None


def _value_of(option: str, words: Sequence[str]) -> str | None:
    """The last value of an option in a command line, in either spelling."""
    value = None
    for position, word in enumerate(words):
        if word.startswith(f"{option}="):
            value = word.partition("=")[2]
        elif word == option and position + 1 < len(words):
            value = words[position + 1]
    return value
