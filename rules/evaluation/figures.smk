# Purpose: counterparts of the TrioSim paper's figures: fig06 to fig16, and published_fig06 and so on
#          with public measurements and public traces; docs/read_the_report.md.
# Inputs:  config/figures/<name>.yaml; results/report/error.parquet, measurements/, timelines/ and
#          studies/; the latter ones also results/validation/, published/ and imported_traces/
# Outputs: results/figures/<figure>.pdf, .svg, .png, .parquet; results/figures/predictions/;
#          results/report/figures.html, published_figures.html


wildcard_constraints:
    paper_figure="|".join(PAPER_FIGURES),
    prediction="[a-z0-9-]+",
    figures_page="|".join(FIGURE_PAGES),


rule predict_figure:
    input:
        scenario_files,
        description=scenario_description,
    output:
        "<results>/figures/predictions/{prediction}.parquet",
    log:
        "<logs>/predict_figure/{prediction}.log",
    benchmark:
        "<benchmarks>/predict_figure/{prediction}.tsv"
    conda:
        "../../envs/analysis.yaml"
    resources:
        mem_mb=4000,
        runtime=15,
    params:
        library=library_digest("evaluation/predict_figure"),
    message:
        "predict the scenarios of {wildcards.prediction}"
    script:
        "../../scripts/evaluation/predict_figure.py"


rule time_simulations:
    input:
        timed_description,
    output:
        "<results>/figures/simulator_times.parquet",
    log:
        "<logs>/time_simulations.log",
    benchmark:
        "<benchmarks>/time_simulations.tsv"
    conda:
        "../../envs/analysis.yaml"
    resources:
        mem_mb=4000,
        runtime=15,
    params:
        library=library_digest("evaluation/time_simulations"),
    message:
        "time the simulator"
    script:
        "../../scripts/evaluation/time_simulations.py"


rule draw_figure:
    input:
        unpack(figure_files),
    output:
        pdf="<results>/figures/{paper_figure}.pdf",
        svg=report(
            "<results>/figures/{paper_figure}.svg",
            caption="../../workflow/report/paper_figure.rst",
            category="Figures of the TrioSim paper",
            labels={"figure": "{paper_figure}"},
        ),
        png="<results>/figures/{paper_figure}.png",
        table="<results>/figures/{paper_figure}.parquet",
    log:
        "<logs>/draw_figure/{paper_figure}.log",
    benchmark:
        "<benchmarks>/draw_figure/{paper_figure}.tsv"
    conda:
        "../../envs/analysis.yaml"
    params:
        library=library_digest("evaluation/draw_figure"),
        figure=subpath(output.pdf, strip_suffix=".pdf"),
        plans=as_rows(PLANS.values()),
    message:
        "draw {wildcards.paper_figure}"
    script:
        "../../scripts/evaluation/draw_figure.py"


rule describe_figures:
    input:
        page_figures,
    output:
        "<results>/report/{figures_page}.html",
    log:
        "<logs>/describe_figures/{figures_page}.log",
    benchmark:
        "<benchmarks>/describe_figures/{figures_page}.tsv"
    conda:
        "../../envs/analysis.yaml"
    params:
        library=library_digest("evaluation/describe_figures"),
    message:
        "put the figures on a page: {wildcards.figures_page}"
    script:
        "../../scripts/evaluation/describe_figures.py"


rule figures:
    """The figures of the TrioSim paper, with measurements of this machine."""
    input:
        "<results>/report/figures.html",
    localrule: True


rule published_figures:
    """The figures of the TrioSim paper, with public measurements."""
    input:
        "<results>/report/published_figures.html",
    localrule: True
