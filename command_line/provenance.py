"""What a result stands on: versions, commit, and a hash of the code that made it."""

import ast
import hashlib
import json
import platform
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fulgurite
from fulgurite import callbacks, datamodules, modules

PACKAGE = "fulgurite"
ROOT = Path(fulgurite.__file__).parent
STACK = ("torch", "lightning", "torchmetrics", "jsonargparse", "numpy", "scikit-learn", "timm", "datasets")
LAZY_TABLES: Mapping[str, Mapping[str, str]] = {
    f"{PACKAGE}.modules": modules.CLASSES,
    f"{PACKAGE}.datamodules": datamodules.CLASSES,
    f"{PACKAGE}.callbacks": callbacks.CLASSES,
}


def package_versions() -> dict[str, str]:
    """Versions of Fulgurite, Python and the stack, without importing any of it."""
    versions = {PACKAGE: fulgurite.__version__, "python": platform.python_version()}
    for name in STACK:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def commit() -> str | None:
    """The commit of the checkout that this package is; None where it is installed, whatever repository is around it."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True, timeout=10
        ).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "cli.py")
        head = git("rev-parse", "HEAD")
        return f"{head}-dirty" if git("status", "--porcelain", "--untracked-files=no") else head
    except (OSError, subprocess.SubprocessError):
        return None


def config_hash(config: Mapping[str, Any]) -> str:
    """Hash of a resolved config, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]


def code_hash(class_paths: Iterable[str], files: Iterable[Path] = ()) -> str:
    """Hash of the abstract syntax of every file of this package that the classes import, directly or not.

    Comments, layout and docstrings do not count; neither do the tables that list all methods. Of a foreign class the
    file that defines it counts, as it is. ``files`` below the root count with what they import, too.
    """
    digest = hashlib.sha256()
    class_paths = list(class_paths)
    for path in sorted(import_closure(class_paths, files)):
        digest.update(path.relative_to(ROOT).as_posix().encode())
        digest.update(_syntax(path).encode())
    for name in sorted(class_paths):
        foreign = None if name.startswith(f"{PACKAGE}.") else _foreign_file(name.rpartition(".")[0])
        if foreign:
            digest.update(name.encode())
            digest.update(foreign.read_bytes())
    return digest.hexdigest()[:16]


def import_closure(class_paths: Iterable[str], files: Iterable[Path] = ()) -> set[Path]:
    """The files of this package behind the class paths, and ``files``; foreign classes have none."""
    pending = [*files, *(path for name in class_paths if name for path in _files_of(name))]
    found: set[Path] = set()
    while pending:
        path = pending.pop()
        if path not in found:
            found.add(path)
            pending += [file for name in imported_names(path) for file in _files_of(name)]
    return found


def imported_names(path: Path) -> list[str]:
    """Dotted names of this package that a file imports, at its top or inside a function."""
    names = []
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in names if name == PACKAGE or name.startswith(f"{PACKAGE}.")]


def _files_of(name: str) -> Iterator[Path]:
    """The file that defines a dotted name of this package: through a lazy table, or the longest module in the name."""
    package, _, attribute = name.rpartition(".")
    name = LAZY_TABLES.get(package, {}).get(attribute, name)
    parts = name.split(".")
    if parts[0] != PACKAGE:
        return
    for length in range(len(parts), 1, -1):
        path = ROOT.joinpath(*parts[1:length])
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                if ".".join(parts[:length]) not in LAZY_TABLES:
                    yield candidate
                return


def _foreign_file(module: str) -> Path | None:
    """The file of a module outside this package, found without importing anything."""
    top, *rest = module.split(".")
    try:
        spec = find_spec(top) if top else None
    except ValueError:  # a module without a spec, such as __main__
        return None
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.has_location and spec.origin else None
    for folder in spec.submodule_search_locations or ():
        path = Path(folder, *rest)
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def _syntax(path: Path) -> str:
    return ast.dump(_without_docstrings(_parse(path)))


def _without_docstrings(tree: ast.Module) -> ast.Module:
    copy = ast.parse(ast.unparse(tree))
    for node in ast.walk(copy):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            del body[0]
    return copy
