"""Where lines go: our own to stdout as they are, of Lightning's the warnings and errors that apply."""

import logging
import sys
import warnings

from lightning.pytorch.utilities import rank_zero_only

UNNEEDED_WARNINGS = (
    ".*does not have many workers.*",  # for data in memory, worker processes only cost time
    ".*smaller than the logging interval.*",  # epoch values are logged whatever the interval
    ".*your dataloader is not resumable.*",  # it is: the data module keeps the position
    ".*treespec, LeafSpec.*",  # Lightning's own use of torch, nothing a user can mend
    ".*Checkpoint directory .* exists and is not empty.*",  # a resumed run goes on in its own folder
)
CALLBACK_WARNING = ".*callbacks used to create the checkpoint need to be provided.*"  # to go on, not to test


def process_rank() -> int:
    """The rank of this process, known from the launcher before there is a Trainer."""
    return getattr(rank_zero_only, "rank", None) or 0


def set_up_output(command: str) -> None:
    """Configure logging and warnings for one command."""
    logger = logging.getLogger("fulgurite")
    for handler in [handler for handler in logger.handlers if isinstance(handler, logging.StreamHandler)]:
        logger.removeHandler(handler)
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if process_rank() == 0 else logging.WARNING)
    logger.propagate = False
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in UNNEEDED_WARNINGS if command == "fit" else (*UNNEEDED_WARNINGS, CALLBACK_WARNING):
        warnings.filterwarnings("ignore", message=message)
