# syntax=docker/dockerfile:1
# A policy's update on CUDA cards. From the root of the repository:
#
#   docker build --file infra/deploy/images/gpu.Dockerfile --tag mgrpo-gpu:0.1.0 .
#
# torch brings the CUDA libraries that it was built with, so the base is the smallest one: it says what the host's driver
# has to be able to do. Its minor version is that of the build of torch which requirements.lock leads pip to.
FROM nvidia/cuda:13.0.2-base-ubuntu24.04

# python3 is 3.12 here as in cpu.Dockerfile: what one pickles, the other reads.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --home-dir /data --no-create-home --shell /usr/sbin/nologin mgrpo \
    && install --directory --owner mgrpo --group mgrpo /app /data /data/prefect

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
    python3 -m venv /venv \
    && python -c "import tomllib; print(*tomllib.load(open('/build/pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
        > /build/requirements.txt \
    && pip install --requirement /build/requirements.txt --constraint /build/requirements.lock \
    && python -c "import torch; assert torch.version.cuda, 'torch has no CUDA: pip took a CPU build'"

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
