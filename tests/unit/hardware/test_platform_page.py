"""docs/platforms.md: its examples load, its tables are complete."""

import inspect
import json
import re
import tomllib
from pathlib import Path

import pytest
from trioflow.base.units import format_time
from trioflow.cli.main import build_parser
from trioflow.hardware.platform import BUILDERS, ENTRY_POINTS, find_builder, list_platforms, load_platform
from trioflow.network.algorithms.catalogue import list_algorithm_words

PAGE = (Path(__file__).parents[3] / "docs" / "platforms.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("text", blocks("yaml"), ids=lambda text: text.split()[1])
def test_every_example_loads(text: str, tmp_path: Path) -> None:
    (csv,) = blocks("csv")
    (tmp_path / "links.csv").write_text(csv)
    (xml,) = blocks("xml")
    (tmp_path / "node.xml").write_text(xml)
    (tmp_path / "mine.yaml").write_text(text)
    platform = load_platform(tmp_path / "mine.yaml")
    assert platform.links and platform.name in text


def test_the_examples_are_what_they_say() -> None:
    assert len(blocks("yaml")) == 7
    (toml,) = blocks("toml")
    assert ENTRY_POINTS in tomllib.loads(toml)["project"]["entry-points"]


def test_the_tables_name_every_machine_and_every_parameter() -> None:
    for name in list_platforms():
        assert f"`{name}`" in PAGE, name
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.split("## Builders")[1], re.MULTILINE))
    assert list(rows) == [*BUILDERS, "nccl_file"]
    for name in rows:
        builder = find_builder(name)
        parameters = list(inspect.signature(builder).parameters.values())[1:]
        common = {"bandwidth_bytes_per_s", "latency_s"}
        own = [one for one in parameters if one.name not in common]
        assert ("no link of its own" in rows[name]) == (len(own) == len(parameters)), name
        due, _, optional = rows[name].rpartition(" | ")[2].partition("[")
        words = re.findall(r"`(\w+)`", due), re.findall(r"`(\w+)`", optional)
        assert words[0] == [one.name for one in own if one.default is one.empty], name
        assert words[1] == [one.name for one in own if one.default is not one.empty], name


def test_the_page_names_every_algorithm() -> None:
    text = PAGE.partition("## Algorithms of collectives")[2].partition("\n## ")[0]
    assert set(list_algorithm_words()) <= set(re.findall(r"`([\w-]+)`", text))


def test_ways_and_failed_links_of_the_example_are_read(tmp_path: Path) -> None:
    (text,) = (block for block in blocks("yaml") if "our-leaves" in block)
    (tmp_path / "mine.yaml").write_text(text)
    routing = load_platform(tmp_path / "mine.yaml").routing
    assert (routing.ties, routing.seed, len(routing.failed)) == ("ecmp", 1, 2)


def test_what_sharing_costs_is_what_the_page_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (text,) = (block for block in blocks("yaml") if "shared-bridge" in block)
    path = tmp_path / "shared-bridge.yaml"
    path.write_text(text)
    (command,) = re.findall(r"^`trioflow (collective .*) --ranks N`", PAGE, re.MULTILINE)
    told = re.findall(r"^\| (\d+) \| ([\d.]+ ms) \| ([\d.]+ ms) \|$", PAGE, re.MULTILINE)
    assert len(told) == 2
    for ranks, *written in told:
        found = []
        for network in ("contention-free", "fair-share"):
            words = command.replace("shared-bridge.yaml", str(path)).split()
            options = build_parser().parse_args([*words, "--ranks", ranks, "--network", network, "--json"])
            options.run(options)
            found.append(format_time(json.loads(capsys.readouterr().out)["time_s"]))
        assert found == written
