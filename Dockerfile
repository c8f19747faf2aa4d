# Oncurve for CPUs.
#   docker build -t oncurve .
#   docker run --rm -v "$PWD:/work" oncurve train arithmetic
FROM python:3.11-slim-bookworm

# A C compiler: sampler and learner of the Llama family are compiled when they are first used.
# Their versions are not pinned: Debian removes old ones from its mirrors.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev bubblewrap \
    && rm -rf /var/lib/apt/lists/*

COPY . /src
WORKDIR /src
# torch for CPUs is a tenth of the size of torch with CUDA.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --constraint constraints.txt --extra-index-url "$TORCH_INDEX" torch \
    && pip install --no-cache-dir --constraint constraints.txt ".[studio,serve,lora,math,gguf]"

RUN useradd --create-home --uid 1000 oncurve && mkdir /work && chown oncurve /work
USER 1000
WORKDIR /work
ENTRYPOINT ["oncurve"]
CMD ["--help"]
