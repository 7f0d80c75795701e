"""A release: its files, a clean environment without the checkout, and links that a clone lost."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import serried
from testing.rank_pool import ROOT

TOP_LEVEL = ("configs", "launch", "parallel", "planner", "recipes", "records", "runtime", "slurm", "trainer")
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


def test_links_lead_to_the_top_level_folders() -> None:
    links = {path.name: path.resolve() for path in (ROOT / "serried").iterdir() if path.is_symlink()}
    assert links == {name: ROOT / name for name in TOP_LEVEL}


def test_links_that_git_wrote_as_text_give_one_error(tmp_path: Path) -> None:
    package = tmp_path / "serried"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "configs").mkdir()
    serried._check_links(package)
    (package / "trainer").write_text("../trainer")
    (package / "launch").symlink_to("../launch")
    with pytest.raises(ImportError, match=r"^launch, trainer in .* are broken; on Windows, clone inside WSL 2"):
        serried._check_links(package)


def test_version_is_that_of_the_changelog() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("resolution", ["lowest-direct", "highest"])
def test_all_extras_resolve_together_at_their_lowest_and_highest_versions(resolution: str, tmp_path: Path) -> None:
    """If all fit together, each fits alone. Only metadata is downloaded."""
    out = tmp_path / "versions.txt"
    command = [sys.executable, "-m", "uv", "pip", "compile", "--native-tls", "--all-extras", f"--output-file={out}"]
    command += [f"--resolution={resolution}", "--python-version=3.11", "--no-annotate", str(ROOT / "pyproject.toml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path)
    if "error sending request" in done.stderr:
        pytest.skip("the package index cannot be reached")
    assert done.returncode == 0, done.stderr
    versions = dict(re.findall(r"^([\w.-]+)==(\S+)", out.read_text("utf-8"), re.MULTILINE))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    needed = {re.split(r"[\[><=]", requirement)[0] for names in extras.values() for requirement in names}
    assert needed <= versions.keys()
    if resolution == "lowest-direct":
        assert versions["torch"].startswith("2.11.")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a source distribution, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    ignored = shutil.ignore_patterns(
        ".venv", ".git", "runs", "site", "build", "dist", "*.egg-info", "__pycache__", ".*_cache"
    )
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    backend = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", backend, str(folder)], cwd=source, check=True, stdout=subprocess.DEVNULL)
    (archive,) = folder.glob("serried-*.tar.gz")
    wheel = [*PIP, "wheel", "--no-deps", "--no-build-isolation", f"--wheel-dir={folder}", str(archive)]
    subprocess.run(wheel, check=True, timeout=240)
    return folder


@pytest.fixture(scope="module")
def installed(built: Path) -> Path:
    """Environment with the wheel and the packages of this one, but without the checkout."""
    environment = built / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    # A folder that a .pth file adds has its own .pth files ignored, such as that of an editable install.
    (site / "packages.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith("site-packages")))
    (wheel,) = built.glob("serried-*.whl")
    install = ["install", "--no-deps", "--ignore-installed", f"--prefix={environment}", str(wheel)]
    subprocess.run([*PIP, *install], check=True, timeout=240)
    return environment / "bin"


@pytest.mark.slow
def test_release_holds_every_file_of_the_product(built: Path) -> None:
    folders = os.walk(ROOT / "serried", followlinks=True)
    paths = (Path(folder) / name for folder, _, names in folders for name in names if "__pycache__" not in folder)
    product = {str(path.relative_to(ROOT)) for path in paths}
    assert len(product) > 300
    (wheel,) = built.glob("serried-*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == product
    (archive,) = built.glob("serried-*.tar.gz")
    with tarfile.open(archive) as opened:
        assert product <= {name.partition("/")[2] for name in opened.getnames()}


@pytest.mark.slow
def test_installed_wheel_trains_reports_and_prints_a_slurm_script(installed: Path, tmp_path: Path) -> None:
    def printed(command: str, *arguments: str) -> str:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        done = subprocess.run(
            [installed / command, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True,
            timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = Path(printed("python", "-c", "import serried; print(serried.__file__)").strip())
    assert where.is_relative_to(installed.parent)
    assert "usage: serried COMMAND" in printed("serried", "--help")
    assert "llama8b" in printed("serried", "recipes")
    train = ("-m", "serried.program", "recipe=tiny", "launch.device=cpu")
    short = ("trainer.steps=2", "trainer.eval_batches=1", "trainer.sample_tokens=8", "run.name=short")
    assert "finished   2 steps" in printed("python", *train, *short)
    assert (tmp_path / "runs/short/checkpoints/step-00000002/config.json").exists()
    page = tmp_path / "runs/short/report.html"
    page.unlink()
    printed("serried", "report", "runs/short")
    assert "uPlot" in page.read_text("utf-8")
    assert "fits" in printed("serried", "plan", "recipe=llama8b", "launch.processes=8", "plan.mode=formula")
    assert "preflight: " in printed("serried", "verify", "list", "launch.device=cpu")
    nodes = ("launch=slurm", "launch.nodes=2", "slurm.gpus_per_node=8", "trainer.global_batch=128")
    script = printed("python", "-m", "serried.program", "recipe=tiny", *nodes, "slurm.dry_run=true")
    assert "#SBATCH --nodes=2" in script
    modules = sorted({*re.findall(r"-m (serried\.[\w.]*\w)", script)})  # that the script starts on the nodes
    assert modules == ["serried.launch.slurm.requeue", "serried.program"]
    printed("python", "-c", f"import importlib.util as i; assert all(map(i.find_spec, {modules}))")
