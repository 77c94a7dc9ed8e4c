"""Config files: where they are found, and what stands in them."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

import fulgurite

CONFIG_ROOT = Path(fulgurite.__file__).parent / "configs"
CONFIG_SUFFIX = ".yaml"
MAXIMUM_NODES = 1_000_000  # of a config with its aliases written out


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


def load_yaml(text: str) -> Any:
    """Parse YAML with the safe loader, and refuse what it accepts and no config means.

    Raises:
        yaml.YAMLError: it is not valid, a key is given twice or is no text, or an alias makes it endless.
    """
    _expanded_size(yaml.compose(text, Loader=yaml.SafeLoader), [], {})
    return yaml.safe_load(text)


def _expanded_size(node: yaml.Node | None, above: list[yaml.Node], sizes: dict[int, int]) -> int:
    """The number of nodes below one, with its aliases written out; each node is looked at once."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if any(node is parent for parent in above):
        raise ConstructorError(None, None, "a value contains itself", node.start_mark)
    if id(node) not in sizes:
        children = node.value
        if isinstance(node, yaml.MappingNode):
            keys = [key.value for key, _ in node.value]
            for key, _ in node.value:
                if not above and key.tag != "tag:yaml.org,2002:str":
                    raise ConstructorError(None, None, f"the key {key.value!r} is not text", key.start_mark)
                if key.value != "<<" and keys.count(key.value) > 1:
                    raise ConstructorError(None, None, f"the key {key.value!r} is given twice", key.start_mark)
            children = [value for _, value in node.value]
        sizes[id(node)] = 1 + sum(_expanded_size(child, [*above, node], sizes) for child in children)
    if sizes[id(node)] > MAXIMUM_NODES:
        raise ConstructorError(None, None, "its aliases make it too large", node.start_mark)
    return sizes[id(node)]


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
