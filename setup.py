"""Packaging. The library itself requires neither Paddle wheel: choose one with the extra `cpu` or `gpu`."""

import re
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
version = re.search(r'__version__ = "(.+)"', (here / "ppfleet" / "_version.py").read_text(encoding="utf-8"))
if version is None:
    raise RuntimeError("ppfleet/_version.py holds no __version__")

# What the model repo needs besides. OpenCV without windows: it is the same `cv2`, and needs no libGL on a server.
model = ["opencv-python-headless>=4.5", "visualdl>=2.5"]
# The handwritten digits that tools/lite_data.py and examples/ train on.
digits = ["scikit-learn>=1.0"]

setup(
    name="ppfleet",
    version=version.group(1),
    description="Data-parallel training for PaddlePaddle: same numbers on N ranks, exact evaluation, bitwise resume",
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.9",
    packages=find_packages(include=["ppfleet", "ppfleet.*"]),
    package_data={
        "ppfleet": [
            "py.typed",
            "html/templates/*",
            "tipc/*.j2",
            "commands/*/*.j2",
            "cpu/*.cc",
            "cpu/*.h",
            "cpu/*.inc",
        ]
    },
    install_requires=["jinja2>=3.0", "matplotlib>=3.6", "numpy>=1.21", "psutil>=5.9", "safetensors>=0.4", "tqdm>=4.60"],
    extras_require={
        "cpu": ["paddlepaddle>=3.0", *model],
        "gpu": ["paddlepaddle-gpu", *model],
        # paddle2onnx where models are exported, the others where they are deployed. The release for Paddle 3 cannot be
        # installed on newer versions of Python.
        "deploy": ["openvino>=2024.0", "onnxruntime>=1.16", "paddle2onnx>=2.0; python_version < '3.12'"],
        "examples": digits,
        "dev": [
            *digits,
            "pytest>=7",
            "pytest-xdist>=3",
            "ruff>=0.6",
            "mypy>=1.8",
            "setuptools",
            "etcd3>=0.12",
            "kubernetes-validate>=1.31",
        ],
    },
    classifiers=["Programming Language :: Python :: 3", "Operating System :: POSIX :: Linux"],
)
