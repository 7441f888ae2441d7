# megatron-mtp in an image: docker build --tag megatron-mtp .
# docs/guides/cluster.md explains how to run it, and how to build it for CPU only or on another base image.
ARG BASE=python:3.12-slim
FROM ${BASE}

# Extra package index for pip, such as PyTorch's index of CPU builds.
ARG PIP_EXTRA_INDEX_URL
# Extras of pyproject.toml: "[serve,te]" for GPUs.
ARG EXTRAS=[serve]

ENV PATH=/opt/venv/bin:${PATH} HOME=/tmp PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/venv

# Triton compiles its kernel launcher: it needs a C compiler, and Python.h, which the base image must have.
RUN command -v gcc || { apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && \
    rm -rf /var/lib/apt/lists/*; }
RUN test -f "$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h"

WORKDIR /opt/megatron-mtp
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY megatron_mtp megatron_mtp
RUN pip install --constraint constraints.txt ".${EXTRAS}"

WORKDIR /work
ENTRYPOINT ["megatron-mtp"]
CMD ["--help"]
