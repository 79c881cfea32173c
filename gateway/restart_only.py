"""What a reload cannot change, because it was made once when the process started: ports, certificates, sizes, sockets."""

from gateway.config import LoadedConfig
from gateway.producers_config import PrecisePrefixCacheProducer

SETTINGS = (
    *("listen", "grpc_port", "grpc_health_port", "transport", "tls", "max_body_bytes", "drain_timeout"),
    *("metrics_port", "metrics_listen", "compatibility_metrics", "admin_port", "admin_listen"),
    *("tracing", "index", "events", "dynamo"),
)
"""Fields of the `warmroute` section."""


def needs_restart(running: LoadedConfig, wanted: LoadedConfig) -> list[str]:
    """Names of what differs between the configuration that the process was started with and another one."""
    names = [name for name in SETTINGS if getattr(wanted.settings, name) != getattr(running.settings, name)]
    if _streams(wanted) != _streams(running):
        names.append(PrecisePrefixCacheProducer.type)
    return names


def _streams(config: LoadedConfig) -> object:
    return config.precise.parameters if config.precise else None
