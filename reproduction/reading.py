"""Reading a claim file: every mistake is named with its place and the nearest right name."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_args

from fulgurite.command_line.arguments import read_layer
from fulgurite.command_line.configs import CONFIG_ROOT
from fulgurite.command_line.errors import UsageError, nearest
from fulgurite.reproduction.claims import (
    COMMANDS,
    CheckpointFrom,
    Claim,
    ClaimFile,
    Comparison,
    Direction,
    Growth,
    Margin,
    Property,
    Run,
    Scale,
    Setting,
    Variant,
    Which,
)

CLAIM_FILE = "claim.yaml"


def shipped_claims() -> dict[str, Path]:
    """Slug -> claim file of every method that has one."""
    return {path.parent.name: path for path in sorted(CONFIG_ROOT.glob(f"*/{CLAIM_FILE}"))}


def find_claims(name: str) -> ClaimFile:
    """The claims of a method by its slug, or of a file of the user's own.

    Raises:
        UsageError: there is no such file, or something in it is wrong.
    """
    shipped = shipped_claims()
    if name in shipped:
        return read_claims(shipped[name], name)
    path = Path(name).expanduser()
    if path.suffix in (".yaml", ".yml"):
        return read_claims(path, path.parent.resolve().name if path.name == CLAIM_FILE else path.stem)
    raise UsageError(f"no claims for {name!r}{nearest(name, shipped, 'there are some for ' + ', '.join(shipped))}")


def read_claims(path: Path, name: str) -> ClaimFile:
    """Read a claim file.

    Raises:
        UsageError: something in it is wrong; names the place and the nearest right name.
    """
    tree = read_layer(path).tree
    try:
        _only(tree, ("minutes", "runs", "claims"), "the file")
        minutes = _number(tree.get("minutes", 0), "minutes")
        runs = {run.name: run for run in _runs(_mapping(tree.get("runs", {}), "runs"))}
        for run in runs.values():
            if run.checkpoint_from and run.checkpoint_from.run not in runs:
                raise ClaimError(f"run {run.name}, checkpoint_from: {_unknown(run.checkpoint_from.run, runs)}")
            _refuse_circle(run, runs)
        entries = tree.get("claims")
        if not isinstance(entries, list) or not entries:
            raise ClaimError("claims: give a list of claims")
        claims: dict[str, Claim] = {}
        for number, entry in enumerate(entries, start=1):
            claim = _claim(entry, runs, number)
            if claim.id in claims:
                raise ClaimError(f"claim {claim.id!r} stands there twice")
            claims[claim.id] = claim
    except ClaimError as error:
        raise UsageError(f"{path}: {error}") from error
    return ClaimFile(name, path, runs, claims, minutes)


class ClaimError(Exception):
    """Something in a claim file is wrong."""


def _runs(tree: Mapping[str, Any]) -> Iterator[Run]:
    for name, raw in tree.items():
        body = dict(_mapping(raw, f"run {name}"))
        over = body.pop("over", {})
        for values in _combinations(over, f"run {name}, over"):
            yield _run(str(_fill(name, values)), _fill(body, values))


def _run(name: str, body: Mapping[str, Any]) -> Run:
    where = f"run {name}"
    _only(body, [field.name for field in fields(Run) if field.name != "name"], where)
    configs = body.get("configs")
    if not isinstance(configs, list) or not configs:
        raise ClaimError(f"{where}, configs: give a list of config names, such as [rocp/cpu]")
    commands = tuple(body.get("commands", COMMANDS))
    if not commands or not set(commands) <= set(COMMANDS):
        raise ClaimError(f"{where}, commands: {list(commands)} is not a choice of {', '.join(COMMANDS)}")
    source = None
    if "checkpoint_from" in body:
        given = _mapping(body["checkpoint_from"], f"{where}, checkpoint_from")
        source = _build(CheckpointFrom, given, f"{where}, checkpoint_from")
        _one_of(source.which, get_args(Which), f"{where}, checkpoint_from, which")
    if "fit" not in commands and (source is None or source.option != "ckpt_path"):
        raise ClaimError(f"{where}: a test without a fit needs checkpoint_from with option ckpt_path")
    callbacks = _mapping(body.get("callbacks", {}), f"{where}, callbacks")
    for callback, taking_part in callbacks.items():
        if not isinstance(taking_part, bool):
            raise ClaimError(f"{where}, callbacks, {callback}: give true (takes part) or false (does not)")
    return Run(
        name=name,
        configs=tuple(str(config) for config in configs),
        overrides=_mapping(body.get("overrides", {}), f"{where}, overrides"),
        callbacks=callbacks,
        commands=commands,
        checkpoint=_one_of(body.get("checkpoint", "best"), get_args(Which), f"{where}, checkpoint"),
        checkpoint_from=source,
    )


def _refuse_circle(run: Run, runs: Mapping[str, Run]) -> None:
    seen = {run.name}
    while run.checkpoint_from:
        run = runs[run.checkpoint_from.run]
        if run.name in seen:
            raise ClaimError(f"run {run.name}: it starts from its own checkpoint, through checkpoint_from")
        seen.add(run.name)


COMMON = ("id", "claim", "source", "kind", "minutes", "remark")
KINDS: Mapping[str, tuple[str, ...]] = {
    "comparison": ("variants", "over", "direction", "margin", "paired", "seeds", "measure"),
    "growth": ("variants", "over", "size", "scale", "at_least", "at_most", "seeds", "measure"),
    "property": ("tests",),
}


def _claim(entry: Any, runs: Mapping[str, Run], number: int) -> Claim:
    raw = _mapping(entry, f"claim {number}")
    where = f"claim {raw.get('id', number)!r}"
    kind = _one_of(raw.get("kind", "comparison"), tuple(KINDS), f"{where}, kind")
    _only(raw, (*COMMON, *KINDS[kind]), where)
    for key in ("id", "claim", "source"):
        if not isinstance(raw.get(key), str) or not raw[key].strip():
            raise ClaimError(f"{where}: it needs {key!r}, a text")
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", raw["id"]):
        raise ClaimError(f"{where}, id: give lower-case words joined by hyphens")
    common = {
        "id": raw["id"],
        "claim": " ".join(raw["claim"].split()),
        "source": " ".join(raw["source"].split()),
        "minutes": _number(raw.get("minutes", 1), f"{where}, minutes"),
        "remark": " ".join(str(raw.get("remark", "")).split()),
        "raw": raw,
    }
    if kind == "property":
        tests = raw.get("tests")
        if not isinstance(tests, list) or not tests:
            raise ClaimError(f"{where}, tests: give a list of pytest nodes")
        return Property(**common, tests=tuple(str(node) for node in tests))
    seeds = raw.get("seeds", 5)
    if not isinstance(seeds, int) or seeds < 1:
        raise ClaimError(f"{where}, seeds: {seeds!r} is not a number of seeds")
    over = raw.get("over", {})
    if kind == "growth":
        return _growth(common, raw, over, runs, seeds, where)
    settings = tuple(_settings(raw, over, runs, where))
    if len(settings[0].variants) < 2:
        raise ClaimError(f"{where}, variants: give the method's first, then at least one to compare with")
    if next(iter(settings[0].variants.values())).value is not None:
        raise ClaimError(f"{where}, variants: the first is the method's, so it is no constant")
    return Comparison(
        **common,
        settings=settings,
        direction=_one_of(raw.get("direction"), get_args(Direction), f"{where}, direction"),
        margin=_margin(raw.get("margin", 0), f"{where}, margin"),
        paired=bool(raw.get("paired", True)),
        seeds=seeds,
        measure=str(raw.get("measure", "")),
    )


def _growth(
    common: Mapping[str, Any],
    raw: Mapping[str, Any],
    over: Any,
    runs: Mapping[str, Run],
    seeds: int,
    where: str,
) -> Growth:
    sizes = _mapping(raw.get("size", {}), f"{where}, size")
    if len(sizes) != 1 or not isinstance(next(iter(sizes.values())), list) or len(next(iter(sizes.values()))) < 2:
        raise ClaimError(f"{where}, size: give one name and its values, such as {{price: [10, 20, 50]}}")
    ((size, values),) = sizes.items()
    for value in values:
        _number(value, f"{where}, size, {size}")
    at_least, at_most = (
        None if raw.get(bound) is None else _number(raw[bound], f"{where}, {bound}")
        for bound in ("at_least", "at_most")
    )
    if at_least is None and at_most is None:
        raise ClaimError(f"{where}: give at_least, at_most or both: bounds of the exponent or slope")
    return Growth(
        **common,
        settings=tuple(_settings(raw, {**_mapping(over, f"{where}, over"), size: values}, runs, where)),
        size=size,
        scale=_one_of(raw.get("scale", "log"), get_args(Scale), f"{where}, scale"),
        at_least=at_least,
        at_most=at_most,
        seeds=seeds,
        measure=str(raw.get("measure", "")),
    )


def _settings(raw: Mapping[str, Any], over: Any, runs: Mapping[str, Run], where: str) -> Iterator[Setting]:
    variants = _mapping(raw.get("variants", {}), f"{where}, variants")
    if not variants:
        raise ClaimError(f"{where}, variants: give a name and {{run: ..., metric: ...}} for each")
    for values in _combinations(over, f"{where}, over"):
        built = {}
        for name, body in _fill(variants, values).items():
            place = f"{where}, variant {name}"
            variant = _build(Variant, _mapping(body, place), place)
            if variant.value is not None:
                _number(variant.value, f"{place}, value")
            elif not variant.run or not variant.metric:
                raise ClaimError(f"{place}: give run and metric, or value")
            elif variant.run not in runs:
                raise ClaimError(f"{place}: {_unknown(variant.run, runs)}")
            built[str(name)] = variant
        yield Setting(values, built)


def _margin(value: Any, where: str) -> Margin:
    if isinstance(value, str) and (share := re.fullmatch(r"\s*(-?[\d.]+)\s*%\s*", value)):
        return Margin(float(share[1]) / 100, relative=True)
    return Margin(_number(value, where, "a number, or a share such as 10 %"), relative=False)


def _combinations(over: Any, where: str) -> Iterator[dict[str, Any]]:
    """Every choice of one value for each name; or, of a list, the choices as they stand there."""
    if isinstance(over, list) and over:
        for number, values in enumerate(over, start=1):
            yield dict(_mapping(values, f"{where}, {number}"))
        return
    for name, values in _mapping(over, where).items():
        if not isinstance(values, list) or not values:
            raise ClaimError(f"{where}, {name}: give a list of values")
    for chosen in itertools.product(*over.values()):
        yield dict(zip(over, chosen, strict=True))


def _fill(tree: Any, values: Mapping[str, Any]) -> Any:
    """Put values in the place of ``{name}``; a string that is nothing else becomes the value itself."""
    if isinstance(tree, Mapping):
        return {_fill(key, values): _fill(inner, values) for key, inner in tree.items()}
    if isinstance(tree, list):
        return [_fill(inner, values) for inner in tree]
    if isinstance(tree, str):
        for name, value in values.items():
            if tree == f"{{{name}}}":
                return value
            tree = tree.replace(f"{{{name}}}", str(value))
    return tree


def _build(kind: type[Any], body: Mapping[str, Any], where: str) -> Any:
    _only(body, [field.name for field in fields(kind)], where)
    for field in fields(kind):
        if field.default is MISSING and field.name not in body:
            raise ClaimError(f"{where}: it needs {field.name!r}")
    return kind(**body)


def _only(body: Mapping[str, Any], allowed: Sequence[str], where: str) -> None:
    for key in body:
        if key not in allowed:
            raise ClaimError(
                f"{where}: there is no {key!r}{nearest(str(key), allowed, 'there are ' + ', '.join(allowed))}"
            )


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ClaimError(f"{where}: expected a mapping, got {value!r}")
    return value


def _number(value: Any, where: str, kind: str = "a number") -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ClaimError(f"{where}: {value!r} is not {kind}")
    return float(value)


def _one_of(value: Any, choices: Sequence[str], where: str) -> Any:
    if value not in choices:
        given = "nothing is given" if value is None else f"{value!r} is none of the choices"
        raise ClaimError(f"{where}: {given}; choose {' or '.join(choices)}")
    return value


def _unknown(name: str, runs: Mapping[str, Run]) -> str:
    return f"there is no run {name!r}{nearest(name, runs, 'there are ' + ', '.join(runs))}"
