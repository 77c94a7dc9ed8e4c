"""Config files: where they are found, and what stands in them."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

import fulgurite

CONFIG_ROOT = Path(fulgurite.__file__).parent / "configs"
CONFIG_SUFFIX = ".yaml"


@dataclass(frozen=True)
class Layer:
    """One ``--config``.

    Args:
        name: the file as the user would find it, or what the layer is.
        text: its content.
        tree: its content, parsed.
        path: the file; None where there is none.
        changed: whether text and tree are no longer those of the file.
    """

    name: str
    text: str
    tree: Mapping[str, Any]
    path: Path | None = None
    changed: bool = False

    @property
    def digest(self) -> str:
        """Digest of the content."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    def argument(self) -> str:
        """What to hand to the parser: the file (so that paths in it are relative to it), or the text."""
        return self.text if self.path is None or self.changed else str(self.path)

    def without(self, key: str) -> "Layer":
        """This layer less one top-level key."""
        return self.with_tree({name: value for name, value in self.tree.items() if name != key})

    def with_tree(self, tree: Mapping[str, Any]) -> "Layer":
        """This layer with another content."""
        return replace(self, text=yaml.safe_dump(dict(tree), sort_keys=False), tree=tree, changed=True)

    def line_of(self, keys: Sequence[str]) -> int | None:
        """The line where a key is set; of several below ``keys[0]`` the first that ends like ``keys``."""
        root = yaml.compose(self.text, Loader=yaml.SafeLoader)
        for path, line in _lines(root, ()):
            if path[0] == keys[0] and path[-1] == keys[-1] and len(path) >= len(keys):
                return line
        return None


def _lines(node: yaml.Node | None, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*path, str(key.value).rstrip("+"))
            yield inner, key.start_mark.line + 1
            yield from _lines(value, inner)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _lines(value, path)


def shipped_configs() -> dict[str, Path]:
    """Name (``rocp/cpu``) -> file of every config in the package."""
    return {
        path.relative_to(CONFIG_ROOT).with_suffix("").as_posix(): path
        for path in sorted(CONFIG_ROOT.glob(f"*/*{CONFIG_SUFFIX}"))
        if path.stem != "claim"
    }


def imported_object(class_path: str) -> Any:
    """The object behind a dotted path that the parser has accepted, and so has imported already."""
    module, _, name = class_path.rpartition(".")
    return getattr(import_module(module), name)
