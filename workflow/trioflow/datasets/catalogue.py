"""The catalogue of public data: ``datasets.yaml``, read and checked."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trioflow.base.errors import DatasetError
from trioflow.base.input_files import read_text
from trioflow.base.provenance import PACKAGE, read_json
from trioflow.base.settings import check_schema, suggest_name
from trioflow.base.yaml_files import LARGEST_BYTES, parse_yaml

CATALOGUE = PACKAGE.parent / "resources" / "datasets.yaml"
"""Where a checkout keeps it; an installed library has none."""
SCHEMA = PACKAGE / "data" / "datasets.schema.json"

STEP_TRACES = ("triosim",)
"""Datasets of whole training steps in TrioSim's tables, and as a profile."""
MODEL_TABLES = (
    "neusight/labels-a100-pcie-40gb",
    "neusight/labels-a100-pcie-80gb",
    "neusight/labels-h100-sxm-80gb",
    "neusight/labels-v100-pcie-32gb",
)
"""Datasets of whole models' operators, and of their measured steps."""
SINGLE_OPERATORS = ("neusight/operators-train", "neusight/operators-test")
"""Datasets of operators that were measured one by one."""
SINGLE_PRODUCTS = ("aiconfigurator/gemm-a100", "aiconfigurator/gemm-h100", "aiconfigurator/gemm-h200")
"""Datasets of matrix products in half precision that the new-GPU rule is fitted to; one table a GPU."""
HALF_PRODUCTS = (
    "aiconfigurator/gemm-a100",
    *(f"aiconfigurator/linear-{name}" for name in ("h100", "h200", "b200", "gb200", "l40s")),
)
"""Datasets of matrix products that steps in half precision are timed with; one table a GPU."""
HALF_ATTENTION = tuple(f"aiconfigurator/attention-{name}" for name in ("a100", "h100", "h200", "b200", "gb200", "l40s"))
"""Datasets of fused attention in half precision; one table a GPU."""
HALF_EXPERTS = tuple(f"aiconfigurator/experts-{name}" for name in ("a100", "h100", "h200", "b200", "gb200", "l40s"))
"""Datasets of layers of experts in half precision; one table a GPU."""
NODE_BANDWIDTHS = ("nanotron/runs-h100",)
"""Datasets of collectives over many nodes."""


@dataclass(frozen=True)
class DatasetFile:
    """One public file, pinned."""

    dataset: str  # name of the dataset that it belongs to
    repository: str  # ``owner/repository``
    commit: str  # full hash of the commit
    path: str  # path in the repository
    bytes: int  # size [bytes]
    sha256: str  # SHA-256 of the content, hexadecimal
    licence: str  # SPDX identifier

    @property
    def key(self) -> str:
        """The file's name here, in a mirror and among the results: ``<owner>+<repository>/<path>``."""
        return f"{self.repository.replace('/', '+')}/{self.path}"

    @property
    def address(self) -> str:
        """The part of the file's URL after the base address, quoted."""
        return quote(f"{self.repository}/{self.commit}/{self.path}")


@dataclass(frozen=True)
class Dataset:
    """Files of one repository at one commit that are used together, and what to know of them."""

    name: str
    about: str
    units: str
    traps: str
    repository: str
    commit: str
    licence: str
    files: tuple[DatasetFile, ...]


@dataclass(frozen=True)
class Catalogue:
    """All datasets by name, and where files are served."""

    datasets: Mapping[str, Dataset]  # datasets by name
    base_url: str  # address of the files
    # Address of files of which ``base_url`` has Git LFS pointers only; empty where there is none.
    lfs_url: str
    file: Path  # where the catalogue was read from

    def addresses(self) -> dict[str, str]:
        """Return ``base_url`` and ``lfs_url`` by these names."""
        return {"base_url": self.base_url, "lfs_url": self.lfs_url}

    def files(self) -> Iterator[DatasetFile]:
        """Yield every file of every dataset."""
        for dataset in self.datasets.values():
            yield from dataset.files

    def select_datasets(self, names: Iterable[str]) -> list[Dataset]:
        """Return datasets by names such as ``triosim/vgg13-h100-b128``, or by their first part, ``triosim``.

        Raises DatasetError, with the likely name, when none is called so.
        """
        datasets: dict[str, Dataset] = {}
        for name in names:
            chosen = {key: dataset for key, dataset in self.datasets.items() if name in (key, key.partition("/")[0])}
            if not chosen:
                families = {key.partition("/")[0] for key in self.datasets}
                raise DatasetError(
                    f"no dataset is called {name!r}",
                    file=self.file,
                    fix=suggest_name(name, [*sorted(families), *self.datasets]),
                )
            datasets |= chosen
        return list(datasets.values())

    def find_file(self, key: str) -> DatasetFile:
        """Return the file ``<owner>+<repository>/<path>``; DatasetError, with the likely name, where there is none."""
        known = {file.key: file for file in self.files()}
        if key not in known:
            raise DatasetError(f"no file is called {key!r}", file=self.file, fix=_suggest_file(key, known))
        return known[key]

    def select_files(self, names: Iterable[str]) -> list[DatasetFile]:
        """Return the files of datasets, of families of datasets, or by their own names; DatasetError for other names."""
        files: dict[str, DatasetFile] = {}
        for name in names:
            if "+" in name:
                chosen: Iterable[DatasetFile] = [self.find_file(name)]
            else:
                chosen = (file for d in self.select_datasets([name]) for file in d.files)
            files |= {file.key: file for file in chosen}
        return list(files.values())

    def held_files(self, folder: str | Path, names: Iterable[str], ending: str = "") -> list[Path]:
        """Return the files of datasets (or families, or files) that a folder holds, in order of their paths.

        Whatever else lies there was chosen by nobody, and must not change an answer. ``ending``: of
        the wanted files' names.
        """
        files = (Path(folder) / file.key for file in self.select_files(names))
        return sorted(file for file in files if file.name.endswith(ending) and file.is_file())


def _suggest_file(key: str, known: Mapping[str, DatasetFile]) -> str:
    """Return the likely fix for a file's name: 173 names are no help, so at most its folder."""
    near = suggest_name(key, known)
    if near.startswith("did you mean"):
        return near
    repositories = sorted({name.partition("/")[0] for name in known})
    return f"names start with one of {', '.join(repositories)}"


def load_catalogue(file: str | Path | None = None, name: str = "") -> Catalogue:
    """Read and check a catalogue (``datasets.yaml``), by default the checkout's; ``name``: what messages call it.

    Raises DatasetError when it is missing, not YAML, breaks its schema, or names a file twice.
    """
    path = CATALOGUE if file is None else Path(file)
    if file is None and not path.exists():
        raise DatasetError(
            "this installation of trioflow has no catalogue of public data",
            fix="give the file workflow/resources/datasets.yaml of a checkout with --datasets FILE",
        )
    called = Path(name) if name else path
    try:
        facts = path.stat()
    except OSError as error:
        raise DatasetError(f"cannot be read: {error.strerror}", file=called) from None
    # Time and size are part of the key of what is cached, so that an edited file is read again.
    return _read_catalogue(path, called, facts.st_mtime_ns, facts.st_size)


@cache
def _read_catalogue(path: Path, called: Path, _mtime_ns: int, _size: int) -> Catalogue:
    text = read_text(path, DatasetError, LARGEST_BYTES)
    content = parse_yaml(text, called, DatasetError)
    check_schema(content, read_json(SCHEMA), called, DatasetError)
    datasets = {name: _build(name, entry) for name, entry in content["datasets"].items()}
    catalogue = Catalogue(datasets, content["base_url"].rstrip("/"), content.get("lfs_url", "").rstrip("/"), called)
    _check_names(catalogue)
    return catalogue


def _build(name: str, entry: dict[str, Any]) -> Dataset:
    common = {key: entry[key] for key in ("repository", "commit", "licence")}
    files = tuple(DatasetFile(dataset=name, **common, **file) for file in entry["files"])
    return Dataset(name, entry["about"], entry["units"], entry.get("traps", ""), **common, files=files)


def _check_names(catalogue: Catalogue) -> None:
    """Refuse two entries that would lie in one place, or one below the other."""
    owner: dict[str, str] = {}
    for file in catalogue.files():
        if file.key in owner:
            raise DatasetError(
                f"{file.key} is listed twice, in {owner[file.key]} and {file.dataset}",
                file=catalogue.file,
                place=f"datasets.{file.dataset}",
                fix="keep one; two commits of one file cannot lie in one place",
            )
        owner[file.key] = file.dataset
    for key, dataset in owner.items():
        above = [str(folder) for folder in Path(key).parents if str(folder) in owner]
        if above:
            raise DatasetError(
                f"{above[0]} is a file and the folder of another", file=catalogue.file, place=f"datasets.{dataset}"
            )
