"""``trioflow fit-collectives``: a platform's collectives from logs of nccl-tests."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from trioflow import __version__
from trioflow.costmodel.collectives import wire_factor
from trioflow.costmodel.nccl_formula import NcclMachine, load_constants, recognise_device
from trioflow.costmodel.nccl_tests_log import PROGRAMS, import_nccl_tests
from trioflow.costmodel.platform_collectives import fit_platform_collectives
from trioflow.errors import InputError
from trioflow.provenance import digest_file
from trioflow.units import format_bytes

EXAMPLE = """example:
  all_reduce_perf -b 1K -e 1G -f 2 -g 8 | tee all_reduce_perf.log
  trioflow fit-collectives all_reduce_perf.log --platform our-h100 -o collectives.json
  trioflow collective all_reduce --bytes 25e6 --ranks 8 --platform h100x8-nvlink --collectives collectives.json
"""


def add_import_collectives(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of ``trioflow fit-collectives``."""
    parser = commands.add_parser(
        "fit-collectives", help="fit a platform's collectives to logs of nccl-tests",
        epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.set_defaults(run=run_fit_collectives)
    parser.add_argument(
        "logs", metavar="LOG", nargs="+", help="output of all_reduce_perf and its like"
    )
    parser.add_argument(
        "--platform", required=True, metavar="NAME", help="name of what was measured"
    )
    parser.add_argument("-o", "--output", required=True, metavar="MODEL", help="JSON file to write")
    said = parser.add_argument_group("what a log does not say (an error asks for it)")
    said.add_argument("--ranks", type=int, metavar="N", help="ranks of the group")
    said.add_argument("--collective", choices=sorted(PROGRAMS.values()), metavar="OP",
                      help=f"operation: {', '.join(sorted(PROGRAMS.values()))}")  # fmt: skip
    said.add_argument("--nccl", metavar="VERSION", help="version of NCCL, such as 2.21.5")
    said.add_argument("--gpu", metavar="NAME", help="the GPU, as its driver names it")
    said.add_argument(
        "--ranks-per-node",
        type=int,
        metavar="N",
        help="GPUs of a node (default: 8, or more where a log has more)",
    )


def run_fit_collectives(options: argparse.Namespace) -> None:
    """Read the logs, fit, write the model and say what it holds."""
    library = f"NCCL {options.nccl}" if options.nccl else None
    samples = import_nccl_tests(
        options.logs, options.platform, options.ranks, options.collective, library
    )
    libraries = sorted(set(samples["library"]))
    if len(libraries) > 1:
        raise InputError(
            f"logs of several versions: {', '.join(libraries)}", fix="fit a model for each"
        )
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
            machine = replace(machine, bus_bytes_per_s=known.links * link)
        else:
            machine = replace(machine, hop="pci", in_switch_reduction=False)
    seen = max(n // m for n, m in zip(samples["ranks"], samples["nodes"], strict=True))
    ranks_per_node = options.ranks_per_node or max(int(seen), machine.ranks_per_node)
    machine = replace(machine, ranks_per_node=ranks_per_node)
    model = fit_platform_collectives(
        samples, options.platform, libraries[0], machine, f"nccl-tests on {gpu or 'an unnamed GPU'}",
        {
            "trioflow_version": __version__,
            "inputs": {Path(log).name: digest_file(log) for log in options.logs},
        },
    )  # fmt: skip
    model.save(options.output)
    for (collective, ranks, nodes), curve in sorted(model.curves.items()):
        size = float(curve.message_bytes[-1])
        rate = wire_factor(collective, ranks) * size / float(curve.time_s[-1])
        place = f"{ranks} ranks" + (f" of {nodes} nodes" if nodes > 1 else "")
        print(f"{collective} on {place}: {len(curve.time_s)} sizes, {format_bytes(rate)}/s bus "
              f"bandwidth at {format_bytes(size)}")  # fmt: skip
    print(f"{libraries[0]} on {options.platform}; written: {options.output}")
