"""The report of measured claims: a record that keeps everything, and a page, a figure and a table made from it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from fulgurite.modules import METHODS
from fulgurite.reproduction.claims import Claim, ClaimFile, Comparison, Growth
from fulgurite.reproduction.execution import Outcome
from fulgurite.reproduction.figure import claims_figure
from fulgurite.reproduction.measurement import Measured, bounds
from fulgurite.reproduction.plan import Plan, fingerprint, seeds_of
from fulgurite.reproduction.records import Record, part_rows, read_record, verdicts
from fulgurite.reproduction.statistics import CONFIDENCE, Estimate
from fulgurite.storage import atomic_path, write_text


def claim_record(measured: Measured, plan: Plan, seeds: int | None) -> Record:
    """Everything that is known of a measured claim, as plain data."""
    claim, decisive = measured.claim, measured.decisive
    own = seeds or seeds_of(claim)
    return {
        "id": claim.id,
        "kind": type(claim).__name__.lower(),
        "claim": claim.claim,
        "source": claim.source,
        "verdict": measured.verdict,
        "reason": measured.reason,
        "remark": claim.remark,
        **estimate_fields(decisive.estimate),
        "confidence": CONFIDENCE,
        "expected": expected(claim),
        "measure": claim.measure if isinstance(claim, Comparison | Growth) else "",
        "seeds": own or None,
        "fingerprint": fingerprint(plan, claim, seeds),
        "parts": [
            {
                "setting": part.label,
                "variant": part.variant,
                "other": part.other,
                "verdict": part.verdict,
                "reason": part.reason,
                **estimate_fields(part.estimate),
                **{f"excess_{name}": value for name, value in estimate_fields(part.excess).items()},
            }
            for part in measured.parts
        ],
        "variants": [
            {
                "setting": setting,
                "variant": name,
                "values": list(values),
                "mean": summary.mean if (summary := measured.summary(setting, name)) else None,
                "standard_error": summary.error if summary else None,
            }
            for setting, variants in measured.values.items()
            for name, values in variants.items()
        ],
        "sizes": sizes_of(claim),
        "runs": [run_record(outcome, metrics_of(claim, outcome)) for outcome in measured.outcomes],
    }


def estimate_fields(estimate: Estimate | None) -> dict[str, Any]:
    """An estimate with its intervals, as plain data."""
    return {
        "estimate": estimate.value if estimate else None,
        "interval": list(estimate.bootstrap) if estimate and estimate.bootstrap else None,
        "student_interval": list(estimate.student) if estimate and estimate.student else None,
    }


def expected(claim: Claim) -> str:
    """What the claim asks for, in words."""
    if isinstance(claim, Comparison):
        margin = claim.margin
        if margin.size < 0:
            return f"{claim.direction}, or worse by less than {str(margin).lstrip('-')}"
        return f"{claim.direction} by more than {margin}" if margin.size else claim.direction
    if isinstance(claim, Growth):
        what = "exponent" if claim.scale == "log" else "slope"
        return f"{what} against {claim.size} {bounds(claim)}"
    return "all tests pass"


def sizes_of(claim: Claim) -> dict[str, Any] | None:
    """For a growth: the name of the size, its scale, and for each setting the size and the rest of it."""
    if not isinstance(claim, Growth):
        return None
    of = {setting.label: setting.values[claim.size] for setting in claim.settings}
    rest = {setting.label: setting.without(claim.size).label for setting in claim.settings}
    return {"name": claim.size, "scale": claim.scale, "of": of, "rest": rest}


def metrics_of(claim: Claim, outcome: Outcome) -> list[str]:
    """The metrics of a run that a claim reads."""
    if not isinstance(claim, Comparison | Growth):
        return list(outcome.result["metrics"]) if outcome.result else []
    variants = [variant for setting in claim.settings for variant in setting.variants.values()]
    names = (metric for variant in variants if variant.run == outcome.job.name for metric in variant.metrics)
    return list(dict.fromkeys(names))


def run_record(outcome: Outcome, metrics: Sequence[str]) -> Record:
    """One run: what it was, what it gave, what it stands on."""
    job, result = outcome.job, outcome.result
    record: Record = {"run": job.name, "config": dict(job.description), "seed": job.seed, "key": job.key}
    record |= {"config_hash": job.config, "code_hash": job.code}
    if result is None:
        failure = outcome.failure
        return record | {
            "status": "failed" if failure else "not run",
            "exit_code": failure and failure.exit_code,
            "error": failure and failure.error,
        }
    kept = ("seconds", "peak_memory_mib", "versions", "commit", "finished")
    return record | {
        "status": "done",
        "metrics": {name: outcome.value(name) for name in metrics},
        "resumed": result.get("resumed", False),
        **{name: result[name] for name in kept},
    }


def write_report(file: ClaimFile, claims: Sequence[Record], folder: Path) -> list[Path]:
    """Write the record, the page and the figure; claims that were not measured now are kept as they were.

    Returns:
        The files.
    """
    earlier = read_record(folder, file.name)
    new = {claim["id"]: claim for claim in claims}
    old = {claim["id"]: claim for claim in earlier["claims"]} if earlier else {}
    merged = [new.get(name) or old[name] for name in file.claims if name in new or name in old]
    method = METHODS.get(file.name)
    record: Record = {
        "name": file.name,
        "title": method.title if method else file.name,
        "paper": method.paper if method else None,
        "arxiv": method.arxiv if method else None,
        "claims": merged,
    }
    paths = [folder / f"{file.name}.{kind}" for kind in ("json", "md", "png")]
    write_text(paths[0], json.dumps(record, indent=1) + "\n")
    figure = claims_figure(merged)
    if figure:
        with atomic_path(paths[2]) as temporary:
            figure.savefig(temporary, dpi=120)
    else:
        paths[2].unlink(missing_ok=True)
    write_text(paths[1], page(record, has_figure=figure is not None))
    return [path for path in paths if path.exists()]


def page(record: Record, has_figure: bool) -> str:
    """The page of a method's claims, in Markdown."""
    name, claims = record["name"], record["claims"]
    lines = [f"# {name}: the claims, measured", ""]
    if record["paper"]:
        lines += [
            f'"{record["paper"]}", ICML 2026, [arXiv {record["arxiv"]}](https://arxiv.org/abs/{record["arxiv"]}).'
        ]
    lines += [
        f"Written by `fulgurite reproduce {name}`; {verdicts(claims)}. A verdict is computed: `holds` where the",
        "bootstrap and Student's 95 % interval both lie beyond the margin, `does not hold` where both lie short of it.",
        "A gain is positive where the method is better; values are means and standard errors over the seeds.",
        "",
    ]
    if has_figure:
        lines += [f"![Every seed as a dot, mean and 95 % interval as a bar]({name}.png)", ""]
    for claim in claims:
        lines += claim_section(claim)
    return "\n".join(lines).rstrip() + "\n"


def claim_section(claim: Record) -> list[str]:
    """The part of the page on one claim."""
    lines = [f"## {claim['id']}: {claim['verdict']}", "", claim["claim"], "", f"Source: {claim['source']}."]
    seeds = f", {claim['seeds']} seeds" if claim["seeds"] else ""
    lines += [f"Asked for: {claim['expected']}{seeds}.", ""]
    for word in ("reason", "remark"):
        if claim[word]:
            lines += [f"{word.capitalize()}: {claim[word]}.".replace("..", "."), ""]
    rows = part_rows(claim)
    if claim["kind"] == "comparison":
        lines += ["| setting | method | compared with | gain | 95 % interval | verdict |", "| --- " * 6 + "|"]
        for row in rows:
            cells = [row["setting"], f"{row['variant']} {row['value']}", f"{row['other']} {row['other_value']}"]
            lines.append("| " + " | ".join([*cells, row["estimate"], row["interval"], row["verdict"]]) + " |")
    elif claim["kind"] == "growth":
        keys = ("setting", "variant", "estimate", "interval", "verdict")
        lines += ["| setting | variant | estimate | 95 % interval | verdict |", "| --- " * 5 + "|"]
        for row in rows:
            lines.append("| " + " | ".join(row[key] for key in keys) + " |")
        lines += ["", f"| {claim['sizes']['name']} | variant | value |", "| --- " * 3 + "|"]
        for one in claim["variants"]:
            error = "" if one["standard_error"] is None else f" ± {one['standard_error']:.2g}"
            value = "missing" if one["mean"] is None else f"{one['mean']:.4g}{error}"
            lines.append(f"| {one['setting']} | {one['variant']} | {value} |")
    else:
        lines += [f"- `{node}`" for run in claim["runs"] for node in run["config"]["tests"]]
    return [*lines, "", *run_lines(claim["runs"]), ""]


def run_lines(runs: Sequence[Record]) -> list[str]:
    """What the runs took and stand on; failed ones by name."""
    done = [run for run in runs if run["status"] == "done"]
    lines = []
    if done:
        seconds = sum(run["seconds"] for run in done)
        memory = max(run["peak_memory_mib"] for run in done)
        versions = sorted(
            {f"torch {run['versions']['torch']}, lightning {run['versions']['lightning']}" for run in done}
        )
        number = f"{len(done)} run{'s' if len(done) > 1 else ''}"
        lines.append(f"{number}, {seconds:.0f} s in all, at most {memory:.0f} MiB; {'; '.join(versions)}.")
    for run in runs:
        if run["status"] != "done":
            seed = "" if run["seed"] is None else f", seed {run['seed']}"
            error = f" (exit code {run['exit_code']}): {' '.join(run['error'].split())}" if run["error"] else ""
            lines.append(f"\n**{run['status']}**: {run['run']}{seed}{error}")
    return lines


def show(claims: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print each claim with its verdict, and what it was computed from."""
    for claim in claims:
        console.print(f"\n[bold]{claim['id']}: {claim['verdict']}[/bold]\n{claim['claim']}")
        if claim["reason"]:
            console.print(f"Reason: {claim['reason']}.")
        rows = part_rows(claim)
        if claim["kind"] == "property":
            continue
        gain = "gain" if claim["kind"] == "comparison" else "growth"
        columns = {"setting": "setting", "method": "value", "compared with": "other_value", gain: "estimate"}
        columns |= {"95 % interval": "interval", "verdict": "verdict"}
        for row in rows:
            row["value"] = f"{row['variant']} {row['value']}".strip()
            row["other_value"] = f"{row['other']} {row['other_value']}".strip()
        filled = {header: key for header, key in columns.items() if any(row[key] for row in rows)}
        table = Table(*filled, box=box.SIMPLE_HEAD)
        for row in rows:
            table.add_row(*(row[key] for key in filled.values()))
        console.print(table)
