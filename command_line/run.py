"""``fit``, ``validate``, ``test`` and ``predict`` as exit codes and short errors."""

import errno
import os
import re
import traceback
from collections.abc import Sequence
from pathlib import Path

import lightning
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.exceptions import SIGTERMException

from fulgurite.callbacks.reproducibility import NonFiniteError, Requeue
from fulgurite.command_line.app import FulguriteCLI, Session
from fulgurite.command_line.arguments import prepare
from fulgurite.command_line.errors import TRACEBACK_VARIABLE, UsageError, explain_load_error, is_deliberate, print_error
from fulgurite.command_line.output import process_rank, set_up_output
from fulgurite.command_line.runs import CHECKPOINT_FOLDER, discard_unstarted
from fulgurite.command_line.slurm import requeue_job
from fulgurite.command_line.trust import allow_imports

DISK_ERRORS = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENAMETOOLONG,
    errno.EISDIR, errno.ENOTDIR, errno.EEXIST,
)  # fmt: skip
UNFINISHED_ARCHIVE = r"PytorchStreamWriter failed|inline_container.* unexpected pos"  # torch's words for a full disk
LOST_PROCESS = r"Connection (closed|reset) by peer|remote process exit"  # gloo; NCCL
LIBRARIES = tuple(Path(str(package.__file__)).parent for package in (lightning, torch))


def run(arguments: Sequence[str], session: Session | None = None) -> int:
    """Run one command.

    Args:
        arguments: the command line, the command first.
        session: filled with what becomes known of the command, for a caller that asks afterwards.

    Returns:
        The exit code, as :func:`fulgurite.cli.main` documents it.
    """
    set_up_output(arguments[0])
    session = session or Session()
    with session.resources:
        try:
            session.invocation = prepare(arguments)
            allow_imports(session.invocation.trusted)
            FulguriteCLI(session)
        except Requeue:
            return requeue_job(session.folder)
        except SIGTERMException:
            return ended_by("SIGTERM", 143, session)
        except KeyboardInterrupt:
            return ended_by("Ctrl-C", 130, session)
        except SystemExit as error:
            # Lightning turns Ctrl-C into exit code 1, and --help ends with 0.
            if isinstance(error.__context__, KeyboardInterrupt):
                return ended_by("Ctrl-C", 130, session)
            return error.code if isinstance(error.code, int) else 0
        except Exception as error:  # noqa: BLE001 - what it is decides how it is shown; a surprise is raised again
            return explain(error, session)
        finally:
            if session.folder and not session.running and process_rank() == 0:
                discard_unstarted(session.folder, arguments[0])
    return 0


def explain(error: Exception, session: Session) -> int:
    """Show an error whose message says enough in a few lines, and return the exit code.

    Raises:
        Exception: the error itself, where only its trace explains it.
    """
    text = str(error)
    code = 1 if session.running else 2
    if isinstance(error, UsageError | MisconfigurationException):
        code = 2
    elif isinstance(error, NonFiniteError):
        code = 1
    elif text.startswith("Error(s) in loading state_dict"):
        text = explain_load_error(text, session.invocation.checkpoint if session.invocation else None)
    elif is_of_the_disk(error, session.folder) or re.search(UNFINISHED_ARCHIVE, text):
        text = f"cannot write below {session.folder or '.'}: {text}\nthe last checkpoint that was written is whole"
        code = 1
    elif "Trying to restore optimizer state" in text:
        checkpoint = session.invocation.checkpoint if session.invocation else None
        text = f"{checkpoint} holds no optimiser state, like every consolidated one: it can be tested, not gone on with"
        code = 2
    elif isinstance(error, RuntimeError) and re.search(LOST_PROCESS, text):
        text = "another process of this run ended; its own message says why, and one that was killed leaves none"
        code = 1
    elif "Early stopping conditioned on metric" in text:
        code = 2
    elif not session.running and not is_deliberate(error) and is_deliberate(error, LIBRARIES):
        text += f"\n{TRACEBACK_VARIABLE}=1 shows where this {type(error).__name__} was raised"
    elif not (isinstance(error, ValueError | TypeError | OSError | ImportError) and is_deliberate(error)):
        raise error
    if os.environ.get(TRACEBACK_VARIABLE):
        traceback.print_exception(error)
    print_error(text)
    return code


def is_of_the_disk(error: Exception, folder: Path | None) -> bool:
    """Whether a file in the run's folder could not be written, or its disk is full."""
    if not isinstance(error, OSError) or error.errno not in DISK_ERRORS:
        return False
    if folder is None or not isinstance(error.filename, str | os.PathLike):
        return True
    return Path(error.filename).resolve().is_relative_to(folder.resolve())


def ended_by(what: str, code: int, session: Session) -> int:
    """Say that a signal ended the run, and how to go on; returns the exit code."""
    last = session.folder / CHECKPOINT_FOLDER / "last.ckpt" if session.folder else None
    go_on = f"\ncontinue with: fulgurite fit --ckpt_path {last}" if last and last.is_file() else ""
    if process_rank() == 0:
        print_error(f"ended by {what}{go_on}")
    return code
