"""What many tests share: ranks, and a small text to train on."""

import os
import random
import signal
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

# Tests and what they start share the cores: threads would wait for each other. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # of those that ask for several
# Tests expect the devices and the rounding of a CPU, but for those of tests/ranks/test_gpu.py.
if os.environ.get("TEST_DEVICE") != "cuda":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# The first profile of a process decides what torch's profiler prints in all later ones, of other tests too.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import pytest
from hypothesis import settings

from serried.configs.schema.data import sources
from serried.configs.schema.registry import models, optimizers, schedules, tasks
from testing.forked_runs import set_aside
from testing.rank_pool import Cluster

# A shell has what it starts in the background (`make test &`) ignore SIGINT, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

REGISTRIES = (models, optimizers, schedules, sources, tasks)

settings.register_profile("here", deadline=None, print_blob=True)  # a busy machine is not a failing test
settings.load_profile("here")


# With two processes of tests, a long file that begins last keeps one of them waiting.
LONGEST = (
    "test_parity.py", "test_plan.py", "test_verify.py", "test_eight_bits.py", "test_any_layout.py",
    "test_kill_storm.py", "test_command.py", "test_sweep.py", "test_families.py", "test_optimizers.py",
    "test_tutorials.py", "test_signal_storm.py", "test_resume.py", "test_compile.py", "test_shutdown.py",
    "test_config.py",
    "test_examples.py", "test_trackers.py", "test_watchdog.py", "test_out_of_memory.py", "test_launch.py",
    "test_lora.py", "test_health.py", "test_activations.py", "test_evaluate.py", "test_muon.py", "test_adafactor.py",
    "test_offload.py", "test_quantize_aware.py", "test_ranks_on_one_gpu.py", "test_layouts.py",
    "test_checkpoint_faults.py", "test_prepare.py", "test_micro_batch.py", "test_plan_of_runs.py", "test_session.py",
    "test_foreign_modules.py", "test_any_hugging_face_model.py", "test_seconds.py", "test_interop.py",
    "test_export_formats.py", "test_resume_policy.py", "test_api.py",
)  # fmt: skip


REFUSED_ON_TORCH_2_11 = ("zbv", "dualpipev", "zero_bubble")
"""In the names of tests: one of a refusal must not have them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order files by how long they take, for ``--dist=loadfile --no-loadscope-reorder``; skip what torch 2.11 lacks."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
    if version("torch").startswith("2.11."):
        for item in items:
            if any(name in item.nodeid for name in REFUSED_ON_TORCH_2_11):
                item.add_marker(pytest.mark.skip(reason="serried refuses it on torch 2.11"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Make weights that tests and their fixtures draw independent of the tests that ran before in this process."""
    import numpy as np
    import torch

    random.seed(1)
    np.random.seed(1)
    # torch.manual_seed would also record a stack trace for devices that do not exist.
    torch.default_generator.manual_seed(1)


@pytest.fixture(autouse=True)
def _nothing_of_earlier_tests_is_garbage() -> None:
    set_aside()


@pytest.fixture(autouse=True)
def _registries_as_they_were() -> Iterator[None]:
    """What a test registers is gone after it: other tests look at all there is."""
    for registry in REGISTRIES:
        registry.names()  # loads the built-in ones
    before = [dict(registry._entries) for registry in REGISTRIES]
    yield
    for registry, entries in zip(REGISTRIES, before, strict=True):
        registry._entries = entries


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Four ranks, alive for the whole session."""
    ranks = Cluster(4)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of text, and beside it the cache of its tokens."""
    from testing.runs import write_text  # imports torch, which the process that only distributes tests does not need

    folder = tmp_path_factory.mktemp("text")
    write_text(folder)
    return folder
