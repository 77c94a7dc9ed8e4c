"""Where lines go: our own to stdout as they are, of Lightning's the warnings and errors that apply."""

import logging
import sys
import warnings
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from fulgurite.command_line.streams import prepare_streams, silence

UNNEEDED_WARNINGS = (
    ".*does not have many workers.*",  # for data in memory, worker processes only cost time
    ".*smaller than the logging interval.*",  # epoch values are logged whatever the interval
    ".*`IterableDataset` has `__len__` defined.*",  # ours are read by the main process alone
    ".*your dataloader is not resumable.*",  # it is: the data module keeps the position
    ".*treespec, LeafSpec.*",  # Lightning's own use of torch, nothing a user can mend
    ".*Checkpoint directory .* exists and is not empty.*",  # a resumed run goes on in its own folder
)
CALLBACK_WARNING = ".*callbacks used to create the checkpoint need to be provided.*"  # to go on, not to test


class OutputHandler(logging.StreamHandler[Any]):
    """Writes lines for as long as they can be written: a run does not end because nobody reads along."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name is logging's
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        if not isinstance(error, BrokenPipeError):
            print(
                f"warning: standard output cannot be written to: {error.strerror}; nothing more goes there",
                file=sys.stderr,
            )
        silence(self.stream)


def process_rank() -> int:
    """The rank of this process, known from the launcher before there is a Trainer."""
    return getattr(rank_zero_only, "rank", None) or 0


def set_up_output(command: str) -> None:
    """Configure logging and warnings for one command."""
    prepare_streams()
    logger = logging.getLogger("fulgurite")
    for handler in [handler for handler in logger.handlers if isinstance(handler, logging.StreamHandler)]:
        logger.removeHandler(handler)
    handler = OutputHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if process_rank() == 0 else logging.WARNING)
    logger.propagate = False
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in UNNEEDED_WARNINGS if command == "fit" else (*UNNEEDED_WARNINGS, CALLBACK_WARNING):
        warnings.filterwarnings("ignore", message=message)
