"""The package itself: what is generated, and the wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*args: str | Path, cwd: Path | None = None) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(args, capture_output=True, text=True, check=False, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_generated_code_is_up_to_date() -> None:
    run(sys.executable, ROOT / "generate.py", "--check")


def test_types() -> None:
    run(sys.executable, "-m", "mypy", "--cache-dir", os.devnull, "src", "tests", "generate.py", cwd=ROOT)


def test_style() -> None:
    run(sys.executable, "-m", "ruff", "check", "--no-cache", ".", cwd=ROOT)
    run(sys.executable, "-m", "ruff", "format", "--no-cache", "--check", ".", cwd=ROOT)


@pytest.mark.usefixtures("service")
def test_wheel(tmp_path: Path) -> None:
    """The wheel has all that it needs, and its types, in an environment with nothing else."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    assert list(tmp_path.glob("*.tar.gz"))
    with zipfile.ZipFile(wheel) as z:
        assert {"pando/py.typed", "pando/_api.py", "pando/models.py"} <= set(z.namelist())
        assert not [n for n in z.namelist() if "test" in n or "generate" in n]

    venv.create(tmp_path / "fresh", with_pip=True)
    python = tmp_path / "fresh" / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-index", "--quiet", wheel)
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import subprocess
        import pando

        with pando.clone("web", "from-wheel") as v:
            print(pando.__file__, v.name, subprocess.check_output(["cat", "index.html"], cwd=v.path, text=True))
            size: int = v.info.size_bytes
        """)
    )
    out = run(python, program)
    assert "from-wheel v1" in out
    assert str(tmp_path / "fresh") in out

    check = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", os.devnull, "--python-executable", str(python)]
    run(*check, program)
    program.write_text(
        'import pando\n\nwith pando.clone("web", mount="yes") as v:\n    size: str = v.info.size_bytes\n'
    )
    wrong = subprocess.run([*check, program], capture_output=True, text=True, check=False)
    assert wrong.stdout.count("error:") == 2, wrong.stdout
