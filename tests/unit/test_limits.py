"""How long a module may be; ruff says how many statements and branches a function may have."""

from trioflow.base.provenance import PACKAGE

SOURCES = sorted(PACKAGE.parent.glob("trioflow*/**/*.py"))
LONGEST_MODULE_LINES = 800


def test_no_module_is_too_long() -> None:
    lengths = {
        str(path.relative_to(PACKAGE.parent)): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES
    }
    too_long = {name: lines for name, lines in lengths.items() if lines > LONGEST_MODULE_LINES}
    assert not too_long, "split by meaning"
