"""``fulgurite reproduce``: measure the claims of a method, and write down what came out."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fulgurite.command_line.errors import UsageError, nearest, print_error
from fulgurite.reproduction.claims import Claim, ClaimFile
from fulgurite.reproduction.execution import LOG_FILE, Outcome, TerminationError, execute, outcomes_of
from fulgurite.reproduction.ledger import publish
from fulgurite.reproduction.measurement import measure
from fulgurite.reproduction.plan import Plan, seeds_of
from fulgurite.reproduction.reading import find_claims, shipped_claims
from fulgurite.reproduction.records import PUBLISHED, published_folder, read_record, verdicts
from fulgurite.reproduction.report import claim_record, show, write_report

ROOT = Path("runs") / "reproduction"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are ours: one line, and the nearest right option."""

    def error(self, message: str) -> NoReturn:
        options = [option for action in self._actions for option in action.option_strings]
        unknown = [word for word in message.split() if word.startswith("--") and word not in options]
        raise UsageError(f"reproduce: {message}{nearest(unknown[0], options) if unknown else ''}")


def parser() -> Parser:
    """The options of ``fulgurite reproduce``."""
    built = Parser(
        prog="fulgurite reproduce",
        description="Measure the claims of a method against their baselines, over seeds, and compute the verdicts. "
        "What was measured before with the same code, configs and versions is not run again.",
        allow_abbrev=False,
    )
    built.add_argument("methods", nargs="*", metavar="METHOD", help="slug of a method, or a claim file of your own")
    built.add_argument("--all", action="store_true", help="every method that has claims")
    built.add_argument("--list", action="store_true", help="show the claims and run nothing")
    built.add_argument("--claim", action="append", default=[], metavar="ID", help="this claim only; may be repeated")
    built.add_argument("--seeds", type=positive, metavar="N", help="seeds 0 to N-1; default: what each claim asks for")
    built.add_argument(
        "--jobs", type=positive, metavar="N", default=min(2, os.cpu_count() or 1), help="runs at a time; default 2"
    )
    built.add_argument("--fresh", action="store_true", help="forget earlier results")
    built.add_argument("--report", action="store_true", help="write the report from the results there are; run nothing")
    built.add_argument("--root", type=Path, default=ROOT, metavar="FOLDER", help=f"of the runs; default {ROOT}")
    built.add_argument(
        "--output", type=Path, metavar="FOLDER", help="of the report; default docs/results of a checkout, else --root"
    )
    return built


def positive(word: str) -> int:
    """A whole number of at least 1."""
    if not word.isdigit() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number of 1 or more")
    return int(word)


def reproduce(arguments: Sequence[str]) -> int:
    """Run the command.

    Returns:
        The exit code: 0 measured (whatever the verdicts), 1 a run failed, 130 or 143 ended by a signal.

    Raises:
        UsageError: an option, a claim file or something that it names is wrong.
    """
    options = parser().parse_args(arguments)
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)
    names = list(shipped_claims()) if options.all or (options.list and not options.methods) else options.methods
    if not names:
        raise UsageError(f"reproduce: name a method ({', '.join(shipped_claims())}), a claim file, or give --all")
    files = [find_claims(name) for name in dict.fromkeys(names)]
    if options.list:
        for file in files:
            list_claims(file, output_folder(file, options), console)
        return 0
    chosen = {file.name: file.chosen(options.claim) for file in files}
    failed = False
    try:
        for file in files:
            failed |= measure_file(file, chosen[file.name], options, console)
    except KeyboardInterrupt:
        return stopped("Ctrl-C", 130)
    except TerminationError:
        return stopped("SIGTERM", 143)
    return 1 if failed else 0


def measure_file(file: ClaimFile, claims: Sequence[Claim], options: argparse.Namespace, console: Console) -> bool:
    """Measure claims of one file, and write the report; returns whether a run failed."""
    plan = Plan(file)
    for claim in claims:
        plan.add(claim, options.seeds)
    root = options.root / file.name
    outcomes = outcomes_of(plan, root)
    there = 0 if options.fresh else sum(outcome.result is not None for outcome in outcomes.values())
    minutes = sum(claim.minutes for claim in claims)
    minutes = min(minutes, file.minutes or minutes)
    number = len(plan.jobs)
    console.print(f"{file.name}: {len(claims)} claims, {number} runs, {there} of them there already")
    if there < number:
        console.print(f"together they take about {minutes:g} minutes")
    if not options.report and there < number:
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not sys.stdout.isatty(),
        ) as progress:
            task = progress.add_task(file.name, total=number, completed=there)

            def report(outcome: Outcome) -> None:
                progress.advance(task)
                console.print(line_of(outcome, root))

            outcomes = execute(plan, root, options.jobs, options.fresh, report)
    records = [claim_record(measure(claim, plan, outcomes, options.seeds), plan, options.seeds) for claim in claims]
    show(records, console)
    console.print(f"\n{file.name}: {verdicts(records)}")
    output = output_folder(file, options)
    for path in write_report(file, records, output):
        console.print(f"wrote {path}")
    if output == PUBLISHED:
        publish()
        console.print(f"wrote {PUBLISHED / 'README.md'} and the table of the README")
    return any(outcome.failure for outcome in outcomes.values())


def output_folder(file: ClaimFile, options: argparse.Namespace) -> Path:
    """Where the report goes: of a shipped method to the documentation of a checkout."""
    if options.output:
        return Path(options.output)
    published = published_folder() if file.name in shipped_claims() else None
    return published or Path(options.root)


def line_of(outcome: Outcome, root: Path) -> str:
    """A line of progress on a job that ended."""
    if outcome.result is not None:
        return f"  {outcome.job.label}: {outcome.result['seconds']:.1f} s"
    assert outcome.failure is not None
    lines = [f"  FAILED {outcome.job.label}, exit code {outcome.failure.exit_code}"]
    lines += outcome.failure.error.splitlines() or ["it printed nothing"]
    return "\n    ".join([*lines, f"log: {root / outcome.job.key / LOG_FILE}"])


def list_claims(file: ClaimFile, output: Path, console: Console) -> None:
    """Print the claims of a file, with the verdicts there are."""
    record = read_record(output, file.name)
    verdicts = {claim["id"]: claim["verdict"] for claim in record["claims"]} if record else {}
    console.print(f"{file.name} ({file.path})")
    for claim in file.claims.values():
        seeds = f"{seeds_of(claim)} seeds, " if seeds_of(claim) else ""
        console.print(f"  {claim.id}: {verdicts.get(claim.id, 'not measured')} ({seeds}{claim.minutes:g} minutes)")
        console.print(f"    {claim.claim}")


def stopped(what: str, code: int) -> int:
    """Say how to go on; returns the exit code."""
    print_error(f"ended by {what}; what is finished is kept: the same command goes on from there")
    return code
