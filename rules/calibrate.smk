# Purpose: what a prediction may know of this machine: collectives, host costs, single-rank steps. One session on the
#          machine serves this stage and measure: it runs the workload's experiments too, interleaved with the steps
#          that predictions are calibrated to, and records them apart.
# Inputs:  the workload's stages (results/partitions/); rows of workloads.tsv, plans.tsv and
#          experiments.tsv; the settings under measure
# Outputs: results/calibration/<workload>/: session.json, collective_samples.parquet;
#          results/sessions/<workload>/, which measure alone reads


rule calibrate:
    input:
        partition="<results>/partitions/{workload}.json",
    output:
        session="<results>/calibration/{workload}/session.json",
        collective_samples="<results>/calibration/{workload}/collective_samples.parquet",
        steps="<results>/sessions/{workload}/steps.json",
        events="<results>/sessions/{workload}/events.parquet",
    log:
        "<logs>/calibrate/{workload}.log",
    benchmark:
        "<benchmarks>/calibrate/{workload}.tsv"
    conda:
        "../envs/capture.yaml"
    threads: 2
    resources:
        measurement=1,
        gpu=session_gpus,
        mem_mb=8000,
        runtime=30,
    params:
        library=library_digest("calibrate"),
        folder=subpath(output.session, parent=True),
        record=subpath(output.steps, parent=True),
        row=workload_row,
        experiments=experiments_of_workload,
        plans=plans_of_workload,
        device=config["device"],
        seed=config["seed"],
        settings=config["measure"],
    message:
        "run the session of {wildcards.workload} on all ranks"
    script:
        "../scripts/calibrate.py"


rule calibrations:
    """Run every workload's session on this machine."""
    input:
        expand("<results>/calibration/{workload}/session.json", workload=MEASURED),
