# zonerelay in a container: non-root, spool on a volume. How to run it: config/docker.toml.

# `make pin` names the image by its digest.
FROM python:3.12-slim-bookworm AS build
WORKDIR /src
RUN python -m venv /opt/zonerelay
COPY locks locks
# What the storage engine needs: docker build --build-arg EXTRAS=postgres (or redis, s3; several with commas).
ARG EXTRAS=""
RUN /opt/zonerelay/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes --no-deps --compile \
        -r locks/build.lock -r locks/base.lock \
        $(echo "$EXTRAS" | tr , '\n' | sed -n 's|..*|-r locks/&.lock|p')
COPY pyproject.toml README.md LICENSE ./
COPY config config
COPY systemd systemd
COPY zonerelay zonerelay
RUN /opt/zonerelay/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation \
        --compile . \
    && /opt/zonerelay/bin/pip uninstall --yes setuptools pip

FROM python:3.12-slim-bookworm
LABEL org.opencontainers.image.title="zonerelay" \
      org.opencontainers.image.description="A standalone SMTP relay that never loses what it acknowledged" \
      org.opencontainers.image.licenses="MIT"
# A fixed number, so that a volume keeps its owner from one image to the next.
RUN groupadd --gid 2525 zonerelay \
    && useradd --uid 2525 --gid 2525 --home-dir /var/lib/zonerelay --no-create-home --shell /usr/sbin/nologin zonerelay \
    && install -d -o zonerelay -g zonerelay -m 0750 /var/lib/zonerelay
COPY --from=build /opt/zonerelay /opt/zonerelay
COPY config/docker.toml /etc/zonerelay/zonerelay.toml
ENV PATH=/opt/zonerelay/bin:$PATH \
    PYTHONUNBUFFERED=1
USER zonerelay
WORKDIR /var/lib/zonerelay
# The spool, the key of the log's pseudonyms and the control socket. Mail lives here: always mount it.
VOLUME /var/lib/zonerelay
# SMTP; metrics and health.
EXPOSE 2525 8025
STOPSIGNAL SIGTERM
# Ready means that it can write and sync its spool now.
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8025/readyz', timeout=4)"]
ENTRYPOINT ["zonerelay"]
CMD ["serve", "--config", "/etc/zonerelay/zonerelay.toml"]
