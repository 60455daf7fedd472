# Purpose: the tables that every rule looks things up in, and the look-ups.
# Inputs:  config/workloads.tsv, config/plans.tsv, config/experiments.tsv
# Outputs: WORKLOADS, PLANS, EXPERIMENTS (rows by name), TRACES (names of the traces to capture)

from trioflow.experiments import as_rows, load_experiments, load_plans, load_workloads
from trioflow.imports import required_modules
from trioflow.provenance import digest_modules

WORKLOADS = load_workloads(config["tables"]["workloads"])
PLANS = load_plans(config["tables"]["plans"])
EXPERIMENTS = load_experiments(config["tables"]["experiments"], WORKLOADS, PLANS)
TRACES = [trace for workload in WORKLOADS.values() for trace in workload.traces]
MEASURED = sorted({row.workload for row in EXPERIMENTS.values()})


wildcard_constraints:
    workload="[a-z0-9-]+",
    batch="[1-9][0-9]*",
    trace="[a-z0-9-]+-b[1-9][0-9]*",
    experiment="[a-z0-9-]+",


def library_digest(rule_name):
    """Digest of every library module that the rule's script imports, directly or not."""
    return digest_modules(
        *required_modules(workflow.source_path(f"../scripts/{rule_name}.py"))
    )


def workload_row(wildcards):
    """The row of workloads.tsv of the wildcard, or of the experiment's workload."""
    return as_rows([WORKLOADS[wildcards.workload]])[0]


def experiment_row(wildcards):
    """The row of experiments.tsv."""
    return as_rows([EXPERIMENTS[wildcards.experiment]])[0]


def plan_row(wildcards):
    """The row of plans.tsv of the experiment's plan."""
    return as_rows([PLANS[EXPERIMENTS[wildcards.experiment].plan]])[0]


def experiments_of_workload(wildcards):
    """The rows of experiments.tsv of the workload."""
    return as_rows(
        row for row in EXPERIMENTS.values() if row.workload == wildcards.workload
    )


def plans_of_workload(wildcards):
    """The rows of plans.tsv that the workload's experiments use."""
    used = {row["plan"] for row in experiments_of_workload(wildcards)}
    return as_rows(PLANS[name] for name in sorted(used))


def stages_of_workload(wildcards):
    """The numbers of pipeline stages that the workload's experiments use."""
    return sorted({row["pipeline"] for row in plans_of_workload(wildcards)} - {1})


def workload_trace_files(name):
    """Find a file of every trace of the workload, the one that plans start from first."""

    def find(wildcards):
        traces = WORKLOADS[wildcards.workload].traces
        return [f"<results>/operator_tables/{trace}/{name}" for trace in traces]

    return find


def experiment_trace_files(name):
    """Find a file of every trace of the experiment's workload, in the same order."""

    def find(wildcards):
        traces = WORKLOADS[EXPERIMENTS[wildcards.experiment].workload].traces
        return [f"<results>/operator_tables/{trace}/{name}" for trace in traces]

    return find


def experiment_partition(wildcards):
    """The stages of the experiment's workload."""
    return f"<results>/partitions/{EXPERIMENTS[wildcards.experiment].workload}.json"


def experiment_session_file(name):
    """Find a file of the session that measured the experiment."""

    def find(wildcards):
        workload = EXPERIMENTS[wildcards.experiment].workload
        return f"<results>/measurements/{workload}/{name}"

    return find
