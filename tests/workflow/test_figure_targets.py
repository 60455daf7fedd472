"""Every counterpart of the paper's figures is a target, and asks for public data only where it says so."""

from pathlib import Path

from project_copy import ROOT, Project
from trioflow.base.settings import list_descriptions
from trioflow_evaluation.figures.catalogue import FIGURES, list_figures

NAMES = list_figures(list_descriptions(ROOT / "config/figures"), published=True)


def test_every_figure_is_a_target_and_needs_no_public_data(project: Project) -> None:
    jobs = project.planned(*(f"results/figures/{name}.pdf" for name in FIGURES), "figures")
    assert (jobs["draw_figure"], jobs["describe_figures"]) == (len(FIGURES), 1)
    scenarios = {figure.scenarios for figure in FIGURES.values()} - {""}
    assert jobs["predict_figure"] == len(scenarios)
    assert (jobs["wafer_study"], jobs["hop_study"], jobs["time_simulations"]) == (1, 1, 1)
    assert not {"retrieve", "judge_published", "import_trace"} & jobs.keys()


def test_every_figure_with_public_data_is_a_target(project: Project) -> None:
    targets = [f"results/figures/{name}.svg" for name in NAMES]
    jobs = project.planned(*targets, "published_figures")
    assert jobs["draw_figure"] == len(NAMES) == len(FIGURES)
    assert jobs["validate_operators"] == jobs["validate_new_gpu"] == 1
    assert jobs["judge_published"] > 1 and jobs["import_trace"] == 2


def test_a_figure_of_what_ships_alone_measures_nothing(project: Project) -> None:
    assert project.planned("results/figures/fig07.pdf") == {"predict_figure": 1, "draw_figure": 1}


def test_the_scenarios_lie_where_the_rules_look() -> None:
    folder = Path(ROOT / "config/figures")
    assert {path.stem for path in folder.glob("*.yaml")} == set(list_descriptions(folder))
