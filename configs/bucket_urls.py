"""URLs of folders in a bucket: ``s3://BUCKET/PATH``, ``gs://BUCKET/PATH`` and ``az://CONTAINER/PATH``."""

import re

from serried.configs.errors import UserError

SCHEMES = ("s3", "gs", "az")
_ENVIRONMENT = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY",
}
"""Variables that hold credentials, by scheme."""


def is_bucket_url(text: object) -> bool:
    """Return whether ``text`` is meant as a URL of a bucket. ``check_bucket_url`` validates it."""
    return isinstance(text, str) and bool(re.match(rf"({'|'.join(SCHEMES)}):/", text, re.IGNORECASE))


def check_bucket_url(url: str, key: str) -> str:
    """Return the URL that ``key=url`` sets, without a slash at its end.

    Raises ``UserError`` if it names no bucket or contains credentials, which are not repeated in the message.
    """
    scheme = url.partition(":")[0].lower()
    if "@" in url or "?" in url or "#" in url:
        raise UserError(
            f"{key} contains a user, a query or a fragment; credentials belong in the environment "
            f"({_ENVIRONMENT[scheme]}) or the instance, not in {key}; use {scheme}://BUCKET/PATH"
        )
    bucket, _, path = url.partition("://")[2].rstrip("/").partition("/")
    if not bucket or scheme not in SCHEMES or not url.startswith(f"{scheme}://"):
        raise UserError(f"no bucket in {key}={url}; use {scheme}://BUCKET/PATH")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", bucket) or any(part in ("", ".", "..") for part in path.split("/")[:-1]):
        raise UserError(f"{key}={url} is not the URL of a folder in a bucket; use {scheme}://BUCKET/PATH")
    return f"{scheme}://{bucket}/{path}".rstrip("/")


def credentials_of(url: str) -> str:
    """Return the names of the environment variables that hold the credentials for ``url``."""
    return _ENVIRONMENT[url.partition(":")[0]]
