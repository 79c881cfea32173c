"""Envoy's external-processing protocol: a core without sockets, and the transports that carry it."""
