# Purpose: put every prediction beside its measurement: error table, what errors are made of, figures, page;
#          and all traces side by side, the imported ones on a page of their own.
# Inputs:  results/timelines/, results/measurements/, results/calibration/, results/operator_tables/, cost models,
#          and results/task_graphs/, simulated again with measured values in place of models
# Outputs: results/report/: error.parquet, attribution.parquet, causes.parquet, index.html, figures/, perfetto/;
#          traces.html, traces.parquet, published_traces.html, published_traces.parquet


rule attribute:
    input:
        graphs=expand(
            "<results>/task_graphs/{experiment}/{file}",
            experiment=EXPERIMENTS,
            file=["tasks.parquet", "dependencies.parquet"],
        ),
        traces=expand(
            "<results>/operator_tables/{trace}/{file}",
            trace=TRACES,
            file=["trace.json", "operators.parquet", "tensors.parquet"],
        ),
        measurements=expand(
            "<results>/measurements/{workload}/{file}",
            workload=MEASURED,
            file=["measurements.parquet", "rank_timelines.parquet"],
        ),
        sessions=expand(
            "<results>/calibration/{workload}/session.json", workload=MEASURED
        ),
        platform="<results>/platforms/this-machine.yaml",
        collectives="<results>/cost_models/this-machine/collectives.json",
    output:
        attribution="<results>/report/attribution.parquet",
        causes="<results>/report/causes.parquet",
    log:
        "<logs>/attribute.log",
    benchmark:
        "<benchmarks>/attribute.tsv"
    conda:
        "../envs/analysis.yaml"
    resources:
        mem_mb=4000,
        runtime=15,
    params:
        library=library_digest("attribute"),
        experiments=as_rows(EXPERIMENTS.values()),
    message:
        "divide the errors among the models behind them"
    script:
        "../scripts/attribute.py"


rule report:
    input:
        traces=expand("<results>/operator_tables/{trace}/trace.json", trace=TRACES),
        measurements=expand(
            "<results>/measurements/{workload}/{file}",
            workload=MEASURED,
            file=["measurements.parquet", "rank_timelines.parquet"],
        ),
        calibrations=expand(
            "<results>/calibration/{workload}/{file}",
            workload=MEASURED,
            file=["collective_samples.parquet", "session.json"],
        ),
        predictions=expand(
            "<results>/timelines/{experiment}/{file}",
            experiment=EXPERIMENTS,
            file=[
                "timeline.parquet",
                "critical_path.parquet",
                "breakdown.parquet",
                "links.parquet",
                "summary.json",
            ],
        ),
        operator_fit="<results>/cost_models/this-machine/operator_fit.parquet",
        collectives="<results>/cost_models/this-machine/collectives.json",
        attribution="<results>/report/attribution.parquet",
        causes="<results>/report/causes.parquet",
    output:
        errors="<results>/report/error.parquet",
        page="<results>/report/index.html",
        predicted_vs_measured=report(
            "<results>/report/figures/predicted_vs_measured.svg",
            caption="../workflow/trioflow/data/report/sections/predicted_vs_measured.rst",
            category="Errors",
            labels={"figure": "predicted and measured step time"},
        ),
        error_by_plan=report(
            "<results>/report/figures/error_by_plan.svg",
            caption="../workflow/trioflow/data/report/sections/error_by_plan.rst",
            category="Errors",
            labels={"figure": "error by workload and plan"},
        ),
        attribution=report(
            "<results>/report/figures/attribution.svg",
            caption="../workflow/trioflow/data/report/sections/attribution.rst",
            category="Errors",
            labels={"figure": "what the errors are made of"},
        ),
        sensitivity=report(
            "<results>/report/figures/sensitivity.svg",
            caption="../workflow/trioflow/data/report/sections/sensitivity.rst",
            category="Errors",
            labels={"figure": "what moves the predictions"},
        ),
        collective_curve=report(
            "<results>/report/figures/collective_curve.svg",
            caption="../workflow/trioflow/data/report/sections/collective_curve.rst",
            category="Cost models",
            labels={"figure": "collectives"},
        ),
        operator_fit=report(
            "<results>/report/figures/operator_fit.svg",
            caption="../workflow/trioflow/data/report/sections/operator_fit.rst",
            category="Cost models",
            labels={"figure": "operators"},
        ),
        timelines=expand(
            "<results>/report/figures/timelines/{experiment}.svg",
            experiment=EXPERIMENTS,
        ),
        pictures=expand(
            "<results>/report/figures/{figure}.png",
            figure=[
                "predicted_vs_measured",
                "error_by_plan",
                "attribution",
                "sensitivity",
                "collective_curve",
                "operator_fit",
            ],
        ),
        perfetto=expand(
            "<results>/report/perfetto/{experiment}.json.gz", experiment=EXPERIMENTS
        ),
        timeline_pictures=expand(
            "<results>/report/figures/timelines/{experiment}.png",
            experiment=EXPERIMENTS,
        ),
    log:
        "<logs>/report.log",
    benchmark:
        "<benchmarks>/report.tsv"
    conda:
        "../envs/analysis.yaml"
    resources:
        mem_mb=4000,
        runtime=15,
    params:
        library=library_digest("report"),
        folder=subpath(output.page, parent=True),
        experiments=as_rows(EXPERIMENTS.values()),
        plans=as_rows(PLANS.values()),
    message:
        "write the report"
    script:
        "../scripts/report.py"


rule describe_traces:
    input:
        facts=page_traces,
    output:
        page="<results>/report/{traces_page}.html",
        table="<results>/report/{traces_page}.parquet",
    log:
        "<logs>/describe_traces/{traces_page}.log",
    benchmark:
        "<benchmarks>/describe_traces/{traces_page}.tsv"
    conda:
        "../envs/analysis.yaml"
    params:
        library=library_digest("describe_traces"),
        traces=trace_folders,
    message:
        "put the traces side by side: {wildcards.traces_page}"
    script:
        "../scripts/describe_traces.py"
