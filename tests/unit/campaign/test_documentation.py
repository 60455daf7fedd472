import re
from pathlib import Path

from trioflow.campaign.__main__ import make_parser
from trioflow.campaign.packing import Limits

PAGE = Path(__file__).parents[3] / "docs" / "capture_campaign.md"


def test_the_page_names_every_option_and_no_other():
    said = set(re.findall(r"--[a-z][a-z-]*", PAGE.read_text()))
    known = {
        word
        for action in make_parser()._actions
        for word in action.option_strings
        if word.startswith("--") and word not in ("--help", "--until")
    }
    assert said == known


def test_the_page_says_the_limits_that_hold():
    options = make_parser().parse_args([])
    assert (options.files, options.file_mib, options.total_mib) == (8, 16, 60)
    limits = Limits()
    assert limits.files == options.files
    assert limits.file_bytes == options.file_mib * 2**20
    assert limits.total_bytes == options.total_mib * 2**20
    assert "8 files, 16 MiB each, 60 MiB together" in PAGE.read_text()
