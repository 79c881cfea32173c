"""grpc.health.v1 as gateways and Kubernetes ask it: which names exist and when they say NOT_SERVING."""

from collections.abc import Callable, Mapping

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from gateway.extproc.calls import Answers, Receiver, Service
from gateway.extproc.grpc_wire import Status

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
LIVENESS = "liveness"
READINESS = "readiness"
# Everything that means "send requests here". Liveness is not among them: a draining process must not be restarted.
SERVING_NAMES = ("", READINESS, SERVICE)
_STATUS = health_pb2.HealthCheckResponse
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3


class Health:
    """What health checks are told. NOT_SERVING (liveness aside) until `set_serving(True)`."""

    def __init__(self) -> None:
        self.serving = False
        self._watchers: set[_Watch] = set()

    def set_serving(self, serving: bool) -> None:
        """Change all names but liveness and tell the watchers."""
        self.serving = serving
        for watcher in list(self._watchers):
            watcher.tell()

    def status(self, name: str) -> int | None:
        """The status of a name, None for one that does not exist."""
        if name == LIVENESS:
            return SERVING
        if name in SERVING_NAMES:
            return SERVING if self.serving else NOT_SERVING
        return None

    def services(self) -> Mapping[str, Service]:
        """Method path -> what takes its calls."""
        return {
            "/grpc.health.v1.Health/Check": lambda call: _Check(self, call),
            "/grpc.health.v1.Health/Watch": lambda call: _Watch(self, call),
        }

    def watch(self, watcher: "_Watch") -> Callable[[], None]:
        self._watchers.add(watcher)
        return lambda: self._watchers.discard(watcher)


class _Check(Receiver):
    """One answer to one question: NOT_FOUND for unknown names."""

    def __init__(self, health: Health, answers: Answers) -> None:
        self._health, self._answers = health, answers
        self._asked = False

    def message(self, data: bytes) -> None:
        if self._asked:
            return
        self._asked = True
        if (name := _name(data, self._answers)) is None:
            return
        status = self._health.status(name)
        if status is None:
            self._answers.finish(Status.NOT_FOUND, f"no service {name!r}")
        else:
            self._answers.send(_STATUS(status=status).SerializeToString())
            self._answers.finish()

    def ended(self) -> None:
        if not self._asked:
            self._answers.finish(Status.INVALID_ARGUMENT, "a health check without a request")

    def aborted(self) -> None:
        return


class _Watch(Receiver):
    """The status now and after every change; SERVICE_UNKNOWN for unknown names. Lasts until the client goes away."""

    def __init__(self, health: Health, answers: Answers) -> None:
        self._health, self._answers = health, answers
        self._name: str | None = None
        self._told: int | None = None
        self._stop: Callable[[], None] = lambda: None

    def message(self, data: bytes) -> None:
        if self._name is None and (name := _name(data, self._answers)) is not None:
            self._name = name
            self._stop = self._health.watch(self)
            self.tell()

    def tell(self) -> None:
        assert self._name is not None
        status = self._health.status(self._name)
        status = SERVICE_UNKNOWN if status is None else status
        if status != self._told:
            self._told = status
            self._answers.send(_STATUS(status=status).SerializeToString())

    def ended(self) -> None:
        if self._name is None:
            self._answers.finish(Status.INVALID_ARGUMENT, "a health watch without a request")

    def aborted(self) -> None:
        self._stop()


def _name(data: bytes, answers: Answers) -> str | None:
    try:
        return str(health_pb2.HealthCheckRequest.FromString(data).service)
    except DecodeError as error:
        answers.finish(Status.INVALID_ARGUMENT, f"not a HealthCheckRequest: {error}")
        return None
