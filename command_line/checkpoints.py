"""Reading a checkpoint before anything is built from it: its config, or why it cannot be read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import fulgurite
from fulgurite.command_line.configs import Layer, load_yaml
from fulgurite.command_line.errors import UsageError

CHECKPOINT_KEY = "fulgurite"
LIGHTNING_KEYS = ("state_dict", "pytorch-lightning_version")


@dataclass(frozen=True)
class StoredConfig:
    """What a run keeps of its config in its checkpoints.

    Args:
        text: the resolved config, YAML.
        tree: the same, parsed.
        sources: digests of the config files that it was resolved from.
        name: what messages call it.
    """

    text: str
    tree: Mapping[str, Any]
    sources: tuple[str, ...]
    name: str = "the checkpoint's config"

    @classmethod
    def of(cls, resolved: Mapping[str, Any], layers: Sequence[Layer], earlier: "StoredConfig | None") -> "StoredConfig":
        """What to store for a run, which may go on from an ``earlier`` one."""
        sources = {*(layer.digest for layer in layers if layer.path), *(earlier.sources if earlier else ())}
        return cls(text=yaml.safe_dump(resolved, sort_keys=False), tree=resolved, sources=tuple(sorted(sources)))

    def as_plain(self) -> dict[str, Any]:
        """The value under ``CHECKPOINT_KEY``: strings only, which load with ``weights_only=True``."""
        return {"config": self.text, "sources": list(self.sources), "version": fulgurite.__version__}

    def says_nothing_new(self, layer: Layer) -> bool:
        """Whether the run was given this very file.

        It then names the experiment, but must not undo what the run's command line changed.
        """
        return layer.digest in self.sources

    def class_path(self, section: str) -> str | None:
        """The class of the model or of the data."""
        group = self.tree.get(section)
        return group.get("class_path") if isinstance(group, dict) else None

    def layer(self) -> Layer:
        """The config as the lowest layer of a command line."""
        return Layer(name=self.name, text=self.text, tree=self.tree)


def read_stored_config(checkpoint: Path) -> StoredConfig | None:
    """The config in a checkpoint file; None where a foreign Trainer wrote it.

    Raises:
        UsageError: the file is not a checkpoint; names it, its size and the newest other one beside it.
    """
    import torch

    if (checkpoint / ".metadata").is_file():
        raise UsageError(
            f"{checkpoint} is a sharded checkpoint, a folder with a file of each rank; make one file of it with\n"
            f"python -m lightning.fabric.utilities.consolidate_checkpoint {checkpoint}\n"
            f"and give --ckpt_path {checkpoint}.consolidated"
        )
    if checkpoint.is_dir():
        raise UsageError(f"{checkpoint} is a folder; give the .ckpt file in it{_other(checkpoint / 'x')}")
    if not checkpoint.is_file():
        raise UsageError(f"{checkpoint} is not a file that could hold a checkpoint{_other(checkpoint)}")
    size = checkpoint.stat().st_size
    try:
        content = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=size > 0)
    except Exception as error:  # torch raises a dozen different types here, by what the bytes happen to be
        cause = "empty" if size == 0 else "truncated, or not a checkpoint"
        if "Weights only load failed" in str(error):
            cause = "not a checkpoint, or it holds objects other than tensors and plain values, which are not loaded"
        raise UsageError(f"{checkpoint} ({size} bytes) is {cause}{_other(checkpoint)}") from error
    missing = [key for key in LIGHTNING_KEYS if not isinstance(content, dict) or key not in content]
    if missing:
        raise UsageError(
            f"{checkpoint} ({size} bytes) is not a Lightning checkpoint: it has no {missing[0]}{_other(checkpoint)}"
        )
    if not isinstance(content["state_dict"], dict):
        raise UsageError(f"{checkpoint} ({size} bytes) is not a Lightning checkpoint: its state_dict is no mapping")
    own = content.get(CHECKPOINT_KEY)
    return None if own is None else _stored_config(own, checkpoint)


def _stored_config(own: Any, checkpoint: Path) -> StoredConfig:
    """Check what a file claims to be a config of ours."""
    try:
        text, sources = own["config"], own["sources"]
        tree = load_yaml(text)
    except (TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        raise UsageError(f"{checkpoint}: its {CHECKPOINT_KEY!r} entry holds no config") from error
    strings = isinstance(text, str) and isinstance(sources, list) and all(isinstance(name, str) for name in sources)
    sections = isinstance(tree, dict) and all(
        isinstance(group := tree.get(key, {}), dict) and isinstance(group.get("class_path"), str | None)
        for key in ("model", "data", "trainer")
    )
    if not strings or not sections:
        raise UsageError(f"{checkpoint}: its {CHECKPOINT_KEY!r} entry holds no config")
    version = own.get("version", fulgurite.__version__)
    other = f", written by Fulgurite {version} (this is {fulgurite.__version__})"
    name = f"the config in {checkpoint}{other if version != fulgurite.__version__ else ''}"
    return StoredConfig(text=text, tree=tree, sources=tuple(sources), name=name)


def _other(checkpoint: Path) -> str:
    others = [path for path in checkpoint.parent.glob("[!.]*.ckpt") if path != checkpoint and path.is_file()]
    if not others:
        return ""
    return f"\nthe newest other checkpoint there is {max(others, key=lambda path: path.stat().st_mtime)}"
