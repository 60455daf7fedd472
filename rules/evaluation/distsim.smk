# Purpose: DistSim's evaluation on our own runs: activity and timestamp errors, a GPT of 145B
#          parameters over the batch, what it costs; and the counterparts of its figures.
# Inputs:  results/measurements/, results/calibration/, results/timelines/, results/operator_tables/, the benchmarks of the jobs
#          behind them; shipped models for what is only simulated
# Outputs: results/distsim/: throughput.parquet, analytical.parquet;
#          results/report/distsim.html, and beside it distsim/: tables, distsim03, 08 to 12 as SVG and PNG

DISTSIM_FIGURES = [f"distsim{number:02}" for number in (3, 8, 9, 10, 11, 12)]

JOB_BENCHMARKS = [
    *expand("<benchmarks>/capture/{trace}.tsv", trace=TRACES),
    *expand("<benchmarks>/merge/{trace}.tsv", trace=TRACES),
    *expand("<benchmarks>/partition/{workload}.tsv", workload=MEASURED),
    *expand("<benchmarks>/calibrate/{workload}.tsv", workload=MEASURED),
    *expand("<benchmarks>/extrapolate/{experiment}.tsv", experiment=EXPERIMENTS),
    *expand("<benchmarks>/simulate/{experiment}.tsv", experiment=EXPERIMENTS),
    "<benchmarks>/fit_operators.tsv",
    "<benchmarks>/fit_collectives.tsv",
    "<benchmarks>/describe_machine.tsv",
]


rule distsim_throughput:
    output:
        table="<results>/distsim/throughput.parquet",
    log:
        "<logs>/distsim_throughput.log",
    benchmark:
        "<benchmarks>/distsim_throughput.tsv"
    conda:
        "../../envs/analysis.yaml"
    resources:
        mem_mb=6000,
        runtime=15,
    params:
        library=library_digest("evaluation/distsim_throughput"),
    message:
        "GPT 145B on 128 GPUs at several batches"
    script:
        "../../scripts/evaluation/distsim_throughput.py"


rule distsim_analytical:
    input:
        facts=expand("<results>/operator_tables/{trace}/trace.json", trace=TRACES),
        operators=expand(
            "<results>/operator_tables/{trace}/operators.parquet", trace=TRACES
        ),
        tensors=expand(
            "<results>/operator_tables/{trace}/tensors.parquet", trace=TRACES
        ),
        partitions=expand("<results>/partitions/{workload}.json", workload=MEASURED),
        platform="<results>/platforms/this-machine.yaml",
    output:
        table="<results>/distsim/analytical.parquet",
    log:
        "<logs>/distsim_analytical.log",
    benchmark:
        "<benchmarks>/distsim_analytical.tsv"
    conda:
        "../../envs/analysis.yaml"
    params:
        library=library_digest("evaluation/distsim_analytical"),
        traces=trace_folders,
        workloads={name: WORKLOADS[name].traces for name in MEASURED},
        experiments=as_rows(EXPERIMENTS.values()),
        plans=as_rows(PLANS.values()),
    message:
        "predict the experiments by the best rates of operators"
    script:
        "../../scripts/evaluation/distsim_analytical.py"


rule distsim:
    input:
        sessions=expand(
            "<results>/calibration/{workload}/session.json", workload=MEASURED
        ),
        recordings=expand(
            "<results>/measurements/{workload}/{table}.parquet",
            workload=MEASURED,
            table=["measurements", "step_marks", "recorded_events"],
        ),
        timelines=expand(
            "<results>/timelines/{experiment}/timeline.parquet",
            experiment=EXPERIMENTS,
        ),
        summaries=expand(
            "<results>/timelines/{experiment}/summary.json", experiment=EXPERIMENTS
        ),
        benchmarks=JOB_BENCHMARKS,
        analytical="<results>/distsim/analytical.parquet",
        throughput="<results>/distsim/throughput.parquet",
        search="<results>/studies/distsim_search.svg",
        search_picture="<results>/studies/distsim_search.png",
    output:
        page="<results>/report/distsim.html",
        tables=expand(
            "<results>/report/distsim/{table}.parquet",
            table=["timestamps", "activity", "costs"],
        ),
        figures=report(
            expand("<results>/report/distsim/{figure}.svg", figure=DISTSIM_FIGURES),
            caption="../../workflow/report/distsim.rst",
            category="DistSim's evaluation",
        ),
        pictures=expand("<results>/report/distsim/{figure}.png", figure=DISTSIM_FIGURES),
    log:
        "<logs>/distsim.log",
    benchmark:
        "<benchmarks>/distsim.tsv"
    conda:
        "../../envs/analysis.yaml"
    params:
        library=library_digest("evaluation/distsim"),
        experiments=as_rows(EXPERIMENTS.values()),
        plans=as_rows(PLANS.values()),
    message:
        "compare recorded with simulated timelines"
    script:
        "../../scripts/evaluation/distsim.py"
