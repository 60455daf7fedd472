"""Telling what a source of traces is, and importing it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trioflow.base.errors import TraceError
from trioflow.base.experiments import IMPORT_FORMATS
from trioflow.base.input_files import check_file
from trioflow.base.settings import NOTHING
from trioflow.trace.importers.kineto import import_kineto
from trioflow.trace.importers.ranks import EXECUTION_TRACE, KINETO, RankFile, find_ranks, list_files, recognise_json
from trioflow.trace.importers.sources import ImportOptions
from trioflow.trace.profile.events import RAW_FILES
from trioflow.trace.profile.merge import merge_trace
from trioflow.trace.repeat import repeat_layers
from trioflow.trace.store import Trace

FORMATS = ("capture", *IMPORT_FORMATS)


class Reader(NamedTuple):
    """What reads a format of one file or folder."""

    recognise: Callable[[Path], bool]  # whether a file or folder has the format
    read: Callable[[Path, ImportOptions], Trace]
    what: str  # the format in words, for errors
    repeats: bool = False  # whether ``ImportOptions.repeat_layers`` is followed
    # Each rank's files, where sources are of several; None for a format of one.
    find_ranks: Callable[[Sequence[Path]], dict[int, RankFile]] | None = None


def import_trace(sources: Sequence[str | Path], options: ImportOptions, form: str | None = None) -> Trace:
    """Build a trace from one of the known sources.

    ``sources``: what `list_known` says; a Kineto trace with or without the execution trace of the same run is two
    files in any order, or their folder. ``options``: what the source does not say. ``form``: one of ``FORMATS``; found out by default. Raises TraceError when
    the source is not one of these, is broken, or leaves open what no option says.
    """
    paths = _check_sources(sources)
    form = form or detect_format(paths)
    first = paths[0]
    if form != "kineto" and len(paths) > 1:
        raise TraceError(
            f"a source of format {form} is one file or folder, {len(paths)} were given",
            file=first,
            fix="give one, or --format kineto with a Kineto trace and its execution trace",
        )
    reader = None if form in ("capture", "kineto") else _list_readers()[form]
    if options.repeat_layers and reader and not reader.repeats:
        raise TraceError(
            f"a source of format {form} names no blocks that could be repeated",
            file=first,
            fix="leave --repeat-layers out",
        )
    try:
        if reader:
            trace = reader.read(first, options)
        else:
            trace = import_kineto(*_pair(paths), options) if form == "kineto" else merge_trace(first)
        # A NeuSight table's reader repeats its layer itself: the step's facts count all layers.
        layers = None if form == "neusight" else options.repeat_layers
        return repeat_layers(trace, layers) if layers else trace
    except TraceError as error:
        if error.file is not None:
            raise
        raise TraceError(error.problem, file=first, place=error.place, fix=error.fix) from None


def find_rank_files(sources: Sequence[str | Path], form: str | None = None) -> dict[int, RankFile]:
    """Return each rank's files where sources are of several, else nothing; TraceError as `import_trace`."""
    paths = _check_sources(sources)
    form = form or detect_format(paths)
    if form == "kineto":
        return find_ranks(paths)
    find = None if form == "capture" else _list_readers()[form].find_ranks
    return find(paths) if find else {}


def _check_sources(sources: Sequence[str | Path]) -> list[Path]:
    paths = [Path(source) for source in sources]
    for path in paths:
        if not path.exists():
            raise TraceError("no such file or folder", file=path)
        if not path.is_dir():
            check_file(path, TraceError)
    folders = {path.parent for path in paths if path.name in ("trace.csv", "tensor.csv")}
    return paths if len(folders) != 1 else sorted(folders)  # TrioSim's two files are their folder


def _list_readers() -> Mapping[str, Reader]:
    """Return what reads each format of one file or folder, in the order in which sources are tried."""
    from trioflow.trace.importers import chakra, neusight, nsight, simai, triosim, xla

    return {
        "triosim": Reader(triosim.recognise, triosim.import_triosim, "TrioSim's trace.csv and tensor.csv"),
        "nsight": Reader(
            nsight.recognise,
            nsight.import_nsight,
            "Nsight Systems' .sqlite, .jsonl, or its folder of .parquet",
            repeats=True,
            find_ranks=nsight.find_nsight_ranks,
        ),
        "neusight": Reader(neusight.recognise, neusight.import_neusight, "a NeuSight table", repeats=True),
        "simai": Reader(simai.recognise, simai.import_simai, "a workload file of SimAI"),
        "xla": Reader(xla.recognise, xla.import_xla, "a profile of XLA (JAX)"),
        "chakra": Reader(
            chakra.recognise,
            chakra.import_chakra,
            "a Chakra .et file or its JSON form, one or a rank each",
            find_ranks=chakra.find_chakra_ranks,
        ),
    }


def list_known() -> list[str]:
    """Return in words the sources that can be read."""
    return [
        "a Kineto trace (with its execution trace)",
        "a folder of `trioflow capture`",
        *(reader.what for reader in _list_readers().values()),
    ]


def import_row(files: Sequence[str | Path], row: Mapping[str, Any]) -> Trace:
    """Build the trace of a row of ``imports.tsv`` from its files; ``-`` leaves a fact to them. TraceError as `import_trace`."""
    given = {key: None if row[key] in NOTHING else row[key] for key in ("gpu", "batch", "precision", "optimizer")}
    form = str(row["format"])
    options = ImportOptions(**given, workload=str(row["trace"]))
    return import_trace(files if form == "kineto" else files[:1], options, form)


def detect_format(paths: Sequence[Path]) -> str:
    """Return the format of some files or of a folder; TraceError where none is known."""
    first, readers = paths[0], _list_readers()
    if first.is_dir() and (first / RAW_FILES[2]).exists():
        return "capture"
    for name, reader in readers.items():
        if reader.recognise(first):
            return name
    if any(recognise_json(path) for path in list_files(paths)):
        return "kineto"
    *others, last = list_known()
    raise TraceError("not a source that trioflow knows", file=first, fix=f"give {', '.join(others)} or {last}")


def _pair(paths: Sequence[Path]) -> tuple[Path, Path | None]:
    """Return Kineto and execution trace among some files; TraceError where the first is missing, or two are of one sort."""
    pairs: dict[str, Path] = {}
    for path in list_files(paths):
        kind = recognise_json(path)
        if kind is None and path in paths:
            raise TraceError(
                f"neither a {KINETO} nor an {EXECUTION_TRACE}",
                file=path,
                fix="give what export_chrome_trace and ExecutionTraceObserver wrote",
            )
        if kind is not None and kind in pairs:
            raise TraceError(f"a second {kind} beside {pairs[kind].name}", file=path, fix="give one of them")
        if kind is not None:
            pairs[kind] = path
    if KINETO not in pairs:
        raise TraceError(
            f"an {EXECUTION_TRACE} holds no times", file=paths[0], fix="give the Kineto trace of the same run too"
        )
    return pairs[KINETO], pairs.get(EXECUTION_TRACE)
