"""The engine stays small: under 3,500 lines of code together, and no file anywhere over 500 lines of any kind.

Docstrings, comments and blank lines are not counted in the first: the house style asks for them.
"""

import io
import subprocess
import tokenize

from conftest import ROOT

NOT_ENGINE = ("server", "bench", "benchmarks/", "examples/", "tools/", "tests/")


def code_lines(source: str) -> int:
    """Lines that hold a token of code: not blank, and not all comment or docstring."""
    found, previous = set(), tokenize.INDENT
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.NL, tokenize.COMMENT, tokenize.ENCODING, tokenize.ENDMARKER):
            continue
        begins = previous in (tokenize.INDENT, tokenize.DEDENT, tokenize.NEWLINE)
        is_docstring = token.type == tokenize.STRING and begins
        if not is_docstring and token.type not in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            found.update(range(token.start[0], token.end[0] + 1))
        previous = token.type
    return len(found)


def test_code_lines():
    source = '"""Doc.\n\nMore."""\n\nx = 1  # why\n# a comment\n\ndef f():\n    """Doc."""\n    return 2\n'
    assert code_lines(source) == 3


def test_line_budget():
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    names = subprocess.run(listed, cwd=ROOT, text=True, capture_output=True, check=True).stdout.split()
    assert "engine.py" in names
    sources = {name: (ROOT / name).read_text() for name in names if (ROOT / name).exists()}
    assert {name for name, source in sources.items() if len(source.splitlines()) > 500} == set()
    assert sum(code_lines(source) for name, source in sources.items() if not name.startswith(NOT_ENGINE)) < 3500


def test_readme_prints_the_numerics_sheet():
    from kernels.tiles import NUMERICS

    readme = (ROOT / "README.md").read_text()
    missing = [name for name, value in NUMERICS.items() if f"| {name} | {value} |" not in readme]
    assert not missing, "README.md must print every line of kernels.tiles.NUMERICS as a row of its table"
    assert len(readme.splitlines()) < 115
