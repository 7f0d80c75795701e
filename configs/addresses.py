"""Addresses of servers and databases, which may contain passwords, and of storage that cannot be used as a folder."""

import re
from urllib.parse import unquote

# A password in a database address may contain a slash: it ends at the last @. Digits before a slash are a port.
_USER_WITH_PASSWORD = re.compile(r"""(://[^/?#@:\s"']*):(?![0-9]{1,5}[/?#])[^\s"']*@""")
_USER = re.compile(r"""(?<=://)[^/?#@\s"']+(?=@)""")
_USER_OF_SERVER = re.compile(r"""(https?://)[^/?#\s"']*@""", re.IGNORECASE)
"""User name of a server, which may be a token. Database addresses keep their user name, which is needed."""
_KEYS = (
    r"(?:[\w.-]*(?:(?:password|passwd|passphrase|pwd|secret|signature|credential)s?|token)"
    r"|(?!ssl)(?:[\w.-]*[_.-])?(?:api|access)?keys?)"  # sslkey=FILE names a file
)
_KEY = re.compile(rf"{_KEYS}|[\w-]*(?:api|access|auth|hf|hub)[_-]?tokens|authorization", re.IGNORECASE)
_NOT_SECRET = re.compile(r"(bos|eos|pad|unk|sep)_token")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_IN_QUERY = re.compile(rf"""([?&;]{_KEYS}=)[^&;#\s"']*""", re.IGNORECASE)


def is_address(text: str) -> bool:
    """Return whether ``text`` is an address, such as ``s3://bucket/run``, rather than a path."""
    return bool(_SCHEME.match(text))


def is_secret(name: str) -> bool:
    """Return whether a setting with this dotted name holds a password or an access token, such as ``env.OPENAI_KEY``.
    Settings for text tokens, such as ``pad_token``, do not."""
    return any(_KEY.fullmatch(part) and not _NOT_SECRET.search(part) for part in name.split("."))


def host_and_port(text: str) -> tuple[str, int] | None:
    """Return the host and port of ``PORT``, which is a port of this machine, ``HOST:PORT`` or ``[IPV6]:PORT``; None for
    any other text."""
    found = re.fullmatch(r"(?:(\[[0-9A-Fa-f:.]+\]|[\w.-]*):)?([0-9]{1,5})", text)
    if not found or not 0 < int(found[2]) < 65536:
        return None
    return (found[1] or "127.0.0.1").strip("[]"), int(found[2])


def not_a_path(key: str, address: str, source: str = "", *, takes_buckets: bool = False) -> str:
    """Return the error message for an address as the value of ``key``, which needs a path. ``source``: where it was
    set. ``takes_buckets``: the key also takes the URL of a bucket."""
    scheme, _, place = address.partition("://")
    host, _, rest = place.partition("/")
    name = "/".join(rest.removeprefix("datasets/").split("/")[:2])
    if scheme.lower() == "file" and rest:
        use = f"use {key}=/{rest}"
    elif host.lower().removeprefix("www.") in ("huggingface.co", "hf.co") and "/" in name:
        use = f"use the name on the Hub: {key}={name}"
    elif takes_buckets:
        use = f"for a bucket of S3, Google or Azure: {key}=s3://BUCKET/PATH, gs:// or az://"
    else:
        use = f"mount the storage or copy the files, and give the path: {key}=/PATH"
    where = f" ({source})" if source else ""
    kinds = "local files and folders, and buckets," if takes_buckets else "local files and folders"
    return f"{key}={masked(address)}{where} is an address, but only {kinds} are supported; {use}"


def has_password(address: str) -> bool:
    """Return whether ``address`` contains a password or token, before its host or in its query, even if encoded. For a
    server, a user name alone counts too, since it may be a token."""
    return any(
        any(pattern.search(text) for pattern in (_USER_WITH_PASSWORD, _USER_OF_SERVER, _IN_QUERY))
        for text in (address, unquote(unquote(address)))
    )


def without_password(address: str) -> str | None:
    """Return ``address`` without its password and, for a server, without its user name; None if a secret remains."""
    kept = _USER_OF_SERVER.sub(r"\1", _USER_WITH_PASSWORD.sub(r"\1@", address))
    kept = re.sub(r"[?&;]+$", "", _IN_QUERY.sub(r"\1", kept))
    kept = re.sub(rf"(?<=[?&;]){_KEYS}=(?:[&;]|$)", "", kept, flags=re.IGNORECASE).rstrip("?&;")
    return None if has_password(kept) else kept


def masked(text: str) -> str:
    """Return ``text`` with user names and passwords in addresses replaced by ***."""
    return _IN_QUERY.sub(r"\1***", _USER.sub("***", _USER_WITH_PASSWORD.sub("://***@", text)))
