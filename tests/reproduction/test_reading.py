"""Claim files: what they mean, and what is said of a wrong one."""

import copy

import pytest
import yaml

from fulgurite.command_line.errors import UsageError
from fulgurite.command_line.provenance import ROOT
from fulgurite.modules import METHODS
from fulgurite.reproduction.claims import CheckpointFrom, Comparison, Growth, Margin, Property
from fulgurite.reproduction.plan import Plan
from fulgurite.reproduction.reading import find_claims, read_claims, shipped_claims

COMPARISON = {
    "id": "first",
    "claim": "A is better\nthan B.",
    "source": "Table 1",
    "over": {"size": [1, 2]},
    "variants": {"A": {"run": "a_{size}", "metric": "test/{size}_loss"}, "B": {"value": 3}},
    "direction": "lower",
    "margin": "10 %",
    "seeds": 3,
}
RUN = {"over": {"size": [1, 2]}, "configs": ["rocp/smoke"], "overrides": {"model.hidden": ["{size}"]}}
FILE = {
    "runs": {"a_{size}": RUN},
    "claims": [COMPARISON],
}


@pytest.fixture
def read(tmp_path):
    def read(tree):
        path = tmp_path / "mine.yaml"
        path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree, sort_keys=False))
        return read_claims(path, "mine")

    return read


def changed(*keys, value):
    """The example with the value at a place changed; None removes it."""
    tree = copy.deepcopy(FILE)
    place = tree
    for key in keys[:-1]:
        place = place[key]
    if value is None:
        del place[keys[-1]]
    else:
        place[keys[-1]] = value
    return tree


def test_what_a_claim_ranges_over_is_filled_in_with_its_type(read):
    file = read(FILE)
    assert set(file.runs) == {"a_1", "a_2"}
    assert file.runs["a_2"].overrides == {"model.hidden": [2]}
    (claim,) = file.claims.values()
    assert isinstance(claim, Comparison)
    assert claim.claim == "A is better than B."
    assert [setting.label for setting in claim.settings] == ["size 1", "size 2"]
    assert claim.settings[1].variants["A"].run == "a_2"
    assert claim.settings[1].variants["A"].metric == "test/2_loss"
    assert claim.margin == Margin(0.1, relative=True)
    assert claim.paired


def test_settings_can_be_listed_one_by_one(read):
    tree = changed("claims", 0, "over", value=[{"size": 1, "level": 0.5}, {"size": 2, "level": 0.7}])
    tree["claims"][0]["variants"]["B"] = {"value": "{level}"}
    (claim,) = read(tree).claims.values()
    assert [setting.variants["B"].value for setting in claim.settings] == [0.5, 0.7]


def test_a_growth_and_a_property_are_claims_too(read):
    tree = copy.deepcopy(FILE)
    variants = {"A": {"run": "a_{size}", "metric": "run/seconds"}}
    common = {"claim": "It is.", "source": "Section 2"}
    tree["claims"] = [
        {**common, "id": "cost", "kind": "growth", "size": {"size": [1, 2]}, "variants": variants, "at_most": 1.2},
        {**common, "id": "exact", "kind": "property", "tests": ["tests/test_it.py::test_it"]},
    ]
    cost, exact = read(tree).claims.values()
    assert isinstance(cost, Growth)
    assert cost.scale == "log"
    assert cost.at_least is None
    assert [setting.values for setting in cost.settings] == [{"size": 1}, {"size": 2}]
    assert isinstance(exact, Property)


def test_a_run_can_start_from_another(read):
    tree = copy.deepcopy(FILE)
    tree["runs"]["b"] = {
        "configs": ["rocp/smoke"],
        "commands": ["test"],
        "checkpoint_from": {"run": "a_1", "which": "last"},
    }
    assert read(tree).runs["b"].checkpoint_from == CheckpointFrom("a_1", "ckpt_path", "last")


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (changed("claims", value=[]), "give a list of claims"),
        ({**FILE, "claim": 1}, "the file: there is no 'claim'; did you mean claims"),
        (changed("claims", 0, "directoin", value="lower"), "'first': there is no 'directoin'; did you mean direction"),
        (changed("claims", 0, "direction", value="down"), "'down' is none of the choices; choose lower or higher"),
        (changed("claims", 0, "direction", value=None), "direction: nothing is given; choose lower or higher"),
        (changed("claims", 0, "kind", value="comparision"), "kind: 'comparision' is none of the choices"),
        (changed("claims", 0, "id", value="First claim"), "lower-case words joined by hyphens"),
        (changed("claims", 0, "source", value=None), "it needs 'source'"),
        (changed("claims", 0, "seeds", value=0), "0 is not a number of seeds"),
        (changed("claims", 0, "margin", value="ten"), "'ten' is not a number, or a share such as 10 %"),
        (changed("claims", 0, "minutes", value="long"), "minutes: 'long' is not a number"),
        (changed("claims", 0, "over", value={"size": 3}), "over, size: give a list of values"),
        (changed("claims", 0, "variants", "B", value={"run": "a_3", "metric": "x"}), "no run 'a_3'; did you mean a_"),
        (changed("claims", 0, "variants", "B", value={"run": "a_1"}), "variant B: give run and metric, or value"),
        (changed("claims", 0, "variants", "B", value={"vaule": 1}), "there is no 'vaule'; did you mean value"),
        (changed("claims", 0, "variants", "B", value=None), "then at least one to compare with"),
        (changed("claims", 0, "variants", "A", value={"value": 1}), "the first is the method's, so it is no constant"),
        (changed("runs", "a_{size}", "configs", value="rocp/smoke"), "configs: give a list of config names"),
        (changed("runs", "a_{size}", "commands", value=["train"]), r"\['train'\] is not a choice of fit, test"),
        (changed("runs", "a_{size}", "commands", value=["test"]), "a test without a fit needs checkpoint_from"),
        (changed("runs", "a_{size}", "callbacks", value={"PAVE": "off please"}), "give true .takes part. or false"),
        (changed("runs", "a_{size}", "checkpoint_from", value={"run": "c"}), "checkpoint_from: there is no run 'c'"),
        (changed("runs", "a_{size}", "checkpoint_from", value={"run": "a_1"}), "it starts from its own checkpoint"),
        (changed("runs", "a_{size}", "checkpoint_from", value={}), "checkpoint_from: it needs 'run'"),
        ({**FILE, "claims": [COMPARISON, COMPARISON]}, "'first' stands there twice"),
        ("runs: [", "line 1: this is not valid YAML"),
        ("", "the file is empty"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_place(read, tree, message):
    with pytest.raises(UsageError, match=message) as error:
        read(tree)
    assert "mine.yaml" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_growth_needs_sizes_and_a_bound(read):
    entry = {"id": "cost", "claim": "It is.", "source": "Section 2", "kind": "growth", "variants": {}}
    for change, message in (
        ({"size": {"size": [1]}}, "give one name and its values"),
        ({"size": {"size": [1, "two"]}}, "'two' is not a number"),
        ({"size": {"size": [1, 2]}}, "give at_least, at_most or both"),
    ):
        with pytest.raises(UsageError, match=message):
            read({"claims": [{**entry, **change}]})


def test_an_unknown_method_is_answered_with_the_nearest():
    with pytest.raises(UsageError, match="no claims for 'rcop'; did you mean rocp"):
        find_claims("rcop")
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        find_claims("nowhere/claim.yaml")
    with pytest.raises(UsageError, match=r"has no claim 'lost'; did you mean loss"):
        find_claims("rocp").chosen(["lost"])


@pytest.mark.parametrize("slug", shipped_claims())
def test_every_shipped_claim_can_be_planned(slug):
    assert slug in METHODS
    file = find_claims(slug)
    plan = Plan(file)
    for claim in file.claims.values():
        plan.add(claim, seeds=1)
    assert plan.jobs
    for job in plan.jobs.values():
        for node in job.tests:
            assert (ROOT / node.partition("::")[0]).is_file()
