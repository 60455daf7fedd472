# Purpose: the ground truth: run a workload's experiments for real, on all ranks, interleaved with
#          the steps and messages they are predicted from.
# Inputs:  the workload's stages (results/partitions/); rows of workloads.tsv, plans.tsv and
#          experiments.tsv; the settings under measure
# Outputs: results/measurements/<workload>/


rule measure:
    input:
        partition="<results>/partitions/{workload}.json",
    output:
        measurements="<results>/measurements/{workload}/measurements.parquet",
        collective_samples="<results>/measurements/{workload}/collective_samples.parquet",
        rank_timelines="<results>/measurements/{workload}/rank_timelines.parquet",
        step_marks="<results>/measurements/{workload}/step_marks.parquet",
        recorded_events="<results>/measurements/{workload}/recorded_events.parquet",
        session="<results>/measurements/{workload}/session.json",
    log:
        "<logs>/measure/{workload}.log",
    benchmark:
        "<benchmarks>/measure/{workload}.tsv"
    conda:
        "../envs/capture.yaml"
    threads: 2
    resources:
        measurement=1,
        gpu=measure_gpus,
        mem_mb=8000,
        runtime=30,
    params:
        library=library_digest("measure"),
        folder=subpath(output.session, parent=True),
        row=workload_row,
        experiments=experiments_of_workload,
        plans=plans_of_workload,
        device=config["device"],
        seed=config["seed"],
        settings=config["measure"],
    message:
        "measure the experiments of {wildcards.workload} on all ranks"
    script:
        "../scripts/measure.py"


rule measurements:
    """Run every experiment for real, on all ranks."""
    input:
        expand("<results>/measurements/{workload}/session.json", workload=MEASURED),
