import pytest
from hypothesis import settings

settings.register_profile("rackplan", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("rackplan")


@pytest.fixture(autouse=True)
def _no_stray_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
