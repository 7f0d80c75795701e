"""Image classification: one curve on every layout, the same pixels after a resume, and one line for a mistake."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image as pillow

from harness.cluster import Cluster
from harness.runs import checkpoint, different_tensors, kept_batches, losses, metrics, weights
from serried import cli
from serried.configs.errors import UserError
from serried.configs.tasks import ImageSection
from serried.program import main
from serried.recipes.data.images import Image, cropped_at_random, cropped_to_centre, open_images
from serried.recipes.image_classification import ImageClassification
from serried.recipes.models.image_models import normalization

CLASSES = ("blue", "green", "red")


def has(library: str) -> bool:
    """Whether ``library`` can be imported: its operators are compiled for one version of torch."""
    try:
        __import__(library)
    except Exception:
        return False
    return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small images of three classes, a ViT and a ResNet."""
    from transformers import ResNetConfig, ViTConfig

    root, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split, count in (("train", 14), ("val", 5)):
        for place, name in enumerate(CLASSES):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 155, (24 + number, 40, 3), np.uint8)
                pixels[..., 2 - place] += 100
                pillow.fromarray(pixels).save(root / split / name / f"{number:02d}.png")
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
    ViTConfig(hidden_size=32, intermediate_size=64, **sizes).save_pretrained(root / "vit")
    ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic").save_pretrained(
        root / "resnet"
    )
    return root


def images(folder: Path, run_dir: Path, *more: str, model: str = "vit") -> list[str]:
    small = [
        "task=image_classification", f"task.path={folder}", "task.library=transformers", f"task.model={folder / model}",
        "task.image_size=32", f"run.dir={run_dir}", "trainer.steps=6", "trainer.global_batch=12",
        "trainer.micro_batch=3", "trainer.log_every=1", "trainer.eval_every=6", "schedule.warmup_steps=2",
        "precision=fp32", "optim.lr=0.003", "optim.weight_decay=0", "launch.device=cpu",
    ]  # fmt: skip
    return [*small, *more]


def train(argv: list[str], code: int = 0) -> None:
    """On this rank."""
    assert main(argv) == code


def test_training_is_that_of_transformers_and_sharding_changes_nothing(
    cluster: Cluster, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForImageClassification

    train(images(folder, tmp_path / "first", "trainer.steps=1", "optim.lr=0"))
    start = checkpoint(tmp_path / "first")
    theirs = AutoModelForImageClassification.from_pretrained(start)
    assert theirs.config.id2label == dict(enumerate(CLASSES))
    more = [f"task.model={start}", "task.pretrained=true", "task.label_smoothing=0.1", "trainer.seed=7"]
    with kept_batches(ImageClassification, "loss") as trained_on:
        train(images(folder, tmp_path / "run", *more))
    ours = metrics(tmp_path / "run")
    optimizer = torch.optim.AdamW(theirs.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in normalization(ImageSection()))
    for step, line in enumerate(ours[:3]):
        pixels, labels = (torch.cat(each) for each in zip(*trained_on[4 * step : 4 * step + 4], strict=True))
        scores = theirs((pixels / 255 - mean) / std).logits
        loss = F.cross_entropy(scores, labels, label_smoothing=0.1)
        accuracy = (scores.argmax(1) == labels).double().mean()
        assert (line["loss"], line["accuracy"]) == pytest.approx((loss.item(), accuracy.item()), abs=1e-5)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = line["lr"]
        optimizer.step()
        optimizer.zero_grad()
    (evaluated,) = metrics(tmp_path / "run", "eval")
    assert evaluated["accuracy"] > 0.5
    capfd.readouterr()
    assert cli.evaluate([str(tmp_path / "run"), "json=true"]) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["accuracy"] == evaluated["accuracy"]
    cluster.run(2, "tests.test_images:train", argv=images(folder, tmp_path / "fsdp", *more, "parallel=fsdp"))
    assert losses(tmp_path / "fsdp") == pytest.approx(losses(tmp_path / "run"), rel=1e-5)
    (again,) = metrics(tmp_path / "fsdp", "eval")
    assert (again["loss"], again["accuracy"]) == pytest.approx((evaluated["loss"], evaluated["accuracy"]), rel=1e-5)


def test_stopped_run_resumes_with_the_same_bits_and_pixels(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForImageClassification

    for name, *stops in (("whole",), ("stopped", "trainer.stop_at=4")):  # in the second epoch
        argv = images(folder, tmp_path / name, "trainer.deterministic=true", model="resnet")
        for stop in stops:
            train([*argv, stop], 75)
        train(argv)
    assert not different_tensors(tmp_path / "whole", tmp_path / "stopped")
    whole = weights(tmp_path / "whole")
    assert any(name.endswith("running_mean") for name in whole)
    saved = AutoModelForImageClassification.from_pretrained(checkpoint(tmp_path / "whole")).state_dict()
    assert all(saved[name].equal(whole[name]) for name in whole)


def test_pixels_follow_from_the_seed_and_differ_between_seeds(folder: Path) -> None:
    picture = open_images(ImageSection(path=str(folder))).training[0].pixels
    one, again, other = (cropped_at_random(picture, 16, 0.08, True, seed) for seed in (1, 1, 2))
    assert one.shape == (3, 16, 16)
    assert one.equal(again)
    assert not one.equal(other)
    whole = cropped_to_centre(picture, 16)
    mirrored = {cropped_at_random(picture, 16, 1.0, True, seed).equal(whole) for seed in range(8)}
    assert mirrored == {True, False}
    assert {cropped_at_random(picture, 16, 1.0, False, seed).equal(whole) for seed in range(8)} == {True}


def test_rows_of_a_dataset_are_images_too(folder: Path, tmp_path: Path) -> None:
    import datasets

    for split in ("train", "test"):
        names = sorted((folder / split.replace("test", "val")).glob("*/*.png"))
        rows = {"picture": [str(name) for name in names], "kind": [name.parent.name for name in names]}
        table = datasets.Dataset.from_dict(rows).cast_column("picture", datasets.Image())
        table.to_parquet(tmp_path / f"{split}-00000-of-00001.parquet")
    keys = {"path": str(tmp_path), "image_column": "picture", "label_column": "kind"}
    found, expected = open_images(ImageSection(**keys)), open_images(ImageSection(path=str(folder)))
    assert found.classes == expected.classes
    assert found.validation is not None
    first, its_file = found.training[0], expected.training[0]
    assert (first.label, first.pixels.tobytes()) == (its_file.label, its_file.pixels.tobytes())
    assert len(found.validation) == 3 * 5
    with pytest.raises(UserError, match=r"task.label_column=label: .* has the columns picture, kind; use"):
        open_images(ImageSection(**keys | {"label_column": "label"}))


def test_mistakes_are_one_line(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("empty", "bare/train/red", "odd/train/red", "odd/val/rde", "broken/train/red"):
        (tmp_path / name).mkdir(parents=True)
    for place in ("odd/train/red", "odd/val/rde"):
        pillow.new("RGB", (8, 8)).save(tmp_path / place / "a.png")
    (tmp_path / "broken/train/red/a.png").write_text("no image")
    (tmp_path / "file").mkdir()
    (tmp_path / "file/train").write_text("")
    with pytest.raises(UserError, match=r"cannot read .*/red/a\.png as an image"):
        open_images(ImageSection(path=str(tmp_path / "broken"))).training[0]
    for words, told in (
        ([f"task.path={tmp_path / 'empty'}"], "the folder is empty, and no train; images are expected in"),
        ([f"task.path={tmp_path / 'file'}"], "file/train: Not a directory"),
        ([f"task.path={tmp_path / 'bare'}"], "bare/train holds no images"),
        ([f"task.path={tmp_path / 'none'}"], "there is no such folder"),
        ([f"task.path={tmp_path / 'odd'}"], "odd/val has the class rde, which the training data do not have: red"),
        (["task.validation=vla"], "use task.validation=val"),
        (["task.model=nowhere"], "cannot read nowhere/config.json"),
        (["task.pretrained=true"], "the weights cannot be read or downloaded"),
        (["adapter=lora"], "would leave the new head of task=image_classification as it is"),
        (["task.sync_batch_norm=true", "dry_run=false"], "needs GPUs"),
        (["data.sequence_length=32"], "unknown key data.sequence_length"),
        (["model=resnet50"], "did you mean task.model=resnet50?"),
        (["parallel=fsdp", "parallel.tensor=2", "launch.processes=2"], "declares no roles"),
    ):
        assert main(images(folder, tmp_path / "run", "dry_run=true", *words)) == 78, words
        *_, line = capfd.readouterr().err.splitlines()
        assert line.startswith("error: ")
        assert told in line
    assert main(["task.flip=true"]) == 78
    assert "it is read by task=image_classification" in capfd.readouterr().err
    assert main(images(folder, tmp_path / "run", "dry_run=true")) == 0
    assert "42 images, 15 to evaluate on; 32x32" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("library", "model"), [("timm", "test_vit"), ("torchvision", "squeezenet1_1")])
def test_models_of_a_library_train_by_name(
    folder: Path, tmp_path: Path, library: str, model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    if not has(library):
        pytest.skip(f"{library} is not here, or not made for this torch")
    argv = [f"task.library={library}", f"task.model={model}", "trainer.steps=2"]
    train(images(folder, tmp_path / "run", *argv))
    config = json.loads((checkpoint(tmp_path / "run") / "config.json").read_text())
    assert config["label_names"] == list(CLASSES)
    if library == "timm":
        import timm

        opened = timm.create_model(f"local-dir:{checkpoint(tmp_path / 'run')}", pretrained=True).state_dict()
        saved = weights(tmp_path / "run")
        assert all(saved[name].equal(opened[name]) for name in opened)
    assert main(images(folder, tmp_path / "other", f"task.library={library}", f"task.model={model}x")) == 78
    assert f"did you mean task.model={model}?" in capfd.readouterr().err


def test_a_class_without_images_is_part_of_the_fingerprint(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "train", tmp_path / "train")
    first = open_images(ImageSection(path=str(tmp_path))).training
    assert first.fingerprint == open_images(ImageSection(path=str(folder))).training.fingerprint
    (tmp_path / "train" / "amber").mkdir()
    assert open_images(ImageSection(path=str(tmp_path))).training.fingerprint != first.fingerprint


def test_label_of_a_batch_is_that_of_its_images(folder: Path) -> None:
    task = ImageClassification()
    task.config = ImageSection(path=str(folder), image_size=16)
    sample = task.dataset("train")[20]
    pixels, labels = task.collate([Image(sample.pixels, 1), task.augment(sample, 5)])
    assert (pixels.shape, pixels.dtype, labels.tolist()) == ((2, 3, 16, 16), torch.uint8, [1, 1])
