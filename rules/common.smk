# Purpose: the tables that every rule looks things up in, and the look-ups.
# Inputs:  config/workloads.tsv, config/plans.tsv, config/experiments.tsv, config/imports.tsv
#          and, only when a job asks for it, workflow/resources/datasets.yaml
# Outputs: WORKLOADS, PLANS, EXPERIMENTS, IMPORTS (rows by name), TRACES (names of the traces to
#          capture), VALIDATIONS (sets that judge the cost models), SWEEPS (descriptions by name),
#          PUBLISHED_SETS (of config/published.tsv)
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
from trioflow.base.imports import required_modules
from trioflow.base.provenance import digest_modules
from trioflow.reproductions.published.cases import list_published_sets
from trioflow.base.settings import list_descriptions

WORKLOADS = load_workloads(config["tables"]["workloads"])
PLANS = load_plans(config["tables"]["plans"])
EXPERIMENTS = load_experiments(config["tables"]["experiments"], WORKLOADS, PLANS)
PUBLISHED_DEVICES = ["a100-pcie-40gb", "a100-pcie-80gb", "h100-sxm", "v100-pcie-32gb"]
OPERATOR_SETS = ["batch-change", "leave-workload-out", "operator-data"]
VALIDATIONS = [*OPERATOR_SETS, "new-gpu", "collectives"]
CATALOGUE_NAME = "workflow/resources/datasets.yaml"
CATALOGUE_FILE = workflow.source_path(f"../{CATALOGUE_NAME}")
IMPORTS = load_imports(config["tables"]["imports"])
TRACES = [trace for workload in WORKLOADS.values() for trace in workload.traces]
MEASURED = sorted({row.workload for row in EXPERIMENTS.values()})
SWEEPS = list_descriptions(config["sweeps"]["folder"])
PUBLISHED_SETS = list_published_sets(config["tables"]["published"])
VTRAIN_SETS = ["vtrain-a100", "vtrain-a100-plans", "vtrain-a100-uncalibrated"]
PUBLISHED_PAGE_SETS = [*PUBLISHED_SETS, *VTRAIN_SETS]
CLUSTER_RUNS = "nanotron/runs-h100"
MEGATRON_PEAKS = "megatron/peaks"
DRIFT_JOBS = "stragglers/jobs"
BRIDGE_RATES = "megatron/rates"
VTRAIN_DATASETS = ["vtrain/iteration-times-a100", "vtrain/all-reduce-a100"]


wildcard_constraints:
    workload="[a-z0-9-]+",
    batch="[1-9][0-9]*",
    trace="[a-z0-9-]+-b[1-9][0-9]*",
    experiment="[a-z0-9-]+",
    imported="[a-z0-9-]+",
    dataset_file=r"[^/]+\+[^/]+/.+",
    traces_page="traces|published_traces",
    operator_set="|".join(OPERATOR_SETS),
    sweep="[a-z0-9-]+",
    published_set="|".join(PUBLISHED_SETS),
    platform="[a-z0-9-]+",
    chunk="[0-9a-f]{16}",


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


def capture_gpus(wildcards):
    """GPUs that a capture asks for: one where the settings say CUDA, none otherwise."""
    return int(config["device"] == "cuda")


def measure_gpus(wildcards):
    """GPUs that the workload's experiments ask for: one a rank of the largest plan."""
    names = {row["plan"] for row in experiments_of_workload(wildcards)}
    return max(PLANS[name].ranks for name in names) * capture_gpus(wildcards)


def stages_of_workload(wildcards):
    """The numbers of pipeline stages that the workload's experiments use."""
    counts = {
        row["pipeline"] * row["stages_per_rank"] for row in plans_of_workload(wildcards)
    }
    return sorted(counts - {1})


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


def trace_folders(wildcards, input):
    """The folders of the traces whose facts a job reads, in the same order."""
    return [subpath(facts, parent=True) for facts in input.facts]


def experiment_partition(wildcards):
    """The stages of the experiment's workload."""
    return f"<results>/partitions/{EXPERIMENTS[wildcards.experiment].workload}.json"


def experiment_session_file(name):
    """Find a file of the session that measured the experiment."""

    def find(wildcards):
        workload = EXPERIMENTS[wildcards.experiment].workload
        return f"<results>/measurements/{workload}/{name}"

    return find


def import_row(wildcards):
    """The row of imports.tsv."""
    return as_rows([IMPORTS[wildcards.imported]])[0]


def imported_files(wildcards):
    """The public files that the imported trace is made from."""
    return [f"<results>/data/{file}" for file in IMPORTS[wildcards.imported].files]


def page_traces(wildcards):
    """The traces of a page: those captured here, or those of imports.tsv."""
    if wildcards.traces_page == "traces":
        return [f"<results>/operator_tables/{trace}/trace.json" for trace in TRACES]
    return [f"<results>/imported_traces/{trace}/trace.json" for trace in IMPORTS]


def find_catalogue():
    """The catalogue; it is read once, when first asked for."""
    return load_catalogue(CATALOGUE_FILE, CATALOGUE_NAME)


def dataset_entry(wildcards):
    """The facts of one file: where it is pinned, its size and hash."""
    return find_catalogue().find_file(wildcards.dataset_file).as_row()


def dataset_addresses(wildcards):
    """The addresses that serve files unless the environment names others."""
    return find_catalogue().addresses()


def data_files(wildcards):
    """The files of the groups that the settings name."""
    files = find_catalogue().select_files(config["data"]["groups"])
    return [f"<results>/data/{file.key}" for file in files]


def published_files(wildcards):
    """The public files that the platform's collectives are fitted from."""
    from trioflow.costmodel.collectives.published import (
        find_published,
        published_tables,
    )

    tables = published_tables(find_published(wildcards.platform))
    return [f"<results>/data/{table.key}" for table in tables]


def published_collectives(wildcards):
    """The collectives of every platform that ships."""
    from trioflow.costmodel.collectives.published import PLATFORMS

    return [
        f"<results>/cost_models/published/{platform}/collectives.json"
        for platform in PLATFORMS
    ]


def published_operator_files(wildcards):
    """The public files that hold operator measurements."""
    files = find_catalogue().select_files(["triosim", "neusight"])
    return [f"<results>/data/{file.key}" for file in files]


def published_gpu_files(wildcards):
    """The public files that hold one operator on several GPUs, and a step to judge."""
    groups = ["triosim", "neusight", *SINGLE_PRODUCTS]
    return [
        f"<results>/data/{file.key}" for file in find_catalogue().select_files(groups)
    ]


def published_collective_files(wildcards):
    """The public files that hold measured collectives."""
    from trioflow.costmodel.collectives.published import PUBLIC_TABLES

    return [f"<results>/data/{table.key}" for table in PUBLIC_TABLES]


def published_node_files(wildcards):
    """The public files that hold collectives over many nodes."""
    files = find_catalogue().select_files(NODE_BANDWIDTHS)
    return [f"<results>/data/{file.key}" for file in files]


def published_product_files(wildcards):
    """The public files that hold products, attention and experts in half precision."""
    files = find_catalogue().select_files(
        [*HALF_PRODUCTS, *HALF_ATTENTION, *HALF_EXPERTS]
    )
    return [f"<results>/data/{file.key}" for file in files]


def vtrain_files(wildcards):
    """The file of iteration times and the all-reduces beside it."""
    files = find_catalogue().select_files(VTRAIN_DATASETS)
    return [f"<results>/data/{file.key}" for file in files]


def drift_files(wildcards):
    """The recorded jobs whose ranks drift apart."""
    files = find_catalogue().select_files([DRIFT_JOBS])
    return [f"<results>/data/{file.key}" for file in files]


def cluster_files(wildcards):
    """The file of nanotron's runs."""
    files = find_catalogue().select_files([CLUSTER_RUNS])
    return [f"<results>/data/{file.key}" for file in files]


def sweep_plan(wildcards):
    """The files, shipped ones apart, that each chunk of a sweep needs, by its digest."""
    from trioflow.sweeps.chunks import plan_sweep

    return plan_sweep(SWEEPS[wildcards.sweep], config["sweeps"]["chunk"])


def megatron_files(wildcards):
    """Arguments and logged peaks of Megatron-LM's tests."""
    files = find_catalogue().select_files([MEGATRON_PEAKS])
    return [f"<results>/data/{file.key}" for file in files]


def bridge_files(wildcards):
    """Megatron-Bridge's pages of measured rates."""
    files = find_catalogue().select_files([BRIDGE_RATES])
    return [f"<results>/data/{file.key}" for file in files]


def sweep_chunks(wildcards):
    """The chunks of a sweep's scenarios, each predicted by a job of its own."""
    return [
        f"<results>/sweeps/{wildcards.sweep}/chunks/{chunk}.parquet"
        for chunk in sweep_plan(wildcards)
    ]


def sweep_files(wildcards):
    """The files, shipped ones apart, that a chunk's scenarios need."""
    return sweep_plan(wildcards)[wildcards.chunk]


def chunk_minutes(wildcards, attempt):
    """The time limit of a chunk: an hour, doubled each time that it is sent again."""
    return 60 * 2 ** (attempt - 1)


def sweep_description(wildcards):
    """The description of a sweep."""
    return SWEEPS[wildcards.sweep]
