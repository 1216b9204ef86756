# syntax=docker/dockerfile:1
# The iteration's worker, MLflow, and the command line. From the root of the repository:
#
#   docker build --file infra/deploy/images/cpu.Dockerfile --tag mgrpo-cpu:0.1.0 .
#
# pip's usual index has torch for Linux with CUDA, gigabytes that a CPU never uses. Where you have an index with the CPU
# build, hand pip a configuration that names it: --secret id=pip_conf,src=pip.conf
FROM python:3.12.12-slim-bookworm

RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --home-dir /data --no-create-home --shell /usr/sbin/nologin mgrpo \
    && install --directory --owner mgrpo --group mgrpo /app /data /data/prefect /data/mlflow

ENV PATH=/venv/bin:$PATH \
    GIT_PYTHON_REFRESH=quiet \
    PREFECT_HOME=/data/prefect \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /app

# What mgrpo runs on, at the lock's versions, before its code: a change of the code leaves this layer as it is. The lock
# also pins the tools of developers, so it constrains what pyproject.toml asks for and installs nothing by itself.
COPY pyproject.toml requirements.lock /build/
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    --mount=type=cache,target=/root/.cache/pip \
    python -m venv /venv \
    && python -c "import tomllib; print(*tomllib.load(open('/build/pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
        > /build/requirements.txt \
    && pip install --requirement /build/requirements.txt --constraint /build/requirements.lock

COPY pyproject.toml README.md LICENSE ./
COPY flows flows
COPY infra infra
COPY mgrpo_core mgrpo_core
COPY tasks tasks
# By the setuptools that torch asked for: nothing is downloaded any more.
RUN pip install --no-cache-dir --no-deps --no-build-isolation --editable .

USER 10001:10001
# Prefect starts runs in Kubernetes with arguments alone. tini passes signals on and takes in what torchrun leaves behind.
ENTRYPOINT ["tini", "--"]
CMD ["mgrpo", "--help"]
