"""TLS of the gRPC server, with certificates that may be replaced on disk while it runs."""

import logging
import ssl
from pathlib import Path

import grpc
import msgspec

logger = logging.getLogger("gateway.extproc")


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """PEM files. With `client_ca`, clients must present a certificate that it signed (mutual TLS)."""

    certificate: Path
    key: Path
    client_ca: Path | None = None


class TlsError(Exception):
    """The files cannot be used; the message names the file and what is wrong."""


class Reloading:
    """Reads the files again for the first connection after one of them changed.

    A replacement that cannot be read is logged and the old certificate stays: a half-written file during a rotation
    must not take the router down. `reloads` and `failures` count.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._stamp = self._changed_at()
        self._context = self._read()
        self.reloads = 0
        self.failures = 0

    # For asyncio

    def context(self) -> ssl.SSLContext:
        """A server context that follows the files."""
        outer = self._read()

        def choose(connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _outer: ssl.SSLContext) -> None:
            self.changed()
            connection.context = self._context

        outer.sni_callback = choose  # called in every handshake, with or without a name
        return outer

    # For grpcio

    def credentials(self) -> grpc.ServerCredentials:
        """Server credentials that follow the files."""
        fetch = self._fetch  # may return None, which the type stubs do not know
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(),
            fetch,  # type: ignore[arg-type]
            require_client_authentication=self._files.client_ca is not None,
        )

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """The new configuration when the files changed, None when the present one stays. Called by gRPC's threads."""
        return self._configuration() if self.changed() else None

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        certificate, key, *client_ca = [path.read_bytes() for path in self._paths()]
        return grpc.ssl_server_certificate_configuration(
            [(key, certificate)], root_certificates=client_ca[0] if client_ca else None
        )

    # The files

    def changed(self) -> bool:
        """Take files that were replaced; False where nothing was, or where they cannot be used."""
        try:
            stamp = self._changed_at()
            if stamp == self._stamp:
                return False
            context = self._read()
        except TlsError as error:
            self.failures += 1
            logger.error("tls_reload_failed certificate=%s error=%s", self._files.certificate, error)
            return False
        self._stamp, self._context = stamp, context
        self.reloads += 1
        logger.info("tls_reloaded certificate=%s", self._files.certificate)
        return True

    def _paths(self) -> list[Path]:
        files = self._files
        return [files.certificate, files.key, *([files.client_ca] if files.client_ca else [])]

    def _changed_at(self) -> tuple[tuple[int, int, int], ...]:
        # Inode too: Kubernetes replaces a mounted secret by switching a symbolic link.
        try:
            return tuple((s.st_mtime_ns, s.st_ino, s.st_size) for s in (path.stat() for path in self._paths()))
        except OSError as error:
            raise TlsError(f"{error.filename}: {error.strerror}") from error

    def _read(self) -> ssl.SSLContext:
        files = self._files
        try:
            certificate, key = files.certificate.read_bytes(), files.key.read_bytes()
        except OSError as error:
            raise TlsError(f"{error.filename}: {error.strerror}") from error
        for path, data, kind in ((files.certificate, certificate, b"CERTIFICATE"), (files.key, key, b"KEY")):
            if b"-----BEGIN" not in data or kind not in data:
                raise TlsError(f"{path}: not a PEM file with a {kind.decode().lower()}")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["h2"])
        try:
            context.load_cert_chain(files.certificate, files.key)
        except ssl.SSLError as error:
            raise TlsError(f"{files.certificate}, {files.key}: {error.reason or error}") from error
        if files.client_ca is not None:
            try:
                context.load_verify_locations(files.client_ca)
            except (ssl.SSLError, OSError) as error:
                raise TlsError(f"{files.client_ca}: {error}") from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context
