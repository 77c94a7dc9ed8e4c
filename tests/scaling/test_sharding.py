"""FSDP2 beyond the plain loss curve: buffers, sharded checkpoints, conformal calibration."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

EARLY = ("--config", "rocp/cpu", "--trainer.max_epochs", "5", "--trainer.check_val_every_n_epoch", "5")

# Two ranks with other weights, other statistics and other inputs, as they are before anything has made them equal.
BUFFERS = """
import os
import sys

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fulgurite.modules.base import send_weights, shard

torch.distributed.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data_parallel",))
rank = mesh.get_local_rank()
torch.manual_seed(rank)
piece = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
piece[1].running_mean += rank
send_weights(piece, mesh["data_parallel"], torch.device("cpu"))
shard(piece, mesh["data_parallel"])
for step in range(3):
    piece(torch.randn(5, 4)).sum().backward()
piece.eval()
out = piece(torch.ones(2, 4)).detach()
state = {name: getattr(value, "full_tensor", lambda: value)().detach() for name, value in piece.state_dict().items()}
torch.save({"out": out, **state}, sys.argv[1] + str(rank))
torch.distributed.destroy_process_group()
"""


def test_the_pieces_of_a_module_are_sharded():
    cases = Path(__file__).with_name("pieces.py")
    program = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    done = subprocess.run(program, cwd=cases.parents[2], timeout=100, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^5 passed", done.stdout, re.MULTILINE)


def test_ranks_share_the_first_one_s_weights_and_statistics(tmp_path, free_port):
    (tmp_path / "script.py").write_text(BUFFERS)
    program = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", free_port)
    subprocess.run(
        [sys.executable, *program, "script.py", "state"], cwd=tmp_path, check=True, timeout=100, capture_output=True
    )
    first, second = (torch.load(tmp_path / f"state{rank}", weights_only=True) for rank in (0, 1))

    torch.manual_seed(0)
    alone = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    for _ in range(3):
        alone(torch.randn(5, 4))
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(first[name], value, msg=name)
    torch.testing.assert_close(first["out"], alone.eval()(torch.ones(2, 4)).detach())
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_sharded_checkpoint_names_the_command_that_makes_one_file_of_it(launch, fulgurite_cli, tmp_path):
    one = ("--trainer.devices", "1", "--trainer.strategy.data_parallel_size", "1", "--trainer.max_epochs", "1")
    launch(
        "fit", "--config", "rocp/smoke", "--config", "trainer/fsdp", *one,
        "--trainer.strategy.save_distributed_checkpoint", "true", folder=tmp_path,
    )  # fmt: skip
    (last,) = tmp_path.rglob("20*/checkpoints/last.ckpt")
    ended = fulgurite_cli("test", "--ckpt_path", str(last))
    assert ended.code == 2
    assert ended.err.startswith(f"error: {last} is a sharded checkpoint")
    (command,) = (line.strip() for line in ended.err.splitlines() if line.strip().startswith("python -m "))
    subprocess.run(
        [sys.executable, *command.split()[1:]], cwd=tmp_path, check=True, timeout=100, capture_output=True
    )  # fmt: skip
    for command, code, says in (("test", 0, ""), ("fit", 2, "holds no optimiser state, like every consolidated one")):
        ended = fulgurite_cli(command, "--ckpt_path", f"{last}.consolidated", "--config", "trainer/cpu")
        assert ended.code == code, ended.err
        assert says in ended.err
    whole = torch.load(f"{last}.consolidated", weights_only=True)["state_dict"]
    assert whole["network.1.weight"].shape == (64, 64)


def test_a_sharded_fit_with_dropout_resumes_exactly(launch, tmp_path):
    """Its checkpoint is read later than others': after the hook in which those restore the random state."""
    base = ("--config", "rocp/smoke", "--config", "trainer/fsdp")
    one = ("--trainer.devices", "1", "--trainer.strategy.data_parallel_size", "1", "--trainer.max_epochs")
    launch("fit", *base, *one, "3", "--trainer.default_root_dir", "whole", folder=tmp_path)
    launch("fit", *base, *one, "2", folder=tmp_path)
    (last,) = (tmp_path / "runs").rglob("20*/checkpoints/last.ckpt")
    launch("fit", "--ckpt_path", str(last), "--trainer.max_epochs", "3", folder=tmp_path)
    (whole,) = (tmp_path / "whole").rglob("20*/checkpoints/last.ckpt")
    one, other = (torch.load(path, weights_only=True) for path in (whole, last))
    assert one["global_step"] == other["global_step"]
    for name, value in one["state_dict"].items():
        assert torch.equal(value, other["state_dict"][name]), name
    for key, state in one["optimizer_states"][0]["state"].items():
        assert all(torch.equal(state[name], other["optimizer_states"][0]["state"][key][name]) for name in state)
    assert torch.equal(one["random_state"][0]["torch"], other["random_state"][0]["torch"])


def test_a_calibration_under_fsdp_is_that_of_one_process(launch, here, tmp_path):
    base = (*EARLY, "--data.n_calibration", "301", "--data.n_test", "455")
    here(tmp_path, "fit", *base)
    (last,) = tmp_path.rglob("20*/checkpoints/last.ckpt")
    checkpoint = torch.load(last, weights_only=True)
    checkpoint["callbacks"].pop("ConformalCalibration")  # so that both have to calibrate
    torch.save(checkpoint, tmp_path / "without.ckpt")
    arguments = ("test", "--ckpt_path", "without.ckpt", "--trainer.default_root_dir")
    here(tmp_path, *arguments, "one")
    launch(*arguments, "two", "--config", "trainer/fsdp", folder=tmp_path)
    tables = []
    for name in ("one", "two"):
        (path,) = (tmp_path / name).rglob("conformal.csv")
        with path.open() as file:
            tables.append(list(csv.DictReader(file)))
    one, two = tables
    assert [row["arm"] for row in one] == [row["arm"] for row in two]
    for first, second in zip(one, two, strict=True):
        for name in first:
            assert first[name] == second[name] or float(first[name]) == pytest.approx(float(second[name]), abs=1e-6)
