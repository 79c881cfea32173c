"""The four dashboards as data: what `generate` writes for Grafana, `render` draws for the docs, and the tests ask Prometheus."""

from deploy.grafana.dashboards.events import EVENTS
from deploy.grafana.dashboards.fleet import FLEET
from deploy.grafana.dashboards.quality import QUALITY
from deploy.grafana.dashboards.stages import STAGES

DASHBOARDS = (FLEET, EVENTS, QUALITY, STAGES)
