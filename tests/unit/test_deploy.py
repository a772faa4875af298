"""The files for Kubernetes and Slurm: what must be in them, and that their commands exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture(scope="module")
def resources() -> dict[str, dict]:
    return {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "serve.yaml").read_text())}


def test_the_service_finds_the_pods_and_what_they_mount_exists(resources):
    template = resources["Deployment"]["spec"]["template"]
    assert resources["Service"]["spec"]["selector"] == template["metadata"]["labels"]
    (container,) = template["spec"]["containers"]
    assert {one["name"] for one in container["volumeMounts"]} == {
        one["name"] for one in template["spec"]["volumes"]
    }


def commands() -> list[str]:
    found = []
    for path in sorted(DEPLOY.iterdir()):
        text = path.read_text().replace("\\\n", " ")
        if path.suffix == ".yaml":
            text = re.sub(r"\s+", " ", text)
        found += re.findall(r"(?:exec|srun|\$|--) (genius [^\n]*?)(?:$| env:)", text, re.MULTILINE)
        found += [f"genius {one}" for one in re.findall(r"-m genius_search (.*)", text)]
    return found


def test_commands_and_flags_exist():
    reference = (DEPLOY.parent / "docs" / "cli.md").read_text(encoding="utf-8")
    assert len(commands()) >= 4
    for command in commands():
        name = re.match(r"genius ((?:cluster |keys )?\w+)", command)[1]
        _, _, described = reference.partition(f"## genius {name}\n")
        described = described.partition("\n## ")[0]
        assert described, name
        for flag in re.findall(r"--[\w-]+", command.split("-- ")[-1]):
            assert flag in described, command


@pytest.mark.parametrize("name", ["build.sbatch", "fit.sbatch"])
def test_scripts_are_bash(name):
    subprocess.run(["bash", "-n", DEPLOY / name], check=True)  # noqa: S603, S607


def test_the_page_is_short():
    assert len((DEPLOY / "README.md").read_text().split()) <= 900
