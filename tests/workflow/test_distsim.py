"""The targets of DistSim's evaluation, asked of Snakemake itself."""

from project_copy import Project

FIGURES = [f"results/report/distsim/distsim{number:02}.svg" for number in (3, 8, 9, 10, 11, 12)]


def test_every_figure_is_a_target_and_rests_on_real_and_simulated_steps(project: Project) -> None:
    planned = project.planned(*FIGURES)
    every = ("distsim", "distsim_throughput", "distsim_analytical")
    assert {name: planned.pop(name) for name in every} == dict.fromkeys(every, 1)
    assert (planned["measure"], planned["simulate"]) == (2, 3)
    assert planned["distsim_search_study"] == 1


def test_what_is_only_simulated_needs_no_real_run(project: Project) -> None:
    planned = project.planned("results/distsim/throughput.parquet")
    assert planned == {"distsim_throughput": 1}
