"""Jobs: what is shared, what the key depends on, and the command lines that come of it."""

import json

import pytest
import yaml

from fulgurite.command_line.errors import UsageError
from fulgurite.reproduction import plan as planning
from fulgurite.reproduction.claims import Run
from fulgurite.reproduction.plan import Plan, fingerprint, layers_of, run_job
from fulgurite.reproduction.reading import read_claims


def run(**changes):
    return Run(**{"name": "a", "configs": ("rocp/cpu",), "overrides": {}, "callbacks": {}, **changes})


@pytest.fixture
def plan_of(tmp_path):
    def plan_of(runs, *claims, seeds=None):
        path = tmp_path / "mine.yaml"
        entries = [
            {
                "id": f"claim-{number}",
                "claim": "It is.",
                "source": "Table 1",
                "direction": "lower",
                "seeds": 2,
                "variants": {name: {"run": name, "metric": "test/loss"} for name in names},
            }
            for number, names in enumerate(claims)
        ]
        path.write_text(yaml.safe_dump({"runs": runs, "claims": entries}, sort_keys=False))
        plan = Plan(read_claims(path, "mine"))
        for claim in plan.file.claims.values():
            plan.add(claim, seeds)
        return plan

    return plan_of


A = {"configs": ["rocp/smoke"]}
B = {"configs": ["rocp/smoke"], "overrides": {"model.dropout": 0.5}}


def test_a_run_is_planned_once_for_each_seed_whoever_reads_it(plan_of):
    plan = plan_of({"a": A, "b": B}, ["a", "b"], ["b", "a"])
    assert len(plan.jobs) == 4
    assert {(job.name, job.seed) for job in plan.jobs.values()} == {("a", 0), ("a", 1), ("b", 0), ("b", 1)}


def test_equal_runs_under_two_names_are_one(plan_of):
    plan = plan_of({"a": A, "again": A, "b": B}, ["a", "again"], ["a", "b"])
    assert len(plan.jobs) == 4
    assert plan.job("a", 1) is plan.job("again", 1)


def test_a_run_stands_behind_the_one_it_starts_from(plan_of):
    b = {**B, "commands": ["test"], "checkpoint_from": {"run": "a"}}
    plan = plan_of({"a": {**A, "commands": ["fit"]}, "b": b, "c": B}, ["b", "c"], seeds=1)
    assert [job.name for job in plan.jobs.values()] == ["a", "b", "c"]
    assert plan.job("b", 0).source is plan.job("a", 0)


def test_the_number_of_seeds_can_be_asked_for(plan_of):
    assert len(plan_of({"a": A, "b": B}, ["a", "b"], seeds=3).jobs) == 6


@pytest.mark.parametrize(
    "change",
    [
        {"configs": ("rocp/smoke",)},
        {"configs": ("rocp/cpu", "trainer/cpu")},
        {"overrides": {"model.dropout": 0.5}},
        {"callbacks": {"ConformalCalibration": False}},
        {"callbacks": {"PlainProgress": True}},
        {"commands": ("fit",)},
        {"checkpoint": "last"},
    ],
)
def test_whatever_is_run_is_in_the_key(change):
    assert run_job(run(**change), 0, None).key != run_job(run(), 0, None).key
    assert run_job(run(**change), 0, None).config != run_job(run(), 0, None).config


def test_the_key_depends_on_seed_versions_source_and_code_but_not_on_the_name(monkeypatch):
    key = run_job(run(), 0, None).key
    assert run_job(run(name="b"), 0, None).key == key
    assert run_job(run(), 1, None).key != key
    assert run_job(run(), 0, run_job(run(), 0, None)).key != key
    with monkeypatch.context() as changed:
        changed.setattr(planning, "versions", lambda: ("99", "99"))
        assert run_job(run(), 0, None).key != key
    with monkeypatch.context() as changed:
        changed.setattr(planning, "code_hash", lambda *_: "other")
        assert run_job(run(), 0, None).key != key


def test_the_code_is_that_of_model_data_and_callbacks(monkeypatch):
    seen = []
    monkeypatch.setattr(planning, "code_hash", lambda names, files=(): seen.extend(names) or "hash")
    run_job(run(overrides={"data": "DigitsHazard", "trainer.logger": {"class_path": "a.B"}}), 0, None)
    assert {
        "fulgurite.modules.Classifier",
        "fulgurite.datamodules.DigitsHazard",
        "fulgurite.callbacks.ConformalCalibration",
        "torch.optim.Adam",
        "a.B",
    } <= set(seen)


def test_comments_in_a_config_do_not_change_the_key(tmp_path):
    one, other = tmp_path / "one.yaml", tmp_path / "other.yaml"
    one.write_text("model: {class_path: fulgurite.modules.Classifier}\n")
    other.write_text("# words\nmodel:\n  class_path: fulgurite.modules.Classifier\n")
    assert run_job(run(configs=(str(one),)), 0, None).key == run_job(run(configs=(str(other),)), 0, None).key


def test_a_callback_is_dropped_from_the_layers_or_added_to_the_command_line(tmp_path):
    job = run_job(run(callbacks={"ConformalCalibration": False, "PlainProgress": True}), 3, None)
    words = job.arguments(tmp_path)
    written = tmp_path / "cpu.yaml"
    assert words[:2] == ["--config", str(written)]
    assert yaml.safe_load(written.read_text())["trainer"]["callbacks"] == []
    assert "--trainer.callbacks+=PlainProgress" in words
    assert words[words.index("--seed_everything") + 1] == "3"


def test_a_callback_is_found_in_every_way_of_writing_it(tmp_path):
    path = tmp_path / "mine.yaml"
    for callbacks in (
        {"callbacks+": [{"class_path": "fulgurite.callbacks.FiniteGuard"}]},
        {"callbacks": {"class_path": "fulgurite.callbacks.FiniteGuard"}},
        {"callbacks": ["FiniteGuard", "PlainProgress"]},
    ):
        path.write_text(yaml.safe_dump({"trainer": callbacks}))
        (layer,) = layers_of(run(configs=(str(path),), callbacks={"FiniteGuard": False}))
        assert "FiniteGuard" not in layer.text
    with pytest.raises(UsageError, match="none of rocp/smoke has a callback FiniteGuard"):
        layers_of(run(configs=("rocp/smoke",), callbacks={"FiniteGuard": False}))


def test_values_become_words_that_the_parser_reads_back(tmp_path):
    values = {"model.a": "text: with colon", "model.b": [[1, 2.5], None], "model.c": True, "model.d": {"x": {"y": "z"}}}
    words = run_job(run(overrides=values), 0, None).arguments(tmp_path)
    read = dict(word.removeprefix("--").split("=", 1) for word in words[-4:])
    assert read["model.a"] == "text: with colon"
    assert {key: yaml.safe_load(read[key]) for key in list(values)[1:]} == {
        key: values[key] for key in list(values)[1:]
    }
    assert json.dumps(values)  # plain data throughout


def test_a_fingerprint_is_of_the_definition_the_configs_and_the_code(plan_of, monkeypatch):
    def of(runs, names, seeds=None):
        plan = plan_of(runs, names, seeds=seeds)
        (claim,) = plan.file.claims.values()
        return fingerprint(plan, claim, seeds)

    present = of({"a": A, "b": B}, ["a", "b"])
    assert of({"a": A, "b": B, "c": A}, ["a", "b"]) == present
    assert of({"a": A, "b": B}, ["a", "b"], seeds=5) == present, "more seeds are no other claim"
    assert of({"a": A, "b": {**B, "checkpoint": "last"}}, ["a", "b"]) != present
    assert of({"a": A, "b": B}, ["b", "a"]) != present, "the first variant is the method's"
    monkeypatch.setattr(planning, "code_hash", lambda *_: "other")
    assert of({"a": A, "b": B}, ["a", "b"]) != present


def test_an_unknown_config_is_named(plan_of):
    with pytest.raises(
        UsageError, match="config 'rocp/smok' is neither a file nor a shipped config; did you mean rocp/smoke"
    ):
        plan_of({"a": {"configs": ["rocp/smok"]}, "b": B}, ["a", "b"])
