"""``trioflow fit``: a model of operators from traces; ``trioflow fit-collectives``: one of collectives from logs."""

import argparse
import json
from pathlib import Path

from msgspec import structs

from trioflow import __version__
from trioflow.base.errors import InputError
from trioflow.base.provenance import digest_file
from trioflow.base.units import format_bytes
from trioflow.cli.output import JSON, add_command, format_table
from trioflow.costmodel.collectives.model import wire_factor
from trioflow.costmodel.collectives.platform import NcclMachine, load_constants, recognise_device
from trioflow.costmodel.fits.collectives import fit_platform_collectives
from trioflow.costmodel.fits.operators import AUTO, METHOD_NAMES, fit_named_model
from trioflow.formats.nccl_tests import PROGRAMS, import_nccl_tests
from trioflow.tables import records
from trioflow.trace.store import find_operators, load_trace

EXAMPLE = """example:
  all_reduce_perf -b 1K -e 1G -f 2 -g 8 | tee all_reduce_perf.log
  trioflow fit-collectives all_reduce_perf.log --platform our-h100 -o collectives.json
  trioflow collective all_reduce --bytes 25e6 --ranks 8 --platform h100x8-nvlink --collectives collectives.json
"""


def add_fit(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand ``fit``."""
    add_command(
        parser,
        _run_fit,
        {
            "": (
                ("traces", "TRACE", "folders of traces of one device", {"nargs": "+"}),
                (
                    "--method",
                    "NAME",
                    f"{', '.join(METHOD_NAMES)}, or one that a package registers (default: {AUTO})",
                    {"default": AUTO},
                ),
                ("-o --output", "MODEL", "JSON file to write", {"required": True}),
            )
        },
        JSON,
    )


def _run_fit(options: argparse.Namespace) -> None:
    """Fit a model, write it, and print how well it predicts what it did not see."""
    traces = [load_trace(name) for name in options.traces]
    model, diagnostics = fit_named_model(traces, options.method)
    model.save(options.output, inputs=[find_operators(n) for n in options.traces])
    rows = records(diagnostics.sort_values("time_share", ascending=False))
    low, high = model.step_interval()
    if options.json:
        print(json.dumps({"model": options.output, "step_interval": [low, high], "classes": rows}))
        return
    print(
        format_table(
            ("class", "phase", "driver", "operators", "time share", "R2", "held-out sum", "held-out each"),
            [
                (
                    row["operator_class"],
                    row["phase"],
                    row["driver"],
                    str(row["operators"]),
                    f"{row['time_share']:.1%}",
                    _optional(row["r_squared"], ".3f"),
                    _optional(row["held_out_error"], "+.1%"),
                    _optional(row["held_out_absolute_error"], ".1%"),
                )
                for row in rows
            ],
            left=3,
        )
    )
    print(
        f"\n80 % of left-out steps lie between {low:.2f} and {high:.2f} of their prediction\nwritten: {options.output}"
    )


def _optional(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def add_fit_collectives(parser: argparse.ArgumentParser) -> None:
    """Add the parser of ``trioflow fit-collectives``."""
    programs = sorted(PROGRAMS.values())
    add_command(
        parser,
        _run_fit_collectives,
        {
            "": (
                ("logs", "LOG", "output of all_reduce_perf and its like", {"nargs": "+"}),
                ("--platform", "NAME", "name of what was measured", {"required": True}),
                ("-o --output", "MODEL", "JSON file to write", {"required": True}),
            ),
            "what a log does not say (an error names what is missing)": (
                ("--ranks", (int, "N"), "ranks of the group"),
                ("--collective", programs, f"operation: {', '.join(programs)}", {"metavar": "OP"}),
                ("--nccl", "VERSION", "version of NCCL, such as 2.21.5"),
                ("--gpu", "NAME", "the GPU, as its driver names it"),
                ("--ranks-per-node", (int, "N"), "GPUs of a node (default: 8, or more where a log has more)"),
            ),
        },
        epilog=EXAMPLE,
    )


def _run_fit_collectives(options: argparse.Namespace) -> None:
    """Read the logs, fit, write the model and say what it holds."""
    library = f"NCCL {options.nccl}" if options.nccl else None
    samples = import_nccl_tests(options.logs, options.platform, options.ranks, options.collective, library)
    libraries = sorted(set(samples["library"]))
    if len(libraries) > 1:
        raise InputError(f"logs of several versions: {', '.join(libraries)}", fix="fit a model for each")
    within = samples[samples["nodes"] == 1]
    rates = [
        wire_factor(name, int(ranks)) * size / (time_ns * 1e-9)
        for name, ranks, size, time_ns in (within if len(within) else samples)[
            ["collective", "ranks", "message_bytes", "time_ns"]
        ].itertuples(index=False)
    ]
    gpu = options.gpu or samples.attrs["device"]
    known = recognise_device(gpu)
    machine = NcclMachine(known.generation, "nvlink", max(rates), known.in_switch_reduction)
    if known.links:
        link = load_constants(libraries[0])["link_gb_per_s"][known.link] * 1e9
        if max(rates) > link:  # otherwise no NVLink joins the ranks
            machine = structs.replace(machine, bus_bytes_per_s=known.links * link)
        else:
            machine = structs.replace(machine, hop="pci", in_switch_reduction=False)
    seen = max(n // m for n, m in zip(samples["ranks"], samples["nodes"], strict=True))
    ranks_per_node = options.ranks_per_node or max(int(seen), machine.ranks_per_node)
    machine = structs.replace(machine, ranks_per_node=ranks_per_node)
    model = fit_platform_collectives(
        samples,
        options.platform,
        libraries[0],
        machine,
        f"nccl-tests on {gpu or 'an unnamed GPU'}",
        {"trioflow_version": __version__, "inputs": {Path(log).name: digest_file(log) for log in options.logs}},
    )
    model.save(options.output)
    for (collective, ranks, nodes), curve in sorted(model.curves.items()):
        size = float(curve.message_bytes[-1])
        rate = wire_factor(collective, ranks) * size / float(curve.time_s[-1])
        place = f"{ranks} ranks" + (f" of {nodes} nodes" if nodes > 1 else "")
        print(
            f"{collective} on {place}: {len(curve.time_s)} sizes, {format_bytes(rate)}/s bus "
            f"bandwidth at {format_bytes(size)}"
        )
    print(f"{libraries[0]} on {options.platform}; written: {options.output}")
