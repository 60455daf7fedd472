"""Expert parallelism: the generated graph's collectives are those of the real run on gloo."""

from dataclasses import asdict, replace

import pytest
from captured import with_steady_times
from rank_runs import run_ranks
from test_messages import Same
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan
from trioflow.tables import records
from trioflow.trace.language import make
from trioflow.trace.language.sizes import LanguageModel, LanguageStep

torch = pytest.importorskip("torch", reason="the real run needs torch (extra [capture])")

MODEL = LanguageModel("experts", 2, 32, 4, 2, 8, 48, 64, experts=4, experts_per_token=2, shared_feed_forward=32)
SEQUENCE, BATCH = 16, 2
RUNS = {2: [2], 4: [2, 4]}


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """What each rank of a run asked for, by the expert degree; each run takes place once."""
    known = {}

    def find(ranks):
        if ranks not in known:
            job = {"model": asdict(MODEL), "sequence": SEQUENCE, "batch": BATCH, "ranks": ranks, "expert": RUNS[ranks]}
            folder = tmp_path_factory.mktemp(f"experts-{ranks}")
            known[ranks] = run_ranks("real_expert_rank.py", job, folder)
        return known[ranks]

    return find


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        made = make.make_trace(MODEL, LanguageStep(SEQUENCE, BATCH, "pure-bf16"))
    return with_steady_times(replace(made, facts=replace(made.facts, device="cpu")))


@pytest.mark.parametrize(("ranks", "expert"), [(ranks, e) for ranks, found in RUNS.items() for e in found])
def test_collectives_are_those_of_the_real_run(trace, ranks, expert, real, compare):
    plan = make_plan(data=ranks, expert=expert, sharding="fsdp")
    graph = extrapolate(trace, plan, Same(), batch=BATCH * ranks)
    about = {"plan": plan, "batch": BATCH * ranks, "row": {"model": "decoder with experts"}}
    for rank, found in enumerate(real(ranks)):
        tasks = records(graph.tasks[graph.tasks["rank"] == rank])
        asked = [
            [t["name"], t["message_bytes"], [int(r) for r in t["group"].split(",")]]
            for t in tasks
            if t["kind"] == "collective"
        ]
        assert "all_to_all" in {name for name, *_ in asked}
        theirs = [[n.removesuffix("_single"), *rest] for n, *rest in found[str(expert)]]
        compare("collectives, bytes and groups", asked, theirs, **about, ranks=ranks)
