"""The README says what is true now."""

import re
import shlex

import pytest

from fulgurite.command_line.provenance import ROOT
from fulgurite.modules import METHODS
from fulgurite.reproduction.ledger import LEDGER, ledger, publish, readme_example, readme_table
from fulgurite.reproduction.plan import Plan
from fulgurite.reproduction.reading import find_claims

README = ROOT / "README.md"
PAGES = [f"docs/methods/{slug}.md" for slug in METHODS]


def between(name):
    text = README.read_text()
    return text.partition(f"<!-- {name}: begin -->\n")[2].partition(f"\n<!-- {name}: end -->")[0]


def test_the_method_table_and_the_ledger_are_those_of_the_register_and_the_records(request):
    if request.config.getoption("--update-readme"):
        publish()
    remedy = "measure again, or say that the results are of earlier code: pytest tests/docs --update-readme"
    assert between("methods") == readme_table(), remedy
    assert between("claim") == readme_example(), remedy
    assert LEDGER.read_text() == ledger(), remedy


def numbers(text):
    """(row, column) -> value of every number in the printed tables."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    return {(row[0], at): float(cell) for row in rows for at, cell in enumerate(row[1:]) if cell}


def outline(text):
    """The lines without their numbers."""
    return [re.sub(r"\d{8}-\d{6}-\d+|[\d.]+(e-\d+)?", "#", line) for line in text.splitlines()]


def test_the_demo_prints_what_the_readme_shows(fulgurite_cli):
    commands = re.findall(r"\$\(BIN\)/fulgurite (.+)", (ROOT / "Makefile").read_text())
    for command, part in zip(commands, ("demo fit", "demo test"), strict=True):
        shown = between(part).removeprefix("```text\n").removesuffix("\n```")
        outcome = fulgurite_cli(*shlex.split(command))
        assert outcome.code == 0, outcome.err
        # Other processors round differently: a few samples of 600 may be decided otherwise.
        assert numbers(outcome.out) == pytest.approx(numbers(shown), abs=0.1), "run `make demo` and copy its output"
        assert len(numbers(shown)) >= 5
        assert outline(outcome.out) == outline(shown)


@pytest.mark.parametrize(
    "page",
    ["README.md", "SECURITY.md", "CONTRIBUTING.md"]
    + [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))],
)
def test_links_in_the_docs_lead_somewhere(page):
    prose = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", prose):
        assert ((ROOT / page).parent / target).exists(), target


def test_the_example_of_a_claim_file_can_be_planned(tmp_path):
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/claims.md").read_text(), re.DOTALL)
    (tmp_path / "mine.yaml").write_text(text)
    plan = Plan(find_claims(str(tmp_path / "mine.yaml")))
    for claim in plan.file.claims.values():
        plan.add(claim)
    assert {job.name for job in plan.jobs.values()} == {"base", "price_10", "price_50", "exact"}


@pytest.mark.parametrize("page", ["README.md", *PAGES])
def test_the_python_examples_run(workspace, page):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    exec(compile(code, page, "exec"), {})


def commands_of(page):
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("fulgurite ")]
    return [shlex.split(line, comments=True)[1:] for line in lines]


@pytest.mark.parametrize("page", ["README.md", *PAGES])
def test_the_commands_of_a_page_run(fulgurite_cli, page):
    commands = commands_of(page)
    assert len(commands) >= 2
    for command in commands:
        short = ["--trainer.max_epochs", "1", "--trainer.check_val_every_n_epoch", "1"] if command[0] == "fit" else []
        outcome = fulgurite_cli(*command, *short)
        assert outcome.code == 0, (command, outcome.err)
