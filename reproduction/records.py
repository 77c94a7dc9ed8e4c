"""What was measured and is kept: one JSON file a method, which listing, ledger, page and figure are made from."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fulgurite.command_line.errors import UsageError
from fulgurite.command_line.provenance import ROOT

Record = dict[str, Any]
PUBLISHED = ROOT / "docs" / "results"
WORDS = {"holds": "hold", "does not hold": "do not hold", "inconclusive": "inconclusive"}


def published_folder() -> Path | None:
    """The folder of the published results; None where the package is installed without its documentation."""
    return PUBLISHED if PUBLISHED.parent.is_dir() else None


def read_record(folder: Path, name: str) -> Record | None:
    """The record of a method; None where nothing was measured.

    Raises:
        UsageError: the file is no record.
    """
    path = folder / f"{name}.json"
    if not path.is_file():
        return None
    try:
        record: Record = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(record["claims"], list):
            raise TypeError
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path} is no record of claims; move it away, then measure again") from error
    return record


def verdicts(claims: Sequence[Mapping[str, Any]]) -> str:
    """Such as ``4 hold, 1 inconclusive``."""
    counts = {word: sum(claim["verdict"] == verdict for claim in claims) for verdict, word in WORDS.items()}
    if counts["do not hold"] == 1:
        counts = {("does not hold" if word == "do not hold" else word): count for word, count in counts.items()}
    if counts.get("hold") == 1:
        counts = {("holds" if word == "hold" else word): count for word, count in counts.items()}
    return ", ".join(f"{count} {word}" for word, count in counts.items() if count)


def published_verdicts(slug: str) -> str | None:
    """The verdicts on a method's claims, as published; None where there are none."""
    folder = published_folder()
    record = read_record(folder, slug) if folder else None
    return verdicts(record["claims"]) if record else None


def number(value: float | None) -> str:
    """A number with four digits; empty for none."""
    return "" if value is None else f"{value:.4g}"


def interval(pair: Sequence[float] | None) -> str:
    """An interval, such as ``[0.5, 0.7]``; empty for none."""
    if pair is None:
        return ""
    rounding = 1e-6 * max(abs(end) for end in pair)
    return "[" + ", ".join(number(0.0 if abs(end) < rounding else end) for end in pair) + "]"


def spread(summary: Mapping[str, Any]) -> str:
    """Mean and standard error."""
    if summary["mean"] is None:
        return "missing"
    error = summary["standard_error"]
    return number(summary["mean"]) + (f" ± {error:.2g}" if error else "")


def part_rows(claim: Mapping[str, Any]) -> list[dict[str, str]]:
    """One row for each thing that a claim asks for."""
    shown = {(one["setting"], one["variant"]): spread(one) for one in claim["variants"]}
    rows = []
    for part in claim["parts"]:
        row = {"setting": part["setting"], "verdict": part["verdict"], "interval": interval(part["interval"])}
        row["estimate"] = number(part["estimate"])
        row["variant"], row["other"] = part["variant"], part["other"]
        row["value"] = shown.get((part["setting"], part["variant"]), "")
        row["other_value"] = shown.get((part["setting"], part["other"]), "")
        rows.append(row)
    return rows
