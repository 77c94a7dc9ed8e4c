"""One job in a process of its own: ``python -m fulgurite.reproduction.worker run.json``.

The file says what to do; ``result.json`` beside it, written last and at once, says that it was done. A fit that was
interrupted goes on from its last checkpoint.
"""

import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fulgurite.command_line import provenance
from fulgurite.command_line.app import Session
from fulgurite.command_line.errors import UsageError, print_error
from fulgurite.command_line.results import peak_memory
from fulgurite.command_line.run import run as run_command
from fulgurite.command_line.runs import RESULTS_FILE
from fulgurite.reproduction.execution import RESULT_FILE
from fulgurite.reproduction.plan import RUNS_FOLDER
from fulgurite.storage import write_text


def main(path: Path) -> int:
    """Do the job of a file; returns the exit code of the command that failed, or 0."""
    folder = path.parent
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another `reproduce` may be at the same job: wait for it
        if (folder / RESULT_FILE).exists():
            return 0
        end_with_parent()
        job = json.loads(path.read_text(encoding="utf-8"))
        started = time.monotonic()
        code, result = run_tests(job["tests"]) if job["tests"] else run_commands(job, folder)
        if code == 0:
            result |= {
                "key": job["key"],
                "finished": datetime.now(UTC).isoformat(timespec="seconds"),
                "seconds": round(time.monotonic() - started, 3),
                "peak_memory_mib": round(peak_memory(), 1),
                "versions": provenance.package_versions(),
                "commit": provenance.commit(),
            }
            write_text(folder / RESULT_FILE, json.dumps(result, indent=2) + "\n")
        return code


def run_commands(job: dict[str, Any], folder: Path) -> tuple[int, dict[str, Any]]:
    """Fit and test as the job says.

    Returns:
        The exit code, and what the commands left: their metrics, and where the checkpoints lie.
    """
    arguments = list(job["arguments"])
    metrics: dict[str, float | None] = {}
    checkpoints: dict[str, str] = {}
    given: str | None = None
    if source := job["checkpoint_from"]:
        given = str(source_checkpoint(Path(source["folder"]), source["which"]))
        if source["option"] != "ckpt_path":
            arguments.append(f"--{source['option']}={given}")
            given = None
    resumed = False
    if "fit" in job["commands"]:
        run = latest_run(folder)
        if run is None or not (run / RESULTS_FILE).exists():
            last = run / "checkpoints" / "last.ckpt" if run else None
            resumed = last is not None and last.exists()
            start = str(last) if resumed else given
            session = Session()
            code = run_command(["fit", *arguments, *(["--ckpt_path", start] if start else [])], session)
            if code or session.folder is None:
                return code or 1, {}
            run = session.folder
        fitted = json.loads((run / RESULTS_FILE).read_text(encoding="utf-8"))
        metrics |= fitted["metrics"]
        best = fitted["best_checkpoint"]
        files = {"best": best and best["file"], "last": fitted["last_checkpoint"]}
        checkpoints = {which: str((run / file).relative_to(folder)) for which, file in files.items() if file}
        given = str(folder / checkpoints[job["checkpoint"]]) if job["checkpoint"] in checkpoints else None
    if "test" in job["commands"]:
        if given is None:
            print_error(f"there is no {job['checkpoint']} checkpoint to test")
            return 1, {}
        session = Session()
        code = run_command(["test", *arguments, "--ckpt_path", given], session)
        if code or session.folder is None:
            return code or 1, {}
        metrics |= json.loads((session.folder / RESULTS_FILE).read_text(encoding="utf-8"))["metrics"]
    return 0, {"metrics": metrics, "checkpoints": checkpoints, "resumed": resumed}


def run_tests(nodes: Sequence[str]) -> tuple[int, dict[str, Any]]:
    """Run pytest nodes; how many passed, failed or were skipped are the metrics."""
    import pytest

    counts = {"passed": 0, "failed": 0, "skipped": 0}

    class Count:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when == "call" or report.outcome != "passed":
                counts[report.outcome] += 1

    os.chdir(provenance.ROOT)
    # Whatever the project's own options deselect, these nodes are asked for by name.
    code = int(pytest.main(["-q", "-p", "no:cacheprovider", "-m", "", *nodes], plugins=[Count()]))
    # A failing test is a result: the property does not hold. Codes above 1 are no result: no such test, say.
    counted = any(counts.values())
    return (0 if code <= 1 and counted else code or 1), {"metrics": counts, "checkpoints": {}}


def latest_run(folder: Path) -> Path | None:
    """The run that an earlier process of this job began, if it came to train."""
    links = list((folder / RUNS_FOLDER).glob("*/*/latest"))
    return links[0].parent / links[0].readlink() if links else None


def source_checkpoint(folder: Path, which: str) -> Path:
    """The checkpoint of a finished job.

    Raises:
        UsageError: it has none of that name.
    """
    files: dict[str, str] = json.loads((folder / RESULT_FILE).read_text(encoding="utf-8"))["checkpoints"]
    if which not in files:
        raise UsageError(f"the run to start from has no {which} checkpoint, it has {', '.join(files) or 'none'}")
    return folder / files[which]


def end_with_parent() -> None:
    """Ask this process to end, as by SIGTERM, when the one that started it is gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1]).resolve()))
    except UsageError as error:
        print_error(str(error))
        sys.exit(2)
