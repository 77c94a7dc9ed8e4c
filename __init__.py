"""Fulgurite: methods of ICML 2026 as PyTorch Lightning modules, data modules and callbacks behind one command line.

The repository's root is this package, so that ``from fulgurite.callbacks import ...`` works inside a repository that
has ``modules/`` and ``callbacks/`` folders of its own.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

__version__ = "0.1.0"


def import_lazily(package: str, table: Mapping[str, str], name: str) -> Any:
    """Resolve ``name`` of a lazy table (public name -> module path), for the ``__getattr__`` of a package (PEP 562).

    Only the module that defines the name is imported, so one method never pays for the packages of another.

    Raises:
        AttributeError: the table has no such name.
    """
    if name not in table:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return getattr(import_module(table[name]), name)
