"""Every YAML in configs/ is held to the same rules, and runs through the real command line."""

import inspect
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from fulgurite.command_line.configs import shipped_configs
from fulgurite.modules import METHODS

CONFIGS = shipped_configs()
EXPERIMENTS = [name for name in CONFIGS if not name.startswith("trainer/")]
OVERLAYS = [name for name in CONFIGS if name.startswith("trainer/")]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_is_short_and_begins_with_what_it_shows(name):
    lines = CONFIGS[name].read_text().splitlines()
    assert len(lines) <= 60
    assert [line.startswith("# ") for line in lines[:4]] == [True, True, True, False]
    opening = (
        ("# Claim: ", "# Expected: ", "# Run: ") if name in EXPERIMENTS else ("# Overlay: ", "# Changes: ", "# Run: ")
    )
    for line, begin in zip(lines, opening, strict=False):
        assert line.startswith(begin)
    assert "${" not in "\n".join(lines)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_is_complete_in_itself(name):
    tree = yaml.safe_load(CONFIGS[name].read_text())
    assert isinstance(tree["seed_everything"], int)
    for section in ("model", "data"):
        assert tree[section]["class_path"].startswith("fulgurite.")


def skip_without_data(name):
    """A config that names a folder of data needs files that are not shipped; one that does not, works offline."""
    root = yaml.safe_load(CONFIGS[name].read_text())["data"].get("init_args", {}).get("root")
    if root and not Path(root).is_dir():
        pytest.skip(f"{name} needs the data in {root}")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_trains_and_tests_a_few_batches(fulgurite_cli, name):
    skip_without_data(name)
    package, _, data = yaml.safe_load(CONFIGS[name].read_text())["data"]["class_path"].rpartition(".")
    known = inspect.signature(getattr(import_module(package), data)).parameters
    few = {"learning_starts": "100", "evaluation_episodes": "2"}  # what fast_dev_run does not know of
    short = [f"--data.{argument}={value}" for argument, value in few.items() if argument in known]
    for command in ("fit", "test"):
        outcome = fulgurite_cli(command, "--config", name, "--trainer.fast_dev_run", "2", *short)
        if "needs what is not installed" in outcome.err:
            pytest.skip(outcome.err)
        assert outcome.code == 0, outcome.err


def holds(whole, part):
    """Whether a tree has everything that another one sets."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(key in whole and holds(whole[key], value) for key, value in part.items())
    if isinstance(part, list):
        return isinstance(whole, list) and len(whole) == len(part) and all(map(holds, whole, part))
    return whole == part


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_layers_on_every_experiment(fulgurite_cli, name, overlay):
    outcome = fulgurite_cli("fit", "--config", name, "--config", overlay, "--print_config")
    assert outcome.code == 0, outcome.err
    printed, changed = yaml.safe_load(outcome.out), yaml.safe_load(CONFIGS[overlay].read_text())
    assert holds(printed["trainer"], changed["trainer"])


@pytest.mark.parametrize("overlay", ["trainer/cpu", "trainer/debug"])
def test_an_overlay_that_needs_no_gpu_runs(fulgurite_cli, overlay):
    outcome = fulgurite_cli("fit", "--config", "rocp/smoke", "--config", overlay, "--trainer.max_epochs", "1")
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize("slug", METHODS)
def test_every_method_has_its_smoke_and_cpu_configs(slug):
    assert {f"{slug}/smoke", f"{slug}/cpu"} <= CONFIGS.keys()


def test_every_config_belongs_to_a_method_or_is_an_overlay():
    assert {name.partition("/")[0] for name in CONFIGS} <= {*METHODS, "trainer"}


@pytest.mark.slow
@pytest.mark.parametrize("slug", METHODS)
def test_a_fit_and_a_test_in_a_process_of_its_own_give_the_numbers_of_this_process(fresh_process, fulgurite_cli, slug):
    def metrics(root: str, command: str) -> dict[str, float]:
        (file,) = (path for path in Path(root).rglob("results.json") if f"/{command}/" in str(path))
        return yaml.safe_load(file.read_text())["metrics"]

    fitted = fulgurite_cli("fit", "--config", f"{slug}/smoke", "--trainer.default_root_dir", "here")
    assert fitted.code == 0, fitted.err
    best = str(next(Path("here").rglob("best.ckpt")))
    assert fulgurite_cli("test", "--ckpt_path", best).code == 0
    here = metrics("here", "test")

    tested = fresh_process("test", "--ckpt_path", best, "--trainer.default_root_dir", "there")
    assert tested.code == 0, tested.err
    both = [path for path in Path("here").rglob("results.json") if "/test/" in str(path)]
    assert len(both) == 2
    for file in both:
        assert yaml.safe_load(file.read_text())["metrics"] == here
