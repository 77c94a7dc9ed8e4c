"""Files that survive a crash: every write outside Lightning's own goes through here."""

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger(__name__)


def exists(path: str | Path) -> bool:
    """Whether there is such a path; a name that is too long for the file system, or cannot be looked up, names none."""
    try:
        return Path(path).exists()
    except OSError:
        return False


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path`` to write to; it becomes ``path`` when the block ends without an error.

    A reader sees the old file or the whole new one, never a part. Missing folders are made.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The suffix is kept, because writers of figures and arrays look at it.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def write_text(path: str | Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def point_link(link: str | Path, target: str) -> None:
    """Make ``link`` a symbolic link to ``target``, relative to the link's folder; replaces an older one atomically.

    Where the file system has no links, as on some network drives, a warning says so.
    """
    link = Path(link)
    temporary = link.with_name(f".{link.name}-{os.getpid()}")
    with suppress(FileNotFoundError):
        temporary.unlink()
    try:
        temporary.symlink_to(target)
    except OSError as error:
        log.warning("no link %s (%s): name checkpoints by their path", link, error.strerror)
        return
    temporary.replace(link)


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
