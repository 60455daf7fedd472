"""The pages that the workflow can make, and the command that makes each: told on all of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SitePage:
    """One page below ``results/report``.

    Attributes
    ----------
    file : str
        Its name; all pages lie in one folder.
    title, about : str
        What it is called and what it holds.
    command : str
        Makes it, and what it needs.
    """

    file: str
    title: str
    command: str
    about: str


PAGES = (
    SitePage("index.html", "Report of the run", "make reproduce",
             "predicted and measured steps of this machine, what the errors are made of, timelines"),
    SitePage("traces.html", "Traces", "make reproduce", "the captured steps: size, source, what could not be joined"),
    SitePage("published_traces.html", "Public traces", "snakemake published_traces", "the same of imported public traces"),
    SitePage("cost_models.html", "Cost models", "snakemake validation", "every cost model on public measurements that it never saw"),
    SitePage("published.html", "Public measurements", "snakemake published", "plans on A40, A100 and H100 beside public measured steps"),
    SitePage("published_vtrain.html", "vTrain's points", "snakemake published", "1,440 iteration times of GPT models under 18 combinations of degrees"),
    SitePage("distsim.html", "DistSim's evaluation", "snakemake distsim", "the same questions asked of runs on this machine"),
    SitePage("studies.html", "Case studies", "snakemake studies", "studies that are simulated only"),
    SitePage("figures.html", "Figures of the paper", "snakemake figures", "counterparts of the paper's figures, on runs of this machine and simulated"),
    SitePage("published_figures.html", "Figures of the paper, public data", "snakemake published_figures", "the same with public measurements and traces"),
)  # fmt: skip
"""In the order in which they are listed. Pages that were not made yet are listed too."""
