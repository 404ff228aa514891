# A training node: torch, rdzv-etcd, the example, and what docker-compose.yml's helpers run.
#
#   docker build -t rdzv-etcd-node .
#
# BASE_IMAGE needs python3 (3.10 or later) with pip; for GPUs take one that has torch with CUDA.
# PIP_ARGS goes to pip: --extra-index-url with the index of the CPU-only torch, which the selector on
# pytorch.org shows. (--index-url would be instead of the index that has all other packages.)
ARG BASE_IMAGE=python:3.11-slim-bookworm
FROM ${BASE_IMAGE}
ARG PIP_ARGS=""

# A layer of its own, so that a change of the project does not fetch torch again.
RUN python3 -m pip install --no-cache-dir --root-user-action=ignore ${PIP_ARGS} "torch>=2.6"

WORKDIR /opt/rdzv-etcd
COPY pyproject.toml README.md LICENSE ./
COPY rdzv_etcd rdzv_etcd
RUN python3 -m pip install --no-cache-dir --root-user-action=ignore ${PIP_ARGS} ".[cli,embedded,examples]"
COPY examples examples
COPY compose compose

# Whoever trains needs no rights; a number, so that Kubernetes can tell that it is not root.
RUN echo "trainer:x:10001:10001::/home/trainer:/bin/sh" >>/etc/passwd && \
    echo "trainer:x:10001:" >>/etc/group && \
    install -d -o 10001 -g 10001 /home/trainer && \
    chmod -R a+rX /opt/rdzv-etcd
ENV HOME=/home/trainer
USER 10001:10001
CMD ["torchrun", "--help"]
