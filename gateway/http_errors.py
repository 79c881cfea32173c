"""What a failed HTTP request is called in messages for people."""

import os

import aiohttp


def reason(error: BaseException) -> str:
    """Why there was no answer, in a few words; "" where the error says nothing.

    aiohttp's own text of a failed connection names a TLS setting ("ssl:default") whether or not there is TLS.
    """
    if isinstance(error, TimeoutError):
        return str(error)
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return f"no address is known for the host {error.host!r}"
    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientConnectorSSLError):
        return f"TLS failed: {error.__cause__ or error}"
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.errno or error.os_error.errno
        return os.strerror(number).lower() if number else str(error.os_error)
    if isinstance(error, aiohttp.ClientResponseError) and error.message.startswith("Bad status line"):
        return "what answers there does not speak HTTP/1.1"
    return str(error)
