"""What plugins about request headers need of the rest of the configuration."""

from collections.abc import Sequence

from fleet.plugin import HeaderReader
from gateway.config_plugins import Plugins
from gateway.config_source import did_you_mean
from gateway.cycle import Profile
from scorers.p2p_source_producer import P2PSourceProducer


def header_readers(plugins: Plugins) -> None:
    """A request has one value per attribute, so one plugin finds it."""
    finds: dict[str, str] = {}
    for name, reader in plugins.of(HeaderReader).items():
        if (first := finds.setdefault(reader.attribute, name)) != name:
            message = f"a second plugin that finds {reader.attribute!r}; {first!r} is already there, keep one"
            plugins.decoder.report(plugins.at[name], message)


def cache_sources(bound: Sequence[Profile], plugins: Plugins) -> None:
    """A prefill profile that is named must exist. The usual name need not: there may be no such stage."""
    usual = P2PSourceProducer.Parameters().prefill_profile_name
    names = [profile.name for profile in bound]
    for name, producer in plugins.of(P2PSourceProducer).items():
        wanted = producer.parameters.prefill_profile_name
        if wanted != usual and wanted not in names:
            at = (*plugins.at[name], "parameters", "prefillProfileName")
            plugins.decoder.report(at, f"no profile named {wanted!r}{did_you_mean(wanted, names)}")
