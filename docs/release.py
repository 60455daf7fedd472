"""Write a version into all places that name it: `make release VERSION=0.2.0`.

The places are the library, the citation file, the conda recipe and the changelog, whose
"unreleased" section gets the version's heading and date, with an empty one above it. Nothing is
written unless all of them can be. Commit and tag are left to whoever releases.
"""

from __future__ import annotations

import datetime
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.compile(r"\d+\.\d+\.\d+")
UNRELEASED = re.compile(r"^## (\d+\.\d+\.\d+), unreleased$", re.MULTILINE)


def change_files(root: Path, version: str, day: datetime.date) -> dict[Path, str]:
    """Return the new text of every file that names the version.

    Raises ValueError, in a sentence, when the version is none or not above the last one, or a file
    does not name it where it should.
    """
    if not VERSION.fullmatch(version):
        raise ValueError(f"{version!r} is no version; write MAJOR.MINOR.PATCH, such as 0.2.0")
    library = root / "workflow/trioflow/__init__.py"
    last = _find(library, r'^__version__ = "(.*)"$')
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    open_section = UNRELEASED.search(changelog)
    if open_section is None:
        raise ValueError("CHANGELOG.md has no section '## VERSION, unreleased'")
    first = last == version == open_section[1]  # what was never released keeps its number
    if not first and _order(version) <= _order(last):
        raise ValueError(f"{version} does not come after {last}")
    following = ".".join([*version.split(".")[:-1], str(int(version.rsplit(".", maxsplit=1)[-1]) + 1)])
    heading = f"## {following}, unreleased\n\n## {version}, {day.isoformat()}"
    return {
        library: _replace(library, r'^__version__ = ".*"$', f'__version__ = "{version}"'),
        root / "CITATION.cff": _cite(root / "CITATION.cff", version, day),
        root / "envs/conda/meta.yaml": _replace(
            root / "envs/conda/meta.yaml", r'^{% set version = ".*" %}$', f'{{% set version = "{version}" %}}'
        ),
        root / "CHANGELOG.md": changelog.replace(open_section[0], heading, 1),
    }


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _find(file: Path, pattern: str) -> str:
    found = re.search(pattern, file.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise ValueError(f"{file.name} does not name its version")
    return found[1]


def _replace(file: Path, pattern: str, line: str) -> str:
    text, count = re.subn(pattern, line, file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"{file.name} names its version {count} times where it should once")
    return text


def _cite(file: Path, version: str, day: datetime.date) -> str:
    """Return the citation with version and day of release."""
    text = _replace(file, r"^version: .*$", f"version: {version}")
    text = re.sub(r"^date-released: .*\n", "", text, flags=re.MULTILINE)
    return text.replace(f"version: {version}\n", f"version: {version}\ndate-released: {day.isoformat()}\n")


if __name__ == "__main__":
    try:
        written = change_files(ROOT, sys.argv[1] if len(sys.argv) > 1 else "", datetime.date.today())
    except ValueError as error:
        sys.exit(f"release: {error}")
    for path, text in written.items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
    print(f"next: make test, then git commit -am 'trioflow {sys.argv[1]}' and git tag v{sys.argv[1]}")
