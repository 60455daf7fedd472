# Purpose: what single rules ask for: rows of the tables, files, limits.
# Inputs:  the tables of common.smk
# Outputs: functions of wildcards, in the order of the rules


def experiments_of_workload(wildcards):
    """The rows of experiments.tsv of the workload."""
    return as_rows(
        row for row in EXPERIMENTS.values() if row.workload == wildcards.workload
    )


def plans_of_workload(wildcards):
    """The rows of plans.tsv that the workload's experiments use."""
    used = {row["plan"] for row in experiments_of_workload(wildcards)}
    return as_rows(PLANS[name] for name in sorted(used))


def session_gpus(wildcards):
    """GPUs that the workload's experiments ask for: one a rank of the largest plan."""
    names = {row["plan"] for row in experiments_of_workload(wildcards)}
    return max(PLANS[name].ranks for name in names) * capture_gpus(wildcards)


def stages_of_workload(wildcards):
    """The numbers of pipeline stages that the workload's experiments use."""
    counts = {
        row["pipeline"] * row["stages_per_rank"] for row in plans_of_workload(wildcards)
    }
    return sorted(counts - {1})


def experiment_row(wildcards):
    """The row of experiments.tsv."""
    return as_rows([EXPERIMENTS[wildcards.experiment]])[0]


def plan_row(wildcards):
    """The row of plans.tsv of the experiment's plan."""
    return as_rows([PLANS[EXPERIMENTS[wildcards.experiment].plan]])[0]


def experiment_partition(wildcards):
    """The stages of the experiment's workload."""
    return f"<results>/partitions/{EXPERIMENTS[wildcards.experiment].workload}.json"


def experiment_session(wildcards):
    """The session that the experiment's prediction is calibrated to."""
    return f"<results>/calibration/{EXPERIMENTS[wildcards.experiment].workload}/session.json"


def published_files(wildcards):
    """The public files that the platform's collectives are fitted from."""
    from trioflow_evaluation.fits.collectives import find_published, published_tables

    tables = published_tables(find_published(wildcards.platform))
    return [f"<results>/data/{table.key}" for table in tables]


def published_collectives(wildcards):
    """The collectives of every platform that ships."""
    from trioflow_evaluation.fits.collectives import PLATFORMS

    return [
        f"<results>/cost_models/published/{platform}/collectives.json"
        for platform in PLATFORMS
    ]


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


def dataset_entry(wildcards):
    """The facts of one file: where it is pinned, its size and hash."""
    return dict(vars(find_catalogue().find_file(wildcards.dataset_file)))


def dataset_addresses(wildcards):
    """The addresses that serve files unless the environment names others."""
    return find_catalogue().addresses()


def sweep_description(wildcards):
    """The description of a sweep."""
    return SWEEPS[wildcards.sweep]


def sweep_plan(wildcards):
    """The files, shipped ones apart, that each chunk of a sweep needs, by its digest."""
    from trioflow.sweeps.scenarios import plan_sweep

    return plan_sweep(SWEEPS[wildcards.sweep], config["sweeps"]["chunk"])


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


def list_campaign():
    """The items of config/campaign.tsv by name, the most valuable first; read once, when first asked for."""
    from trioflow.campaign.items import load_items

    return load_items(config["tables"]["campaign"])


def find_item(wildcards):
    """The campaign's item that a job measures, None for a capture of workloads.tsv."""
    words = dict(wildcards)
    if words.get("workload") in WORKLOADS:
        return None
    name = (
        "{workload}-b{batch}"
        if "workload" in words
        else "{operation}-{precision}-{level}"
    )
    return list_campaign().get(name.format(**words))


def campaign_items(wildcards):
    """What every item of the campaign makes."""
    return [f"<results>/{item.place}" for item in list_campaign().values()]


def finished_items(wildcards):
    """What is finished of the campaign: tables of times, and captures, which are packed."""
    items = list_campaign().values()
    return [
        f"<results>/{item.packed}" for item in items if item.is_done(config["results"])
    ]


def item_priority(wildcards):
    """Items of a campaign run in its order, those that failed before at the end; 0 for anything else."""
    item = find_item(wildcards)
    return item.priority(config["results"]) if item else 0


def smaller_captures(wildcards):
    """Captures of a campaign that come first: where a smaller batch ran out of memory, this one is not tried."""
    item = find_item(wildcards)
    smaller = item.list_smaller(list_campaign().values()) if item else []
    return [ancient(f"<results>/{one.place}") for one in smaller]
