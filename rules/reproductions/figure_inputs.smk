# Purpose: the scenarios and the inputs of the paper's figures, looked up.
# Inputs:  config/figures/<name>.yaml
# Outputs: FIGURE_SCENARIOS (descriptions by name), FIGURE_PAGES (figures by page), PAPER_FIGURES

from trioflow.reproductions.figures.catalogue import (
    SUFFIXES,
    find_descriptions,
    list_figures,
    list_inputs,
)

FIGURE_SCENARIOS = list_descriptions("config/figures")
FIGURE_PAGES = {
    "figures": list_figures(FIGURE_SCENARIOS, published=False),
    "published_figures": list_figures(FIGURE_SCENARIOS, published=True),
}
PAPER_FIGURES = list(dict.fromkeys(sum(FIGURE_PAGES.values(), [])))


def scenario_description(wildcards):
    """The description of a figure's scenarios."""
    return FIGURE_SCENARIOS[wildcards.prediction]


def scenario_files(wildcards):
    """The files that the scenarios need, those that ship apart."""
    from trioflow.sweeps.chunks import list_sweep_files

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
