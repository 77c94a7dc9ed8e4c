"""``fit``, ``validate``, ``test`` and ``predict`` as exit codes and short errors."""

import errno
import os
import traceback
from collections.abc import Sequence
from contextlib import ExitStack

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.exceptions import SIGTERMException

from fulgurite.callbacks.reproducibility import NonFiniteError
from fulgurite.command_line.app import FulguriteCLI, Session
from fulgurite.command_line.arguments import prepare
from fulgurite.command_line.errors import TRACEBACK_VARIABLE, UsageError, explain_load_error, is_deliberate, print_error
from fulgurite.command_line.output import process_rank, set_up_output
from fulgurite.command_line.runs import CHECKPOINT_FOLDER
from fulgurite.command_line.trust import allow_imports

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)


def run(arguments: Sequence[str]) -> int:
    """Run one command.

    Returns:
        The exit code, as :func:`fulgurite.cli.main` documents it.
    """
    set_up_output(arguments[0])
    with ExitStack() as resources:
        session = Session(resources)
        try:
            session.invocation = prepare(arguments)
            allow_imports(session.invocation.trusted)
            FulguriteCLI(session)
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
    elif (isinstance(error, OSError) and error.errno in DISK_ERRORS) or "PytorchStreamWriter failed" in text:
        text = f"cannot write below {session.folder or '.'}: {text}\nthe last checkpoint that was written is whole"
        code = 1
    elif "Early stopping conditioned on metric" in text:
        code = 2
    elif not (isinstance(error, ValueError | TypeError | OSError | ImportError) and is_deliberate(error)):
        raise error
    if os.environ.get(TRACEBACK_VARIABLE):
        traceback.print_exception(error)
    print_error(text)
    return code


def ended_by(what: str, code: int, session: Session) -> int:
    """Say that a signal ended the run, and how to go on; returns the exit code."""
    last = session.folder / CHECKPOINT_FOLDER / "last.ckpt" if session.folder else None
    go_on = f"\ncontinue with: fulgurite fit --ckpt_path {last}" if last and last.is_file() else ""
    if process_rank() == 0:
        print_error(f"ended by {what}{go_on}")
    return code
