"""One process, DDP and FSDP2 give the same numbers, for every method that runs under them."""

import csv
import inspect
import json
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from fulgurite import datamodules, modules
from fulgurite.command_line.configs import shipped_configs
from fulgurite.modules import METHODS

pytestmark = pytest.mark.slow

ROOT = Path(modules.__file__).parents[1]
FIRST = next(iter(METHODS))  # what is the same for all methods is tested with it alone
TOLERANCE = 1e-5
EPOCHS = 3

# What makes a smoke config comparable, by slug: an even number of training samples (an odd one is padded), and an odd
# number of test samples.
ARGUMENTS = {"rocp": ("--data.n_test", "601")}


class Runs:
    """The runs of one method, each made once: one process with a batch of 2 B, and two with B each."""

    def __init__(self, slug, folder, launch, here):
        self.folder, self.launch, self.here = folder, launch, here
        tree = yaml.safe_load(shipped_configs()[f"{slug}/smoke"].read_text())
        self.method = getattr(modules, tree["model"]["class_path"].rpartition(".")[2])
        parameters = inspect.signature(self.method).parameters
        off = ("--model.dropout", "0") if "dropout" in parameters else ()
        self.base = ("--config", f"{slug}/smoke", *off, *ARGUMENTS.get(slug, ()))
        data = getattr(datamodules, tree["data"]["class_path"].rpartition(".")[2])
        self.data = data
        default = inspect.signature(data).parameters["batch_size"].default
        self.batch = tree["data"].get("init_args", {}).get("batch_size", default)
        self.pair = ("--data.batch_size", str(self.batch // 2))

    def needs(self, *strategies):
        """Skip where the method does not run under them; that it says so is tested elsewhere."""
        for strategy in strategies:
            if not getattr(self.method, strategy):
                pytest.skip(f"{self.method.__name__} does not run under {strategy}")

    def fit(self, name, *arguments, epochs=EPOCHS, **options):
        place = ("--trainer.max_epochs", str(epochs), "--trainer.default_root_dir", name)
        return self.launch("fit", *self.base, *self.pair, *arguments, *place, folder=self.folder, **options)

    @cached_property
    def one(self):
        place = ("--trainer.max_epochs", str(EPOCHS), "--trainer.default_root_dir", "one")
        self.here(self.folder, "fit", *self.base, "--data.batch_size", str(self.batch), *place)
        return Run(self.folder / "one")

    @cached_property
    def ddp(self):
        self.needs("ddp")
        self.said = self.fit("ddp", "--config", "trainer/ddp", epochs=EPOCHS - 1)
        return Run(self.folder / "ddp")

    @cached_property
    def fsdp(self):
        self.needs("fsdp")
        self.fit("fsdp", "--config", "trainer/fsdp", epochs=EPOCHS - 1)
        return Run(self.folder / "fsdp")

    def test(self, checkpoint, processes):
        """The metrics of a test on one process (this one), or on as many as the checkpoint was fitted with."""
        written = checkpoint.parent.parent / "test"
        before = set(written.glob("*/results.json"))
        if processes == 1:
            self.here(self.folder, "test", "--ckpt_path", str(checkpoint), "--config", "trainer/cpu")
        else:
            self.launch("test", "--ckpt_path", str(checkpoint), folder=self.folder)
        (file,) = set(written.glob("*/results.json")) - before
        return json.loads(file.read_text())["metrics"]


class Run:
    """What a fit left."""

    def __init__(self, root):
        (latest,) = (path for path in root.rglob("latest") if path.is_symlink())
        self.folder = latest.resolve()
        self.last = self.folder / "checkpoints" / "last.ckpt"
        self.weights = torch.load(self.last, weights_only=True)["state_dict"]
        self.optimizers = torch.load(self.last, weights_only=True)["optimizer_states"]
        with (self.folder / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert rows
        self.curve = {
            name: [float(row[name]) if row[name] else np.nan for row in rows]
            for name in rows[0]
            if name.partition("/")[0] in ("train", "val")
        }


def assert_equal_curves(one, other):
    """Up to the end of the shorter run."""
    assert one.keys() == other.keys()
    for name in one:
        epochs = min(len(one[name]), len(other[name]))
        assert epochs
        np.testing.assert_allclose(one[name][:epochs], other[name][:epochs], rtol=0, atol=TOLERANCE, err_msg=name)


def assert_equal_weights(one, other, tolerance=TOLERANCE):
    assert one.keys() == other.keys()
    for name in one:
        assert type(other[name]) is torch.Tensor, "a checkpoint file holds whole tensors"
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=tolerance, msg=name)


@pytest.fixture(scope="module", params=METHODS)
def runs(request, tmp_path_factory, launch, here):
    return Runs(request.param, tmp_path_factory.mktemp(request.param), launch, here)


def test_two_processes_with_half_the_batch_learn_what_one_learns(runs):
    if runs.data.deals_out:
        assert_equal_curves(runs.one.curve, runs.ddp.curve)
    else:  # each rank has samples of its own
        assert runs.one.curve.keys() == runs.ddp.curve.keys()
    effective = f"effective batch {runs.batch} = 2 processes x {runs.batch // 2}"
    assert effective in runs.said.out.splitlines(), "it is said once"
    assert runs.said.out.count("effective batch") == 1


def test_fsdp_equals_ddp(runs):
    runs.needs("ddp", "fsdp")
    assert_equal_curves(runs.ddp.curve, runs.fsdp.curve)
    assert_equal_weights(runs.ddp.weights, runs.fsdp.weights)
    for one, other in zip(runs.ddp.optimizers, runs.fsdp.optimizers, strict=True):
        assert one["state"].keys() == other["state"].keys()
        for key in one["state"]:
            assert_equal_weights(one["state"][key], other["state"][key])


def assert_every_sample_counts_once(runs, strategy):
    checkpoint = getattr(runs, strategy).last
    one, two = runs.test(checkpoint, processes=1), runs.test(checkpoint, processes=2)
    assert one.keys() == two.keys()
    assert any(name.startswith("test/") for name in one)
    for name in one:
        # Of a large value, such as a return of a thousand, float32 keeps seven digits.
        tolerance = 0 if name.endswith("accuracy") else 1e-6 * max(1.0, abs(one[name]))
        assert two[name] == pytest.approx(one[name], abs=tolerance), name


def test_a_test_on_two_processes_counts_every_sample_once(runs):
    # The stricter one: with an unequal number of batches FSDP2 would not end.
    assert_every_sample_counts_once(runs, "fsdp" if runs.method.fsdp else "ddp")


@pytest.mark.parametrize("runs", [FIRST], indirect=True)
def test_a_test_under_ddp_counts_every_sample_once(runs):
    assert_every_sample_counts_once(runs, "ddp")


@pytest.mark.parametrize("runs", [FIRST], indirect=True)
@pytest.mark.parametrize(("first", "then"), [("ddp", "fsdp"), ("fsdp", "ddp")])
def test_a_fit_goes_on_under_the_other_strategy(runs, first, then):
    runs.needs(first, then)
    # A copy outside of the run's folder, which other tests read.
    source = getattr(runs, first).last
    copy = runs.folder / f"{first}_then_{then}.ckpt"
    copy.write_bytes(source.read_bytes())
    runs.fit(f"{first}_then_{then}", "--config", f"trainer/{then}", "--ckpt_path", str(copy))
    resumed = Run(runs.folder / f"{first}_then_{then}")
    assert_equal_weights(runs.one.weights, resumed.weights)
    for name, values in runs.one.curve.items():
        assert resumed.curve[name] == pytest.approx(values[-1:], abs=TOLERANCE), name


@pytest.mark.parametrize("runs", [FIRST], indirect=True)
def test_torchrun_gives_the_numbers_of_the_own_launcher(runs, free_port):
    ddp = runs.ddp
    program = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", free_port, str(ROOT / "cli.py"))
    runs.fit("torchrun", "--config", "trainer/ddp", epochs=EPOCHS - 1, program=program)
    other = Run(runs.folder / "torchrun")
    assert_equal_weights(ddp.weights, other.weights, tolerance=0)
    assert ddp.curve == other.curve
