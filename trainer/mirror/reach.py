"""Whether a tracker's server can be reached, asked without its client.

To import a client takes a second of a processor, which training would be without: again and again, where there is
nobody to reach. What only a client can know is left to it.
"""

import configparser
import http.client
import json
import netrc
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

ANSWER_SECONDS = 20.0
_FAILED = 500  # and above: the server's own fault, or nobody behind a gateway. RFC 9110, 15.6
_WANDB = "https://api.wandb.ai"
_QUESTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "wandb": ("/graphql", {"query": "query Viewer { viewer { id } }"}),
    "mlflow": ("/api/2.0/mlflow/experiments/search", {"max_results": 1}),
}
"""What the clients ask too, where: of a server that hangs, the front page may still answer. Without a key: one who does
not know who asks answers all the same."""
_WANDB_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


class Reach(NamedTuple):
    """What is known of a tracker's server."""

    has_answered: bool
    why_not: str | None = None
    """Why the tracker can take nothing now; None: nothing speaks against it."""


_UNKNOWN, _ANSWERED = Reach(has_answered=False), Reach(has_answered=True)


def ask(name: str, track: Mapping[str, Any], seconds: float = ANSWER_SECONDS) -> Reach:
    """Ask the server of the tracker ``name``, if it has one. Waits for ``seconds`` at most, and for the name of a host
    as long as the system does.

    ``track``: the section of the config.
    """
    try:
        if name == "wandb" and track["wandb"] == "online":
            return _ask_wandb(seconds)
        return _ask("mlflow", track["mlflow"], seconds) if name == "mlflow" else _UNKNOWN
    except (ValueError, configparser.Error):  # an address or a file that is none
        return _UNKNOWN


def _ask_wandb(seconds: float) -> Reach:
    """Reads what the client reads: https://docs.wandb.ai/models/track/environment-variables."""
    settings = _wandb_settings()
    address = os.environ.get("WANDB_BASE_URL") or settings.get("base_url") or _WANDB
    if not any(map(os.environ.get, _WANDB_KEYS)) and "api_key" not in settings and not _netrc_knows(address):
        whose = _without_secrets(address)
        return _not(f"no key for {whose}: WANDB_API_KEY is not set, and nobody has typed wandb login")
    has_own_proxy = any(
        key in settings or f"WANDB_{key.upper()}" in os.environ for key in ("http_proxy", "https_proxy")
    )
    return _UNKNOWN if has_own_proxy else _ask("wandb", address, seconds)


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


def _not(why: str) -> Reach:
    return Reach(has_answered=False, why_not=why)


def _ask(name: str, address: str, seconds: float) -> Reach:
    """Ask for the tracker ``name`` at ``address``, which may be no web address."""
    address = _without_secrets(address)
    if urlsplit(address).scheme not in ("http", "https") or _has_another_proxy():
        return _UNKNOWN
    where, what = _QUESTIONS[name]
    question = urllib.request.Request(
        address.rstrip("/") + where, json.dumps(what).encode(), {"Content-Type": "application/json"}
    )
    try:
        # An opener of its own: the one that urlopen keeps knows the proxies of its first call.
        urllib.request.build_opener().open(question, timeout=seconds).close()
    except urllib.error.HTTPError as answer:
        answer.close()
        if answer.code >= _FAILED:
            return _not(f"{address} answers {answer.code} ({answer.reason})")
    except (urllib.error.URLError, OSError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, ssl.SSLError):  # of which a client may know more
            return _ANSWERED
        if isinstance(reason, TimeoutError):
            return _not(f"{address} has not answered for {seconds:.0f} s")
        words = (reason.strerror if isinstance(reason, OSError) else None) or str(reason)
        return _not(f"{address} cannot be reached ({words})")
    except http.client.HTTPException:
        pass  # an answer, in words of its own
    return _ANSWERED


def _has_another_proxy() -> bool:
    """Whether the environment names a proxy that a client may know how to use, and urllib does not."""
    proxies = urllib.request.getproxies()
    of_web = [proxies[kind] for kind in ("http", "https") if kind in proxies]
    return "all" in proxies or not all(proxy.startswith(("http://", "https://")) for proxy in of_web)


def _without_secrets(address: str) -> str:
    """``address`` without a user, a password and a query: urllib takes the first two for a part of the host."""
    parts = urlsplit(address)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
