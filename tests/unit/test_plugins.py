"""What other packages offer, as an installer leaves it on the path."""

from __future__ import annotations

import sys

import pytest
from trioflow.costmodel.interface import find_operator_model
from trioflow.engine.simulate import find_network
from trioflow.errors import InputError
from trioflow.network.contention_free import ContentionFreeNetwork
from trioflow.plugins import list_plugins


@pytest.fixture
def install(tmp_path, monkeypatch):
    def put(package, group, **entries):
        folder = tmp_path / package
        info = folder / f"{package}-1.0.dist-info"
        info.mkdir(parents=True)
        (folder / f"{package}_kit.py").write_text(
            "from trioflow.network.contention_free import ContentionFreeNetwork as Net\nNUMBER = 3\n"
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
    assert list_plugins("trioflow.networks", ["fair_share"]) == ["fair_share", "own"]


def test_what_cannot_be_used_is_refused_in_a_sentence(install):
    install("odd", "trioflow.networks", number="NUMBER", absent="nothing")
    install("one", "trioflow.operator_models", twice="Net")
    install("two", "trioflow.operator_models", twice="NUMBER")
    with pytest.raises(InputError, match=r"the network 'number' \(odd_kit:NUMBER\) is no function"):
        find_network("number")
    with pytest.raises(
        InputError, match=r"the network 'absent' \(odd_kit:nothing\) cannot be loaded"
    ):
        find_network("absent")
    with pytest.raises(InputError, match="the operator model 'twice' is registered 2 times"):
        find_operator_model("twice")
    with pytest.raises(
        InputError, match=r"no network is called 'fair-share'.*did you mean 'fair_share'"
    ):
        find_network("fair-share")
