"""Imports everything that registers plugins: our rooms, and packages of others through an entry point group.

A package adds plugins by naming the module that defines them:

    [project.entry-points."warmroute.plugins"]
    anything = "my_package.my_scorers"
"""

import functools
import importlib
import importlib.metadata
import logging
import pkgutil

GROUP = "warmroute.plugins"
ROOMS = ("scorers", "deciders")
"""Packages whose every module is imported: a new file is a new plugin."""
MODULES = (
    "fleet.discovery",
    "gateway.producers_config",
    "gateway.burst_producer",
    "gateway.data_layer_config",
    "gateway.saturation",
    "gateway.expected_work_queue",
    "gateway.profile_handlers",
)

log = logging.getLogger(__name__)


@functools.cache
def load_plugin_modules() -> dict[str, str]:
    """Import all plugin modules, once. Returns entry point name -> error for those of others that failed to import."""
    for room in map(importlib.import_module, ROOMS):
        for module in pkgutil.iter_modules(room.__path__):
            importlib.import_module(f"{room.__name__}.{module.name}")
    for name in MODULES:
        importlib.import_module(name)
    failed = {}
    for point in importlib.metadata.entry_points(group=GROUP):
        try:
            point.load()
        except Exception as error:  # another package's import can raise anything
            log.exception("plugin-package-failed entry_point=%s value=%s", point.name, point.value)
            failed[point.name] = f"{type(error).__name__}: {error}"
    return failed
