# Purpose: run a task graph through the event engine and the network of the platform.
# Inputs:  results/task_graphs/<experiment>/, the platform, the collective cost model,
#          the session that the prediction is calibrated to,
#          the workload's traces (modules, shapes, gradients), what repeats in all captures differ by
# Outputs: results/timelines/<experiment>/: timeline.parquet, summary.json, perfetto.json.gz,
#          critical_path.parquet, links.parquet, breakdown.parquet


rule simulate:
    input:
        tasks="<results>/task_graphs/{experiment}/tasks.parquet",
        dependencies="<results>/task_graphs/{experiment}/dependencies.parquet",
        platform="<results>/platforms/this-machine.yaml",
        collectives="<results>/cost_models/this-machine/collectives.json",
        facts=trace_files("trace.json"),
        operators=trace_files("operators.parquet"),
        tensors=trace_files("tensors.parquet"),
        session=experiment_session,
        captures=expand("<results>/operator_tables/{trace}/trace.json", trace=TRACES),
    output:
        timeline="<results>/timelines/{experiment}/timeline.parquet",
        critical_path="<results>/timelines/{experiment}/critical_path.parquet",
        links="<results>/timelines/{experiment}/links.parquet",
        breakdown="<results>/timelines/{experiment}/breakdown.parquet",
        perfetto="<results>/timelines/{experiment}/perfetto.json.gz",
        summary="<results>/timelines/{experiment}/summary.json",
    log:
        "<logs>/simulate/{experiment}.log",
    benchmark:
        "<benchmarks>/simulate/{experiment}.tsv"
    conda:
        "../envs/analysis.yaml"
    params:
        library=library_digest("simulate"),
        graph=subpath(input.tasks, parent=True),
        traces=trace_folders,
        folder=subpath(output.summary, parent=True),
    message:
        "simulate {wildcards.experiment}"
    script:
        "../scripts/simulate.py"


rule timelines:
    """Simulate every experiment."""
    input:
        expand("<results>/timelines/{experiment}/summary.json", experiment=EXPERIMENTS),
