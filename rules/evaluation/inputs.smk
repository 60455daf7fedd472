# Purpose: what rules of the evaluation look up: judged sets, scenarios and inputs of the paper's figures.
# Inputs:  config/published.tsv, config/figures/<name>.yaml
# Outputs: PUBLISHED_SETS (of config/published.tsv), VALIDATIONS (sets that judge the cost models), FIGURE_SCENARIOS
#          (descriptions by name), FIGURE_PAGES (figures by page), PAPER_FIGURES

from trioflow_evaluation.figures.catalogue import (
    SUFFIXES,
    find_descriptions,
    list_figures,
    list_inputs,
)
from trioflow_evaluation.published.cases import list_published_sets

PUBLISHED_SETS = list_published_sets(config["tables"]["published"])
OPERATOR_SETS = ["batch-change", "leave-workload-out", "operator-data"]
VALIDATIONS = [*OPERATOR_SETS, "new-gpu", "collectives"]

FIGURE_SCENARIOS = list_descriptions("config/figures")
FIGURE_PAGES = {
    "figures": list_figures(FIGURE_SCENARIOS, published=False),
    "published_figures": list_figures(FIGURE_SCENARIOS, published=True),
}
PAPER_FIGURES = list(dict.fromkeys(sum(FIGURE_PAGES.values(), [])))


wildcard_constraints:
    operator_set="|".join(OPERATOR_SETS),
    published_set="|".join(PUBLISHED_SETS),


def scenario_description(wildcards):
    """The description of a figure's scenarios."""
    return FIGURE_SCENARIOS[wildcards.prediction]


def scenario_files(wildcards):
    """The files that the scenarios need, those that ship apart."""
    from trioflow.sweeps.scenarios import list_sweep_files

    return list_sweep_files(FIGURE_SCENARIOS[wildcards.prediction])


def timed_description(wildcards):
    """The scenarios that the simulator is timed on."""
    names = find_descriptions("fig14", FIGURE_SCENARIOS)
    return [FIGURE_SCENARIOS[name] for name in names]


def figure_files(wildcards):
    """The tables that a figure is built from, by their kind."""
    found = list_inputs(
        wildcards.paper_figure,
        FIGURE_SCENARIOS,
        MEASURED,
        list(EXPERIMENTS),
        PUBLISHED_SETS,
    )
    return {
        kind: [f"<results>/{file}" for file in files] for kind, files in found.items()
    }


def page_figures(wildcards):
    """The figures of a page, as pictures and tables."""
    return expand(
        "<results>/figures/{name}.{suffix}",
        name=FIGURE_PAGES[wildcards.figures_page],
        suffix=SUFFIXES,
    )


def published_collective_files(wildcards):
    """The public files that hold measured collectives."""
    from trioflow_evaluation.fits.collectives import PUBLIC_TABLES

    return [f"<results>/data/{table.key}" for table in PUBLIC_TABLES]
