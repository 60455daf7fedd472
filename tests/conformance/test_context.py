"""Context parallelism: what ranks that share sequences send is what PyTorch's own code sends on gloo.

PyTorch has no all-to-all of heads; that follows its paper (arXiv 2309.14509).
"""

import pytest
from captured import BATCH, TRANSFORMER
from rank_runs import run_ranks
from test_messages import Same
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan

torch = pytest.importorskip("torch", reason="the real run needs torch (extra [capture])")


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """What the ranks of a run recorded, by how they attend; each run takes place once."""
    known = {}

    def find(ranks):
        if ranks not in known:
            job = {"row": TRANSFORMER, "batch": BATCH, "ranks": ranks}
            known[ranks] = run_ranks("real_context_rank.py", job, tmp_path_factory.mktemp("context"))
        return known[ranks]

    return find


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("method", ["ring", "all-gather"])
def test_messages_are_those_of_the_real_run(method, ranks, real, transformer_trace, compare):
    plan = make_plan(context=ranks, context_method=method)
    graph = extrapolate(transformer_trace, plan, Same(), batch=BATCH)
    about = {"plan": plan, "batch": BATCH, "row": TRANSFORMER, "ranks": ranks}
    for rank, found in enumerate(real(ranks)):
        tasks = graph.tasks[(graph.tasks["rank"] == rank) & (graph.tasks["stream"] == "context")]
        columns = (tasks[name] for name in ("name", "message_bytes", "group"))
        sent = [[name, size, [int(r) for r in group.split(",")]] for name, size, group in zip(*columns, strict=True)]
        assert sent, "the graph sends nothing"
        compare("messages of attention and groups", sent, found[method], **about)
