"""Ways over the links, as a platform file states them."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from trioflow.base.errors import PlatformError
from trioflow.hardware.machine import Routing
from trioflow.hardware.platform import load_platform, save_platform


def describe(**more: Any) -> dict[str, Any]:
    """Return the content of a valid file: four ranks in a ring, both ways."""

    def sourced(value: float) -> dict[str, Any]:
        return {"value": value, "source": "a test"}

    return {
        "name": "ring",
        "device": {
            "name": "chip",
            "kind": "gpu",
            "memory_bytes": sourced(1e9),
            "peak_flop_per_s": {"fp32": sourced(1e12)},
        },
        "ranks": 4,
        "topology": {
            "builder": "ring",
            "bandwidth_bytes_per_s": sourced(1e9),
            "latency_s": sourced(1e-6),
        },
        "communication_on_compute_stream": False,
        **more,
    }


def write(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / "ring.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_without_a_word_the_first_route_takes_all(tmp_path: Path) -> None:
    assert load_platform(write(tmp_path, describe())).routing == Routing("first", 0, frozenset())


def test_ties_seed_and_failed_links_are_read_and_saved(tmp_path: Path) -> None:
    content = describe(
        routing={"ties": "ecmp", "seed": 3},
        failed_links=[{"from": "rank0", "to": "rank1", "both_ways": True}],
    )
    platform = load_platform(write(tmp_path, content))
    failed = frozenset({("rank0", "rank1"), ("rank1", "rank0")})
    assert platform.routing == Routing("ecmp", 3, failed)
    assert len(platform.links) == 8, "failed links stay links"
    save_platform(platform, tmp_path / "saved.yaml")
    again = load_platform(tmp_path / "saved.yaml")
    assert (again.routing, again.links) == (platform.routing, platform.links)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"routing": {"ties": "random"}},
            r"routing\.ties: 'random' is not possible here; choose one",
        ),
        ({"routing": {"seed": 1}}, "routing: the key 'ties' is missing"),
        ({"routing": {"ties": "ecmp", "seed": -1}}, r"routing\.seed: -1 is too small"),
        (
            {"failed_links": [{"from": "rank0", "to": "rank2"}]},
            r"failed_links\.0: no link leads from rank0 to rank2; from rank0 one leads to",
        ),
        (
            {
                "failed_links": [
                    {"from": "rank0", "to": "rank1", "both_ways": True},
                    {"from": "rank1", "to": "rank2"},
                ]
            },
            "no route leads from rank1 to rank0",
        ),
    ],
)
def test_what_cannot_be_is_refused(more: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(PlatformError, match=message):
        load_platform(write(tmp_path, describe(**more)))
