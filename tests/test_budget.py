"""The engine stays small: under 3,500 lines together, and no file anywhere over 500."""

import subprocess

from conftest import ROOT

NOT_ENGINE = ("server", "bench", "benchmarks/", "examples/", "tools/", "tests/")


def test_line_budget():
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    names = subprocess.run(listed, cwd=ROOT, text=True, capture_output=True, check=True).stdout.split()
    assert "engine.py" in names
    lines = {name: len((ROOT / name).read_text().splitlines()) for name in names if (ROOT / name).exists()}
    assert {name: n for name, n in lines.items() if n > 500} == {}
    assert sum(n for name, n in lines.items() if not name.startswith(NOT_ENGINE)) < 3500


def test_readme_prints_the_numerics_sheet():
    from kernels.tiles import NUMERICS

    readme = (ROOT / "README.md").read_text()
    missing = [name for name, value in NUMERICS.items() if f"| {name} | {value} |" not in readme]
    assert not missing, "README.md must print every line of kernels.tiles.NUMERICS as a row of its table"
    assert len(readme.splitlines()) < 110
