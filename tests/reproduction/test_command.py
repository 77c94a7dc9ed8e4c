"""``fulgurite reproduce`` with real runs, in processes of their own: whole, failing, interrupted, killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from fulgurite.reproduction.plan import Plan
from fulgurite.reproduction.reading import find_claims, read_claims

pytestmark = pytest.mark.slow

SHORT = {"trainer.max_epochs": 1}
CLAIMS = {
    "runs": {
        "narrow": {"configs": ["rocp/smoke"], "overrides": {**SHORT, "model.hidden": [8]}},
        "wide": {"configs": ["rocp/smoke"], "overrides": {**SHORT, "model.hidden": [64]}},
        "wide again": {
            "configs": ["rocp/smoke"],
            "commands": ["test"],
            "checkpoint_from": {"run": "wide"},
            "overrides": {"data.batch_size": 7},
        },
    },
    "claims": [
        {
            "id": "width",
            "claim": "A wide layer learns faster.",
            "source": "folklore",
            "variants": {
                "wide": {"run": "wide", "metric": "test/accuracy"},
                "narrow": {"run": "narrow", "metric": "test/accuracy"},
            },
            "direction": "higher",
            "seeds": 2,
        },
        {
            "id": "batches",
            "claim": "The size of a batch does not matter to a test.",
            "source": "common sense",
            "variants": {
                "again": {"run": "wide again", "metric": "test/accuracy"},
                "wide": {"run": "wide", "metric": "test/accuracy"},
            },
            "direction": "higher",
            "margin": -0.001,
            "seeds": 2,
        },
        {
            "id": "whole-files",
            "claim": "Files are written whole.",
            "source": "our own",
            "kind": "property",
            "tests": ["tests/storage/test_storage.py"],
        },
    ],
}


def write_claims(folder, tree):
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


def reproduce(folder, *arguments, **options):
    command = [sys.executable, "-m", "fulgurite.cli", "reproduce", *arguments]
    return subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )


def finished(process, timeout=180):
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A folder in which the claims were measured once."""
    folder = tmp_path_factory.mktemp("reproduce")
    write_claims(folder, CLAIMS)
    return folder, finished(reproduce(folder, "mine.yaml", "--output", "results"))


def test_claims_are_measured_and_written_down(measured):
    folder, (code, out, err) = measured
    assert code == 0, err + out
    record = json.loads((folder / "results" / "mine.json").read_text())
    claims = {claim["id"]: claim for claim in record["claims"]}
    assert list(claims) == ["width", "batches", "whole-files"]
    assert claims["batches"]["verdict"] == "holds"
    assert claims["batches"]["estimate"] == 0.0
    assert claims["whole-files"]["verdict"] == "holds"
    for claim in claims.values():
        assert claim["verdict"] in ("holds", "does not hold", "inconclusive")
        for run in claim["runs"]:
            assert run["status"] == "done"
            assert run["seconds"] > 0
            assert run["peak_memory_mib"] > 10
            assert run["versions"]["torch"]
            assert "commit" in run
            assert run["config"]
    accuracies = [run["metrics"]["test/accuracy"] for run in claims["width"]["runs"] if run["run"] == "wide"]
    assert accuracies == claims["width"]["variants"][0]["values"]
    assert [run["seed"] for run in claims["width"]["runs"]] == [0, 1, 0, 1]
    assert str(Path.home()) not in json.dumps(record).replace(str(folder), "")
    page = (folder / "results" / "mine.md").read_text()
    assert f"## width: {claims['width']['verdict']}" in page
    assert (folder / "results" / "mine.png").read_bytes().startswith(b"\x89PNG")
    assert "7 runs, 0 of them there already" in out


def test_what_was_measured_is_not_run_again(measured):
    folder, _ = measured
    files = sorted((folder / "runs").rglob("result.json"))
    assert len(files) == 7
    before = [file.stat().st_mtime_ns for file in files]
    code, out, err = finished(reproduce(folder, "mine.yaml", "--output", "again"))
    assert code == 0, err
    assert "7 runs, 7 of them there already" in out
    assert [file.stat().st_mtime_ns for file in files] == before
    assert (folder / "again" / "mine.md").read_text() == (folder / "results" / "mine.md").read_text()


def test_one_claim_leaves_the_record_of_the_others(measured):
    folder, _ = measured
    before = json.loads((folder / "results" / "mine.json").read_text())
    code, out, err = finished(
        reproduce(folder, "mine.yaml", "--output", "results", "--claim", "whole-files", "--fresh")
    )
    assert code == 0, err
    assert "1 runs, 0 of them there already" in out
    after = json.loads((folder / "results" / "mine.json").read_text())
    assert after["claims"][:2] == before["claims"][:2]
    assert after["claims"][2]["runs"][0]["finished"] >= before["claims"][2]["runs"][0]["finished"]


def test_a_failed_run_is_shown_and_tried_again(workspace):
    tree = {"runs": dict(CLAIMS["runs"]), "claims": CLAIMS["claims"][:2]}
    tree["runs"]["wide"] = {"configs": ["rocp/smoke"], "overrides": {**SHORT, "model.hidden": "wide"}}
    write_claims(workspace, tree)
    for _ in range(2):
        code, out, _ = finished(reproduce(workspace, "mine.yaml", "--seeds", "1", "--output", "results"))
        assert code == 1
        assert "FAILED wide, seed 0, exit code 2" in out
        assert "error: command line, model.hidden" in out
        assert "FAILED wide again, seed 0" in out, "it starts from a run that failed"
    record = json.loads((workspace / "results" / "mine.json").read_text())
    assert [claim["verdict"] for claim in record["claims"]] == ["inconclusive"] * 2
    assert "wide, seed 0" in record["claims"][0]["reason"]
    (failed,) = [run for run in record["claims"][0]["runs"] if run["status"] == "failed"]
    assert failed["exit_code"] == 2
    assert "**failed**: wide, seed 0 (exit code 2)" in (workspace / "results" / "mine.md").read_text()


LONG = {"trainer.max_epochs": 200, "trainer.check_val_every_n_epoch": 200, "model.hidden": [64]}


def long_claims(folder):
    """Two runs of which the second takes long; its job's folder."""
    tree = {
        "runs": {"narrow": CLAIMS["runs"]["narrow"], "wide": {"configs": ["rocp/smoke"], "overrides": LONG}},
        "claims": [
            CLAIMS["claims"][0] | {"seeds": 1, "variants": dict(reversed(CLAIMS["claims"][0]["variants"].items()))}
        ],
    }
    path = write_claims(folder, tree)
    plan = Plan(read_claims(path, "mine"))
    plan.add(plan.file.claims["width"])
    return [folder / "runs" / "reproduction" / "mine" / plan.job(name, 0).key for name in ("narrow", "wide")]


def wait_for(condition, seconds=90):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.1)


def processes_at(folder):
    listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if str(folder) in line or folder.name in line]


def test_killed_in_the_middle_it_goes_on_and_repeats_nothing(workspace):
    short, long = long_claims(workspace)
    process = reproduce(workspace, "mine.yaml", "--jobs", "1")
    wait_for(lambda: list(long.rglob("last.ckpt")))
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=10)
    assert (short / "result.json").exists()
    assert not (long / "result.json").exists()
    wait_for(lambda: not processes_at(long), 30)

    first = (short / "result.json").stat().st_mtime_ns
    code, out, err = finished(reproduce(workspace, "mine.yaml", "--jobs", "1"))
    assert code == 0, err + out
    assert "2 runs, 1 of them there already" in out
    assert (short / "result.json").stat().st_mtime_ns == first
    result = json.loads((long / "result.json").read_text())
    assert result["resumed"], "the fit went on from its last checkpoint"
    assert len(list(long.glob("runs/rocp/smoke/*-0"))) == 1
    assert (workspace / "runs" / "reproduction" / "mine.json").exists()


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_ends_it_with_its_children(workspace, sent, code):
    _, long = long_claims(workspace)
    process = reproduce(workspace, "mine.yaml", "--jobs", "2")
    wait_for(lambda: list(long.rglob("last.ckpt")))
    os.kill(process.pid, sent)
    ended, _, err = finished(process, timeout=40)
    assert ended == code
    assert "the same command goes on from there" in err
    assert not processes_at(long)
    assert not (long / "failure.json").exists(), "to be interrupted is not to fail"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "reproduce: name a method ("),
        (["rcop"], "no claims for 'rcop'; did you mean rocp"),
        (["rocp", "--claim", "los"], "has no claim 'los'; did you mean loss"),
        (["rocp", "--seeds", "0"], "argument --seeds: '0' is not a number of 1 or more"),
        (["rocp", "--job", "2"], "unrecognized arguments: --job 2; did you mean --jobs"),
    ],
)
def test_wrong_usage_is_one_line(fulgurite_cli, arguments, message):
    outcome = fulgurite_cli("reproduce", *arguments)
    assert outcome.code == 2
    assert message in outcome.err
    assert len(outcome.err.splitlines()) == 1


def test_the_claims_are_listed_with_their_verdicts(fulgurite_cli):
    outcome = fulgurite_cli("reproduce", "--list")
    assert outcome.code == 0
    for name in find_claims("rocp").claims:
        assert f"  {name}: " in outcome.out
