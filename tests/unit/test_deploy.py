"""The files for Kubernetes and Slurm: what must be in them, and that their commands exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from genius_search.cli import main

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture(scope="module")
def resources() -> dict[str, dict]:
    return {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "raycluster.yaml").read_text())}


def containers(spec: dict) -> list[dict]:
    return spec["template"]["spec"]["containers"]


def test_ray_asks_for_a_token_and_reports_nothing(resources):
    spec = resources["RayCluster"]["spec"]
    assert spec["authOptions"] == {"mode": "token"}
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    router = containers(resources["Deployment"]["spec"])
    for container in [*(one for group in groups for one in containers(group)), *router]:
        values = {one["name"]: one.get("value") for one in container["env"]}
        assert values["RAY_USAGE_STATS_ENABLED"] == "0"
        assert container["resources"]["limits"]["memory"]
    assert all(group["rayStartParams"]["disable-usage-stats"] == "true" for group in groups)
    (token,) = [one for one in router[0]["env"] if one["name"] == "RAY_AUTH_TOKEN"]
    assert token["valueFrom"]["secretKeyRef"]["name"] == resources["RayCluster"]["metadata"]["name"]


def test_every_pod_sees_the_cluster_under_one_path(resources):
    spec = resources["RayCluster"]["spec"]
    pods = [spec["headGroupSpec"], *spec["workerGroupSpecs"], resources["Deployment"]["spec"]]
    for pod in pods:
        claims = {
            one["name"]: one.get("persistentVolumeClaim", {}).get("claimName")
            for one in pod["template"]["spec"]["volumes"]
        }
        (container,) = containers(pod)
        places = {one["mountPath"]: claims[one["name"]] for one in container["volumeMounts"]}
        assert places["/shared"] == "genius-shared"


def test_the_service_and_the_policy_name_pods_that_exist(resources):
    labels = resources["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert resources["Service"]["spec"]["selector"] == labels
    assert resources["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    policy = resources["NetworkPolicy"]["spec"]
    assert (
        policy["podSelector"]["matchLabels"]["ray.io/cluster"] == resources["RayCluster"]["metadata"]["name"]
    )


def commands() -> list[str]:
    found = []
    for path in sorted(DEPLOY.iterdir()):
        text = path.read_text().replace("\\\n", " ")
        if path.suffix == ".yaml":
            text = re.sub(r"\s+", " ", text)
        found += re.findall(r"(?:exec|srun|\$|--) (genius [^\n]*?)(?:$| env:)", text, re.MULTILINE)
        found += [f"genius {one}" for one in re.findall(r"-m genius_search (.*)", text)]
    return found


def test_commands_and_flags_exist(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    assert len(commands()) >= 5
    for command in commands():
        name = re.match(r"genius ((?:cluster |keys )?\w+)", command)[1]
        with pytest.raises(SystemExit):
            main([*name.split(), "--help"])
        described = capsys.readouterr().out
        for flag in re.findall(r"--[\w-]+", command.split("-- ")[-1]):
            assert flag in described, command


@pytest.mark.parametrize("name", ["build.sbatch", "fit.sbatch"])
def test_scripts_are_bash(name):
    subprocess.run(["bash", "-n", DEPLOY / name], check=True)  # noqa: S603, S607


def test_the_page_is_short():
    assert len((DEPLOY / "README.md").read_text().split()) <= 900
