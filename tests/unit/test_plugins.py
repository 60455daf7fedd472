"""What other packages offer, as an installer leaves it on the path."""

import sys
from dataclasses import replace

import pytest
from same_model import ProportionalModel
from trioflow.base.errors import InputError, PlanError
from trioflow.base.plan_row import find_plan_problem
from trioflow.base.plugins import list_plugins
from trioflow.costmodel.features import find_operator_model
from trioflow.network.networks import ContentionFreeNetwork, find_network
from trioflow.parallel.extrapolate import extrapolate
from trioflow.parallel.plan import make_plan, named_plan


@pytest.fixture
def install(tmp_path, monkeypatch):
    def put(package, group, **entries):
        folder = tmp_path / package
        info = folder / f"{package}-1.0.dist-info"
        info.mkdir(parents=True)
        (folder / f"{package}_kit.py").write_text(
            "from trioflow.network.networks import ContentionFreeNetwork as Net\nNUMBER = 3\n"
            "from trioflow.parallel.plan import make_plan\n"
            "from trioflow.parallel.schedules.build import Schedule, build_schedule\n"
            "def halves(ranks):\n    return make_plan(data=2, tensor=ranks // 2)\n"
            "def late(ranks, micro_batches, stages_per_rank):\n"
            "    return Schedule('late', micro_batches, build_schedule('gpipe', ranks, micro_batches).rows)\n"
            "def short(ranks, micro_batches, stages_per_rank):\n"
            "    return build_schedule('gpipe', ranks, 1)\n"
        )
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = "".join(f"{name} = {package}_kit:{what}\n" for name, what in entries.items())
        (info / "entry_points.txt").write_text(f"[{group}]\n{lines}")
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.delitem(sys.modules, f"{package}_kit", raising=False)

    return put


def test_a_package_s_network_is_found(install):
    install("mine", "trioflow.networks", own="Net")
    assert find_network("own") is ContentionFreeNetwork
    found = list_plugins("trioflow.networks", ["fair_share"])
    assert {"fair_share", "own"} <= set(found) and found == sorted(found)


def test_what_cannot_be_used_is_refused_in_a_sentence(install):
    install("odd", "trioflow.networks", number="NUMBER", absent="nothing")
    install("one", "trioflow.operator_models", twice="Net")
    install("two", "trioflow.operator_models", twice="NUMBER")
    with pytest.raises(InputError, match=r"the network 'number' \(odd_kit:NUMBER\) is not a function"):
        find_network("number")
    with pytest.raises(InputError, match=r"the network 'absent' \(odd_kit:nothing\) cannot be loaded"):
        find_network("absent")
    with pytest.raises(InputError, match="the operator model 'twice' is registered 2 times"):
        find_operator_model("twice")
    with pytest.raises(InputError, match=r"no network is called 'fair-share'.*did you mean fair_share"):
        find_network("fair-share")


def test_a_package_s_plan_and_schedule_are_plans_like_any_other(install, transformer_trace):
    install("mine", "trioflow.plans", halves="halves")
    install("late", "trioflow.schedules", late="late", short="short")
    plan = named_plan("halves", 4)
    assert (plan.plan, plan.data, plan.tensor, plan.ranks) == ("halves", 2, 2, 4)
    with pytest.raises(PlanError, match="'halves' returned a plan of 2 ranks"):
        named_plan("halves", 3)
    with pytest.raises(PlanError, match=r"no plan is called 'halfs'; did you mean halves"):
        named_plan("halfs", 4)

    own, gpipe = (named_plan(name, 2, 4) for name in ("late", "gpipe"))
    assert own.schedule == "late" and find_plan_problem(own) is None
    graphs = [extrapolate(transformer_trace, p, ProportionalModel()) for p in (own, gpipe)]
    assert graphs[0].tasks["kind"].tolist() == graphs[1].tasks["kind"].tolist()
    with pytest.raises(PlanError, match="has 2 ranks, 2 stages and 1 micro-batches"):
        named_plan("short", 2, 4)
    with pytest.raises(PlanError, match="unknown schedule 'latest'"):
        make_plan(pipeline=2, schedule="latest")
    assert find_plan_problem(replace(own, schedule="latest"))[0] == "schedule"
