"""The one error of this room: a request whose tokens cannot be known, and what to do with it."""

from http import HTTPStatus


class TokenizationError(Exception):
    """A request that cannot be turned into the token ids the engine will compute with.

    `status` 400: the engine would refuse the request too; answer the client with `message`.
    `status` None: the engine may well serve it; route by load and count `reason`, a label of a metric (few values,
    never request text).
    """

    def __init__(self, reason: str, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.status = status

    def __repr__(self) -> str:
        return f"TokenizationError({self.reason!r}, {self.message!r}, status={self.status})"


def refuse(message: str, reason: str = "invalid_request") -> TokenizationError:
    """The error for what the engine answers with 400."""
    return TokenizationError(reason, message, status=int(HTTPStatus.BAD_REQUEST))


def unroutable(reason: str, message: str) -> TokenizationError:
    """The error for what only the engine can tokenize."""
    return TokenizationError(reason, message)
