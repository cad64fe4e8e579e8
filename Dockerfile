# kvjax for training jobs: xpk, GKE, SkyPilot, Slurm with containers.
#   docker build -t IMAGE .                          for TPUs
#   docker build -t IMAGE --build-arg EXTRA=cuda .   for NVIDIA GPUs
FROM python:3.12-slim
ARG EXTRA=tpu
WORKDIR /kvjax
COPY setup.py pyproject.toml constraints.txt README.md LICENSE ./
COPY kvjax kvjax
COPY configs configs
RUN pip install --no-cache-dir -c constraints.txt ".[train,gcs,${EXTRA}]"
WORKDIR /work
ENTRYPOINT []
CMD ["kvjax"]
