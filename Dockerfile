# An image with the command mttrain and its extras export, report and tensorboard.
#
#     docker build -t mttrain .                               # for CPUs
#     docker build -t mttrain:cuda --build-arg BASE=cuda .    # for NVIDIA GPUs
#
# docs/installing.md shows how it is used. Both kinds start from the same small Python image: the
# CUDA libraries come with the wheels of torch, and the container runtime brings the GPU's driver.
ARG BASE=cpu
ARG PYTHON=3.11

# Where pip looks besides its default: for CPUs in PyTorch's own public index. For another CUDA
# release than that of the default wheels, name its index: --build-arg TORCH_INDEX=...
FROM python:${PYTHON}-slim AS cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_EXTRA_INDEX_URL=${TORCH_INDEX}

FROM python:${PYTHON}-slim AS cuda
ARG TORCH_INDEX=
ENV PIP_EXTRA_INDEX_URL=${TORCH_INDEX}

FROM ${BASE} AS build
RUN python -m venv /opt/mttrain
WORKDIR /build
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY mttrain ./mttrain
RUN /opt/mttrain/bin/pip install --no-cache-dir --disable-pip-version-check \
    -c constraints.txt ".[export,report,tensorboard]"

FROM python:${PYTHON}-slim
COPY --from=build /opt/mttrain /opt/mttrain
# HOME lies where everybody may write, for the caches of libraries: so the container also runs under
# the user's own number (docker run --user), which has no home and no name.
ENV PATH=/opt/mttrain/bin:$PATH HOME=/tmp USER=mttrain PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN useradd --uid 1000 --no-create-home --shell /usr/sbin/nologin mttrain \
    && mkdir -p /mttrain/data /mttrain/runs \
    && chown -R mttrain /mttrain
USER mttrain
WORKDIR /mttrain
VOLUME ["/mttrain/data", "/mttrain/runs"]
ENTRYPOINT ["mttrain"]
CMD ["--help"]
