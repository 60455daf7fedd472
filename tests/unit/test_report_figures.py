"""The figures: what they must show, and that their bytes never change by themselves."""

import re
from xml.etree import ElementTree

import pytest
from report_run import PLANS, experiments_of, write_run
from trioflow.base.errors import InputError
from trioflow.report import figures, style
from trioflow.report.errors import build_error_table
from trioflow.report.inputs import load_report_inputs
from trioflow.report.pages import write_time

SMALL = [("gpt2-tiny", 8, 0.4, 1450, 5_000_000), ("vgg11", 8, 0.3, 140, 28_000_000)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    files = write_run(tmp_path_factory.mktemp("run"), SMALL, scale=0.05)
    inputs = load_report_inputs(files, experiments_of(SMALL), PLANS)
    errors = build_error_table(inputs.experiments, inputs.measurements, inputs.summaries)
    return inputs, errors


def texts(figure):
    found = [text for axes in figure.axes for text in axes.texts]
    ticks = [tick for axes in figure.axes for tick in axes.get_yticklabels()]
    return [text.get_text() for text in (*found, *ticks)]


def signed(value):
    text = f"{100 * value:+.1f}".replace("-", "\u2212")
    return "0.0" if text[1:] == "0.0" else text


def test_predicted_and_measured_shows_every_experiment_and_error(run):
    _, errors = run
    shown = texts(figures.draw_predicted_and_measured(errors))
    for row in errors.to_dict("records"):
        assert row["experiment"] in shown
        assert f"{signed(row['relative_error'])} %" in shown


def test_an_interval_that_says_nothing_is_cut_with_an_arrow(run):
    _, errors = run
    wild = errors.copy()
    wild.loc[0, "high_s"] = 1e6 * wild.loc[0, "measured_s"]
    panel = figures.draw_predicted_and_measured(wild).axes[1]
    spans = figures.draw_predicted_and_measured(errors).axes[1].get_xlim()
    assert panel.get_xlim()[1] < 10 * spans[1]
    [arrow] = [line for line in panel.lines if line.get_marker() == ">" and len(line.get_xdata())]
    assert arrow.get_ydata().tolist() == [0]


def test_rounds_lost_in_noise_stretch_no_axis(run):
    inputs, _ = run
    samples = inputs.collective_samples.copy()
    lost = samples.index[samples["collective"] == "all_reduce"][:1]
    samples.loc[lost, "time_ns"] = 1
    figure = figures.draw_collective_curve(samples, inputs.collectives)
    kept_s = samples["time_ns"].drop(lost).min() * 1e-9
    assert figure.axes[0].get_ylim()[0] == pytest.approx(kept_s / 2)
    assert sum("lost in noise" in text for text in texts(figure)) == 1


def test_notes_lie_where_they_belong_in_the_svg_alone(run, tmp_path):
    _, errors = run
    figure = figures.draw_predicted_and_measured(errors)
    svg = style.save_figure(figure, tmp_path / "figure")[0]
    text = svg.read_text(encoding="utf-8")
    notes = re.findall(
        r'<rect x="(.+?)" y="(.+?)" width="(.+?)" height="(.+?)"><title>(.+?)<', text
    )
    assert [note[-1].split(":")[0] for note in notes] == list(errors["experiment"])
    assert f"measured {write_time(errors['measured_s'][0])}" in notes[0][-1]
    wide, tall = (72 * size for size in figure.get_size_inches())
    middles = [float(y) + float(height) / 2 for _, y, _, height, _ in notes]
    assert middles == sorted(middles), "rows run downwards in the picture as in the table"
    for x, y, width, height, _ in notes:
        assert 0 < float(x) < float(x) + float(width) < wide
        assert 0 < float(y) < float(y) + float(height) < tall
    ElementTree.fromstring(text)
    assert text == style.save_figure(figure, tmp_path / "again")[0].read_text(encoding="utf-8")


def test_error_table_shows_every_error_and_the_holes(run):
    _, errors = run
    shown = "\n".join(texts(figures.draw_error_by_plan(errors))).split("\n")
    for value in errors["relative_error"]:
        assert signed(value) in shown
    assert shown.count("not run") == 1


def test_collective_line_and_table_are_those_of_the_model(run):
    inputs, _ = run
    model = inputs.collectives
    figure = figures.draw_collective_curve(inputs.collective_samples, model)
    above = next(
        axes for axes in figure.axes if axes.get_title(loc="left") == "all_reduce, 2 ranks"
    )
    samples, piecewise, line = above.lines
    curve = model.curves["all_reduce", 2]
    assert (
        len(samples.get_xdata()) == (inputs.collective_samples["collective"] == "all_reduce").sum()
    )
    drawn = dict(zip(piecewise.get_xdata(), piecewise.get_ydata(), strict=True))
    for size, time_s in zip(curve.message_bytes, curve.time_s, strict=True):
        assert drawn[size] == pytest.approx(time_s)
    assert line.get_ydata()[0] == pytest.approx(
        curve.alpha_s + curve.beta_s_per_byte * line.get_xdata()[0]
    )


def test_operator_fit_is_ordered_by_share_and_says_what_was_not_held_out(run):
    inputs, _ = run
    figure = figures.draw_operator_fit(inputs.operator_fit)
    widths = [patch.get_width() for patch in figure.axes[0].patches]
    assert widths == sorted(widths, reverse=True) and len(widths) == len(inputs.operator_fit)
    assert sum("not held out" in text for text in texts(figure)) == 1


def test_style_leaves_other_figures_alone(run):
    import matplotlib

    before = dict(matplotlib.rcParams)
    figures.draw_error_by_plan(run[1])
    assert dict(matplotlib.rcParams) == before


def test_nothing_to_draw_is_refused(run):
    inputs, errors = run
    with pytest.raises(InputError, match="no experiment"):
        figures.draw_predicted_and_measured(errors.head(0))
    with pytest.raises(InputError, match="no experiment"):
        figures.draw_error_by_plan(errors.head(0))
    with pytest.raises(InputError, match="no operator class"):
        figures.draw_operator_fit(inputs.operator_fit.head(0))
    with pytest.raises(InputError, match="no collective"):
        figures.draw_collective_curve(inputs.collective_samples.head(0), inputs.collectives)
    other = inputs.collective_samples.assign(ranks=4)
    with pytest.raises(InputError, match="of 4 ranks was sampled but not fitted"):
        figures.draw_collective_curve(other, inputs.collectives)
