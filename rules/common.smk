# Purpose: the tables that every rule looks things up in, and the look-ups.
# Inputs:  rules/packages.yaml, config/workloads.tsv, config/plans.tsv, config/experiments.tsv, config/imports.tsv
#          and, only when a job asks for it, workflow/resources/datasets.yaml
# Outputs: WORKLOADS, PLANS, EXPERIMENTS, IMPORTS (rows by name), TRACES (names of the traces to
#          capture), SWEEPS (descriptions by name)
# Library modules that need numpy are imported by the look-ups that need them: a run that asks for
# nothing of theirs starts without.

from trioflow.datasets.catalogue import (
    HALF_ATTENTION,
    HALF_EXPERTS,
    HALF_PRODUCTS,
    NODE_BANDWIDTHS,
    SINGLE_PRODUCTS,
    load_catalogue,
)
from trioflow.base.experiments import (
    as_rows,
    load_experiments,
    load_imports,
    load_plans,
    load_workloads,
)
from trioflow.base.provenance import digest_modules, list_packages
from trioflow.base.settings import list_descriptions
from trioflow.base.yaml_files import read_yaml

PACKAGES = read_yaml(workflow.source_path("packages.yaml"))
WORKLOADS = load_workloads(config["tables"]["workloads"])
PLANS = load_plans(config["tables"]["plans"])
EXPERIMENTS = load_experiments(config["tables"]["experiments"], WORKLOADS, PLANS)
PUBLISHED_DEVICES = ["a100-pcie-40gb", "a100-pcie-80gb", "h100-sxm", "v100-pcie-32gb"]
CATALOGUE_NAME = "workflow/resources/datasets.yaml"
CATALOGUE_FILE = workflow.source_path(f"../{CATALOGUE_NAME}")
IMPORTS = load_imports(config["tables"]["imports"])
TRACES = [trace for workload in WORKLOADS.values() for trace in workload.traces]
MEASURED = sorted({row.workload for row in EXPERIMENTS.values()})
SWEEPS = list_descriptions(config["sweeps"]["folder"])


wildcard_constraints:
    workload="[a-z0-9-]+",
    batch="[1-9][0-9]*",
    trace="[a-z0-9-]+-b[1-9][0-9]*",
    experiment="[a-z0-9-]+",
    imported="[a-z0-9-]+",
    dataset_file=r"[^/]+\+[^/]+/.+",
    traces_page="traces|published_traces",
    sweep="[a-z0-9-]+",
    platform="[a-z0-9-]+",
    chunk="[0-9a-f]{16}",
    operation="[a-z0-9_]+",
    level="[a-z]+",
    precision="none|fp32|tf32|bf16|fp16",


def library_digest(rule_name):
    """Digest of the library's packages that the rule declares."""
    return digest_modules(*list_packages(rule_name, PACKAGES))


def workload_row(wildcards):
    """The row of workloads.tsv; of a campaign, the catalogue's in a precision."""
    row = WORKLOADS.get(wildcards.workload)
    if row is None:
        from trioflow.campaign.items import find_workload_row

        row = find_workload_row(wildcards.workload, WORKLOADS)
    return as_rows([row])[0]


def capture_gpus(wildcards):
    """GPUs that a capture asks for: one where the settings say CUDA, none otherwise."""
    return int(config["device"] == "cuda")


def trace_folders(wildcards, input):
    """The folders of the traces whose facts a job reads, in the same order."""
    return [subpath(facts, parent=True) for facts in input.facts]


def find_catalogue():
    """The catalogue; it is read once, when first asked for."""
    return load_catalogue(CATALOGUE_FILE, CATALOGUE_NAME)


def public_files(*groups):
    """Find the retrieved files of groups of the catalogue; it is read when a job first asks."""

    def find(wildcards):
        files = find_catalogue().select_files(groups)
        return [f"<results>/data/{file.key}" for file in files]

    return find


def trace_files(name):
    """Find a file of every trace of the workload or experiment, the one that plans start from first."""

    def find(wildcards):
        workload = (
            wildcards.get("workload") or EXPERIMENTS[wildcards.experiment].workload
        )
        traces = WORKLOADS[workload].traces
        return [f"<results>/operator_tables/{trace}/{name}" for trace in traces]

    return find
