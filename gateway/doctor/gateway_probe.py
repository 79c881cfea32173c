"""Read the running gateway's metrics page. It may not be running; that is a fact, not a fault."""

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from gateway.config_document import Settings
from gateway.doctor.facts import Sample
from gateway.http_errors import reason

ANSWER_S = 2.0
EVERYWHERE = ("0.0.0.0", "::", "")


def metrics_url(settings: Settings) -> str:
    host = "127.0.0.1" if settings.metrics_listen in EVERYWHERE else settings.metrics_listen
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.metrics_port}/metrics"


async def read_metrics(session: aiohttp.ClientSession, url: str) -> tuple[list[Sample], str]:
    """(the gateway's samples, why there are none)."""
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(ANSWER_S)) as response:
            page = await response.text()
    except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError) as error:
        return [], f"{url}: {reason(error) or 'no answer'}"
    try:
        samples = [
            Sample(sample.name, sample.labels, float(sample.value))
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name.startswith("warmroute_")
        ]
    except ValueError as error:
        return [], f"{url}: no metrics page: {error}"
    return samples, "" if samples else f"{url}: not a gateway's metrics page"
