"""The ledger of all claims of all methods, and the README's table; a test keeps both true."""

from collections.abc import Iterator
from io import StringIO

from rich.console import Console

from fulgurite import modules
from fulgurite.command_line.listing import config_names, data_classes
from fulgurite.command_line.provenance import ROOT
from fulgurite.reproduction.claims import Claim, ClaimFile
from fulgurite.reproduction.plan import Plan, fingerprint
from fulgurite.reproduction.reading import find_claims, shipped_claims
from fulgurite.reproduction.records import PUBLISHED, Record, interval, number, read_record, verdicts
from fulgurite.reproduction.report import show
from fulgurite.storage import write_text

LEDGER = PUBLISHED / "README.md"
README = ROOT / "README.md"
EXAMPLE = ("rocp", "loss")  # the claim that the README shows


def present_fingerprint(file: ClaimFile, claim: Claim) -> str:
    """The fingerprint that the claim would get if it were measured now, with any number of seeds."""
    plan = Plan(file)
    plan.add(claim, seeds=1)
    return fingerprint(plan, claim, seeds=1)


def rows_of(slug: str) -> Iterator[tuple[Claim, Record | None, bool]]:
    """Each claim of a method, its record if it was measured, and whether that belongs to the present code."""
    file = find_claims(slug)
    record = read_record(PUBLISHED, slug)
    measured = {claim["id"]: claim for claim in record["claims"]} if record else {}
    for claim in file.claims.values():
        kept = measured.get(claim.id)
        present = kept is not None and kept["fingerprint"] == present_fingerprint(file, claim)
        yield claim, kept, present


def ledger() -> str:
    """The ledger, in Markdown."""
    lines = [
        "# Ledger of claims",
        "",
        "Every claim of every method, as `fulgurite reproduce <method>` last measured it. A verdict is computed from",
        "the runs, never written by hand; `fulgurite reproduce --all` measures all of them again. The column *code*",
        "says whether the result belongs to the present code and configs.",
        "",
        "| method | claim | source | verdict | estimate | 95 % interval | seeds | code |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for slug in shipped_claims():
        for claim, kept, present in rows_of(slug):
            cells = [f"[{slug}]({slug}.md)" if kept else slug, f"{claim.id}: {claim.claim}", claim.source]
            if kept is None:
                cells += ["not measured", "", "", "", ""]
            else:
                cells += [f"**{kept['verdict']}**", number(kept["estimate"]), interval(kept["interval"])]
                cells += [str(kept["seeds"] or ""), "present" if present else "earlier"]
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def claims_cell(slug: str) -> str:
    """The verdicts on a method's claims, for the README's table."""
    if slug not in shipped_claims():
        return ""
    rows = list(rows_of(slug))
    measured = [kept for _, kept, _ in rows if kept]
    if not measured:
        return "not measured"
    text = f"[{verdicts(measured)}](docs/results/{slug}.md)"
    return text if all(present for _, kept, present in rows if kept) else f"{text} (earlier code)"


def readme_table() -> str:
    """The README's method table, in Markdown."""
    rows = [
        "| method | paper (ICML 2026) | module | data | configs | claims |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for record in modules.METHODS.values():
        paper = f"[{record.paper}](https://arxiv.org/abs/{record.arxiv})"
        cells = (
            f"[{record.slug}](docs/methods/{record.slug}.md)",
            paper,
            ", ".join(f"`{name}`" for name in record.classes),
            ", ".join(f"`{name}`" for name in data_classes(record.slug)),
            ", ".join(f"`{record.slug}/{name}`" for name in config_names(record.slug)),
            claims_cell(record.slug),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def readme_example() -> str:
    """What the command prints on the README's example of a claim."""
    slug, claim_id = EXAMPLE
    record = read_record(PUBLISHED, slug)
    claims = [claim for claim in record["claims"] if claim["id"] == claim_id] if record else []
    printed = StringIO()
    show(claims, Console(file=printed, width=110, highlight=False, soft_wrap=True))
    lines = "\n".join(line.rstrip() for line in printed.getvalue().strip().splitlines())
    return f"```text\n{lines}\n```"


def publish() -> None:
    """Write the ledger, and the README's generated parts."""
    write_text(LEDGER, ledger())
    text = README.read_text(encoding="utf-8")
    for part, content in (("methods", readme_table()), ("claim", readme_example())):
        begin, end = f"<!-- {part}: begin -->", f"<!-- {part}: end -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{content}\n{end}{rest.partition(end)[2]}"
    write_text(README, text)
