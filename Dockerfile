# serried for NVIDIA GPUs, with the versions of constraints.txt. torch's wheel from PyPI brings CUDA and NCCL; the host
# needs a driver and the NVIDIA container toolkit. Not tested: no image has been built from this file. Its instructions
# have been parsed, and the packages that they install have been resolved.
#
#   docker build -t REGISTRY/serried:0.2 . && docker push REGISTRY/serried:0.2      # for launch=kubernetes and skypilot
#   docker run --gpus all --ipc=host -v "$PWD/runs:/runs" serried recipe=llama1b launch=local launch.processes=8 run.dir=/runs/llama1b
FROM python:3.12-slim

# gcc compiles the launchers of Triton's kernels, for trainer.compile=true.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates gcc git libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# A layer of its own, which changes of serried do not rebuild.
WORKDIR /opt/serried
COPY constraints.txt .
RUN pip install --no-cache-dir --constraint constraints.txt torch

COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt '.[cloud,data,lowbit,prometheus,tensorboard,wandb]' \
    && cd / && python -c "import obstore, serried.launch.kubernetes.pod, serried.trainer.run"

# Lines of a run appear in the log of its container at once.
ENV PYTHONUNBUFFERED=1

# Pods mount a volume or work in /scratch instead, and run serried.launch.kubernetes.pod.
WORKDIR /workspace
ENTRYPOINT ["python", "-m", "serried.program"]
