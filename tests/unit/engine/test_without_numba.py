import pytest
from trioflow.base.errors import InputError
from trioflow.engine.compiled import run


def test_without_numba_everything_runs_uncompiled(monkeypatch):
    monkeypatch.setattr(run, "_loaded", {})
    monkeypatch.setattr(run, "has_numba", lambda: False)
    assert not run.is_repaid(10**9)
    assert run.find_cache_folder() is None
    with pytest.raises(InputError, match="the compiled engine needs numba; install it: "):
        run.load_kernels()
