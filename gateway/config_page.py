"""The admin page /config: the configuration in force, defaults included, secrets left out."""

from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from fleet.plugin import Plugin
from gateway.config import LoadedConfig
from gateway.cycle import Profile

HIDDEN = "(hidden)"


def in_force(config: LoadedConfig) -> dict[str, Any]:
    """The document as it was understood, and every plugin with the parameters it has, injected plugins too."""
    document = msgspec.to_builtins(config.document, enc_hook=str)
    if document["warmroute"].get("adminToken"):
        document["warmroute"]["adminToken"] = HIDDEN
    return {
        "file": config.file,
        "document": document,
        "plugins": {name: _plugin(plugin) for name, plugin in config.plugins.items()},
        "profiles": {profile.name: _profile(profile) for profile in config.profiles},
        "handler": config.handler.name,
        "defaultMatch": config.default_match,
        "warnings": [str(warning) for warning in config.warnings],
    }


def config_page(config: Callable[[], LoadedConfig]) -> web.RouteDef:
    """GET /config."""

    async def show(_: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(in_force(config())), content_type="application/json")

    return web.get("/config", show)


def _plugin(plugin: Plugin) -> dict[str, Any]:
    return {"type": plugin.type, "parameters": msgspec.to_builtins(plugin.parameters, enc_hook=str)}


def _profile(profile: Profile) -> dict[str, Any]:
    return {
        "filters": [it.name for it in profile.filters],
        "scorers": {it.name: weight for it, weight in profile.scorers},
        "picker": profile.picker.name,
    }
