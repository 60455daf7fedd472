"""The page of case studies: what the simulator says where nothing was measured.

It says of each its tables, what was swept, and what was assumed.
"""

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pyarrow as pa
from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.base.provenance import atomic_path
from trioflow.report.pages import (
    Cell,
    Page,
    Section,
    count_words,
    itself,
    join_words,
    numbers,
    read_captions,
    render_definitions,
    render_details,
    render_figure,
    render_paragraph,
    render_records,
    words,
    write_page,
    write_percent,
    write_time,
)
from trioflow.tables import records

from trioflow_evaluation import DATA
from trioflow_evaluation.circuit import CircuitSettings
from trioflow_evaluation.studies import distsim, triosim
from trioflow_evaluation.tables import HOP, WAFER

_CIRCUITS = {
    "later step": "later steps, circuits stay open",
    "first step": "first step, none is open",
    "without reuse": "a circuit set up for every all-reduce",
}


def render_wafer(rows: pd.DataFrame) -> tuple[str, str]:
    """Return question, answer, tables and assumptions of the wafer study (``WAFER``)."""
    circuit = CircuitSettings()
    words = (
        f"{triosim.GPUS} A100-class GPUs in {triosim.ROWS} x {triosim.COLUMNS}, joined by photonic circuits or by an electrical mesh: "
        "the case study of the TrioSim paper, which reports that the mesh spends "
        f"{write_percent(triosim.PAPER_SHARE, 2)} of a VGG-19 step in communication and that circuits take nearly half of the "
        "communication away. The bandwidth of a mesh link was not published: below it is found by bisection, so that the "
        "mesh has the paper's share, and circuits are compared with it."
    )
    body = "".join(
        [
            _render_paper_cases(rows),
            _render_swept(
                [
                    (
                        "workloads and plans",
                        "; ".join(
                            "{workload} as {plan}, {samples_per_replica} samples a replica".format(**row)
                            for row in records(rows.drop_duplicates(_CASE))
                        ),
                    ),
                    (
                        "links of the mesh",
                        join_words(
                            _gb(rate)
                            for rate in sorted(set(rows.loc[rows["sweep"] == "link", "link_bandwidth_bytes_per_s"]))
                        ),
                    ),
                    ("ring on the mesh", "along the mesh (snake), and row by row"),
                    ("ports of a circuit", join_words(map(str, _bundles(rows)))),
                    ("circuits", "; ".join(_CIRCUITS.values())),
                    ("steps simulated", str(len(rows))),
                    ("seeds", "none: nothing is sampled"),
                ]
            ),
            _render_assumed(
                [
                    (
                        "from the paper",
                        f"{_gb(triosim.DEVICE_BANDWIDTH_BYTES_PER_S)} per GPU on {triosim.PORTS} ports, "
                        f"{write_time(circuit.establish_s)} to set a circuit up, the least recently used idle circuit torn down when no port is free",
                    ),
                    (
                        "assumed",
                        f"{write_time(triosim.LINK_LATENCY_S)} per link, half of what NCCL assumes for an NVLink hop; "
                        "receivers have room for everything; circuits share no wavelengths",
                    ),
                    ("predicted", "operator times of an A100 (80 GB, PCIe), predicted from shapes, strict fp32"),
                    ("simplified", "an all-reduce is the ring's closed form and holds its circuits until it ends"),
                ]
            ),
        ]
    )
    return _render_answer(
        "How much of an electrical mesh's communication do photonic circuits take away?", _answer_wafer(rows), words
    ), body


def _render_paper_cases(rows: pd.DataFrame) -> str:
    """Return what circuits take away where the mesh has the paper's share."""
    listed = [
        numbers(
            f"{mesh['workload']}, {mesh['samples_per_replica']} samples per GPU",
            f"mesh link {_gb(mesh['link_bandwidth_bytes_per_s'])}, found",
            "",
            lambda shares: Cell(_range(shares), min(shares)),
            partial(lambda mesh, circuit: _taken_away(_same_case(rows, mesh), mesh["step_s"], circuit[0]), mesh),
        )
        for mesh in records(rows[rows["sweep"] == "paper"])
    ]
    paper = numbers("the paper", "", "", lambda text: Cell(text, ""), lambda _: "nearly half")
    fields = [words("circuits", "", "", lambda circuit: circuit[1]), *listed, paper]
    return render_records(
        _CIRCUITS.items(), fields, "Communication that circuits take away (1 to 8 ports per circuit: least to most)"
    )


def _answer_wafer(rows: pd.DataFrame) -> str:
    """Say how much circuits take away, and which closest to half of the mesh's communication."""
    listed = [
        (share, ports, variant, mesh["samples_per_replica"])
        for mesh in records(rows[rows["sweep"] == "paper"])
        for variant in _CIRCUITS
        for ports, share in zip(
            _bundles(rows), _taken_away(_same_case(rows, mesh), mesh["step_s"], variant), strict=True
        )
    ]
    share, ports, variant, samples = min(listed, key=lambda one: abs(one[0] - 0.5))
    return (
        f"{_range([one[0] for one in listed])} of the mesh's communication time, depending on samples per GPU, ports per "
        f"circuit and whether circuits stay open. Closest to 'nearly half', as the paper has it: "
        f"{write_percent(share)} ({count_words(ports, 'port')}, {_CIRCUITS[variant]}, {samples} samples per GPU)."
    )


def _taken_away(case: pd.DataFrame, mesh_s: float, variant: str) -> list[float]:
    """Return the shares of the mesh's communication that circuits take away, by ports per circuit."""
    circuits = case[(case["network"] == "circuit") & (case["variant"] == variant)].sort_values("ports_per_circuit")
    return [1 - (row["step_s"] - row["ideal_s"]) / (mesh_s - row["ideal_s"]) for row in records(circuits)]


def render_hop(rows: pd.DataFrame) -> tuple[str, str]:
    """Return question, answer, tables and assumptions of the Hop study (``HOP``)."""
    words = (
        f"{triosim.WORKERS} workers train {triosim.TRACE.partition('-')[0].upper()} and exchange updates with their neighbours only. Rules "
        "say whom a worker waits for: everyone (standard), all but one (backup), updates that may be some iterations old "
        "(staleness); a worker that is behind may skip iterations. The case study of the TrioSim paper takes backup workers; "
        "its speed-ups are not at hand, so they are not compared."
    )
    work = f"{triosim.TRACE}: gradients and predicted compute time of one trace, {triosim.ITERATIONS} iterations"
    body = "".join(
        [
            render_details(
                "The speed-ups in numbers",
                "".join(_render_speedups(rows, graph) for graph in dict.fromkeys(rows["graph"])),
            ),
            _render_swept(
                [
                    ("graphs", join_words(dict.fromkeys(rows["graph"]))),
                    ("what is slowed", join_words(dict.fromkeys(rows["slowed"]))),
                    ("rules", "; ".join(dict.fromkeys(rows["variant"]))),
                    ("links", join_words(_gb(rate) for rate in sorted(set(rows["bandwidth_bytes_per_s"])))),
                    ("seeds", join_words(map(str, sorted(set(rows["seed"]))))),
                    ("runs simulated", str(len(rows))),
                ]
            ),
            _render_assumed(
                [
                    (
                        "from the paper",
                        f"factors between 1 and {triosim.SLOWEST:g}, one a worker; 8 draws (which ones is not known: these are ours)",
                    ),
                    (
                        "assumed",
                        f"{write_time(triosim.LATENCY_S)} from the end of a sending to its arrival; links are independent of each other, "
                        "tokens travel in no time; moments: each iteration is slowed with the probability 1 / workers",
                    ),
                    ("predicted", work),
                    ("not simulated", "what stale, missing or skipped updates cost in accuracy"),
                ]
            ),
        ]
    )
    return _render_answer(
        "How much faster do workers finish that do not wait for every neighbour?", _answer_hop(rows), words
    ), body


def _answer_hop(rows: pd.DataFrame) -> str:
    """Say which rule gains most for each thing that is slowed, on the first graph."""
    graph = str(rows["graph"].iloc[0])
    median = _shown_speedups(rows, graph).groupby(["slowed", "variant"], sort=False)["speedup"].median()
    best = [
        f"{float(part.max()):.2f} times with slow {slowed} ({part.droplevel('slowed').idxmax()})"
        for slowed, part in median.groupby(level="slowed", sort=False)
    ]
    return f"By the best rule, on the {graph} graph: {join_words(best)}; what that costs in accuracy is not simulated."


def _shown_speedups(rows: pd.DataFrame, graph: str) -> pd.DataFrame:
    """Return the rules on one graph, at the bandwidth that the figure shows."""
    return rows[
        (rows["graph"] == graph)
        & (rows["bandwidth_bytes_per_s"] == triosim.SHOWN_BANDWIDTH_BYTES_PER_S)
        & (rows["variant"] != triosim.STANDARD)
    ]


def _render_speedups(rows: pd.DataFrame, graph: str) -> str:
    """Return the speed-up of every rule on one graph, at the bandwidth that the figure shows."""
    chosen = _shown_speedups(rows, graph)
    speedups = chosen.groupby(["variant", "slowed"])["speedup"].agg(["median", "min", "max"])
    fields = [
        words("rule", "", "", str),
        *(
            numbers(
                f"slow {name}",
                "median (least to most)",
                "",
                lambda row: Cell("{median:.2f} ({min:.2f} to {max:.2f})".format(**row), float(row["median"])),
                partial(lambda name, variant: speedups.loc[(variant, name)], name),
            )
            for name in dict.fromkeys(chosen["slowed"])
        ),
    ]
    caption = f"Speed-up over the standard rules, {graph} graph, {_gb(triosim.SHOWN_BANDWIDTH_BYTES_PER_S)}"
    return render_records(dict.fromkeys(chosen["variant"]), fields, caption)


def render_distsim(rows: pd.DataFrame) -> tuple[str, str]:
    """Return question, answer, tables and assumptions of DistSim's search (``SWEEP_RESULTS`` of ``predict_distsim``)."""
    best, worst = (distsim.name_plan(one._asdict()) for one in (distsim.BEST, distsim.WORST))
    words = (
        f"DistSim (CF 2023) searched 15 plans of a 48-layer BERT, global batch {distsim.BATCH}, on 4 nodes of 4 A10. Best "
        f"{best} with {distsim.BEST.predicted_per_s:g} steps/s predicted and {distsim.BEST.measured_per_s:g} measured; worst {worst} "
        f"with {distsim.WORST.predicted_per_s:g} and {distsim.WORST.measured_per_s:g}: {distsim.PREDICTED_RATIO:g} times apart as predicted, "
        f"{distsim.MEASURED_RATIO:g} as measured. A plan is written tensor M, pipeline P, data D."
    )
    scales = join_words(f"{scale:g}" for scale in sorted(set(rows["communication_scale"])))
    body = "".join(
        [
            _render_orders(rows),
            _render_swept(
                [
                    ("plans", "every product of tensor, pipeline and data degree, powers of two, on 16 GPUs"),
                    ("communication", f"{scales} times as slow as over the assumed network"),
                    ("steps simulated", str(len(rows))),
                    ("seeds", "none: nothing is sampled"),
                ]
            ),
            _render_assumed(
                [
                    (
                        "assumed",
                        "hidden size 1024, 16 heads, 512 tokens, fp32, Adam; 1F1B with one sample a micro-batch; embedding, head "
                        "and loss shared by vocabulary; one NIC of 100 Gb/s a node. None of it was published, none is fitted",
                    ),
                    ("predicted", "operator times of an A10, by the rule for new GPUs"),
                ]
            ),
        ]
    )
    return _render_answer(
        "Does a simulation find the best and the worst plan of DistSim's search?", _answer_distsim(rows), words
    ), body


def _answer_distsim(rows: pd.DataFrame) -> str:
    """Say where DistSim's best and worst plan stand over the network as assumed, and how far apart all are."""
    _, order, ratio, (best, worst) = _list_orders(rows)[0]
    return (
        f"Over the network as assumed its best plan is number {best} of {len(order)} and its worst number {worst}; first and "
        f"last are {ratio:.3g} times apart."
    )


def _list_orders(rows: pd.DataFrame) -> list[tuple[float, list[str], float, list[int]]]:
    """Return by speed of the network the plans' order, the last over the first, and the places of DistSim's best and worst."""
    orders = {  # of each speed of the network, the fastest first; ties as they come
        scale: [distsim.name_plan(row) for row in records(case.sort_values("step_time_s", kind="stable"))]
        for scale, case in rows.groupby("communication_scale")
    }
    ratios = rows.groupby("communication_scale")["step_time_s"].agg(lambda steps_s: steps_s.max() / steps_s.min())
    published = [distsim.name_plan(one._asdict()) for one in (distsim.BEST, distsim.WORST)]
    return [
        (float(str(scale)), order, float(ratios[scale]), [order.index(name) + 1 for name in published])
        for scale, order in orders.items()
    ]


def _render_orders(rows: pd.DataFrame) -> str:
    """Return which plans are first and last at each speed of the network."""
    fields = [
        numbers("communication", "times as slow", "", "plain", lambda one: one[0]),
        words("best", "", "", lambda one: one[1][0]),
        words("worst", "", "", lambda one: one[1][-1]),
        numbers("worst over best", "", "", _number, lambda one: one[2]),
        *(
            numbers(
                f"DistSim's {which} is",
                "",
                "",
                itself,
                partial(lambda at, one: Cell(f"{one[3][at]} of {len(one[1])}", float(one[3][at])), at),
            )
            for at, which in enumerate(("best", "worst"))
        ),
    ]
    return render_records(_list_orders(rows), fields, "First and last plan at each speed of the network")


def _render_answer(question: str, answer: str, words: str) -> str:
    """Return the opening of a study; ``words``: what the question is about."""
    return render_paragraph(question, "headline") + render_paragraph(answer, "verdict") + render_paragraph(words)


def _render_swept(entries: Sequence[tuple[str, str]]) -> str:
    return render_details("What was swept", render_definitions(entries))


def _render_assumed(entries: Sequence[tuple[str, str]]) -> str:
    return render_details("What was assumed", render_definitions(entries))


_CASE = ["workload", "plan", "samples_per_replica"]
"""Columns that name a case of the wafer."""


def _same_case(rows: pd.DataFrame, about: dict[str, object]) -> pd.DataFrame:
    return rows[(rows[_CASE] == pd.Series(about)[_CASE]).all(axis=1)]


def _bundles(rows: pd.DataFrame) -> list[int]:
    return sorted(set(rows["ports_per_circuit"]) - {0})


def _gb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"


def _number(value: float) -> Cell:
    return Cell(f"{value:.3g}" if value >= 10 else f"{value:.2f}", value)


def _range(shares: Iterable[float]) -> str:
    """Write a range of shares with as many digits as separate them from all."""
    ordered = sorted(shares)
    digits = 2 if ordered[0] > 0.999 else 1
    low, high = (write_percent(share, digits) for share in (ordered[0], ordered[-1]))
    return low if low == high else f"{low} to {high}"


TITLE = "trioflow: case studies"
FIGURES = "studies"
"""Folder of the figures beside the page."""
CAPTIONS = read_captions(f"{DATA}/studies/page")


class _Study(NamedTuple):
    """A case study: its heading, its table's schema, its figures, and the words before and after them."""

    title: str
    schema: pa.Schema
    figures: tuple[str, ...]
    render: Callable[[pd.DataFrame], tuple[str, str]]


STUDIES: Mapping[str, _Study] = {
    "wafer": _Study("84 GPUs on a photonic wafer", WAFER, ("wafer",), render_wafer),
    "hop": _Study("Hop: decentralised training", HOP, ("hop_speedup", "hop_bandwidth"), render_hop),
    "distsim_search": _Study(
        "DistSim's search for a plan", tables.SCHEMAS["sweep_results"], ("distsim_search",), render_distsim
    ),
}
"""By the name of the table."""


def build_study_page(folder: str | Path, page: str | Path) -> None:
    """Write the page of all case studies from ``<study>.parquet`` and figures (SVG) in ``folder``, copied beside it.

    Raises InputError when a table is empty, or a figure is missing.
    """
    source, target = Path(folder), Path(page)
    frames = {name: _read(source, name) for name in STUDIES}
    made = _compose(frames, source)
    for study in STUDIES.values():
        for figure in study.figures:
            _copy(source / f"{figure}.svg", target.parent / FIGURES / f"{figure}.svg")
    write_page(target, made)


def _read(folder: Path, name: str) -> pd.DataFrame:
    path = folder / f"{name}.parquet"
    rows = tables.read_table(path, name, STUDIES[name].schema)
    if rows.empty:
        raise InputError("the study has no rows", file=path, fix="run `snakemake studies` again")
    for figure in STUDIES[name].figures:
        if not (folder / f"{figure}.svg").is_file():
            raise InputError("no such figure", file=folder / f"{figure}.svg", fix="run `snakemake studies` again")
    return rows


def _copy(source: Path, target: Path) -> None:
    with atomic_path(target) as temporary:
        shutil.copyfile(source, temporary)


def _compose(frames: Mapping[str, pd.DataFrame], folder: Path) -> Page:
    runs = join_words(f"{count_words(len(rows), 'run')} of {STUDIES[name].title}" for name, rows in frames.items())
    sections = []
    for name, study in STUDIES.items():
        words, body = study.render(frames[name])
        figures = [render_figure(f"{FIGURES}/{figure}.svg", CAPTIONS[figure]) for figure in study.figures]
        sections.append(Section(name, study.title, [words, *figures, body]))
    return Page(
        TITLE,
        sections,
        "Nothing on this page was measured here. Operator times are predicted from shapes, networks and protocols are "
        f"simulated: {runs}. What papers report is cited as such, and nothing was fitted to it.",
        files=[folder / f"{name}.parquet" for name in frames],
    )
