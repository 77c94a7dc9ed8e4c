"""Who may import whom, checked from the import statements of every file."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fulgurite import callbacks, datamodules, modules
from fulgurite.command_line import provenance
from fulgurite.command_line.provenance import ROOT, code_hash, import_closure, imported_names

FOLDERS = ("cli.py", "command_line", "reproduction", "modules", "datamodules", "callbacks", "storage")
FILES = sorted(
    path
    for folder in FOLDERS
    for path in ([ROOT / folder] if folder.endswith(".py") else (ROOT / folder).rglob("*.py"))
)

# The first pattern that fits a file rules it: the names of this package that it may import. {slug} is the method's own.
LEAVES = r"fulgurite\.(storage|import_lazily|__version__|__file__)\b.*|fulgurite"
METHOD = r"fulgurite\.modules\.(base|loss_terms|common)\b.*|fulgurite\.modules\.{slug}\."
RULES = {
    r"cli\.py": r"fulgurite\.(command_line|reproduction)\..*",
    r"command_line/listing\.py": r"fulgurite\.(command_line|modules|datamodules|reproduction\.records)\b.*",
    r"reproduction/worker\.py": r"fulgurite\.(command_line|reproduction)\b.*",
    # What runs a command (and imports torch) is left to the worker, in a process of its own.
    r"reproduction/.*": r"fulgurite\.(command_line\.(arguments|configs|errors|listing|provenance)\..*|reproduction\..*"
    r"|modules|modules\.METHODS|datamodules|callbacks)",
    r"command_line/.*": r"fulgurite\.(command_line|modules|datamodules|callbacks)\b.*",
    r"storage/.*": r"$^",
    r"modules/__init__\.py": r"$^",
    r"modules/loss_terms\.py": r"$^",
    r"modules/base\.py": r"fulgurite\.modules\.loss_terms\..*",
    r"modules/common/.*": r"fulgurite\.modules\.common\b.*",
    r"modules/(?P<slug>\w+)/functional.*\.py": r"fulgurite\.modules\.({slug}|common)\.functional.*",
    r"modules/(?P<slug>\w+)/networks.*\.py": r"fulgurite\.modules\.(common\b.*|{slug}\.(functional|networks).*)",
    r"modules/(?P<slug>\w+)/.*": METHOD + r".*",
    r"datamodules/__init__\.py": r"$^",
    r"datamodules/(base\.py|common/.*)": r"fulgurite\.datamodules\.(base|common)\b.*",
    r"datamodules/(?P<slug>\w+)\.py": r"fulgurite\.(datamodules\.(base|common)\b.*|modules\.{slug}\.functional.*)",
    r"callbacks/__init__\.py": r"$^",
    r"callbacks/.*": r"fulgurite\.(callbacks\.\w+\..*|modules\.(base|loss_terms)\..*|modules\.\w+\.({parts}).*)".format(
        parts="functional|networks|metrics|figures"
    ),
}


def test_the_rules_cover_files():
    assert len(FILES) > 20


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_what_its_place_allows(path):
    place = path.relative_to(ROOT).as_posix()
    for pattern, allowed in RULES.items():
        if match := re.fullmatch(pattern, place):
            allowed = allowed.replace("{slug}", match.groupdict().get("slug") or "")
            wrong = [name for name in imported_names(path) if not re.fullmatch(f"{allowed}|{LEAVES}", name)]
            assert not wrong, f"{place} imports {wrong}"
            return
    pytest.fail(f"no rule for {place}")


@pytest.mark.parametrize("path", [p for p in FILES if p.name.startswith("functional")], ids=str)
def test_functional_files_import_torch_and_numpy_only(path):
    outside = re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE)
    assert set(outside) <= {
        "torch",
        "numpy",
        "math",
        "collections",
        "dataclasses",
        "typing",
        "itertools",
        "functools",
        "fulgurite",
    }


@pytest.mark.parametrize("table", [modules, datamodules, callbacks], ids=lambda table: table.__name__)
def test_every_name_of_a_lazy_table_resolves_and_is_listed(table):
    for name, path in table.CLASSES.items():
        found = getattr(table, name)
        assert found.__module__ == path
        assert name in dir(table)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = table.Nothing


def test_no_stray_python_file_lies_in_the_root():
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "cli.py"}


def test_every_method_has_its_folder_data_module_configs_and_page():
    for slug in modules.METHODS:
        for place in (
            f"modules/{slug}/module.py",
            f"datamodules/{slug}.py",
            f"configs/{slug}",
            f"docs/methods/{slug}.md",
        ):
            assert (ROOT / place).exists(), place


def test_the_closure_of_a_class_holds_what_it_imports_and_no_table():
    files = {path.relative_to(ROOT).as_posix() for path in import_closure(["fulgurite.modules.Classifier"])}
    assert {"modules/rocp/module.py", "modules/rocp/networks.py", "modules/base.py"} <= files
    assert not {"modules/__init__.py", "datamodules/rocp.py", "cli.py"} & files


def test_the_code_hash_ignores_comments_and_docstrings_and_sees_code(monkeypatch, tmp_path):
    def hash_of(text: str) -> str:
        (tmp_path / "modules" / "rocp").mkdir(parents=True, exist_ok=True)
        (tmp_path / "modules" / "rocp" / "module.py").write_text(text)
        monkeypatch.setattr(provenance, "ROOT", tmp_path)
        provenance._parse.cache_clear()
        provenance._syntax.cache_clear()
        return code_hash(["fulgurite.modules.Classifier"])

    plain = hash_of("def f(x):\n    return x + 1\n")
    assert hash_of('"""Words."""\n\n\ndef f(x):\n    """More words."""\n    # a comment\n    return (x + 1)\n') == plain
    assert hash_of("def f(x):\n    return x + 2\n") != plain
    provenance._parse.cache_clear()
    provenance._syntax.cache_clear()


def test_heavy_packages_are_not_imported_by_tables_and_bases():
    heavy = re.compile(
        r"^(?:from|import) (sklearn|timm|datasets|matplotlib|diffusers|transformers|gymnasium)\b", re.MULTILINE
    )
    for place in (
        "cli.py",
        "modules/__init__.py",
        "datamodules/__init__.py",
        "callbacks/__init__.py",
        "modules/base.py",
        "datamodules/base.py",
    ):
        assert not heavy.search(Path(ROOT / place).read_text()), place


def test_the_code_hash_is_the_same_whatever_was_imported_before():
    names = ["fulgurite.modules.Classifier", "torch.optim.Adam", "json.JSONDecoder", "nowhere.Net"]
    program = f"from fulgurite.command_line.provenance import code_hash; print(code_hash({names}))"
    fresh = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert fresh.stdout.strip() == code_hash(names)
    assert code_hash(names[:1]) != code_hash(names[:2]) != code_hash(names[:3])
