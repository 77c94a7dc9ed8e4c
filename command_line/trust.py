"""What a config may name. A config is code: finding the class that it names imports it, and building it runs it."""

import inspect
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jsonargparse

from fulgurite.command_line.configs import imported_object
from fulgurite.command_line.errors import UsageError

ALLOWED_IMPORTS = (
    "fulgurite.modules",
    "fulgurite.datamodules",
    "fulgurite.callbacks",
    "lightning.fabric.plugins.environments",  # where those of lightning.pytorch.plugins are defined
    "lightning.pytorch.accelerators",
    "lightning.pytorch.callbacks",
    "lightning.pytorch.cli",
    "lightning.pytorch.loggers",
    "lightning.pytorch.plugins",
    "lightning.pytorch.profilers",
    "lightning.pytorch.strategies",
    "torch.nn",
    "torch.optim",
    "torchmetrics",
)

log = logging.getLogger(__name__)


def allow_imports(trusted: Sequence[str]) -> None:
    """Restrict what can be named, before any config is parsed: parsing imports what a config names.

    Raises:
        UsageError: a trusted name is not the name of a package.
    """
    if trusted:
        log.info("trusted beyond the allow-list: %s", ", ".join(trusted))
    for name in trusted:
        if not all(part.isidentifier() for part in name.split(".")):
            raise UsageError(
                f"--trust {name!r}: give the import name of a package, such as mypackage or mypackage.models"
            )
    try:
        jsonargparse.set_parsing_settings(
            import_path_denylist=["*"],
            import_path_allowlist=[*ALLOWED_IMPORTS, *trusted],
            # A class path inside a free-form value, such as a dict of options, stays the dict that it is.
            instantiate_subclass_spec_in_any=False,
        )
    except ValueError as error:
        raise UsageError(f"--trust {', '.join(trusted)}: {error}") from error


def refuse_functions(options: Any, trusted: Sequence[str], path: str) -> None:
    """Refuse every class path that is not an allowed class: a function in its place would be called, whatever it does.

    Args:
        options: the parsed options, before anything is built.
        trusted: packages whose functions may be named, too.
        path: where the options stand.

    Raises:
        UsageError: naming the key and what stands there.
    """
    if isinstance(options, jsonargparse.Namespace):
        options = vars(options)
    if isinstance(options, Mapping):
        name = options.get("class_path")
        if isinstance(name, str):
            _refuse(name, path, trusted)
        for key, value in options.items():
            if str(key).startswith("__"):
                continue  # the parser's own notes, such as the file that a section came from
            refuse_functions(value, trusted, f"{path}.{key}")
    elif isinstance(options, list | tuple | set):
        for value in options:
            refuse_functions(value, trusted, path)
    elif inspect.isroutine(options) or isinstance(options, partial):
        _refuse(f"{getattr(options, '__module__', '')}.{getattr(options, '__qualname__', '')}", path, trusted, options)


def _refuse(name: str, path: str, trusted: Sequence[str], found: Any = None) -> None:
    if _within(name, trusted):
        return
    if not _within(name, ALLOWED_IMPORTS):
        raise UsageError(
            f"{path}: {name!r} is outside the packages that a config may name\n"
            f"a config is code: if you trust this one, add --trust {name.rpartition('.')[0]}"
        )
    if not inspect.isclass(found or imported_object(name)):
        raise UsageError(f"{path}: {name!r} is not a class; a config may name classes only")


def _within(name: str, packages: Sequence[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)
