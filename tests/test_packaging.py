"""The package as others get it: built, installed elsewhere, imported.

And the checkout as we use it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.checkout import ROOT

pytestmark = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").exists(), reason="tests run outside of a checkout"
)


def python(code: str, folder: Path, *, path: str = "") -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {
        "PYTHONPATH": path
    }

    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_sdist_has_every_folder_once(dist: Path) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        members = archive.getmembers()
    names = {member.name.partition("/")[2] for member in members}

    assert not [member.name for member in members if member.issym() or member.islnk()]
    assert not [name for name in names if name.startswith(("remat/solvers", "remat/tracers"))]
    assert {
        "remat/py.typed",
        "solvers/core/base.py",
        "tracers/synthetic.py",
        "tests/test_packaging.py",
        "LICENSE",
        "Makefile",
    } <= names


def test_the_wheel_holds_one_package_and_its_types(dist: Path) -> None:
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
        entry_points = wheel.read("remat-0.1.0.dist-info/entry_points.txt").decode()

    assert {name.partition("/")[0] for name in names} == {"remat", "remat-0.1.0.dist-info"}
    assert {"remat/py.typed", "remat/solvers/core/base.py", "remat/tracers/synthetic.py"} <= names

    sources = {
        f"remat/{path.relative_to(ROOT)}"
        for folder in ("solvers", "tracers")
        for path in (ROOT / folder).rglob("*.py")
    }
    sources |= {str(path.relative_to(ROOT)) for path in (ROOT / "remat").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources

    assert "remat = remat.cli.commands:main" in entry_points
    assert "[torch_dynamo_backends]\nremat = remat.face.compile_backend:backend" in entry_points


def test_the_installed_wheel_imports_elsewhere(dist: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    wheel = next(dist.glob("*.whl"))

    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(target),
        str(wheel),
    ]
    subprocess.run(command, check=True)

    code = (
        "import remat, remat.solvers.core.base, remat.tracers; print(remat.__file__, "
        "remat.solvers.__file__, remat.tracers.__file__, sep='\\n')"
    )
    for line in python(code, tmp_path, path=str(target)).split():
        assert line.startswith(str(target))
    assert (target / "remat" / "py.typed").exists()


def test_a_users_own_solvers_folder_does_not_clash(tmp_path: Path) -> None:
    (tmp_path / "solvers").mkdir()
    (tmp_path / "solvers" / "__init__.py").write_text("mine = True\n")
    code = "import remat.solvers, solvers; assert solvers.mine and solvers is not remat.solvers"
    python(code, tmp_path, path=f"{tmp_path}{os.pathsep}{ROOT}")


@pytest.mark.parametrize(
    "code",
    [
        "import solvers, remat.solvers; assert solvers is remat.solvers",
        "import tracers, remat.tracers; assert tracers is remat.tracers",
        "import solvers.core.base, sys, remat.solvers.core.base; assert solvers.core.base is "
        "remat.solvers.core.base is sys.modules['solvers.core.base']",
        "import remat.solvers.core.base, solvers.core.base; assert solvers.core.base is "
        "remat.solvers.core.base",
        "from solvers.core.base import Solver as A; from remat.solvers import Solver as B; "
        "assert A is B",
        "from tracers.synthetic import chain; from remat.tracers import synthetic as s; "
        "assert chain is s.chain",
        "from solvers import make_solver; from remat.solvers.baselines.chen import ChenSqrt; "
        "assert isinstance(make_solver('chen-sqrt'), ChenSqrt)",
    ],
)
def test_a_top_folder_is_the_packages_own_module(code: str) -> None:
    python(code, ROOT)


def test_an_unknown_submodule_is_not_found() -> None:
    python(
        "import importlib, pytest\nwith pytest.raises(ModuleNotFoundError): "
        "importlib.import_module('solvers.nothing')",
        ROOT,
    )


def test_the_version_matches_the_metadata() -> None:
    assert (
        python(
            "import remat, importlib.metadata as m; print(remat.__version__ == m.version('remat'))",
            ROOT,
        ).strip()
        == "True"
    )
