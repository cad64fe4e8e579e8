"""Package metadata; tools are configured in pyproject.toml, transitive pins in constraints.txt."""

import pathlib
import re

from setuptools import find_packages
from setuptools import setup

ROOT = pathlib.Path(__file__).parent
JAX = "0.11.2"

setup(
    name="kvjax",
    version=re.search(r'__version__ = "(.+)"', (ROOT / "kvjax/__init__.py").read_text())[1],
    description="Attention with a small KV cache, in JAX: LRKV, MLA, GQA and their kin",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.12",
    packages=find_packages(include=["kvjax", "kvjax.*"]),
    package_data={"kvjax.data": ["corpus/*"], "kvjax.kernels.decode_attention": ["*.json"]},
    install_requires=[
        f"jax=={JAX}",
        f"jaxlib=={JAX}",
        "flax==0.12.12",
        "optax==0.2.8",
        "orbax-checkpoint==0.12.8",
        "grain==0.2.18",
        "tensorflow-datasets==4.9.10",
        "importlib_resources==7.1.0",  # tensorflow-datasets needs it and does not say so
        "array-record==0.8.6",
        "ml_collections==1.1.0",
        "absl-py==2.5.1",
        "etils[epath]==1.15.0",
        "tokenizers==0.23.3",
        "tiktoken==0.14.0",
        "pyarrow==26.0.1",
        "psutil==7.2.2",
        "tqdm==4.70.1",
        "matplotlib==3.11.2",
        "scipy==1.18.1",
        "tensorboardX==2.6.5",
    ],
    extras_require={
        "dev": [
            "pytest==9.2.0",
            "pytest-xdist==3.8.0",
            "hypothesis==6.170.15",
            "ruff==0.17.6",
            "import-linter==2.16",
            "nbclient==0.11.0",
            "ipykernel==7.4.0",
            "nbformat==5.11.1",
        ],
        # Compiles for TPUs and GPUs that are not there; CUDA's compiler is ptxas with libdevice.
        "aot": ["libtpu==0.0.48.1", f"jax-cuda13-plugin=={JAX}", "nvidia-cuda-nvcc==13.5.37"],
        "tpu": [f"jax[tpu]=={JAX}"],
        "cuda": [f"jax[cuda13]=={JAX}"],
        "gcs": ["etils[epath-gcs]==1.15.0"],
        "notebooks": ["jupyterlab==4.6.6"],
    },
)
