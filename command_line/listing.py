"""``fulgurite list``: answered from the register and the files, without importing torch."""

from collections.abc import Sequence
from pathlib import Path

from fulgurite import datamodules
from fulgurite.command_line.configs import CONFIG_ROOT, shipped_configs
from fulgurite.command_line.errors import UsageError, nearest
from fulgurite.modules import METHODS, MethodRecord


def print_listing(arguments: Sequence[str]) -> None:
    """Print the table of methods, or one method in detail.

    Raises:
        UsageError: the argument is not a slug.
    """
    if len(arguments) > 1:
        raise UsageError(f"list takes at most one method, got {' '.join(arguments)}")
    if arguments:
        print(describe(method_named(arguments[0])))
    else:
        print_table()


def method_named(slug: str) -> MethodRecord:
    """The record of a method.

    Raises:
        UsageError: there is none.
    """
    if slug not in METHODS:
        raise UsageError(f"unknown method {slug!r}{nearest(slug, METHODS, 'known are ' + ', '.join(METHODS))}")
    return METHODS[slug]


def print_table() -> None:
    """Print one row a method."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_lines=len(METHODS) > 1)
    for header in ("slug", "paper", "module", "data", "configs", "claims"):
        table.add_column(header, overflow="fold")
    for record in METHODS.values():
        table.add_row(
            record.slug,
            record.paper,
            ", ".join(record.classes),
            ", ".join(data_classes(record.slug)),
            ", ".join(config_names(record.slug)),
            claims(record.slug),
        )
    Console().print(table)


def describe(record: MethodRecord) -> str:
    """One method: what it is, its classes, its configs with the first line of each, and how to run it."""
    lines = [
        f"{record.slug}: {record.title}",
        f'paper    "{record.paper}", ICML 2026, arXiv {record.arxiv}',
        f"module   {', '.join(f'fulgurite.modules.{name}' for name in record.classes)}",
        f"data     {', '.join(f'fulgurite.datamodules.{name}' for name in data_classes(record.slug))}",
        f"claims   {claims(record.slug)}",
        "configs",
    ]
    for name in config_names(record.slug):
        path = shipped_configs()[f"{record.slug}/{name}"]
        lines.append(f"  {record.slug}/{name:<12} {first_comment(path)}")
    lines.append(f"run      fulgurite fit --config {record.slug}/cpu")
    lines.append(f"         fulgurite test --config {record.slug}/cpu --ckpt_path best")
    if has_claims(record.slug):
        lines.append(f"         fulgurite reproduce {record.slug}")
    return "\n".join(lines)


def data_classes(slug: str) -> list[str]:
    """The data modules of a method."""
    return [name for name, path in datamodules.CLASSES.items() if path == f"{datamodules.__name__}.{slug}"]


def config_names(slug: str) -> list[str]:
    """The shipped configs of a method, without the slug."""
    return [name.partition("/")[2] for name in shipped_configs() if name.startswith(f"{slug}/")]


def claims(slug: str) -> str:
    """Where the method's claims stand."""
    from fulgurite.reproduction.records import published_verdicts

    if not has_claims(slug):
        return "none yet"
    return published_verdicts(slug) or "not measured"


def has_claims(slug: str) -> bool:
    """Whether there is a claim file for the method."""
    return (CONFIG_ROOT / slug / "claim.yaml").is_file()


def first_comment(path: Path) -> str:
    """The first comment line of a config: what it shows."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("#").strip().removeprefix("Claim:").strip()
