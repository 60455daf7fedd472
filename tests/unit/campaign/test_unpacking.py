from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
from trioflow.base.errors import InputError
from trioflow.campaign.compaction import pack_json, pack_raw, read_raw
from trioflow.campaign.items import Item, Result, State
from trioflow.campaign.packing import pack_campaign, to_parquet, unpack_campaign
from trioflow.trace.profile.merge import RAW_FILES, merge_trace


@pytest.mark.parametrize("fixture", ["raw_transformer", "raw_cnn"])
def test_what_is_unpacked_merges_like_the_original(fixture, request, tmp_path):
    raw = request.getfixturevalue(fixture)
    files = {name: pack_raw(read_raw(raw / name)) for name in RAW_FILES if (raw / name).exists()}
    state = State(tmp_path / "state")
    state.store("net-b4-fp32", Result(files=files))
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


def test_names_that_leave_the_target_are_refused(tmp_path):
    content = pack_json({})
    row = {"item": "../evil", "file": "x.json", "size_bytes": content.size_bytes}
    table = to_parquet([{**row, "content": content.packed}], "files")
    (tmp_path / "captures-1.parquet").write_bytes(table)
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
