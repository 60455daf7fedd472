# Purpose: the case studies: 84 GPUs on a photonic wafer, decentralised training with Hop, and
#          DistSim's search for a plan; and the page about all of them.
# Inputs:  traces and cost models that ship with the library; nothing is measured
# Outputs: results/studies/: wafer.parquet, hop.parquet, distsim_search.parquet, and figures as
#          SVG and PNG; results/report/studies.html with the figures in studies/

STUDY_FIGURES = ["wafer", "hop_speedup", "hop_bandwidth", "distsim_search"]


rule wafer_study:
    output:
        table="<results>/studies/wafer.parquet",
        figure=report(
            "<results>/studies/wafer.svg",
            caption="../../workflow/trioflow_evaluation/data/studies/page/wafer.rst",
            category="Case studies",
            labels={"figure": "photonic wafer and electrical mesh"},
        ),
        picture="<results>/studies/wafer.png",
    log:
        "<logs>/wafer_study.log",
    benchmark:
        "<benchmarks>/wafer_study.tsv"
    conda:
        "../../envs/analysis.yaml"
    resources:
        mem_mb=4000,
        runtime=15,
    params:
        library=library_digest("evaluation/wafer_study"),
        figure=subpath(output.figure, strip_suffix=".svg"),
    message:
        "84 GPUs on circuits and on a mesh"
    script:
        "../../scripts/evaluation/wafer_study.py"


rule hop_study:
    output:
        table="<results>/studies/hop.parquet",
        speedup=report(
            "<results>/studies/hop_speedup.svg",
            caption="../../workflow/trioflow_evaluation/data/studies/page/hop_speedup.rst",
            category="Case studies",
            labels={"figure": "Hop: speed-up by rule"},
        ),
        bandwidth=report(
            "<results>/studies/hop_bandwidth.svg",
            caption="../../workflow/trioflow_evaluation/data/studies/page/hop_bandwidth.rst",
            category="Case studies",
            labels={"figure": "Hop: speed-up and bandwidth"},
        ),
        pictures=expand(
            "<results>/studies/{figure}.png",
            figure=["hop_speedup", "hop_bandwidth"],
        ),
    log:
        "<logs>/hop_study.log",
    benchmark:
        "<benchmarks>/hop_study.tsv"
    conda:
        "../../envs/analysis.yaml"
    resources:
        mem_mb=2000,
        runtime=15,
    params:
        library=library_digest("evaluation/hop_study"),
        speedup=subpath(output.speedup, strip_suffix=".svg"),
        bandwidth=subpath(output.bandwidth, strip_suffix=".svg"),
    message:
        "decentralised training under Hop's rules"
    script:
        "../../scripts/evaluation/hop_study.py"


rule distsim_search_study:
    output:
        table="<results>/studies/distsim_search.parquet",
        figure=report(
            "<results>/studies/distsim_search.svg",
            caption="../../workflow/trioflow_evaluation/data/studies/page/distsim_search.rst",
            category="Case studies",
            labels={"figure": "DistSim's search for a plan"},
        ),
        picture="<results>/studies/distsim_search.png",
    log:
        "<logs>/distsim_search_study.log",
    benchmark:
        "<benchmarks>/distsim_search_study.tsv"
    conda:
        "../../envs/analysis.yaml"
    resources:
        mem_mb=4000,
        runtime=15,
    params:
        library=library_digest("evaluation/distsim_search_study"),
        figure=subpath(output.figure, strip_suffix=".svg"),
    message:
        "15 plans of a 48-layer BERT on 16 GPUs"
    script:
        "../../scripts/evaluation/distsim_search_study.py"


rule describe_studies:
    input:
        wafer="<results>/studies/wafer.parquet",
        hop="<results>/studies/hop.parquet",
        search="<results>/studies/distsim_search.parquet",
        figures=expand("<results>/studies/{figure}.svg", figure=STUDY_FIGURES),
    output:
        page="<results>/report/studies.html",
        figures=expand("<results>/report/studies/{figure}.svg", figure=STUDY_FIGURES),
    log:
        "<logs>/describe_studies.log",
    benchmark:
        "<benchmarks>/describe_studies.tsv"
    conda:
        "../../envs/analysis.yaml"
    resources:
        mem_mb=1000,
        runtime=5,
    params:
        library=library_digest("evaluation/describe_studies"),
        folder=subpath(input.wafer, parent=True),
    message:
        "write the page of case studies"
    script:
        "../../scripts/evaluation/describe_studies.py"


rule studies:
    """The case studies: photonic wafer, Hop, a search for a plan."""
    input:
        "<results>/report/studies.html",
    localrule: True
