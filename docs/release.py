"""Write a version into all places that name it: `make release VERSION=0.2.0 [URL=https://host/owner/trioflow]`.

The places are the library, the citation file, the conda recipe and the changelog, whose
"unreleased" section gets the version's heading and date, with an empty one above it. A URL takes the
place of the project's address in the package, the citation and the recipe. Nothing is written unless
all of them can be. Commit and tag are left to whoever releases.
"""

from __future__ import annotations

import datetime
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.compile(r"\d+\.\d+\.\d+")
ADDRESS = re.compile(r"https://[!-~]+[^/]")
UNRELEASED = re.compile(r"^## (\d+\.\d+\.\d+), unreleased$", re.MULTILINE)


def change_files(root: Path, version: str, day: datetime.date, url: str = "") -> dict[Path, str]:
    """Return the new text of every file that names the version, or the project's address where a ``url`` is given.

    Raises ValueError, in a sentence, when the version is none or not above the last one, a file
    does not name it where it should, or the address is none.
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
    package = root / "pyproject.toml"
    old = _find(package, r'^Homepage = "(.*)"$')
    if url and not ADDRESS.fullmatch(url):
        raise ValueError(f"{url!r} is no address; write https://host/owner/trioflow")
    texts = {
        package: package.read_text(encoding="utf-8"),
        library: _replace(library, r'^__version__ = ".*"$', f'__version__ = "{version}"'),
        root / "CITATION.cff": _cite(root / "CITATION.cff", version, day),
        root / "envs/conda/meta.yaml": _replace(
            root / "envs/conda/meta.yaml", r'^{% set version = ".*" %}$', f'{{% set version = "{version}" %}}'
        ),
        root / "CHANGELOG.md": changelog.replace(open_section[0], heading, 1),
    }
    return {file: text.replace(old, url) if url else text for file, text in texts.items()}


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
        version, url = [*sys.argv[1:3], "", ""][:2]
        written = change_files(ROOT, version, datetime.date.today(), url)
    except ValueError as error:
        sys.exit(f"release: {error}")
    for path, text in written.items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
    print(f"next: make test, then git commit -am 'trioflow {sys.argv[1]}' and git tag v{sys.argv[1]}")
