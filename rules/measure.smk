# Purpose: the ground truth, which the report alone reads: the steps of plans that ran for real on all ranks.
# Inputs:  what calibrate's session recorded (results/sessions/<workload>/)
# Outputs: results/measurements/<workload>/: measurements, rank_timelines, step_marks and recorded_events.parquet


rule measure:
    input:
        steps="<results>/sessions/{workload}/steps.json",
        events="<results>/sessions/{workload}/events.parquet",
    output:
        measurements="<results>/measurements/{workload}/measurements.parquet",
        rank_timelines="<results>/measurements/{workload}/rank_timelines.parquet",
        step_marks="<results>/measurements/{workload}/step_marks.parquet",
        recorded_events="<results>/measurements/{workload}/recorded_events.parquet",
    log:
        "<logs>/measure/{workload}.log",
    benchmark:
        "<benchmarks>/measure/{workload}.tsv"
    conda:
        "../envs/analysis.yaml"
    params:
        library=library_digest("measure"),
        folder=subpath(output.measurements, parent=True),
    message:
        "collect the measured steps of {wildcards.workload}"
    script:
        "../scripts/measure.py"


rule measurements:
    """Run every experiment for real, on all ranks."""
    input:
        expand(
            "<results>/measurements/{workload}/measurements.parquet", workload=MEASURED
        ),
