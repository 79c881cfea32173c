"""Write the pods that match a selector into an endpoints document, again and again: Warmroute's file-discovery follows it.

Runs beside the gateway, in the same image, with nothing but Python. It reads the pods through the pod's own service account
(`get`, `list` on pods) and replaces the file only when something changed, so that a broken API server changes nothing.
Settings are environment variables: SELECTOR, NAMESPACE, OUT, PORT, EVENTS, REPLAY, INTERVAL (seconds), API.
"""

import json
import os
import ssl
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
ROLE = "llm-d.ai/role"


def endpoint(pod: dict[str, Any], settings: dict[str, str]) -> dict[str, Any] | None:
    """The pod's entry; None while it has no address, and when it has ended. A pod that is being deleted is draining."""
    meta, status = pod["metadata"], pod.get("status", {})
    if not status.get("podIP") or status.get("phase") in ("Succeeded", "Failed"):
        return None
    entry: dict[str, Any] = {
        "name": meta["name"],
        "namespace": meta["namespace"],
        "address": status["podIP"],
        "port": int(settings["PORT"]),
        "events": int(settings["EVENTS"]),
        "replay": int(settings["REPLAY"]),
        "labels": {**meta.get("labels", {}), **({"draining": "true"} if meta.get("deletionTimestamp") else {})},
    }
    return entry


def document(pods: list[dict[str, Any]], settings: dict[str, str]) -> str:
    """The endpoints document, in an order that does not depend on the API server's."""
    entries = [entry for pod in pods if (entry := endpoint(pod, settings)) is not None]
    return json.dumps({"endpoints": sorted(entries, key=lambda it: str(it["name"]))}, indent=1) + "\n"


def pods(settings: dict[str, str]) -> list[dict[str, Any]]:
    """The pods now. Raises OSError, ValueError."""
    query = urllib.parse.urlencode({"labelSelector": settings["SELECTOR"]})
    url = f"{settings['API']}/api/v1/namespaces/{settings['NAMESPACE']}/pods?{query}"
    request = urllib.request.Request(url)
    tls = None
    if (ACCOUNT / "token").is_file():
        request.add_header("Authorization", f"Bearer {(ACCOUNT / 'token').read_text()}")  # rotated: read every time
        tls = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    with urllib.request.urlopen(request, timeout=10, context=tls) as answer:
        found: list[dict[str, Any]] = json.load(answer)["items"]
    return found


def write(path: Path, text: str) -> bool:
    """Replace the file at once where it differs; True where it did."""
    if path.is_file() and path.read_text() == text:
        return False
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)
    return True


def main() -> int:
    """Follow for ever; with --once write one document and say whether that worked."""
    usual = {
        "SELECTOR": "app=vllm",
        "NAMESPACE": (ACCOUNT / "namespace").read_text() if (ACCOUNT / "namespace").is_file() else "default",
        "OUT": "/run/warmroute/endpoints.json",
        "PORT": "8000",
        "EVENTS": "5557",
        "REPLAY": "5657",
        "INTERVAL": "2",
        "API": "https://kubernetes.default.svc",
    }
    settings = {name: os.environ.get(name, value) for name, value in usual.items()}
    while True:
        try:
            text = document(pods(settings), settings)
            if write(Path(settings["OUT"]), text):
                print(f"endpoints_written count={text.count('address')} file={settings['OUT']}", flush=True)
        except (OSError, ValueError, KeyError) as error:
            print(f"pods_unreadable error={error!r} kept=old", file=sys.stderr, flush=True)
            if "--once" in sys.argv:
                return 1
        if "--once" in sys.argv:
            return 0
        time.sleep(float(settings["INTERVAL"]))


if __name__ == "__main__":
    sys.exit(main())
