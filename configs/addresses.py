"""Addresses: of servers and databases, which may hold passwords, and of storage that cannot be used as a folder."""

import re
from urllib.parse import unquote

# The password of a database's address may hold a slash: it ends at the last @. Digits and a slash are a port.
_USER_WITH_PASSWORD = re.compile(r"""(://[^/?#@:\s"']*):(?![0-9]{1,5}[/?#])[^\s"']*@""")
_USER = re.compile(r"""(?<=://)[^/?#@\s"']+(?=@)""")
_USER_OF_SERVER = re.compile(r"""(https?://)[^/?#\s"']*@""", re.IGNORECASE)
"""May be a token; databases need the names of their users."""
_KEYS = (
    r"(?:[\w.-]*(?:password|passwd|passphrase|pwd|token|secret|signature|credentials?)"
    r"|(?!ssl)(?:[\w.-]*[_.-])?(?:api|access)?key)"  # sslkey=FILE names a file
)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_IN_QUERY = re.compile(rf"""([?&;]{_KEYS}=)[^&;#\s"']*""", re.IGNORECASE)


def is_address(text: str) -> bool:
    """Return whether ``text`` is an address, such as ``s3://bucket/run``, and no path."""
    return bool(_SCHEME.match(text))


def not_a_path(key: str, address: str, source: str = "") -> str:
    """Return the sentence that refuses an address as the value of ``key``, which takes a path; ``source``: what set
    it."""
    scheme, _, place = address.partition("://")
    host, _, rest = place.partition("/")
    name = "/".join(rest.removeprefix("datasets/").split("/")[:2])
    if scheme.lower() == "file" and rest:
        use = f"use {key}=/{rest}"
    elif host.lower().removeprefix("www.") in ("huggingface.co", "hf.co") and "/" in name:
        use = f"use the name on the Hub: {key}={name}"
    else:
        use = f"mount the storage, or copy what it holds, and give the path: {key}=/PATH"
    where = f" ({source})" if source else ""
    return (
        f"{key}={masked(address)}{where} is an address, and only files and folders of this machine can be used; {use}"
    )


def has_password(address: str) -> bool:
    """Return whether ``address`` holds a password or token: before its host, or in its query, even if encoded.
    The user of a server may be a token."""
    return any(
        any(pattern.search(text) for pattern in (_USER_WITH_PASSWORD, _USER_OF_SERVER, _IN_QUERY))
        for text in (address, unquote(unquote(address)))
    )


def without_password(address: str) -> str | None:
    """Return ``address`` without its password, and for a server without its user; None if something secret remains."""
    kept = _USER_OF_SERVER.sub(r"\1", _USER_WITH_PASSWORD.sub(r"\1@", address))
    kept = re.sub(r"[?&;]+$", "", _IN_QUERY.sub(r"\1", kept))
    kept = re.sub(rf"(?<=[?&;]){_KEYS}=(?:[&;]|$)", "", kept, flags=re.IGNORECASE).rstrip("?&;")
    return None if has_password(kept) else kept


def masked(text: str) -> str:
    """Return ``text`` with *** for the users and passwords of the addresses in it."""
    return _IN_QUERY.sub(r"\1***", _USER.sub("***", _USER_WITH_PASSWORD.sub("://***@", text)))
