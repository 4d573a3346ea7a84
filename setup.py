"""Packaging. `requirements.lock` has the exact versions that were tested; the ranges here are what should work."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = next(
    line.split('"')[1]
    for line in (ROOT / "megatron_rft" / "__init__.py").read_text().splitlines()
    if "__version__" in line
)

setup(
    name="megatron-rft",
    version=VERSION,
    description="Reinforcement fine-tuning of language models on megatron-core and vLLM",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["megatron_rft", "megatron_rft.*"]),
    include_package_data=True,
    package_data={"megatron_rft": ["**/*.json", "**/*.txt", "**/*.yaml", "**/page.*", "**/*.html", "**/*.cpp"]},
    python_requires=">=3.11",
    install_requires=[
        "torch>=2.9,<2.14",
        "megatron-core==0.16.1",  # the newest for Python 3.11
        "psutil",  # megatron-core's checkpoints hang without it, and it does not ask for it
        "transformers>=5.16.1,<5.20",  # what vLLM 0.32 takes
        "huggingface_hub>=2.4",  # what recipes name on the hub
        "datasets>=5.2",  # parquet, Arrow, folders of save_to_disk
        "pyarrow>=24",  # trajectory stores in parquet
        "safetensors>=0.5",
        "pydantic>=2.11,<3",
        "PyYAML>=6",
        "mpmath>=1.3",
        "networkx",  # torch requires it, too
        "cloudpickle>=3",  # functions of a notebook, for the processes of a run
        "matplotlib>=3.8",
        "jinja2>=3.1",  # the report's pages
        "numpy>=1.26",
    ],
    extras_require={
        "test": [
            "pyright[nodejs]>=1.1.414",
            "pytest>=8",
            "pytest-xdist>=3.8",
            "hypothesis>=6",
            "aiohttp>=3.14",  # programs that talk to the endpoint
            "ruff>=0.12",
            "tensorboard>=2.17",  # torch.utils.tensorboard is loaded late
            "wandb>=0.31",
            "peft>=0.21",  # LoRA is compared with it
            "nbclient>=0.10",  # examples/notebook.ipynb
            "ipykernel>=6.29",
            "gymnasium>=1.2",  # examples/agents/frozen_lake.py
            "uv>=0.13",  # resolves requirements-gpu.lock again
        ],
        "site": ["mkdocs-material>=9.7,<10", "mkdocstrings[python]>=1"],  # `mkdocs build`
        "agents": ["aiohttp>=3.14"],  # environment.kind=program
        "wandb": ["wandb>=0.31"],
        "vllm": ["vllm==0.32.0"],
        "gguf": ["gguf>=0.19", "accelerate>=1.15"],  # examples/smollm2: transformers reads GGUF with them
        # Everything for an NVIDIA GPU but transformer-engine-torch, which is built against the torch that this installs
        # (`. tools/setup_env.sh gpu` does both). From onnx on: what it needs; from nvidia-cuda-nvcc on: what its
        # build needs.
        "gpu": [
            "torch==2.13.0",
            "vllm==0.32.0",
            "transformer-engine==2.20.2",
            "transformer-engine-cu13==2.20.2",
            "wandb>=0.31",
            "onnx",
            "onnxscript",
            "einops",
            "nvdlfw-inspect",
            "nvidia-cuda-nvcc==13.0.*",
            "nvidia-cuda-crt==13.0.*",
            "nvidia-cuda-cccl==13.0.*",
            "nvidia-nvvm==13.0.*",
            "setuptools",
            "wheel",
            "ninja",
            "pybind11",
        ],
        # nemo-run cannot be imported with a newer leptonai; what that one wants is older than requirements.lock has
        # (launch/nemo.lock, tools/setup_nemo_env.sh)
        "launch": ["nemo-run==0.11.1", "leptonai<0.47"],
        "bench": ["trl>=0.24", "math-verify>=0.8"],
    },
    entry_points={"console_scripts": ["megatron-rft = megatron_rft.__main__:main"]},
    classifiers=["Programming Language :: Python :: 3.11", "Programming Language :: Python :: 3.12"],
)
