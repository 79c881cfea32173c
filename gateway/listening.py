"""Where the gateway listens: its ports, checked before anything slow begins, and what its gRPC server needs to know."""

import socket
from pathlib import Path

from gateway.config import LoadedConfig
from gateway.config_document import Settings
from gateway.extproc.grpc_server import ServerSettings
from gateway.extproc.server_tls import TlsFiles


class PortTaken(Exception):
    """A port that the gateway should listen on cannot be had; the message says which setting names it."""


def check_ports(settings: Settings) -> None:
    """Say at once, and by the setting's name, that a port is taken: tokenizers take a while to load. Raises PortTaken."""
    wanted = [
        ("warmroute.grpcPort", settings.listen, settings.grpc_port),
        ("warmroute.grpcHealthPort", settings.listen, settings.grpc_health_port),
        ("warmroute.metricsPort", settings.metrics_listen, settings.metrics_port),
        ("warmroute.adminPort", settings.admin_listen, settings.admin_port),
    ]
    for name, host, port in wanted:
        if port is None:
            continue
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host.strip("[]"), port))
        except OSError as error:
            raise PortTaken(f"{name}: cannot listen on {host}:{port}: {error.strerror or error}") from error


def server_settings(config: LoadedConfig) -> ServerSettings:
    """What the configuration says of the gRPC port."""
    settings = config.settings
    health = settings.grpc_health_port
    return ServerSettings(
        address=f"{settings.listen}:{settings.grpc_port}",
        health_address=f"{settings.listen}:{health}" if health else None,
        transport=settings.transport,
        tls=_tls(settings),
        max_body_bytes=settings.max_body_bytes,
        decide_timeout_s=config.decision_limit_s,
        drain_s=min(5.0, settings.drain_timeout / 2),
        grace_s=settings.drain_timeout,
    )


def _tls(settings: Settings) -> TlsFiles | None:
    if settings.tls is None:
        return None
    certificate = Path(settings.tls.cert_path)
    if certificate.is_dir():
        return TlsFiles(certificate=certificate / "tls.crt", key=certificate / "tls.key")
    return TlsFiles(certificate=certificate, key=Path(settings.tls.key_path or certificate))
