"""The wheel, installed beside nothing of this checkout, works in a repository with folders of the same names."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from fulgurite.command_line.configs import shipped_configs
from fulgurite.command_line.provenance import ROOT
from fulgurite.reproduction.reading import shipped_claims

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of what git would hold, without the network."""
    source = tmp_path_factory.mktemp("source")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for name in listed:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist"],
        cwd=source, check=True, capture_output=True, text=True,
    )  # fmt: skip
    (built,) = (source / "dist").glob("*.whl")
    return built


def test_the_wheel_holds_every_module_and_config_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    folders = ("command_line", "reproduction", "modules", "datamodules", "callbacks", "storage")
    expected = {path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*.py")}
    expected |= {path.relative_to(ROOT) for path in (*shipped_configs().values(), *shipped_claims().values())}
    expected |= {Path("__init__.py"), Path("cli.py"), Path("py.typed")}
    found = {name for name in names if not name.partition("/")[0].endswith(".dist-info")}
    assert found == {f"fulgurite/{path.as_posix()}" for path in expected}


def test_it_runs_from_a_repository_with_its_own_modules_and_callbacks(wheel, tmp_path):
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)}))
    # The dependencies are those of this environment. A plain path in a .pth file does not process the .pth files
    # there, so this checkout's editable installation is not among them.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)],
        check=True,
        capture_output=True,
    )

    work = tmp_path / "their repository"
    for name in ("modules", "callbacks", "datamodules", "storage"):
        (work / name).mkdir(parents=True)
        (work / name / "__init__.py").write_text("raise RuntimeError('this is somebody else\\'s package')\n")
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}

    where = subprocess.run(
        [python, "-c", "import fulgurite; print(fulgurite.__file__)"],
        cwd=work,
        env=clean,
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(environment) in where.stdout

    for command in (
        [environment / "bin" / "fulgurite", "fit", "--config", "rocp/smoke"],
        [environment / "bin" / "fulgurite", "test", "--config", "rocp/smoke", "--ckpt_path", "best"],
        [python, "-c", "from fulgurite.callbacks import FiniteGuard; FiniteGuard()"],
    ):
        done = subprocess.run(command, cwd=work, env=clean, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr
    results = (work / "runs/rocp/smoke/latest/results.json").read_text()
    assert '"commit": null' in results, "an installed package has no commit, whatever repository is around it"
