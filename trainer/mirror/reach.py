"""Whether a tracker's server can be reached, asked without its client.

To import a client takes a second of a processor, which training would be without: again and again, where there is
nobody to reach. What only a client can know is left to it.
"""

import configparser
import http.client
import netrc
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ANSWER_SECONDS = 20.0
_FAILED = 500  # and above: the server's own fault, or nobody behind a gateway. RFC 9110, 15.6
_WANDB = "https://api.wandb.ai"
_WANDB_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


def why_unreachable(name: str, track: Mapping[str, Any], seconds: float = ANSWER_SECONDS) -> str | None:
    """Why the tracker ``name`` can take nothing now; None: nothing speaks against it. Waits for ``seconds`` at most,
    and for the name of a host as long as the system does.

    ``track``: the section of the config.
    """
    try:
        if name == "wandb" and track["wandb"] == "online":
            return _why_not_wandb(seconds)
        return _why_silent(track["mlflow"], seconds) if name == "mlflow" else None
    except (ValueError, configparser.Error):  # an address or a file that is none
        return None


def _why_not_wandb(seconds: float) -> str | None:
    """Reads what the client reads: https://docs.wandb.ai/models/track/environment-variables."""
    settings = _wandb_settings()
    address = os.environ.get("WANDB_BASE_URL") or settings.get("base_url") or _WANDB
    if not any(map(os.environ.get, _WANDB_KEYS)) and "api_key" not in settings and not _netrc_knows(address):
        return f"no key for {_without_secrets(address)}: WANDB_API_KEY is not set, and nobody has typed wandb login"
    has_own_proxy = any(
        key in settings or f"WANDB_{key.upper()}" in os.environ for key in ("http_proxy", "https_proxy")
    )
    return None if has_own_proxy else _why_silent(address, seconds)


def _wandb_settings() -> dict[str, str]:
    folder = os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb"
    files = configparser.ConfigParser()
    root = Path(os.environ.get("WANDB_DIR", ""))
    own = root / (".wandb" if os.path.exists(root / ".wandb") else "wandb")  # noqa: PTH110 -- may not be ours to look at
    files.read([Path(os.path.expanduser(each), "settings") for each in (folder, own)])  # noqa: PTH111
    return dict(files["default"]) if "default" in files else {}


def _netrc_knows(address: str) -> bool:
    """Whether a password for ``address`` may be where ``wandb login`` writes it."""
    paths = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for path in paths:
        try:
            hosts = netrc.netrc(os.path.expanduser(path)).hosts  # noqa: PTH111
        except FileNotFoundError:
            continue
        except (OSError, netrc.NetrcParseError):
            return True
        # Some addresses stand for another: any of W&B's may do.
        if any(host in (urlsplit(address).netloc, "default") or "wandb" in host for host in hosts):
            return True
    return False


def _why_silent(address: str, seconds: float) -> str | None:
    """Why nothing answers at ``address``; None: something does, or it is no web address."""
    address = _without_secrets(address)
    if urlsplit(address).scheme not in ("http", "https") or _has_another_proxy():
        return None
    try:
        # An opener of its own: the one that urlopen keeps knows the proxies of its first call.
        urllib.request.build_opener().open(address, timeout=seconds).close()
    except urllib.error.HTTPError as answer:
        answer.close()
        if answer.code >= _FAILED:
            return f"{address} answers {answer.code} ({answer.reason})"
    except (urllib.error.URLError, OSError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, ssl.SSLError):
            return None
        if isinstance(reason, TimeoutError):
            return f"{address} has not answered for {seconds:.0f} s"
        words = (reason.strerror if isinstance(reason, OSError) else None) or str(reason)
        return f"{address} cannot be reached ({words})"
    except http.client.HTTPException:
        return None
    return None


def _has_another_proxy() -> bool:
    """Whether the environment names a proxy that a client may know how to use, and urllib does not."""
    proxies = urllib.request.getproxies()
    of_web = [proxies[kind] for kind in ("http", "https") if kind in proxies]
    return "all" in proxies or not all(proxy.startswith(("http://", "https://")) for proxy in of_web)


def _without_secrets(address: str) -> str:
    """``address`` without a user, a password and a query: urllib takes the first two for a part of the host."""
    parts = urlsplit(address)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
