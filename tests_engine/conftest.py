import os

import pytest

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", OMP_NUM_THREADS="1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folder of the tiny models."""
    from rackplan.engine.tiny_models import TINY_MODELS, write_model_folder

    folder = tmp_path_factory.mktemp("models")
    for name, config in TINY_MODELS.items():
        write_model_folder(folder / name, config)
    return folder


@pytest.fixture(scope="session")
def tiny_moe(models):
    return models / "tiny-qwen3-moe"
