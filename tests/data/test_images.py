"""Image classification: one curve on every layout, the same pixels after a resume, and one line for a mistake."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from PIL import Image as pillow

from serried.commands import evaluate_model, export_models
from serried.configs.errors import UserError
from serried.configs.schema.sections import CheckpointSection, RunConfig, RunSection
from serried.configs.schema.tasks import ImageLoadingSection, ImageSection
from serried.program import main
from serried.recipes.classification.image_classification import ImageClassification
from serried.recipes.data.labelled.labelled_images import (
    Image,
    cropped_at_random,
    cropped_to_centre,
    image_processor,
    open_images,
)
from serried.recipes.models.hugging_face.image_models import IMAGENET, normalization
from serried.task_class import make_task
from serried.trainer.checkpoint.manifest import read_manifest, record_of, write_manifest
from serried.trainer.checkpoint.resume import resumed_checkpoints
from testing.rank_pool import Cluster
from testing.runs import checkpoint, different_tensors, kept_batches, losses, metrics, weights

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


def configured(section: ImageSection, run_dir: Path) -> ImageClassification:
    """The task of a run in ``run_dir``."""
    run = RunSection(name="run", dir=run_dir)
    config = RunConfig.model_construct(run=run, task=section, checkpoint=CheckpointSection())
    task = make_task(config, ImageClassification)
    assert isinstance(task, ImageClassification)
    return task


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
    assert evaluate_model.evaluate([str(tmp_path / "run"), "json=true"]) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["accuracy"] == evaluated["accuracy"]
    cluster.run(2, "tests.data.test_images:train", argv=images(folder, tmp_path / "fsdp", *more, "parallel=fsdp"))
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


def test_images_are_decoded_by_a_thread_for_each_core_from_2_to_16(folder: Path, tmp_path: Path) -> None:
    train([*images(folder, tmp_path / "run", model="resnet"), "trainer.stop_at=1"], 75)
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["data"] == {"workers": None}
    threads = {workers: ImageLoadingSection(workers=workers) for workers in (None, 0, 5)}
    assert [threads[None].threads(cores) for cores in (1, 8, 64)] == [2, 8, 16]
    assert [threads[workers].threads(8) for workers in (0, 5)] == [0, 5]


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
    with pytest.raises(
        UserError, match=r"task.label_column=label: .* has no such column; its columns are picture, kind; use"
    ):
        open_images(ImageSection(**keys | {"label_column": "label"}))


def test_photo_is_turned_as_its_exif_orientation_says(tmp_path: Path) -> None:
    import datasets
    from transformers.image_utils import load_image

    (tmp_path / "photos/train/red").mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8)
    for orientation in range(10):  # 1 to 8 have a meaning
        for ending in ("png", "tif", "webp"):
            exif = pillow.Exif()
            exif[0x0112] = orientation
            name = tmp_path / f"photos/train/red/{orientation}.{ending}"
            pillow.fromarray(pixels).save(name, exif=exif, lossless=True)
    names = sorted((tmp_path / "photos/train/red").iterdir())
    table = datasets.Dataset.from_dict({"image": list(map(str, names)), "label": ["red"] * 30})
    table.cast_column("image", datasets.Image()).to_parquet(tmp_path / "rows/train.parquet")
    for place in ("photos", "rows"):
        training = open_images(ImageSection(path=str(tmp_path / place))).training
        for number, name in enumerate(names):
            right = np.array(load_image(str(name)))
            found = np.array(training[number].pixels)
            assert np.array_equal(found, right), f"{name.name} of {place}"
    (tmp_path / "photos/train/red/0.png").write_bytes(
        names[3].read_bytes().replace(b"eXIfMM\x00*", b"eXIfMM\x00+")  # damaged: pixels as they are stored
    )
    assert training[3].pixels.size == (6, 4)


def test_run_that_began_before_photos_were_turned_keeps_its_pixels(tmp_path: Path) -> None:
    for name in ("red", "blue"):
        (tmp_path / "train" / name).mkdir(parents=True)
        exif = pillow.Exif()
        exif[0x0112] = 6
        pillow.new("RGB", (6, 4)).save(tmp_path / "train" / name / "a.png", exif=exif)
    state = tmp_path / "run/checkpoints/step-00000002/state.json"
    state.parent.mkdir(parents=True)

    def opened(fingerprint: str) -> ImageClassification:
        state.write_text(json.dumps({"data_fingerprint": fingerprint}))
        return configured(ImageSection(path=str(tmp_path)), tmp_path / "run")

    now = opened("1234-upright")
    assert now.dataset("train")[0].pixels.size == (4, 6)
    assert not now.notes(False)
    before = now.dataset("train").fingerprint.removesuffix("-upright")
    then = opened(before)
    assert then.dataset("train")[0].pixels.size == (6, 4)
    assert then.dataset("train").fingerprint == before  # the data count as unchanged
    assert then.notes(False) == [
        "EXIF orientation of photos is ignored, as at the start of this run; to apply it, start another run: "
        "run.dir=OTHER"
    ]


def test_file_that_is_no_image_of_pixels_is_refused_and_starts_no_program(tmp_path: Path) -> None:
    import datasets

    folder = tmp_path / "photos/train/red"
    folder.mkdir(parents=True)
    pillow.new("RGB", (6, 4)).save(tmp_path / "a.eps")
    postscript = (tmp_path / "a.eps").read_bytes()
    (folder / "a.png").write_bytes(postscript)
    training = open_images(ImageSection(path=str(tmp_path / "photos"))).training
    with pytest.raises(UserError, match=r"cannot read .*/a\.png as an image: cannot identify image file"):
        training[0]
    rows = {"image": [{"bytes": postscript, "path": None}], "label": ["red"]}
    table = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image(decode=False))
    table.to_parquet(tmp_path / "rows/train.parquet")
    with pytest.raises(UserError, match="cannot read row 1 of the dataset: UnidentifiedImageError"):
        open_images(ImageSection(path=str(tmp_path / "rows"))).training[0]
    (folder / "a.png").unlink()
    os.mkfifo(folder / "a.png")
    with pytest.raises(UserError, match=r"cannot read .*/a\.png as an image: .* is not a regular file"):
        training[0]
    with pytest.raises(UserError, match=r"a\.png is not a regular file; remove it"):
        open_images(ImageSection(path=str(tmp_path / "photos")))


def test_grey_of_16_bits_is_scaled_to_8(tmp_path: Path) -> None:
    (tmp_path / "train/red").mkdir(parents=True)
    grey = np.linspace(0, 65535, 64).reshape(8, 8).astype(np.uint16)
    pillow.fromarray(grey).save(tmp_path / "train/red/0.png")
    pillow.fromarray(grey.astype(">u2")).save(tmp_path / "train/red/1.tif")
    pillow.fromarray(grey.astype(np.int32)).save(tmp_path / "train/red/2.tif")
    training = open_images(ImageSection(path=str(tmp_path))).training
    for number in range(3):
        pixels = np.asarray(training[number].pixels)
        assert (pixels == np.round(grey / 257)[..., None]).all(), number
    for values, told in (
        (grey.astype(np.int32) + 1, "mode I from 1 to 65536"),
        (grey.astype(np.int32) - 1, "mode I from -1 to 65534"),
        ((grey / 65535).astype(np.float32), "mode F from 0 to 1"),
    ):
        pillow.fromarray(values).save(tmp_path / "train/red/2.tif")
        with pytest.raises(
            UserError, match=rf"cannot read .*/2\.tif as an image: pixels of {told} are not supported, only 8-bit"
        ):
            training[2]


def test_image_processor_of_transformers_prepares_images_alike() -> None:
    from transformers import CLIPImageProcessor

    processor = CLIPImageProcessor(**image_processor(112, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)))
    waves = np.sin(np.arange(300) / 20)[:, None, None] * np.cos(np.arange(200) / 15)[:, None] * [90, 50, 20]
    for size, most in (((128, 128), 0.5), ((200, 300), 4), ((90, 70), 4)):
        picture = pillow.fromarray((128 + waves).astype(np.uint8)).resize(size)
        theirs = torch.as_tensor(np.array(processor(picture)["pixel_values"][0]))
        assert (theirs * 255 - cropped_to_centre(picture, 112)).abs().max() < most, size


def test_classifier_of_transformers_opens_there_with_the_colours_it_was_trained_on(
    folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline

    colours = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]}
    shutil.copytree(folder / "vit", tmp_path / "vit")
    (tmp_path / "vit/preprocessor_config.json").write_text(json.dumps(colours))
    for path in folder.glob("*/*/*.png"):  # of a size that is cropped and not scaled
        other = tmp_path / path.relative_to(folder)
        other.parent.mkdir(parents=True, exist_ok=True)
        pillow.open(path).resize((64, 64)).save(other)
    words = ["task.image_size=56", "trainer.steps=2", "trainer.eval_every=2", f"task.model={tmp_path / 'vit'}"]
    train(images(tmp_path, tmp_path / "run", *words))
    assert export_models.export([f"run.dir={tmp_path / 'run'}", f"out={tmp_path / 'model'}"]) == 0
    processor = AutoImageProcessor.from_pretrained(tmp_path / "model")
    assert {key: list(getattr(processor, key)) for key in colours} == colours
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "model")
    names = sorted((tmp_path / "val").glob("*/*.png"))
    with torch.no_grad():
        scores = model(processor([pillow.open(name) for name in names], return_tensors="pt")["pixel_values"]).logits
    labels = torch.tensor([CLASSES.index(name.parent.name) for name in names])
    (evaluated,) = metrics(tmp_path / "run", "eval")
    assert evaluated["loss"] == pytest.approx(F.cross_entropy(scores, labels).item(), abs=1e-6)
    best, *_ = pipeline("image-classification", model=str(tmp_path / "model"))(str(names[0]))
    assert best["label"] == CLASSES[scores[0].argmax()]


def test_resumed_run_keeps_the_colours_it_began_with(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "vit", tmp_path / "vit")
    argv = images(folder, tmp_path / "run", f"task.model={tmp_path / 'vit'}")
    train([*argv, "trainer.stop_at=2"], 75)
    saved = checkpoint(tmp_path / "run")
    (saved / "preprocessor_config.json").unlink()  # as an earlier version left it
    write_manifest(saved, {name: it for name, it in read_manifest(saved).items() if name != "preprocessor_config.json"})
    (tmp_path / "vit/preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5], "image_std": [1, 1, 1]}')
    train(argv)
    found = json.loads((checkpoint(tmp_path / "run") / "preprocessor_config.json").read_text())
    assert (found["image_mean"], found["image_std"]) == tuple(map(list, IMAGENET))
    fresh = ImageSection(library="transformers", model=str(tmp_path / "vit"))
    assert normalization(fresh) == ([0.5] * 3, [1] * 3)
    (tmp_path / "vit/preprocessor_config.json").write_text('{"image_mean": 0.5, "image_std": 1, "do_normalize": false}')
    assert normalization(fresh) == ((0,) * 3, (1,) * 3)


def test_checkpoints_whose_colours_are_kept_are_those_that_the_run_continues(tmp_path: Path) -> None:
    def found(run: str, resume: str) -> list[str]:
        section = RunConfig.model_construct(
            run=RunSection(name=run, dir=tmp_path / run), checkpoint=CheckpointSection(resume=resume)
        )
        return [str(path.relative_to(tmp_path)) for path in resumed_checkpoints(section)]

    other, model = tmp_path / "other", tmp_path / "model"
    for run, step, origin in (
        ("other", 99999999, None),
        ("other", 100000000, None),
        ("own", 7, other),
        ("tuned", 3, model),
    ):
        place = tmp_path / run / "checkpoints" / f"step-{step:08d}"
        place.mkdir(parents=True)
        state = {"version": 1, "step": step, "samples": step, "config": {}, "progress": {}, "step_state": {}}
        state |= {"data_fingerprint": "", "origin": origin and str(origin)}
        (place / "state.json").write_text(json.dumps(state))
        write_manifest(place, {"state.json": record_of(place / "state.json")})
    both = ["other/checkpoints/step-100000000", "other/checkpoints/step-99999999"]
    assert found("other", "auto") == found("new", str(other)) == found("new", str(other / "checkpoints")) == both
    assert found("new", str(other / "checkpoints/step-99999999")) == both[1:]
    assert found("own", str(other)) == ["own/checkpoints/step-00000007"]
    assert found("tuned", str(other)) == both
    assert found("tuned", str(model)) == ["tuned/checkpoints/step-00000003"]
    assert found("own", str(model)) == found("own", "never") == found("new", "auto") == []


def test_image_outside_of_a_class_folder_is_reported(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for split in ("train", "val"):
        shutil.copytree(folder / split, tmp_path / split)
    argv = images(folder, tmp_path / "run", f"task.path={tmp_path}", "dry_run=true")
    assert main(argv) == 0
    assert "WARNING" not in capfd.readouterr().out
    for name in ("train/a.png", "train/b.JPG", "train/notes.txt", "val/c.png"):
        (tmp_path / name).touch()
    assert main(argv) == 0
    lines = [line.split(None, 1)[1] for line in capfd.readouterr().out.splitlines() if line.startswith("WARNING")]
    assert lines == [
        f"{count} images in {place} are not used, as they are not in class folders; move them to {place}/CLASS/"
        for place, count in ((tmp_path / "train", 2), (tmp_path / "val", 1))
    ]


def test_mistakes_are_refused_in_one_line(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    hollow = ("hollow/train/red", "hollow/train/none", "hollow/train/void")
    colours = {
        "colours/text": "[]",
        "colours/two": '{"image_mean": [1, 2], "image_std": 1}',
        "colours/zero": '{"image_mean": 0, "image_std": 0}',
    }
    for name in ("empty", "bare/train/red", "odd/train/red", "odd/val/rde", "broken/train/red", *hollow, *colours):
        (tmp_path / name).mkdir(parents=True)
    for place, text in colours.items():
        shutil.copy(folder / "vit/config.json", tmp_path / place)
        (tmp_path / place / "preprocessor_config.json").write_text(text)
    for place in ("odd/train/red", "odd/val/rde", "hollow/train/red"):
        pillow.new("RGB", (8, 8)).save(tmp_path / place / "a.png")
    (tmp_path / "broken/train/red/a.png").write_text("no image")
    (tmp_path / "file").mkdir()
    (tmp_path / "file/train").write_text("")
    told = r"cannot read .*/red/a\.png as an image: .*; repair or remove it, then .*\.allow_changes=\[task\.path\]"
    with pytest.raises(UserError, match=told):
        open_images(ImageSection(path=str(tmp_path / "broken"))).training[0]
    for words, told in (
        ([f"task.path={tmp_path / 'empty'}"], "has no folder train (it is empty); put images into"),
        ([f"task.path={tmp_path / 'file'}"], "file/train: Not a directory"),
        ([f"task.path={tmp_path / 'bare'}"], "bare/train has no images"),
        ([f"task.path={tmp_path / 'none'}"], "is neither a folder nor the name of a dataset"),
        ([f"task.path={tmp_path / 'odd'}"], "odd/val has the class rde, but the training data has only red"),
        ([f"task.path={tmp_path / 'hollow'}"], "hollow/train has classes without images: none, void; remove their"),
        ([f"task.model={tmp_path / 'colours/text'}"], "text/preprocessor_config.json does not contain a mapping"),
        ([f"task.model={tmp_path / 'colours/two'}"], "two/preprocessor_config.json: image_mean [1,2] and image_std 1"),
        ([f"task.model={tmp_path / 'colours/zero'}"], "image_mean 0 and image_std 0 must be three numbers"),
        (["task.validation=vla"], "use task.validation=val"),
        (["task.model=nowhere"], "cannot read nowhere/config.json"),
        (["task.pretrained=true"], "the weights cannot be read or downloaded"),
        (
            ["adapter=lora"],
            "adapter.method=lora is not supported with task=image_classification, as the new head would not",
        ),
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
    assert "it is a key of task=image_classification" in capfd.readouterr().err
    assert main(images(folder, tmp_path / "run", "dry_run=true")) == 0
    assert "42 images, 15 for evaluation; 32x32" in capfd.readouterr().out


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


def test_class_without_images_may_be_in_the_validation_split(folder: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        shutil.copytree(folder / split, tmp_path / split)
    shutil.rmtree(tmp_path / "val/green")
    (tmp_path / "val/green").mkdir()
    found = open_images(ImageSection(path=str(tmp_path)))
    assert found.training.fingerprint == open_images(ImageSection(path=str(folder))).training.fingerprint
    assert (list(found.classes), len(found.validation or ())) == (list(CLASSES), 10)


def test_label_of_a_batch_is_that_of_its_images(folder: Path) -> None:
    task = configured(ImageSection(path=str(folder), image_size=16), folder / "run")
    sample = task.dataset("train")[20]
    pixels, labels = task.collate([Image(sample.pixels, 1), task.augment(sample, 5)])
    assert (pixels.shape, pixels.dtype, labels.tolist()) == ((2, 3, 16, 16), torch.uint8, [1, 1])
