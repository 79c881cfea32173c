"""grpc.health.v1 as gateways and Kubernetes ask it: which names exist and when they say NOT_SERVING."""

from grpc_health.v1 import health, health_pb2, health_pb2_grpc

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
LIVENESS = "liveness"
READINESS = "readiness"
# Everything that means "send requests here". Liveness is not among them: a draining process must not be restarted.
SERVING_NAMES = ("", READINESS, SERVICE)


class Health:
    """The health service. Starts NOT_SERVING (liveness aside) until `set_serving(True)`.

    Check answers NOT_FOUND for other names; Watch answers SERVICE_UNKNOWN for them and stays open.
    """

    def __init__(self) -> None:
        self.servicer = health.aio.HealthServicer()
        self.serving = False

    async def start(self) -> None:
        """Register the names; call once before serving."""
        await self.servicer.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self.set_serving(False)

    async def set_serving(self, serving: bool) -> None:
        """Change all names but liveness and tell the watchers."""
        self.serving = serving
        status = health_pb2.HealthCheckResponse
        for name in SERVING_NAMES:
            await self.servicer.set(name, status.SERVING if serving else status.NOT_SERVING)

    def register(self, server: object) -> None:
        """Add the service to a grpc.aio server."""
        health_pb2_grpc.add_HealthServicer_to_server(self.servicer, server)
