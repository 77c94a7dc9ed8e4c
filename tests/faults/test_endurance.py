"""Long and often interrupted runs: nothing grows, and twenty kills change nothing of the result."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from fulgurite.modules import METHODS

SMOKE = ("--config", "rocp/smoke")
METER = """\
import json, os
from pathlib import Path
from lightning.pytorch import Callback

class Meter(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        line = {"epoch": trainer.current_epoch, "resident": resident, "files": len(os.listdir("/proc/self/fd"))}
        with open("meter.jsonl", "a") as file:
            file.write(json.dumps(line) + "\\n")
"""
KILLS = 20
EPOCHS = 40
MEGABYTE = 2**20

pytestmark = pytest.mark.fault


@pytest.mark.parametrize("slug", METHODS)
def test_memory_and_open_files_stay_flat_over_200_epochs(background, trust, slug):
    trust("meter", METER)
    fit = ("fit", "--config", f"{slug}/smoke", "--trainer.max_epochs", "200", "--trainer.callbacks+=meter.Meter")
    command = background(*fit, "--trainer.limit_train_batches", "10", "--data.batch_size", "25")
    code, _, err = command.finish(300)
    assert code == 0, err
    lines = [json.loads(line) for line in Path("meter.jsonl").read_text().splitlines()]
    assert len(lines) == 200
    (last,) = Path("runs").rglob("last.ckpt")
    assert torch.load(last, weights_only=True)["global_step"] >= 2000
    middle, end = (max(line["resident"] for line in part) for part in (lines[60:80], lines[-20:]))
    assert end - middle < 8 * MEGABYTE, f"{(end - middle) / MEGABYTE:.1f} MiB more after 120 epochs"
    assert lines[-1]["files"] == lines[20]["files"]
    sizes = [path.stat().st_size for path in Path("runs").rglob("*.ckpt")]
    assert max(sizes) < 2 * min(sizes)


def test_twenty_kills_at_random_times_change_nothing_of_the_result(background, fulgurite_cli, assert_equal_state):
    base = ("fit", *SMOKE, "--trainer.max_epochs", str(EPOCHS), "--checkpoint_every", "1", "--trainer.default_root_dir")
    outcome = fulgurite_cli(*base, "whole")
    assert outcome.code == 0, outcome.err
    (whole,) = Path("whole").rglob("last.ckpt")
    began = time.monotonic()
    assert fulgurite_cli(*base, "timed").code == 0
    duration = time.monotonic() - began

    generator, killed = random.Random(0), []
    for number in range(KILLS):
        root = Path(f"killed{number}")
        command = background(*base, str(root))
        command.wait_for(lambda root=root: list(root.rglob("metrics.csv")) or list(root.rglob("last.ckpt")))
        time.sleep(generator.uniform(0, 0.8 * duration))
        os.kill(command.process.pid, signal.SIGKILL)
        command.process.wait(10)
        newest = list(root.rglob("last.ckpt"))
        if not newest:
            continue  # killed before the first state was written
        step = torch.load(newest[0], weights_only=True)["global_step"]
        killed.append(step)
        if step == 8 * EPOCHS:
            continue
        outcome = fulgurite_cli("fit", "--ckpt_path", str(newest[0]))
        assert outcome.code == 0, outcome.err
        assert_equal_state(whole, newest[0])
    between = [step for step in killed if 0 < step < 8 * EPOCHS]
    assert len(between) >= KILLS * 3 // 4, f"the kills came at the steps {killed}: too few between start and end"
    assert len(set(between)) > 5
