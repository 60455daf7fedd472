"""What outputs were made from: stamps and digests; JSON written whole; tables and records that ship with the library."""

import csv
import hashlib
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from trioflow import __version__
from trioflow.base.errors import InputError
from trioflow.base.input_files import LARGEST_JSON_BYTES, parse_json, read_text

PACKAGE = Path(__file__).parents[1]
EVALUATION = "trioflow_evaluation"
"""The package beside trioflow whose modules count into digests by their full places."""


def digest_file(path: str | Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    with Path(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def list_packages(rule: str, declared: Mapping[str, str]) -> set[str]:
    """Return the packages that a rule declares (``rules/packages.yaml``), rows in capitals replaced by what they hold."""
    words = [word for word in declared[rule].split() if not word.isupper()]
    rows = [word for word in declared[rule].split() if word.isupper()]
    return set(words).union(*(list_packages(row, declared) for row in rows))


def digest_modules(*packages: str) -> str:
    """Return one digest of the packages that a rule declares, for its parameters.

    Snakemake runs a rule again when its parameters change, but does not follow imports. ``packages``: as `list_modules`
    takes them; what a module holds below ``data`` at its own place (``data/report/pages.css``) counts with it. Line
    endings and nothing else are normalised.
    """
    return hashlib.sha256(b"".join(map(_digest_package, sorted(packages)))).hexdigest()[:16]


def list_modules(package: str) -> list[Path]:
    """Return a package's modules, those right inside it for ``trace/*``, or the one module of a name.

    Names are places below ``trioflow``, or ``trioflow_evaluation`` with what lies below it. Raises FileNotFoundError
    when there is no such package or module.
    """
    home = PACKAGE.parent if package.partition("/")[0] == EVALUATION else PACKAGE
    inside = package.endswith("/*")
    folder = home / package.removesuffix("/*")
    module = folder.with_suffix(".py")
    files = [module] if module.is_file() else sorted(folder.glob("*.py" if inside else "**/*.py"))
    if not files:
        raise FileNotFoundError(f"trioflow has no package or module {package!r}")
    return files


@cache
def _digest_package(name: str) -> bytes:
    """Return the digest of a package's modules, their places and texts; rules share most of them."""
    digest, modules = hashlib.sha256(), list_modules(name)
    for file in [*modules, *(own for one in modules for own in _data_of_modules().get(one, ()))]:
        digest.update(str(file.relative_to(PACKAGE.parent)).encode())
        digest.update(file.read_bytes().replace(b"\r\n", b"\n"))
    return digest.digest()


@cache
def _data_of_modules() -> dict[Path, list[Path]]:
    """Return what modules hold below ``data``: a file of a module's name, or the files of such a folder."""
    files_of: dict[Path, list[Path]] = {}
    for package in (PACKAGE, PACKAGE.parent / EVALUATION):
        for path in sorted((data := package / "data").rglob("*.*")):
            own = (package / path.relative_to(data)).with_suffix(".py")
            own = own if own.is_file() else own.parent.with_suffix(".py")
            if own.is_file():
                files_of.setdefault(own, []).append(path)
    return files_of


def stamp(inputs: Iterable[str | Path] = (), **facts: Any) -> dict[str, Any]:
    """Return the provenance record of an output.

    ``inputs``: files whose digests are recorded under the last folder's and their own name, so that
    equal inputs give equal stamps anywhere; ``**facts``: what else is worth keeping.
    """
    return {
        "trioflow_version": __version__,
        "inputs": {f"{Path(path).parent.name}/{Path(path).name}": digest_file(path)[:16] for path in inputs},
        **facts,
    }


def host_environment() -> dict[str, Any]:
    """Describe the machine without naming it: system, processor, cores, Python."""
    model = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu_model": model or platform.processor(),
        "cpu_count": os.cpu_count() or 1,
        "python": platform.python_version(),
    }


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path that becomes ``path`` only when the block succeeds.

    The temporary file lies in the same folder, so the rename is atomic; on an exception it is
    removed and ``path`` stays as it was.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.urandom(4).hex()}{target.suffix}")
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))  # less the umask
    try:
        yield temporary
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | Path, content: Any) -> None:
    """Write JSON atomically, with sorted keys so that equal content gives equal bytes."""
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n")


def read_json(path: str | Path, kind: type[InputError] = InputError) -> Any:
    """Read a JSON file, as ``input_files.parse_json`` does; InputError where it is missing, too large or not JSON."""
    return parse_json(read_text(path, kind, LARGEST_JSON_BYTES), path, kind)


def read_table(path: Path) -> list[dict[str, str]]:
    """Return a table's rows by the names of its first line; lines that begin with # say what it holds."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    return list(csv.DictReader(lines, delimiter="\t"))


def read_own_table(module: str) -> list[dict[str, str]]:
    """Return the rows of the table that a module has below ``data``, at its own place; of another package by its whole path."""
    return read_table(PACKAGE / "data" / f"{module}.tsv")


def read_own_records(module: str) -> dict[str, dict[str, Any]]:
    """Return the fields of each record in ``data/<module>.toml``, by its name; lists come as tuples."""
    import tomllib  # which few commands need

    content = tomllib.loads((PACKAGE / "data" / f"{module}.toml").read_text(encoding="utf-8"))
    return {
        name: {key: tuple(v) if isinstance(v, list) else v for key, v in record.items()}
        for name, record in content.items()
    }
