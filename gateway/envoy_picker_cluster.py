"""How Envoy keeps in touch with the picker: health, ejection, keepalive, TLS.

The aim is that Envoy knows at once when there is no picker: only then it fails open in every mode.
"""

from typing import Any

import msgspec

from gateway.envoy_address import EnvoyConfigError, is_numeric, socket_address, split
from gateway.extproc.health import SERVICE

Config = dict[str, Any]

_EXTENSIONS = "type.googleapis.com/envoy.extensions"


class PickerTls(msgspec.Struct, frozen=True, kw_only=True):
    """TLS to the picker. Without `ca_path` any certificate is accepted: encrypted, but not authenticated."""

    ca_path: str | None = None
    server_name: str | None = None  # SNI, and the name the certificate must carry when there is a CA
    certificate_path: str | None = None  # with key_path: Envoy's own certificate, for mutual TLS
    key_path: str | None = None


def picker_cluster(address: str, tls: PickerTls | None, connect_timeout: str, circuit_breakers: Config) -> Config:
    """The cluster `picker`. Raises EnvoyConfigError."""
    host = split(address)[0]
    cluster: Config = {
        "name": "picker",
        "type": "STATIC" if is_numeric(host) else "STRICT_DNS",
        "connect_timeout": connect_timeout,
        "circuit_breakers": circuit_breakers,
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": f"{_EXTENSIONS}.upstreams.http.v3.HttpProtocolOptions",
                # A picker that hangs, or whose machine is gone, closes no connection: streams would wait for it, in
                # FULL_DUPLEX_STREAMED without any other limit.
                "explicit_http_config": {
                    "http2_protocol_options": {"connection_keepalive": {"interval": "2s", "timeout": "5s"}}
                },
            }
        },
        # Without the threshold of 0 Envoy goes on sending to pickers it knows to be down or draining; with the default
        # merge window its workers learn of an ejection up to 1 s late.
        "common_lb_config": {"healthy_panic_threshold": {"value": 0.0}, "update_merge_window": "0s"},
        "health_checks": [
            {
                "timeout": "1s",
                "interval": "1s",
                # 60 s by default, counted before the first request: a draining picker would look ignored.
                "no_traffic_interval": "1s",
                "unhealthy_threshold": 2,
                "healthy_threshold": 1,
                "grpc_health_check": {"service_name": SERVICE},
            }
        ],
        # The first refused connection ejects, rather than the second health check: FULL_DUPLEX_STREAMED fails open only
        # when Envoy already knows that there is no picker. The next good health check takes it back.
        "outlier_detection": {
            "split_external_local_origin_errors": True,
            "consecutive_local_origin_failure": 1,
            "enforcing_consecutive_local_origin_failure": 100,
            "enforcing_local_origin_success_rate": 0,
            "enforcing_consecutive_5xx": 0,
            "enforcing_consecutive_gateway_failure": 0,
            "enforcing_success_rate": 0,
            "max_ejection_percent": 100,
            "base_ejection_time": "30s",
        },
        "load_assignment": {
            "cluster_name": "picker",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": socket_address(address)}}]}],
        },
    }
    if tls is not None:
        cluster["transport_socket"] = _transport_socket(tls)
    return cluster


def _transport_socket(tls: PickerTls) -> Config:
    validation: Config = {}
    if tls.ca_path is not None:
        validation["trusted_ca"] = {"filename": tls.ca_path}
        if tls.server_name is not None:
            validation["match_typed_subject_alt_names"] = [{"san_type": "DNS", "matcher": {"exact": tls.server_name}}]
    common: Config = {"alpn_protocols": ["h2"], "validation_context": validation}
    if (tls.certificate_path is None) != (tls.key_path is None):
        raise EnvoyConfigError("picker_tls: certificate_path and key_path belong together; give both or neither")
    if tls.certificate_path is not None:
        common["tls_certificates"] = [
            {"certificate_chain": {"filename": tls.certificate_path}, "private_key": {"filename": tls.key_path}}
        ]
    context: Config = {
        "@type": f"{_EXTENSIONS}.transport_sockets.tls.v3.UpstreamTlsContext",
        "common_tls_context": common,
    }
    if tls.server_name is not None:
        context["sni"] = tls.server_name
    return {"name": "envoy.transport_sockets.tls", "typed_config": context}
