"""Standard output that is closed, full or of another alphabet: a run goes on, whoever reads along."""

import os
import sys
from typing import TextIO


def prepare_streams() -> None:
    """Make standard output and error writable: a closed one leads nowhere, and what one cannot encode is escaped."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123 - open to the end
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def silence(stream: TextIO) -> None:
    """Let everything that follows on a stream go nowhere, such as after ``| head`` has read enough."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
