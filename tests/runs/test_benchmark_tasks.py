"""trainer.evaluate: tasks of lm-evaluation-harness, scored in training as the harness scores the exported model."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from serried import cli
from serried.configs.compose import compose
from serried.configs.errors import UserError
from serried.configs.schema.launch_plan_track import LaunchSection
from serried.parallel.layout.checks import check_layout
from serried.parallel.layout.mesh import resolve_layout
from serried.runtime.session import open_session
from serried.trainer.monitor.heartbeat import EVALUATE, Pulse
from testing.rank_pool import Cluster
from testing.runs import metrics, overrides, run_here

pytestmark = pytest.mark.slow

CHOICE = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: {kind}
doc_to_text: "{{{{text}}}}"
doc_to_target: "{target}"
"""
CHOOSES = """\
doc_to_choice: ["lorem ipsum", "dolor", "adipiscing elit"]
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ROLLS = "metric_list: [{metric: bits_per_byte}]\n"
WRITES = """\
process_results: !function judging.judged
metric_list: [{{metric: judged, aggregation: mean, higher_is_better: true}}]
generation_kwargs: {{until: [m, "\\n"], max_gen_toks: 12{more}}}
"""
JUDGES = """\
def judged(doc, results):
    return {"judged": sum(place * ord(sign) for place, sign in enumerate(results[0], 1))}
"""
"""Numbers that show any difference of the generated texts."""
TASKS = ("choosing", "rolling", "writing")
WORDS = ["lorem", "dolor sit", "", "amet consectetur elit sed do lorem ipsum dolor"]


@pytest.fixture(scope="module", autouse=True)
def offline() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # also of the processes of the cluster, which are started later


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tasks on seven documents: a choice of answers, the likelihood of a text, and text to be written."""
    pytest.importorskip("lm_eval")
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"text": WORDS[number % 4] * (number + 1), "label": number % 3} for number in range(7)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "judging.py").write_text(JUDGES)
    kinds = {
        "choosing": ("multiple_choice", "{{label}}", CHOOSES), "rolling": ("loglikelihood_rolling", "{{text}}", ROLLS),
        "writing": ("generate_until", "{{text}}", WRITES.format(more=", do_sample: false")),
        "endless": ("generate_until", "{{text}}", WRITES.format(more="").replace('m, "\\n"', "").replace("12", "40")),
        "beams": ("generate_until", "{{text}}", WRITES.format(more=", num_beams: 2")),
        "long": ("generate_until", "{{text}}", WRITES.format(more=", max_new_tokens: 9").replace("12", "8192")),
    }  # fmt: skip
    for name, (kind, target, more) in kinds.items():
        text = CHOICE.format(name=name, data=folder / "rows.jsonl", kind=kind, target=target) + more
        if kind == "generate_until":  # the harness cannot continue an empty text
            text = text.replace('doc_to_text: "', 'doc_to_text: "sed ')
        (folder / f"{name}.yaml").write_text(text)
    return folder


def by_the_harness(model: Path, tasks: Path) -> dict[str, float]:
    """What ``lm_eval --model hf`` finds of an exported model."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found: Any = simple_evaluate(
        HFLM(pretrained=str(model), device="cpu", batch_size=2, dtype="float32"), tasks=[*TASKS],
        task_manager=manager, bootstrap_iters=0, log_samples=False,
    )  # fmt: skip
    named = {f"{name}.{key}": value for name, each in found["results"].items() for key, value in each.items()}
    return {key[:-5]: value for key, value in named.items() if key.endswith(",none") and "stderr" not in key}


def run(text: Path, folder: Path, tasks: Path, *more: str) -> list[str]:
    named = ",".join(f"lm_eval:{tasks / name}.yaml" for name in TASKS)
    return overrides(
        text, folder, f"trainer.evaluate=[{named}]", "trainer.steps=4", "trainer.eval_every=2", "checkpoint.every=2",
        "trainer.eval_batches=1", "launch.device=cpu", "checkpoint.keep_best=true", "checkpoint.keep=1",
        "checkpoint.best_metric=rolling.bits_per_byte", *more,
    )  # fmt: skip


def test_scores_are_those_of_the_exported_model_on_any_layout(
    cluster: Cluster, text: Path, tasks: Path, tmp_path: Path
) -> None:
    assert run_here(run(text, tmp_path / "run", tasks))[0] == 0
    events = metrics(tmp_path / "run", "eval")
    assert cli.main(["export", str(tmp_path / "run"), f"out={tmp_path / 'model'}"]) == 0
    expected = by_the_harness(tmp_path / "model", tasks)
    assert set(expected) == {"choosing.acc", "choosing.acc_norm", "rolling.bits_per_byte", "writing.judged"}
    assert expected["writing.judged"] > 0
    assert {name: events[-1][name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert events[-1]["rolling.bits_per_byte"] < events[0]["rolling.bits_per_byte"], "it learns"
    for ranks, more in ((3, []), (2, ["parallel.tensor=2"])):
        argv = run(text, tmp_path / f"x{ranks}", tasks, "parallel=fsdp", "trainer.micro_batch=2", *more)
        cluster.run(ranks, "testing.runs:train_small", argv=argv)
        found = metrics(tmp_path / f"x{ranks}", "eval")[-1]
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4)


def test_each_generated_token_is_progress_to_the_watchdog(
    text: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, enter = list[str](), Pulse.enter

    def entering(pulse: Pulse, phase: str, step: int) -> None:
        entered.append(phase)
        enter(pulse, phase, step)

    monkeypatch.setattr(Pulse, "enter", entering)
    argv = run(text, tmp_path / "run", tasks, f"trainer.evaluate=[lm_eval:{tasks / 'endless.yaml'}]", "trainer.steps=2")
    assert run_here([word for word in argv if "best" not in word])[0] == 0
    assert entered.count(EVALUATE) >= 40


def test_shuffled_documents_are_the_same_on_every_rank_and_other_documents_are_noticed(
    tasks: Path, tmp_path: Path
) -> None:
    from serried.trainer.evaluation.lm_eval import Benchmarks

    (tmp_path / "shuffling.py").write_text(
        "import random\n\ndef shuffled(docs):\n    return docs.select(random.sample(range(len(docs)), len(docs)))\n"
    )
    text = (tasks / "rolling.yaml").read_text().replace("rolling", "shuffling", 1)
    (tmp_path / "shuffling.yaml").write_text(f"{text}process_docs: !function shuffling.shuffled\n")

    def asked(documents: int) -> str:
        with open_session(LaunchSection(device="cpu")) as session:
            task: Any = None
            return Benchmarks([f"lm_eval:{tmp_path / 'shuffling.yaml'}"], documents, task, session).requests()

    random.seed(1)
    before = random.getstate()
    first = asked(7)
    assert random.getstate() == before, "training draws as it would without"
    random.seed(2)
    assert asked(7) == first
    assert asked(6) != first


def test_mistakes_are_refused_in_one_line_before_training(text: Path, tasks: Path, tmp_path: Path) -> None:
    def refused(*more: str) -> str:
        code, printed, _ = run_here(run(text, tmp_path / "run", tasks, *more))
        error = [line for line in printed.splitlines() if "error:" in line]
        assert code == 78 and len(error) == 1 and not (tmp_path / "run").exists(), printed
        return error[0]

    assert "did you mean lm_eval:arc_easy" in refused("trainer.evaluate=[lm_eval:arc_esy]")
    assert "did you mean lm_eval:arc_easy" in refused("trainer.evaluate=[lm_eval:arc_esy]", "dry_run=true")
    assert "generation_kwargs num_beams, which is not" in refused(f"trainer.evaluate=[lm_eval:{tasks / 'beams.yaml'}]")
    assert "generates 8192 tokens, which leaves" in refused(f"trainer.evaluate=[lm_eval:{tasks / 'long.yaml'}]")
    assert "cannot be loaded" in refused("trainer.evaluate=[lm_eval:absent.yaml]")
    assert "trainer.evaluate=[lm_eval:arc_easy]" in refused("trainer.evaluate=[arc_easy]")
    for axis in ("context", "pipeline"):
        config = compose(run(text, tmp_path / "run", tasks, "parallel=fsdp", f"parallel.{axis}=2"))
        with pytest.raises(UserError, match=f"trainer.evaluate with parallel.{axis}=2"):
            check_layout(config, resolve_layout(config.parallel, 2), 1)
