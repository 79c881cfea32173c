# Two stages: one that builds an environment from the locked versions, one that only runs it, as a user without rights.
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
RUN python -m venv /opt/warmroute
COPY requirements/runtime.txt requirements/build.txt requirements/
RUN /opt/warmroute/bin/pip install --no-cache-dir -r requirements/runtime.txt -r requirements/build.txt
COPY pyproject.toml README.md LICENSE ./
COPY deciders deciders
COPY event_ingest event_ingest
COPY fleet fleet
COPY gateway gateway
COPY indexer indexer
COPY scorers scorers
COPY simulator simulator
COPY tokenization tokenization
RUN /opt/warmroute/bin/pip install --no-cache-dir --no-deps --no-build-isolation .

FROM python:3.11-slim-bookworm
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin warmroute
COPY --from=build /opt/warmroute /opt/warmroute
COPY configs /etc/warmroute
ENV PATH=/opt/warmroute/bin:$PATH PYTHONUNBUFFERED=1 \
    MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=1073741824 MALLOC_TOP_PAD_=67108864
USER 10001
# ext-proc and health, metrics
EXPOSE 9002 9090
ENTRYPOINT ["warmroute"]
CMD ["serve", "-c", "/etc/warmroute/quickstart.yaml"]
