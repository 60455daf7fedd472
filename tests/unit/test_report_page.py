"""The whole report of a small made-up run.

Numbers, facts and captions as the reader sees them.
"""

import gzip
import json
import re
import shutil
from html.parser import HTMLParser

import pytest
from report_run import PLANS, experiments_of, write_run
from trioflow import tables
from trioflow.base.errors import InputError
from trioflow.report import pages
from trioflow.report.build import build_report, compare_rounds, read_conformance
from trioflow.report.inputs import describe_plan_kind, load_report_inputs
from trioflow.report.pages import Cell, Field, escape_text, itself, render_records
from trioflow.report.sections import CAPTIONS

SMALL = [("gpt2-tiny", 8, 0.4, 1450, 5_000_000), ("vgg11", 8, 0.3, 140, 28_000_000)]
SHOWN = {"gpt2-tiny": ("tp2", "gpipe2-m2"), "vgg11": ("single", "ddp2")}
EXPERIMENTS = [row for row in experiments_of(SMALL) if row["plan"] in SHOWN[row["workload"]]]
VOID = {"meta", "img", "br", "link", "hr"}


class Page(HTMLParser):
    """Collects what the tests look at, and checks that tags are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.addresses, self.links, self.sources, self.rows = [], [], [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        if tag not in VOID:
            self.open.append(tag)
        if "id" in values:
            self.addresses.append(values["id"])
        if "href" in values:
            self.links.append(values["href"])
        if "src" in values:
            self.sources.append(values["src"])
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th") and "data-sort" in values:
            self.rows[-1].append(values["data-sort"])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    files = write_run(folder, SMALL, 0.05, EXPERIMENTS)
    errors = build_report(files, folder / "results/report", EXPERIMENTS, PLANS)
    return folder, files, errors


@pytest.fixture(scope="module")
def page(built):
    text = (built[0] / "results/report/index.html").read_text(encoding="utf-8")
    return text, Page(text)


def test_every_experiment_stands_in_the_table_with_its_numbers(built, page):
    stored = tables.read_table(built[0] / "results/report/error.parquet", "errors")
    assert len(stored.attrs["files"]) == len(built[1])
    assert list(stored["experiment"]) == [row["experiment"] for row in EXPERIMENTS]
    # The first table; another tells what their errors are made of.
    found = [row for row in page[1].rows if row and row[0] in set(stored["experiment"])]
    rows = {row[0]: row for row in reversed(found)}
    for expected in stored.to_dict("records"):
        row = rows[expected["experiment"]]
        assert float(row[1]) == expected["relative_error"]
        assert float(row[2]) == expected["measured_s"]
        assert float(row[3]) == expected["simulated_s"]
        assert (row[7], row[9]) == (expected["plan"], expected["confidence"])


def test_page_needs_nothing_from_outside(built, page):
    text, parsed = page
    assert not re.search(r"(?:https?:)?//[a-z]", text)
    assert "@import" not in text and "url(" not in text
    for source in parsed.sources:
        assert (built[0] / "results/report" / source).is_file()
    for link in parsed.links:
        if link.startswith("#"):
            assert link[1:] in parsed.addresses
        else:
            assert (built[0] / "results/report" / link).is_file()
    assert len(parsed.addresses) == len(set(parsed.addresses))


def test_headline_says_what_was_done_and_how_wrong_it_was(built, page):
    errors = built[2]
    headline = page[0].partition('class="headline">')[2].partition("</p>")[0].replace("&nbsp;", " ")
    assert headline.startswith(
        f"{len(errors)} steps on 1 and 2 ranks of 2 workloads were predicted and measured on this "
        "machine: 2 \u00d7 Example CPU, one core, messages over gloo, no GPU."
    )
    assert "2 training steps captured on one rank" in headline
    verdict = page[0].partition('class="verdict">')[2].partition("</p>")[0].replace("&nbsp;", " ")
    assert f"{100 * errors['relative_error'].abs().mean():.1f} %" in verdict


def test_rounds_stand_beside_their_draws(built, page):
    inputs = load_report_inputs(built[1], EXPERIMENTS, PLANS)
    rounds = compare_rounds(built[2], inputs)
    assert rounds["experiment"].tolist() == built[2]["experiment"].tolist()
    assert rounds["drawn_median_s"].to_numpy() == pytest.approx(1.01 * built[2]["simulated_s"])
    assert rounds["measured_median_s"].to_numpy() == pytest.approx(built[2]["measured_s"])
    assert (rounds["measured_low_s"] < rounds["measured_high_s"]).all()
    found = [row for row in page[1].rows if row and len(row) == 10 and row[0] == rounds["experiment"][0]]
    errors = [rounds[f"drawn_{key}"][0] / rounds[f"measured_{key}"][0] - 1 for key in ("low_s", "median_s", "high_s")]
    assert [float(cell) for cell in found[0][7:]] == pytest.approx(errors)
    inputs.summaries[rounds["experiment"][1]].pop("drawn")
    with pytest.raises(InputError, match="has no draws"):
        compare_rounds(built[2], inputs)


def test_warnings_and_units_reach_the_reader(page):
    text = page[0].replace("&nbsp;", " ")
    assert "could not pin the process to core 1: not permitted (vgg11)" in text
    assert "measured_s [s]" in text
    assert "<dt>host costs: data parallel step</dt><dd>310 \u00b5s</dd>" in text
    for name, parts in CAPTIONS.items():
        assert escape_text(" ".join(parts)).replace("&nbsp;", " ") in text, name
        assert len(parts) == 3 and parts[2].startswith("Limit: "), name


def test_same_run_gives_the_same_bytes_and_drops_stale_pictures(built, tmp_path):
    folder, files, _ = built
    target = tmp_path / "results" / "report"
    for stale in (target / "figures/timelines/gone.svg", target / "perfetto/gone.json.gz"):
        stale.parent.mkdir(parents=True)
        stale.write_text("old")
    build_report(reversed(files), target, EXPERIMENTS, PLANS)
    first = folder / "results/report"
    names = sorted(file.relative_to(first) for file in first.rglob("*") if file.is_file())
    assert names == sorted(file.relative_to(target) for file in target.rglob("*") if file.is_file())
    assert len(names) == 3 + 2 * (len(CAPTIONS) - 1) + 3 * len(EXPERIMENTS)
    for name in names:
        content = (first / name).read_bytes()
        assert content == (target / name).read_bytes(), name
        if name.suffix == ".svg":
            assert b"<dc:date>" not in content and b'href="http' not in content, name
    assert [path.name for path in target.parent.iterdir()] == ["report"]


def test_measured_ranks_lie_below_predicted_ones_for_perfetto(built):
    packed = built[0] / "results/report/perfetto/vgg11-ddp2.json.gz"
    events = json.loads(gzip.decompress(packed.read_bytes()))["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"rank 0", "rank 0 (measured)", "rank 1 (measured)", "critical path"} <= names


def test_failure_leaves_the_old_report(built, tmp_path):
    folder, files, _ = built
    target = tmp_path / "report"
    shutil.copytree(folder / "results/report", target)
    before = {file: file.read_bytes() for file in target.rglob("*") if file.is_file()}
    extra = {"experiment": "vgg11-new", "set": "live", "workload": "vgg11", "plan": "ddp2", "batch": 4}
    with pytest.raises(InputError, match="'vgg11-new' has no simulation"):
        build_report(files, target, [*EXPERIMENTS, extra], PLANS)
    assert before == {file: file.read_bytes() for file in target.rglob("*") if file.is_file()}
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_missing_and_doubled_files_are_named(built, tmp_path):
    _, files, _ = built
    without = [file for file in files if file.name != "collectives.json"]
    with pytest.raises(InputError, match=r"the report has no collectives\.json"):
        load_report_inputs(without, EXPERIMENTS, PLANS)
    other = tmp_path / "vgg11" / "session.json"
    other.parent.mkdir()
    other.write_text("{}")
    with pytest.raises(InputError, match=r"session\.json is given twice"):
        load_report_inputs([*files, other], EXPERIMENTS, PLANS)
    lost = [file for file in files if file.parts[-2:] != ("vgg11-ddp2", "timeline.parquet")]
    with pytest.raises(InputError, match="'vgg11-ddp2' has no predicted timeline"):
        build_report(lost, tmp_path / "report", EXPERIMENTS, PLANS)
    assert not (tmp_path / "report").exists()
    lost = [file for file in files if file.parts[-2:] != ("vgg11-ddp2", "links.parquet")]
    with pytest.raises(InputError, match="'vgg11-ddp2' has no table of links"):
        build_report(lost, tmp_path / "report", EXPERIMENTS, PLANS)


def test_every_experiment_tells_what_it_waits_for_and_where_its_time_goes(page):
    text = page[0].replace("&nbsp;", " ")
    assert text.count("What the step waits for, from its start to its end: ") == len(EXPERIMENTS)
    for row in EXPERIMENTS:
        part = text.partition(f'<div id="timeline-{row["experiment"]}">')[2].partition("<div id=")[0]
        for caption in ("Critical path, by kind of work and rank", "Breakdown by rank", "by module"):
            assert caption in part
        assert "(outside)" in part and "8x4" in part and "4.1 kB" in part
        assert "activation 600 MB (75 %), optimizer state 200 MB (25 %)" in part
        assert "backward of h: aten::mm" in part and "800 MB<small>10.0 %" in part
        moved = row["plan"] != "single"
        assert ("rank0-&gt;rank1" in part) == moved
        assert ("Nothing moved over any link." in part) != moved


def test_the_comparisons_with_pytorch_stand_on_the_page(page):
    section = page[0].partition('<section id="conformance">')[2].partition("</section>")[0]
    shipped = read_conformance()
    assert section.count("<tr>") == len(shipped) + 1
    assert str(int(shipped["count"].sum())) in section


def test_markup_in_names_is_escaped():
    table = render_records([Cell("<script>", detail="5 % & more")], [Field("a<b", "", 'say "x"', itself)])
    assert "<script>" not in table and "a<b" not in table
    assert "5&nbsp;% &amp; more" in table


def test_cells_without_a_number_sort_last():
    table = render_records([Cell("x", float("nan")), Cell("1.0 s", 1.0)], [Field("a", "", "", itself)])
    assert re.findall('data-sort="(.*?)"', table) == ["", "1.0"]


@pytest.mark.parametrize(
    ("degrees", "kind"),
    [
        ((1, 1, 1), "one rank"),
        ((2, 1, 1), "data parallel"),
        ((1, 1, 2), "pipeline"),
        ((2, 2, 1), "data parallel and tensor parallel"),
    ],
)
def test_plan_kind_names_what_is_split(degrees, kind):
    plan = dict(zip(("data", "tensor", "pipeline"), degrees, strict=True))
    assert describe_plan_kind(plan) == kind


@pytest.mark.parametrize(
    ("value", "text"), [(0.1234, "+12.3 %"), (-0.05, "\u22125.0 %"), (-0.0001, "0.0 %"), (float("nan"), "\u2013")]
)
def test_signed_percent(value, text):
    assert pages.write_signed_percent(value) == text


@pytest.mark.parametrize(
    ("time_s", "text"),
    [(0.0, "0 s"), (0.9996, "1 s"), (0.0123, "12.3 ms"), (3e-6, "3 \u00b5s"), (1234.0, "1.23e+03 s")],
)
def test_time(time_s, text):
    assert pages.write_time(time_s) == text


def test_range_writes_a_common_unit_once():
    assert pages.write_range(0.1, 0.12) == "100 to 120 ms"
    assert pages.write_range(0.9, 1.2) == "900 ms to 1.2 s"


def test_facts_take_their_unit_from_their_name():
    facts = {
        "environment": {"cpu_count": 2, "pinned": False},
        "step_s": 0.25,
        "size_bytes": 2_000_000,
        "drift": 0.061,
        "times_s": [0.1, 0.2, 0.3, 0.4, 0.5],
        "names": ["a", "b"],
        "devices": ["x", "x"],
        "none": None,
        "warnings": ["left out"],
    }
    assert pages.flatten_facts(facts, skip=("warnings",)) == {
        "environment.cpu_count": "2",
        "environment.pinned": "no",
        "step_s": "250 ms",
        "size_bytes": "2 MB",
        "drift": "6.1 %",
        "times_s": "100 ms to 500 ms (5 values)",
        "names": "a, b",
        "devices": "x (2 times)",
        "none": "\u2013",
    }


def test_lists_of_words():
    assert pages.join_words(["a"]) == "a"
    assert pages.join_words(["a", "b", "c"]) == "a, b and c"
    assert pages.count_words(1, "rank") == "1 rank"
