"""Passwords in addresses of servers and databases."""

import re
from urllib.parse import unquote

# The password of a database's address may hold a slash: it ends at the last @. Digits and a slash are a port.
_USER_WITH_PASSWORD = re.compile(r"""(://[^/?#@:\s"']*):(?![0-9]{1,5}[/?#])[^\s"']*@""")
_USER = re.compile(r"""(?<=://)[^/?#@\s"']+(?=@)""")
_KEYS = (
    r"(?:[\w.-]*(?:password|passwd|passphrase|pwd|token|secret|signature|credentials?)"
    r"|(?!ssl)(?:[\w.-]*[_.-])?(?:api|access)?key)"  # sslkey=FILE names a file
)
_IN_QUERY = re.compile(rf"""([?&;]{_KEYS}=)[^&;#\s"']*""", re.IGNORECASE)


def has_password(address: str) -> bool:
    """Return whether ``address`` holds a password or token: before its host, or in its query, even if encoded."""
    return any(
        _USER_WITH_PASSWORD.search(each) or _IN_QUERY.search(each) for each in (address, unquote(unquote(address)))
    )


def without_password(address: str) -> str | None:
    """Return ``address`` with its user and without its password; None if something secret remains."""
    kept = re.sub(r"[?&;]+$", "", _IN_QUERY.sub(r"\1", _USER_WITH_PASSWORD.sub(r"\1@", address)))
    kept = re.sub(rf"(?<=[?&;]){_KEYS}=(?:[&;]|$)", "", kept, flags=re.IGNORECASE).rstrip("?&;")
    return None if has_password(kept) else kept


def masked(text: str) -> str:
    """Return ``text`` with *** for the users and passwords of the addresses in it."""
    return _IN_QUERY.sub(r"\1***", _USER.sub("***", _USER_WITH_PASSWORD.sub("://***@", text)))
