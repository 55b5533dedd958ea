# Memshard with vLLM for NVIDIA GPUs. From the checkout's root:
#   docker build -f k8s/images/cuda.Dockerfile -t memshard:0.1.0-cuda .
# CUDA's libraries come with the packages; the driver comes from the node.
FROM python:3.11-slim-bookworm

# bash and wget: KubeRay starts and probes Ray with them; a C compiler: Triton compiles its launchers when it runs.
RUN apt-get update \
 && apt-get install --no-install-recommends --yes gcc libc6-dev wget \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --no-create-home --home-dir /tmp memshard

ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

WORKDIR /src
RUN pip install --no-cache-dir uv==0.13.9
COPY k8s/images/cuda.lock ./
RUN uv pip install --system --no-cache --no-deps --compile-bytecode --requirements cuda.lock
COPY pyproject.toml README.md LICENSE ./
COPY benchmarks benchmarks
COPY cluster cluster
COPY connector connector
COPY deployments deployments
COPY sharding sharding
RUN uv pip install --system --no-cache --no-deps --compile-bytecode .

ENV MEMSHARD_STATE_DIR=/opt/memshard \
    HF_HUB_OFFLINE=1 \
    TRANSFORMERS_OFFLINE=1

USER 10001:10001
WORKDIR /tmp
CMD ["memshard", "--help"]
