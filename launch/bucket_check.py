"""Check whether a bucket is fit for a run: rights, conditions of writes, lifecycle rule, and speed."""

import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from serried.configs.errors import UserError
from serried.records.object_store import open_store, s3_endpoint
from serried.records.store import ABSENT, Conflict, Store, StoreError

OBJECT_BYTES = 64 * 2**20
_PART_BYTES = 16 * 2**20
_RETRY_SECONDS = 20.0
_KEEP_DAYS = 2


@dataclass
class BucketReport:
    """Result of the checks of one process."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def check_bucket(url: str) -> BucketReport:
    """Write, read, list and remove a small object below ``url``, and check that the store refuses a stale write."""
    found = BucketReport()
    try:
        store = open_store(url, retry_seconds=_RETRY_SECONDS)
        _check_rights(store, found)
    except UserError as error:
        found.problems.append(str(error))
    if url.startswith("s3:") and not found.problems:
        _check_settings(url, found)
    return found


def _check_rights(store: Store, found: BucketReport) -> None:
    folder = f".preflight-{uuid.uuid4().hex}"
    key = f"{folder}/object"

    def attempt(action: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except StoreError as error:
            found.problems.append(f"{store.url} cannot be used ({action}): {error}")
        except Conflict:  # an earlier try wrote it
            found.problems.append(f"{store.url} cannot be checked ({action}): an answer was lost; repeat the command")
        return None

    tag = attempt("PutObject", lambda: store.put(key, b"1", ABSENT))
    if tag is None:
        return
    attempt("conditional PutObject", lambda: _refuses(store, key, tag, found))
    content = attempt("GetObject", lambda: store.get(key))
    if not found.problems and (content is None or content[0] != b"2"):
        found.problems.append(f"{store.url} does not return the object that was written")
    listed = attempt("ListBucket", lambda: [entry.key for entry in store.list(folder)])
    if listed is not None and listed != [key]:
        found.problems.append(f"{store.url} does not list the object that was written")
    attempt("DeleteObject", lambda: store.delete([key]))
    if not found.problems and attempt("GetObject", lambda: store.get(key)) is not None:
        found.problems.append(f"{store.url} still has an object that was deleted")


def _refuses(store: Store, key: str, tag: str, found: BucketReport) -> None:
    """Check that the store refuses to create an object that exists, and to replace one that has changed."""
    store.put(key, b"2", tag)
    for condition, expect in (("If-None-Match", ABSENT), ("If-Match", tag)):
        try:
            store.put(key, b"2", expect)
        except Conflict:
            continue
        found.problems.append(
            f"{store.url} ignores {condition}, so two starts could both train there; use another store, or a folder"
        )


def _check_settings(url: str, found: BucketReport) -> None:
    """Warn about settings of the bucket that cost money."""
    bucket, prefix = urlsplit(url).netloc, urlsplit(url).path.lstrip("/")
    if find_spec("boto3") is None:
        found.warnings.append(
            f"bucket {bucket}: its lifecycle rules and versioning are not checked, as boto3 is not installed; pip "
            "install boto3"
        )
        return
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    client = boto3.client("s3", endpoint_url=s3_endpoint() or None)
    rule = f"AbortIncompleteMultipartUpload of {_KEEP_DAYS} days"
    try:
        rules = client.get_bucket_lifecycle_configuration(Bucket=bucket).get("Rules", [])
    except (BotoCoreError, ClientError) as error:
        code = getattr(error, "response", {}).get("Error", {}).get("Code")
        rules = [] if code == "NoSuchLifecycleConfiguration" else None
    if rules is None:
        found.warnings.append(f"bucket {bucket}: its lifecycle rules cannot be read; check that there is {rule}")
    elif not any(_aborts_uploads(rule, prefix) for rule in rules):
        found.warnings.append(
            f"bucket {bucket} has no lifecycle rule {rule} for {prefix or 'all objects'}; parts of a save that was "
            "killed may stay, and are billed"
        )
    try:
        status = client.get_bucket_versioning(Bucket=bucket).get("Status")
    except (BotoCoreError, ClientError):
        status = None
    if status == "Enabled":
        found.warnings.append(
            f"bucket {bucket} is versioned: deleted checkpoints stay, and are billed; suspend versioning, or expire "
            "noncurrent versions with a lifecycle rule"
        )


def _aborts_uploads(rule: dict[str, Any], prefix: str) -> bool:
    given = rule.get("Filter", {}).get("Prefix", rule.get("Prefix", ""))
    is_for_all = prefix.startswith(given) and not rule.get("Filter", {}).keys() - {"Prefix"}
    return rule.get("Status") == "Enabled" and "AbortIncompleteMultipartUpload" in rule and is_for_all


def rates(url: str) -> tuple[float, float]:
    """Write, read and remove an object of 64 MiB. Return the bytes per second of writing and of reading.

    Raises ``OSError`` if the store refuses it.
    """
    store = open_store(url, retry_seconds=_RETRY_SECONDS)
    key, content = f".preflight-{uuid.uuid4().hex}/large", bytearray(os.urandom(_PART_BYTES))
    view, count = memoryview(content), OBJECT_BYTES // _PART_BYTES
    try:
        began = time.perf_counter()
        upload = store.writer(key)
        for _ in range(count):
            upload.write(view)
        upload.finish()
        written = time.perf_counter()
        for number in range(count):
            store.read_into(key, number * _PART_BYTES, view)
        ended = time.perf_counter()
    finally:
        store.delete([key])
    return OBJECT_BYTES / (written - began), OBJECT_BYTES / (ended - written)
