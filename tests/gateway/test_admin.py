"""The admin port: who gets in, and what it shows."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from gateway.admin_access import token_of, token_required
from gateway.config import load_text
from gateway.config_document import Settings
from gateway.config_page import HIDDEN, config_page, in_force
from gateway.config_source import ConfigError
from gateway.http_server import admin_app

CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: static-discovery
  parameters: {endpoints: [{name: a, address: 127.0.0.1, port: 8001}]}
- {type: queue-scorer}
- {type: max-score-picker}
schedulingProfiles:
- name: default
  plugins: [{pluginRef: queue-scorer, weight: 2}, {pluginRef: max-score-picker}]
dataLayer: {discovery: {pluginRef: static-discovery}}
warmroute: {adminPort: 9091, adminToken: secret}
"""


class Admin:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.config = load_text(CONFIG)

    def app(self) -> Any:
        sections = {"streams": lambda: {"engines": 3}}
        return admin_app(sections, [config_page(lambda: self.config)], [token_required(lambda: self.settings)])


@pytest.fixture
async def admin() -> AsyncIterator[Any]:
    holder = Admin(Settings(admin_port=9091))
    async with TestClient(TestServer(holder.app())) as client:
        client.holder = holder  # type: ignore[attr-defined]
        yield client


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


# --- configuration


def problems(section: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_text(CONFIG.replace("{adminPort: 9091, adminToken: secret}", section))
    return str(caught.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "admin.example", "'::'"])
def test_an_admin_port_that_others_can_reach_needs_a_token(host: str) -> None:
    assert "adminListen" in problems(f"{{adminPort: 9091, adminListen: {host}}}")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "localhost", "'::1'", "'[::1]'"])
def test_on_loopback_none_is_needed(host: str) -> None:
    load_text(CONFIG.replace("adminToken: secret", f"adminListen: {host}"))


def test_without_a_port_nothing_is_open() -> None:
    load_text(CONFIG.replace("adminPort: 9091, adminToken: secret", "adminListen: 0.0.0.0"))


def test_a_token_and_a_file_with_one_exclude_each_other() -> None:
    assert "exclude each other" in problems("{adminPort: 9091, adminToken: a, adminTokenFile: b}")


def test_an_empty_token_is_none() -> None:
    assert "expected a secret" in problems("{adminPort: 9091, adminToken: ''}")


# --- access


@pytest.mark.parametrize("path", ["/state", "/state/streams", "/config", "/log-level", "/nowhere"])
@pytest.mark.parametrize("headers", [{}, bearer("wrong"), {"Authorization": "Basic secret"}, bearer("")])
async def test_without_the_token_nobody_sees_anything(admin: Any, path: str, headers: dict[str, str]) -> None:
    admin.holder.settings = Settings(admin_port=9091, admin_token="secret")
    response = await admin.get(path, headers=headers)
    assert response.status == 401
    assert await response.json() == {"error": "expected Authorization: Bearer TOKEN"}


async def test_the_log_level_cannot_be_set_without_the_token(admin: Any) -> None:
    admin.holder.settings = Settings(admin_port=9091, admin_token="secret")
    before = logging.getLogger().level
    assert (await admin.put("/log-level", data="debug")).status == 401
    assert logging.getLogger().level == before


async def test_with_the_token_everything_is_there(admin: Any) -> None:
    admin.holder.settings = Settings(admin_port=9091, admin_token="secret")
    response = await admin.get("/state", headers=bearer("secret"))
    assert await response.json() == {"streams": {"engines": 3}}


async def test_a_rotated_token_file_works_at_once(admin: Any, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    admin.holder.settings = Settings(admin_port=9091, admin_token_file=str(file))
    assert (await admin.get("/state", headers=bearer("first"))).status == 200
    file.write_text("second\n")
    assert (await admin.get("/state", headers=bearer("first"))).status == 401
    assert (await admin.get("/state", headers=bearer("second"))).status == 200


@pytest.mark.parametrize("content", [None, "", " \n"])
async def test_a_token_file_that_cannot_be_used_keeps_everybody_out(
    admin: Any, tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
    settings = admin.holder.settings = Settings(admin_port=9091, admin_token_file=str(file))
    assert (await admin.get("/state", headers=bearer(""))).status == 503
    with pytest.raises((OSError, ValueError), match="token"):
        token_of(settings)


# --- pages


async def test_the_configuration_in_force_has_defaults_and_no_secrets(admin: Any) -> None:
    shown = await (await admin.get("/config")).json()
    assert shown["document"]["warmroute"]["adminToken"] == HIDDEN
    assert shown["document"]["warmroute"]["grpcPort"] == 9002
    assert shown["profiles"] == {
        "default": {"filters": [], "scorers": {"queue-scorer": 2.0}, "picker": "max-score-picker"}
    }
    assert shown["plugins"]["static-discovery"]["parameters"]["endpoints"][0]["port"] == 8001


@pytest.mark.parametrize(
    "file", sorted((Path(__file__).parents[2] / "configs").glob("*.yaml")), ids=lambda file: file.name
)
def test_every_shipped_configuration_can_be_shown(file: Path) -> None:
    shown = in_force(load_text(file.read_text(), str(file)))
    assert shown["document"]["kind"] == "EndpointPickerConfig"
    assert set(shown["plugins"]) >= {"static-discovery"}


async def test_the_log_level_is_shown_and_set(admin: Any) -> None:
    before = logging.getLogger().level
    try:
        assert (await admin.put("/log-level", data="error")).status == 200
        assert await (await admin.get("/log-level")).json() == {"level": "error"}
        assert (await admin.put("/log-level", data="loud")).status == 400
    finally:
        logging.getLogger().setLevel(before)


async def test_a_section_that_does_not_exist_is_named(admin: Any) -> None:
    response = await admin.get("/state/stream")
    assert (response.status, await response.json()) == (404, {"error": "no section; there are streams"})
