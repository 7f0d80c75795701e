# serried for NVIDIA GPUs, with the versions of constraints.txt. torch's wheel from PyPI brings CUDA and NCCL; the host
# needs a driver and the NVIDIA container toolkit. Not tested: no image has been built from this file.
#
#   docker build -t serried .
#   docker run --gpus all --ipc=host -v "$PWD/runs:/runs" serried recipe=llama1b launch=local launch.processes=8 run.dir=/runs/llama1b
FROM python:3.12-slim

# gcc compiles the launchers of Triton's kernels, for trainer.compile=true.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc git libc6-dev && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/serried
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt '.[data,lowbit,tensorboard,wandb]'

WORKDIR /workspace
ENTRYPOINT ["python", "-m", "serried.program"]
