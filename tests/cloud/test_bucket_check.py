"""``serried preflight run.dir=s3://...``: whether the bucket can be used, and what it would cost without notice."""

import pytest

from serried.commands.slurm_jobs import preflight
from serried.launch.bucket_check import check_bucket
from testing.s3_server import BUCKET, S3Server

pytestmark = pytest.mark.cloud


def set_rules(server: S3Server, prefix: str) -> None:
    """Give the bucket the lifecycle rule that the documentation recommends."""
    rule = {
        "ID": "uploads", "Status": "Enabled", "Filter": {"Prefix": prefix},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 2},
    }  # fmt: skip
    server.client().put_bucket_lifecycle_configuration(Bucket=BUCKET, LifecycleConfiguration={"Rules": [rule]})


def test_fit_bucket_passes_preflight_and_nothing_stays_in_it(
    server: S3Server, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    set_rules(server, "tests/")
    words = [f"run.dir={server.url(folder)}", "launch.device=cpu", "recipe=tiny"]
    assert preflight(words) == 0, capsys.readouterr().out
    told = capsys.readouterr().out
    assert "one object of 64 MiB" in told
    assert "WARNING    bucket" not in told
    assert server.objects(folder) == {}
    assert server.uploads(folder) == []


def test_missing_rule_and_versions_are_warnings(server: S3Server, folder: str) -> None:
    set_rules(server, "elsewhere/")
    server.client().put_bucket_versioning(Bucket=BUCKET, VersioningConfiguration={"Status": "Enabled"})
    try:
        found = check_bucket(server.url(folder))
    finally:
        server.client().put_bucket_versioning(Bucket=BUCKET, VersioningConfiguration={"Status": "Suspended"})
    assert found.problems == []
    assert [warning.partition(":")[0] for warning in found.warnings] == [
        f"bucket {BUCKET} has no lifecycle rule AbortIncompleteMultipartUpload of 2 days for {folder}; parts of a save "
        "that was killed may stay, and are billed",
        f"bucket {BUCKET} is versioned",
    ]


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ({"expired": 1.0}, "cannot be used (PutObject): cannot write "),
        ({"ignore_conditions": 1.0}, "ignores If-None-Match, so two starts could both train there; use another store"),
    ],
)
def test_bucket_that_cannot_be_used_is_one_line(
    faults: dict[str, float], said: str, server: S3Server, folder: str
) -> None:
    server.set_faults(**faults)
    problems = check_bucket(server.url(folder)).problems
    assert problems[0].startswith(f"{server.url(folder)} {said}"), problems
    assert all("\n" not in problem for problem in problems)


@pytest.mark.usefixtures("server")
def test_missing_bucket_is_one_line() -> None:
    (problem,) = check_bucket("s3://missing/run").problems
    assert problem.endswith("bucket missing does not exist")
