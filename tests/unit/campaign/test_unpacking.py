import gzip
from dataclasses import replace

import pandas as pd
import pytest
from trioflow.base.errors import InputError
from trioflow.campaign.items import Item
from trioflow.campaign.packing import Content, Result, State, _write, pack_campaign, unpack_campaign
from trioflow.trace.profile.merge import RAW_FILES, merge_trace


@pytest.mark.parametrize("fixture", ["raw_transformer", "raw_cnn"])
def test_what_is_unpacked_merges_like_the_original(fixture, request, tmp_path):
    raw = request.getfixturevalue(fixture)
    files = {
        name: Content.of(gzip.decompress(content) if name.endswith(".gz") else content)
        for name in RAW_FILES
        if (raw / name).exists() and (content := (raw / name).read_bytes())
    }
    state = State(tmp_path / "state")
    state.store("net-b4-fp32", Result(), files)
    pack_campaign([Item("net-b4-fp32", "workload", 0, 1.0)], state, tmp_path / "out")
    (folder,) = unpack_campaign(tmp_path / "out", tmp_path / "traces")
    assert folder == tmp_path / "traces" / "net-b4-fp32"
    assert {path.name for path in folder.iterdir()} == set(files)
    packed, original = merge_trace(folder), merge_trace(raw)
    pd.testing.assert_frame_equal(packed.operators, original.operators)
    pd.testing.assert_frame_equal(packed.tensors, original.tensors)
    # The digests are those of smaller files; all else is equal.
    assert packed.facts.inputs.keys() == original.facts.inputs.keys()
    assert packed.facts == replace(original.facts, inputs=packed.facts.inputs)


@pytest.mark.parametrize("damage", ["cut", "swap", "size"])
def test_damaged_content_is_refused(tmp_path, damage):
    good = Content.of(b'{"nodes": [{"id": 1}]}')
    bad = {
        "cut": Content(good.packed[:-6], good.size_bytes),
        "swap": Content(b"x" * 40, good.size_bytes),
        "size": Content(good.packed, 3),
    }[damage]
    with pytest.raises(InputError, match="damaged content"):
        bad.restore(tmp_path / "item/file")


def test_names_that_leave_the_target_are_refused(tmp_path):
    content = Content.of(b"{}")
    row = {"item": "../evil", "file": "x.json", "size_bytes": content.size_bytes}
    _write(tmp_path / "captures-1.parquet", "files", [{**row, "content": content.packed}])
    with pytest.raises(InputError, match="are not file names"):
        unpack_campaign(tmp_path, tmp_path / "target")
    assert not (tmp_path / "evil").exists()


def test_a_folder_without_captures_is_refused(tmp_path):
    with pytest.raises(InputError, match="no captures"):
        unpack_campaign(tmp_path, tmp_path / "target")


def test_unpacking_needs_no_torch():
    import subprocess
    import sys

    from .conftest import LIBRARY

    code = "import sys, trioflow.campaign.packing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=LIBRARY, check=False).returncode == 0
