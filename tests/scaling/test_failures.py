"""A process that fails or is killed ends the whole job, with a cause and a code, and leaves no process behind."""

import os
import signal
import time

import pytest

pytestmark = pytest.mark.slow

CALLBACK = '''
import os
import signal

from lightning.pytorch import Callback


class Trouble(Callback):
    """Rank 1 raises, or is killed, in its second training batch."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == 1 and batch_idx == 1:
            if self.kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("rank 1 has had enough")
'''


@pytest.mark.parametrize("kind", ["raises", "killed"])
def test_one_rank_that_fails_ends_the_job(start, tmp_path, kind):
    (tmp_path / "trouble.py").write_text(CALLBACK)
    job = start(
        "fit", "--config", "rocp/smoke", "--config", "trainer/ddp", "--trust", "trouble",
        "--trainer.callbacks+=trouble.Trouble", f"--trainer.callbacks.kind={kind}",
        folder=tmp_path, PYTHONPATH=str(tmp_path),
    )  # fmt: skip
    ended = job.wait()
    assert ended.code == 1, ended.err
    assert "error: another process of this run ended; its own message says why" in ended.err
    assert ("RuntimeError: rank 1 has had enough" in ended.err) == (kind == "raises")
    deadline = time.monotonic() + 5
    left = ended.left
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = [pid for pid in left if running(pid)]
    assert not left
    assert not list(tmp_path.rglob("results.json")), "a job that failed has no results"


def running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_sigterm_to_the_first_process_ends_both(start, tmp_path):
    """What a scheduler does that knows one process only."""
    job = start(
        "fit", "--config", "rocp/smoke", "--config", "trainer/ddp", "--trainer.max_epochs", "2000", folder=tmp_path
    )
    metrics = tmp_path / "runs" / "rocp" / "smoke" / "latest" / "metrics.csv"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (metrics.exists() and len(metrics.read_text().splitlines()) > 2):
        time.sleep(0.02)
    job.process.send_signal(signal.SIGTERM)
    ended = job.wait()
    assert ended.code == 143, ended.err
    assert "error: ended by SIGTERM" in ended.err
    assert not ended.left
