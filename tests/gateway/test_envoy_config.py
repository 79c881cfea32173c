"""The generated Envoy configuration, checked by Envoy itself where that says something."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway import envoy_binary
from gateway.envoy_binary import EnvoyNotFoundError, find_envoy
from gateway.envoy_config import EnvoyConfigError, EnvoyParameters, PickerTls, envoy_bootstrap, envoy_yaml

FLEET = ["127.0.0.1:9", "127.0.0.1:10"]


@pytest.fixture(scope="module")
def envoy() -> Path:
    try:
        return find_envoy()
    except EnvoyNotFoundError as error:
        pytest.skip(str(error))


def validate(envoy: Path, directory: Path, text: str) -> str:
    """What Envoy says; "" when it accepts the configuration."""
    file = directory / "envoy.yaml"
    file.write_text(text)
    command = [str(envoy), "--mode", "validate", "-c", str(file), "-l", "warning"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return "" if done.returncode == 0 else done.stderr + done.stdout


def typed(config: Any, name: str) -> dict[str, Any]:
    """The typed_config of the first extension with this name, anywhere in the configuration."""
    if isinstance(config, dict):
        if config.get("name") == name and "typed_config" in config:
            return dict(config["typed_config"])
        config = list(config.values())
    for part in config if isinstance(config, list) else ():
        if found := typed(part, name):
            return found
    return {}


# --- what is refused


@pytest.mark.parametrize("address", ["localhost", "localhost:", ":80", "1.2.3.4:99999", "1.2.3.4:http"])
def test_a_broken_address_is_named(address: str) -> None:
    with pytest.raises(EnvoyConfigError, match="is not an address; right would be"):
        envoy_bootstrap(EnvoyParameters(endpoints=[address]))


def test_endpoints_are_needed_and_must_be_numeric() -> None:
    with pytest.raises(EnvoyConfigError, match="no endpoints"):
        envoy_bootstrap(EnvoyParameters())
    with pytest.raises(EnvoyConfigError, match=r"'engine-0:8000': needs a numeric address"):
        envoy_bootstrap(EnvoyParameters(endpoints=["engine-0:8000"]))
    with pytest.raises(EnvoyConfigError, match="plain_listen needs endpoints"):
        envoy_bootstrap(EnvoyParameters(dynamic_hosts=True, plain_listen="0.0.0.0:1"))
    with pytest.raises(EnvoyConfigError, match="belong together"):
        envoy_bootstrap(EnvoyParameters(endpoints=FLEET, picker_tls=PickerTls(certificate_path="x")))


def test_a_missing_envoy_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WARMROUTE_ENVOY", str(tmp_path / "no"))
    with pytest.raises(EnvoyNotFoundError, match="not an executable file"):
        find_envoy()
    monkeypatch.delenv("WARMROUTE_ENVOY")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(envoy_binary, "__file__", str(tmp_path / "gateway" / "envoy_binary.py"))
    with pytest.raises(EnvoyNotFoundError, match=r"no Envoy found in .*\.envoy-venv"):
        find_envoy()
    (tmp_path / "envoy").write_text("#!/bin/sh\n")
    (tmp_path / "envoy").chmod(0o755)
    assert find_envoy() == tmp_path / "envoy"
    monkeypatch.setenv("WARMROUTE_ENVOY", str(tmp_path / "envoy"))
    assert find_envoy() == tmp_path / "envoy"


# --- what it says


def test_the_destination_is_stripped_before_the_picker_is_asked_on_every_listener() -> None:
    bootstrap = envoy_bootstrap(EnvoyParameters(endpoints=FLEET, plain_listen="0.0.0.0:8081"))
    listeners = bootstrap["static_resources"]["listeners"]
    assert len(listeners) == 2
    for listener in listeners:
        manager = typed(listener, "envoy.filters.network.http_connection_manager")
        first = manager["http_filters"][0]
        assert first["name"] == "envoy.filters.http.header_mutation"
        removed = [mutation["remove"] for mutation in first["typed_config"]["mutations"]["request_mutations"]]
        assert "x-gateway-destination-endpoint" in removed
    names = [
        each["name"] for each in typed(listeners[1], "envoy.filters.network.http_connection_manager")["http_filters"]
    ]
    assert "envoy.filters.http.ext_proc" not in names


@pytest.mark.parametrize("dynamic", [False, True])
def test_unused_connections_to_engines_are_closed_before_uvicorn_does(dynamic: bool) -> None:
    parameters = EnvoyParameters(endpoints=["10.0.0.1:8000"], dynamic_hosts=dynamic, plain_listen="0.0.0.0:8081")
    clusters = envoy_bootstrap(parameters)["static_resources"]["clusters"]
    fleet = [cluster for cluster in clusters if cluster["name"] != "picker"]
    assert len(fleet) == 2
    for cluster in fleet:
        (options,) = cluster["typed_extension_protocol_options"].values()
        assert float(options["common_http_protocol_options"]["idle_timeout"].removesuffix("s")) < 5


def test_metadata_passes_in_both_directions() -> None:
    options = typed(envoy_bootstrap(EnvoyParameters(endpoints=FLEET)), "envoy.filters.http.ext_proc")[
        "metadata_options"
    ]
    assert "envoy.lb.subset_hint" in options["forwarding_namespaces"]["untyped"]
    assert "envoy.lb" in options["receiving_namespaces"]["untyped"]


# --- what Envoy says to it

VARIANTS = {
    "buffered": EnvoyParameters(endpoints=FLEET),
    "duplex": EnvoyParameters(endpoints=FLEET, mode="FULL_DUPLEX_STREAMED"),
    "duplex both ways": EnvoyParameters(
        endpoints=FLEET, mode="FULL_DUPLEX_STREAMED", response_mode="FULL_DUPLEX_STREAMED"
    ),
    "dynamic": EnvoyParameters(dynamic_hosts=True, picker="picker.example:9002", fail_open=False),
    "everything": EnvoyParameters(
        endpoints=["10.0.0.1:80", "[fd00::1]:80"],
        listen="[::]:8080",
        plain_listen="0.0.0.0:8081",
        access_log="/dev/stdout",
        admin=None,
        retries=0,
        message_timeout_s=0.25,
        picker_tls=PickerTls(server_name="picker.example"),
    ),
}


@pytest.mark.envoy
@pytest.mark.parametrize("variant", VARIANTS)
def test_envoy_accepts(envoy: Path, tmp_path: Path, variant: str) -> None:
    text = envoy_yaml(VARIANTS[variant])
    assert yaml.safe_load(text) == envoy_bootstrap(VARIANTS[variant])
    assert validate(envoy, tmp_path, text) == ""


@pytest.mark.envoy
def test_envoy_refuses_a_field_it_does_not_know_so_the_check_means_something(envoy: Path, tmp_path: Path) -> None:
    text = envoy_yaml(VARIANTS["buffered"]).replace("failure_mode_allow", "failure_mode_allowed")
    assert "failure_mode_allowed" in validate(envoy, tmp_path, text)
