"""Whether a tracker's server can be reached, asked without its client.

To import a client takes a second of a processor, which training would be without: again and again, where there is
nobody to reach. What only a client can know is left to it.
"""

import base64
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
_MOST_BYTES = 1_000_000
_WANDB = "https://api.wandb.ai"
_QUESTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "wandb": ("/graphql", {"query": "query Viewer { viewer { id } }"}),
    "mlflow": ("/api/2.0/mlflow/experiments/search", {"max_results": 1}),
}
"""What the clients ask too, and where: of a server that hangs, the front page may still answer."""


class Reach(NamedTuple):
    """What is known of a tracker's server."""

    has_answered: bool
    """Whether it has answered as one that takes records."""
    why_not: str | None = None
    """Why the tracker can take nothing now; None: nothing speaks against it, and a client may try."""


_UNKNOWN, _ANSWERED = Reach(has_answered=False), Reach(has_answered=True)


def ask(name: str, track: Mapping[str, Any], seconds: float = ANSWER_SECONDS) -> Reach:
    """Ask the server of the tracker ``name``, if it has one. Waits for ``seconds`` at most for each of the
    host's addresses and parts of an answer, and for the addresses as long as the system does.

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
    key = os.environ.get("WANDB_API_KEY") or settings.get("api_key") or _netrc_key(address)
    if key is None and not os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        whose = _without_secrets(address)
        return _not(f"no key for {whose}: WANDB_API_KEY is not set, and nobody has typed wandb login")
    has_own_proxy = any(
        key in settings or f"WANDB_{key.upper()}" in os.environ for key in ("http_proxy", "https_proxy")
    )
    return _UNKNOWN if has_own_proxy else _ask("wandb", address, seconds, key)


def _wandb_settings() -> dict[str, str]:
    folder = os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb"
    files = configparser.ConfigParser()
    root = Path(os.environ.get("WANDB_DIR", ""))
    own = root / (".wandb" if os.path.exists(root / ".wandb") else "wandb")  # noqa: PTH110 -- may not be ours to look at
    files.read([Path(os.path.expanduser(each), "settings") for each in (folder, own)])  # noqa: PTH111
    return dict(files["default"]) if "default" in files else {}


def _netrc_key(address: str) -> str | None:
    """The key for ``address`` from where ``wandb login`` writes it; empty: it may be there, for all one can tell."""
    paths = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for path in paths:
        try:
            found = netrc.netrc(os.path.expanduser(path))  # noqa: PTH111
        except FileNotFoundError:
            continue
        except (OSError, netrc.NetrcParseError):
            return ""
        if entry := found.authenticators(urlsplit(address).netloc):
            return entry[2] or ""
        if any("wandb" in host for host in found.hosts):  # some addresses stand for another: any of W&B's may do
            return ""
    return None


def _not(why: str) -> Reach:
    return Reach(has_answered=False, why_not=why)


def _ask(name: str, address: str, seconds: float, key: str | None = None) -> Reach:
    """Ask for the tracker ``name`` at ``address``, which may be no web address, as W&B's client does with a ``key``."""
    address = _without_secrets(address)
    if urlsplit(address).scheme not in ("http", "https") or _has_another_proxy():
        return _UNKNOWN
    where, what = _QUESTIONS[name]
    question = urllib.request.Request(
        address.rstrip("/") + where, json.dumps(what).encode(), {"Content-Type": "application/json"}
    )
    if key:  # for this server alone: not for where it may lead
        question.add_unredirected_header("Authorization", f"Basic {base64.b64encode(f'api:{key}'.encode()).decode()}")
    try:
        # An opener of its own: the one that urlopen keeps knows the proxies of its first call.
        with urllib.request.build_opener().open(question, timeout=seconds) as answer:
            told = json.loads(answer.read(_MOST_BYTES))
        return _ANSWERED if name != "wandb" or told["data"]["viewer"] is not None else _UNKNOWN  # not who asks
    except urllib.error.HTTPError as answer:
        answer.close()
        if answer.code >= _FAILED:
            return _not(f"{address} answers {answer.code} ({answer.reason})")
    except (urllib.error.URLError, OSError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, ssl.SSLError):  # of which a client may know more
            return _UNKNOWN
        if isinstance(reason, TimeoutError):
            return _not(f"{address} has not answered for {seconds:.0f} s")
        words = (reason.strerror if isinstance(reason, OSError) else None) or str(reason)
        return _not(f"{address} cannot be reached ({words})")
    except (http.client.HTTPException, ValueError, LookupError, TypeError):  # an answer to something else
        pass
    return _UNKNOWN


def _has_another_proxy() -> bool:
    """Whether the environment names a proxy that a client may know how to use, and urllib does not."""
    proxies = urllib.request.getproxies()
    of_web = [proxies[kind] for kind in ("http", "https") if kind in proxies]
    return "all" in proxies or not all(proxy.startswith(("http://", "https://")) for proxy in of_web)


def _without_secrets(address: str) -> str:
    """``address`` without a user, a password and a query: urllib takes the first two for a part of the host."""
    parts = urlsplit(address)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
