"""From the values of runs to verdicts: gains, margins, missing values."""

import pytest
import yaml

from fulgurite.reproduction.execution import Failure, Outcome
from fulgurite.reproduction.figure import claims_figure
from fulgurite.reproduction.measurement import measure
from fulgurite.reproduction.plan import Plan
from fulgurite.reproduction.reading import read_claims
from fulgurite.reproduction.report import claim_record, page, show


@pytest.fixture
def measured(tmp_path):
    """Measure one claim, given the metrics of each run and seed."""

    def measured(claim, metrics, plan_only=False):
        runs = {name: {"configs": ["rocp/smoke"], "overrides": {"seed": name}} for name in metrics}
        claim = {"id": "it", "claim": "It is.", "source": "Table 1", **claim}
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump({"runs": runs, "claims": [claim]}, sort_keys=False))
        plan = Plan(read_claims(path, "mine"))
        (read,) = plan.file.claims.values()
        plan.add(read)
        outcomes = {key: Outcome(job) for key, job in plan.jobs.items()}
        for name, seeds in metrics.items():
            for seed, values in enumerate(seeds):
                job = plan.job(name, seed)
                if isinstance(values, Failure):
                    outcomes[job.key] = Outcome(job, failure=values)
                elif values is not None:
                    values = values if isinstance(values, dict) else {"m": values}
                    result = {"metrics": values, "seconds": 2.0, "peak_memory_mib": 300.0, "commit": None}
                    result |= {"versions": {"torch": "2", "lightning": "2"}, "finished": "2026-12-01"}
                    outcomes[job.key] = Outcome(job, result=result)
        done = measure(read, plan, outcomes)
        return done, claim_record(done, plan, None)

    return measured


def comparison(direction="lower", n=3, other=None, **extra):
    variants = {"A": {"run": "a", "metric": "m"}, "B": other or {"run": "b", "metric": "m"}}
    return {"variants": variants, "direction": direction, "seeds": n, **extra}


def test_the_gain_is_positive_where_the_method_is_better(measured):
    metrics = {"a": [1.0, 1.1, 1.2], "b": [2.0, 2.1, 2.3]}
    lower, _ = measured(comparison(), metrics)
    assert lower.decisive.estimate.value == pytest.approx(3.1 / 3)
    assert lower.verdict == "holds"
    higher, _ = measured(comparison("higher"), metrics)
    assert higher.decisive.estimate.value == pytest.approx(-3.1 / 3)
    assert higher.verdict == "does not hold"
    assert "A is not better than B by more than 0" in higher.reason


def test_pairs_see_what_two_samples_do_not(measured):
    metrics = {"a": [1.0, 2.0, 3.0, 4.0], "b": [1.5, 2.6, 3.5, 4.5]}
    assert measured(comparison(n=4), metrics)[0].verdict == "holds"
    assert measured(comparison(n=4, paired=False), metrics)[0].verdict == "inconclusive"


@pytest.mark.parametrize(
    ("margin", "verdict"),
    [(0, "holds"), (0.15, "does not hold"), (0.05, "holds"), ("5 %", "holds"), ("15 %", "does not hold")],
)
def test_a_margin_is_absolute_or_a_share_of_the_other(measured, margin, verdict):
    metrics = {"a": [0.901, 0.9, 0.899], "b": [1.0, 1.0, 1.0]}
    assert measured(comparison(margin=margin), metrics)[0].verdict == verdict


def test_a_negative_margin_says_how_much_worse_is_good_enough(measured):
    metrics = {"a": [1.04, 1.041, 1.039], "b": [1.0, 1.0, 1.0]}
    assert measured(comparison(margin="-10 %"), metrics)[0].verdict == "holds"
    assert measured(comparison(margin=-0.02), metrics)[0].verdict == "does not hold"
    higher = {"a": [-1.04, -1.03, -1.05], "b": [-1.0, -1.0, -1.0]}
    assert measured(comparison("higher", margin="-10 %"), higher)[0].verdict == "holds"


def test_a_constant_can_be_compared_with(measured):
    done, record = measured(comparison("higher", other={"value": 0.9}), {"a": [0.95, 0.96, 0.94]})
    assert done.verdict == "holds"
    assert record["estimate"] == pytest.approx(0.05)


def test_a_metric_can_be_a_difference_of_two_and_what_the_run_took(measured):
    claim = comparison(other={"value": 5})
    claim["variants"]["A"] |= {"minus": "n"}
    done, _ = measured(claim, {"a": [{"m": 3.0, "n": 1.0}] * 3})
    assert done.values[""]["A"] == [2.0, 2.0, 2.0]
    claim["variants"]["A"] = {"run": "a", "metric": "run/peak_memory_mib", "minus": "run/seconds"}
    done, _ = measured(claim, {"a": [1.0] * 3})
    assert done.values[""]["A"] == [298.0] * 3


def test_values_equal_to_float32_rounding_make_no_gain(measured):
    done, _ = measured(comparison(), {"a": [0.0191666670143604] * 3, "b": [0.0191666675731539] * 3})
    assert done.decisive.estimate.value == 0.0
    assert done.verdict == "does not hold"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([1.0, Failure(1, "error: it broke"), 1.0], "1 of 6 runs failed: a, seed 1"),
        ([1.0, None, 1.0], "1 of 6 runs were not made"),
        ([1.0, {"m": None}, 1.0], "m of a, seed 1 is not finite"),
        ([1.0, {"mm": 1.0}, 1.0], "m of a, seed 1 is not there"),
    ],
)
def test_a_missing_value_leaves_the_claim_open_and_is_named(measured, values, reason):
    done, record = measured(comparison(), {"a": values, "b": [2.0, 2.0, 2.0]})
    assert done.verdict == "inconclusive"
    assert done.reason.startswith(reason)
    assert record["estimate"] is None
    assert record["variants"][0]["mean"] is None
    assert record["variants"][0]["values"].count(None) == 1


def test_one_seed_decides_nothing(measured):
    done, _ = measured(comparison(n=1), {"a": [1.0], "b": [2.0]})
    assert (done.verdict, done.reason) == ("inconclusive", "one seed has no interval")
    assert done.decisive.estimate.value == 1.0


def test_a_claim_is_as_good_as_its_worst_part(measured):
    claim = comparison()
    claim["variants"]["C"] = {"run": "c", "metric": "m"}
    claim["variants"]["D"] = {"run": "d", "metric": "m"}
    metrics = {"a": [1.0, 1.1, 1.2], "b": [2.0, 2.1, 2.3], "c": [0.9, 1.2, 1.2], "d": [0.5, 0.6, 0.6]}
    done, record = measured(claim, metrics)
    assert [part.verdict for part in done.parts] == ["holds", "inconclusive", "does not hold"]
    assert done.verdict == "does not hold"
    assert record["estimate"] == pytest.approx(-1.6 / 3), "the estimate of the part that decides"
    assert "1 of 3 comparisons, such as: A is not better than D" in done.reason


def test_a_growth_is_fitted_for_each_choice_of_the_rest(measured):
    claim = {
        "kind": "growth",
        "size": {"n": [1, 2, 4]},
        "over": {"k": [1, 2]},
        "variants": {"A": {"run": "a", "metric": "{k}_{n}"}},
        "at_most": 1.5,
        "seeds": 3,
    }
    seeds = [{f"{k}_{n}": noise * n**k for k in (1, 2) for n in (1, 2, 4)} for noise in (1.0, 1.1, 0.9)]
    done, record = measured(claim, {"a": seeds})
    assert [part.label for part in done.parts] == ["k 1", "k 2"]
    assert [part.estimate.value for part in done.parts] == pytest.approx([1.0, 2.0])
    assert [part.verdict for part in done.parts] == ["holds", "does not hold"]
    assert record["sizes"]["of"]["k 1, n 4"] == 4
    assert record["expected"] == "exponent against n less than 1.5"
    zero = [dict.fromkeys(seeds[0], 0.0)] * 3
    done, _ = measured(claim, {"a": zero})
    assert done.verdict == "inconclusive"
    assert "no logarithm" in done.reason


@pytest.mark.parametrize(
    ("counts", "verdict", "reason"),
    [
        ({"passed": 3, "failed": 0, "skipped": 0}, "holds", ""),
        ({"passed": 3, "failed": 1, "skipped": 0}, "does not hold", "1 tests fail"),
        ({"passed": 3, "failed": 0, "skipped": 2}, "inconclusive", "2 tests were skipped"),
    ],
)
def test_an_exact_property_holds_if_all_its_tests_pass(tmp_path, counts, verdict, reason):
    path = tmp_path / "mine.yaml"
    entry = {"id": "it", "claim": "It is.", "source": "S", "kind": "property", "tests": ["tests/conftest.py"]}
    path.write_text(yaml.safe_dump({"claims": [entry]}))
    plan = Plan(read_claims(path, "mine"))
    (claim,) = plan.file.claims.values()
    plan.add(claim)
    (job,) = plan.jobs.values()
    done = measure(claim, plan, {job.key: Outcome(job, result={"metrics": counts})})
    assert (done.verdict, done.reason) == (verdict, reason)


def test_the_page_the_table_and_the_figure_show_every_part_and_every_failure(measured, capsys):
    from rich.console import Console

    claim = comparison(remark="of little weight")
    claim["variants"]["C"] = {"run": "c", "metric": "m"}
    failure = Failure(-9, "error: killed\nby the system")
    _, record = measured(claim, {"a": [1.0, 1.1, 1.3], "b": [2.0, 2.1, 2.3], "c": [2.0, failure, 2.0]})
    text = page({"name": "mine", "paper": None, "arxiv": None, "claims": [record]}, has_figure=True)
    assert "| A 1.133 ± 0.088 | B 2.133 ± 0.088 | 1 | [1, 1] | holds |" in text
    assert "| A 1.133 ± 0.088 | C missing |  |  | inconclusive |" in text
    assert "**failed**: c, seed 1 (exit code -9): error: killed by the system" in text
    assert "Remark: of little weight." in text
    show([record], Console(width=120))
    shown = capsys.readouterr().out
    assert "it: inconclusive" in shown
    assert "1 of 9 runs failed: c, seed 1" in shown
    figure = claims_figure([record])
    assert figure is not None
    (axes,) = figure.axes
    dots = [line for line in axes.lines if line.get_marker() == "." and len(line.get_xdata()) == 3]
    assert [list(line.get_ydata()) for line in dots] == [[1.0, 1.1, 1.3], [2.0, 2.1, 2.3]]


def test_there_is_no_figure_of_nothing(measured):
    _, record = measured(comparison(), {"a": [None] * 3, "b": [None] * 3})
    assert claims_figure([record]) is None
