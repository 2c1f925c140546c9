"""The chart's templates: what helm makes of them, and what a real API server says to the result."""

from __future__ import annotations

import copy
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic_operator.settings import URL_VARIABLE, read_settings
from release.archive import pack_chart
from release.chart_layout import CONTENT, pack_layout
from testbed import helm
from testbed.errors import TestbedError
from tests.cluster import releases
from tests.cluster.releases import CHART

pytestmark = pytest.mark.cluster

ROOT = CHART.parents[1]
EVERYTHING = {
    "commonLabels": {"team": "training"},
    "image": {"repository": "registry.example:5000/etj", "tag": "sha256:" + "0" * 64, "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "registry"}],
    "crds": {"keep": False},
    "replicas": 3,
    "serviceAccount": {"name": "other", "annotations": {"example.com/identity": "me"}},
    "logLevel": "DEBUG",
    "jsonLogs": False,
    "resources": {"limits": {"cpu": "1", "memory": "1Gi"}},
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"key": "amd.com/gpu", "operator": "Exists"}],
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "priorityClassName": "system-cluster-critical",
    "allowJobsInReleaseNamespace": True,
    "admissionPolicy": {"protectedNamespaces": ["kube-system", "vault"]},
    "podAnnotations": {"example.com/note": "yes"},
    "podLabels": {"example.com/label": "yes"},
    "metrics": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "a"}},
        "alerts": {"enabled": True, "labels": {"release": "a"}},
        "dashboards": {"enabled": True},
    },
    "networkPolicy": {
        "enabled": True,
        "metricsFrom": [{"namespaceSelector": {"matchLabels": {"monitoring": "yes"}}}],
        "statusPageFrom": [{"namespaceSelector": {"matchLabels": {"ingress": "yes"}}}],
    },
    "statusPage": {"enabled": True, "port": 8090},
    "notifications": {
        "secretName": "webhook", "secretKey": "slack.url", "format": "cloudevents", "kinds": ["Recovered", "Failed"],
        "source": "https://example.com/clusters/a", "allowHttp": True,
    },
    "settings": {"imageSeconds": 2.5, "unhealthyNodeConditions": ["A*", "B=False"], "unhealthyNodeLabels": ["a/b=c"]},
}  # fmt: skip
NOTHING = {
    "crds": {"enabled": False},
    "replicas": 1,
    "rbac": {"aggregateRoles": False},
    "admissionPolicy": {"enabled": False},
    "serviceAccount": {"create": False, "name": "default"},
    "metrics": {"enabled": False},
    "podDisruptionBudget": {"enabled": False},
    "reshardImage": {"repository": ""},
}
CASES = {"default": {}, "everything": EVERYTHING, "nothing": NOTHING, "one-namespace": {"watchNamespaces": ["HERE"]}}


def values_of(case: str, watched: str) -> dict[str, Any]:
    values = copy.deepcopy(CASES[case])
    if "watchNamespaces" in values:
        values["watchNamespaces"] = [watched]
    return values


def only(objects: list[dict[str, Any]], kind: str, name: str = "") -> dict[str, Any]:
    (found,) = [item for item in objects if item["kind"] == kind and name in ("", item["metadata"]["name"])]
    return found


@pytest.fixture
def restricted(cluster: Any, namespace: str) -> Iterator[str]:
    """A namespace that admits only pods of the level `restricted`."""
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    yield namespace


@pytest.mark.parametrize("case", CASES)
def test_helm_finds_no_fault_with_the_chart(case: str) -> None:
    text = helm.run("lint", CHART, "--strict", f"--kube-version={releases.OLDEST}", values=values_of(case, "team-a"))
    assert "0 chart(s) failed" in text


def test_helm_finds_no_fault_with_the_vendors_values() -> None:
    for path in CHART.glob("values-*.yaml"):
        helm.run("lint", CHART, "--strict", f"--kube-version={releases.OLDEST}", "--values", str(path))
        assert releases.render("etj", yaml.safe_load(path.read_text()))


@pytest.mark.parametrize("case", CASES)
def test_the_api_server_takes_all_objects_and_admits_the_pod_as_restricted(
    cluster: Any, restricted: str, case: str
) -> None:
    objects = releases.render(restricted, values_of(case, "default"))
    # These are the Prometheus Operator's; without it there are no such kinds.
    known = [item for item in objects if item["kind"] not in ("ServiceMonitor", "PrometheusRule")]
    dry_run = ("apply", "--server-side", "--force-conflicts", "--dry-run=server", "-f", "-")
    said = cluster.kubectl(*dry_run, stdin=yaml.safe_dump_all(known))
    assert len(said.splitlines()) == len(known)
    for account in (item for item in objects if item["kind"] == "ServiceAccount"):
        cluster.apply(account)
    template = only(objects, "Deployment")["spec"]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(template)}
    pod["metadata"] |= {"name": "rendered", "namespace": restricted}
    create = ("create", "--dry-run=server", "-f", "-")
    assert "pod/rendered created" in cluster.kubectl(*create, stdin=json.dumps(pod))
    pod["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    with pytest.raises(TestbedError, match=r'violates PodSecurity "restricted.*allowPrivilegeEscalation'):
        cluster.kubectl(*create, stdin=json.dumps(pod))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"replica": 2}, "additional properties 'replica' not allowed"),
        ({"image": {"repo": "x"}}, "additional properties 'repo' not allowed"),
        ({"settings": {"imageSecond": 3}}, "additional properties 'imageSecond' not allowed"),
        ({"settings": {"imageSeconds": "3m"}}, "at '/settings/imageSeconds': got string, want number"),
        ({"settings": {"imageSeconds": 0}}, "at '/settings/imageSeconds': exclusiveMinimum: got 0, want 0"),
        ({"settings": {"unhealthyNodeLabels": ["oops"]}}, "at '/settings/unhealthyNodeLabels/0': 'oops' does not"),
        ({"replicas": 0}, "at '/replicas': minimum: got 0, want 1"),
        ({"image": {"pullPolicy": "Often"}}, "at '/image/pullPolicy': value must be one of 'Always', 'IfNotPresent'"),
        ({"watchNamespaces": ["Team A"]}, "at '/watchNamespaces/0': 'Team A' does not match"),
        ({"statusPage": {"port": 80}}, "at '/statusPage/port': minimum: got 80, want 1,024"),
        ({"statusPage": {"host": "x"}}, "additional properties 'host' not allowed"),
        ({"metrics": {"port": 80}}, "at '/metrics/port': minimum: got 80, want 1,024"),
        ({"notifications": {"kinds": ["Lost"]}}, "at '/notifications/kinds/0': value must be one of 'Recovered'"),
        ({"notifications": {"url": "https://x"}}, "additional properties 'url' not allowed"),
        ({"logLevel": "debug"}, "at '/logLevel': value must be one of 'DEBUG'"),
        ({"watchNamespaces": ["team", "etj"]}, "watchNamespaces: expected other namespaces than the release's own"),
        ({"admissionPolicy": {"protectedNamespaces": ["*"]}}, "at '/admissionPolicy/protectedNamespaces/0': '*'"),
        ({"serviceAccount": {"create": False}}, "serviceAccount.name: expected the name of an existing ServiceAccount"),
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_name(values: dict[str, Any], said: str) -> None:
    with pytest.raises(helm.HelmError) as refused:
        releases.render("etj", values)
    assert said in str(refused.value)


def test_an_old_cluster_is_refused() -> None:
    with pytest.raises(
        helm.HelmError, match=r"requires kubeVersion: >=1\.31\.0-0 .* incompatible with Kubernetes v1\.30\.9"
    ):
        helm.run("template", "etj", CHART, "--kube-version=1.30.9")


def test_the_kind_is_the_plain_file_and_stays_if_it_is_to_be_kept() -> None:
    plain = yaml.safe_load((ROOT / "crds/elastictrainingjobs.yaml").read_text())
    assert only(releases.render("etj", {"crds": {"keep": False}}), "CustomResourceDefinition") == plain
    kept = only(releases.render("etj", {}), "CustomResourceDefinition")
    assert kept["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert kept == plain
    assert not [item for item in releases.render("etj", NOTHING) if item["kind"] == "CustomResourceDefinition"]


def rules(objects: list[dict[str, Any]], *kinds: str) -> list[tuple[str, dict[str, Any]]]:
    """Rules of the operator's roles with the namespace (empty: all) that they hold in; users' roles left out."""
    return [
        (item["metadata"].get("namespace", ""), rule)
        for item in objects
        if item["kind"] in kinds
        and not any("aggregate-to" in label for label in item["metadata"]["labels"])
        for rule in item["rules"]
    ]  # fmt: skip


def test_with_watched_namespaces_nothing_outside_of_them_can_be_changed() -> None:
    objects = releases.render("etj", {"watchNamespaces": ["team-a", "team-b", "team-a"]})
    reading = {"get", "list", "watch"}
    assert all(set(rule["verbs"]) <= reading for _, rule in rules(objects, "ClusterRole"))
    changing = {
        namespace for namespace, rule in rules(objects, "Role") if not set(rule["verbs"]) <= reading
    }  # fmt: skip
    assert changing == {"team-a", "team-b", "etj"}
    (named,) = [rule for namespace, rule in rules(objects, "Role") if namespace == "etj" and "resourceNames" in rule]
    assert named["resourceNames"] == ["elastic-training-operator"]
    arguments = only(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert [item for item in arguments if item.startswith("--namespace")] == [
        "--namespace=team-a",
        "--namespace=team-b",
    ]


@pytest.mark.parametrize("values", [{}, {"watchNamespaces": ["a"]}], ids=["all-namespaces", "one-namespace"])
def test_no_rule_has_a_wildcard_and_attempts_are_handed_nothing_that_the_operator_does_not_hold(
    values: dict[str, Any],
) -> None:
    granted = rules(releases.render("etj", values), "ClusterRole", "Role")
    assert not any("*" in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]] for _, rule in granted)
    leases = [rule for space, rule in granted if space in ("", "a") and rule["resources"] == ["leases"]]
    # The API server lets nobody hand on a permission that they do not hold.
    assert any({"get", "patch"} <= set(rule["verbs"]) for rule in leases)
    secrets = {"secrets", "configmaps", "pods/exec", "pods/eviction"}
    assert not any(secrets & set(rule["resources"]) for _, rule in granted)


def test_two_releases_of_one_name_in_two_namespaces_share_no_object() -> None:
    def identities(namespace: str) -> set[tuple[str, str, str]]:
        objects = releases.render(namespace, {"crds": {"enabled": False}, "watchNamespaces": [f"{namespace}-jobs"]})
        return {(item["kind"], item["metadata"].get("namespace", ""), item["metadata"]["name"]) for item in objects}

    assert not identities("team-a") & identities("team-b")


def test_the_operator_serves_its_own_namespace_only_where_that_is_allowed_by_name() -> None:
    def arguments(values: dict[str, Any]) -> list[str]:
        objects = releases.render("etj", values)
        found: list[str] = only(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]
        return found

    assert "--allow-jobs-in-own-namespace" not in arguments({})
    shared = arguments({"allowJobsInReleaseNamespace": True, "watchNamespaces": ["etj"]})
    assert {"--allow-jobs-in-own-namespace", "--namespace=etj"} <= set(shared)


def test_the_webhook_comes_from_a_secret_and_stands_in_no_argument() -> None:
    def container(values: dict[str, Any]) -> dict[str, Any]:
        objects = releases.render("etj", values)
        found: dict[str, Any] = only(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]
        return found

    on, off = container(EVERYTHING), container({})
    (url,) = [item for item in on["env"] if item["name"] == URL_VARIABLE]
    assert url["valueFrom"] == {"secretKeyRef": {"name": "webhook", "key": "slack.url", "optional": True}}
    settings = read_settings(on["args"], {URL_VARIABLE: "http://receiver/x"}).notifications
    assert settings is not None
    assert (settings.format, settings.kinds) == ("cloudevents", ("Recovered", "Failed"))
    assert settings.source == "https://example.com/clusters/a"
    assert not [item for item in off["args"] if "notification" in item]
    assert URL_VARIABLE not in [item["name"] for item in off["env"]]


def test_the_policy_binds_the_operators_account_alone_and_protects_its_namespace() -> None:
    policy = only(releases.render("etj", {}), "ValidatingAdmissionPolicy")["spec"]
    account = "system:serviceaccount:etj:elastic-training-operator"
    (condition,) = policy["matchConditions"]
    assert condition["expression"] == f"request.userInfo.username == '{account}'"
    assert policy["failurePolicy"] == "Fail"
    assert "['kube-system', 'kube-public', 'kube-node-lease', 'etj']" in str(policy["validations"])
    shared = only(releases.render("etj", EVERYTHING), "ValidatingAdmissionPolicy")["spec"]
    assert "in ['kube-system', 'vault'])" in str(shared["validations"])
    assert "system:serviceaccount:etj:other'" in str(shared["matchConditions"])
    assert not [item for item in releases.render("etj", NOTHING) if "Admission" in item["kind"]]


def test_the_service_monitor_finds_the_service_and_the_service_the_pods() -> None:
    objects = releases.render("etj", EVERYTHING)
    service = only(objects, "Service", "elastic-training-operator-metrics")
    monitor = only(objects, "ServiceMonitor")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    template = only(objects, "Deployment")["spec"]["template"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    ports = {item["name"]: item["containerPort"] for item in template["spec"]["containers"][0]["ports"]}
    assert service["spec"]["ports"][0]["targetPort"] in ports
    budget = only(objects, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"]
    assert budget.items() <= template["metadata"]["labels"].items()


def test_the_status_page_is_off_unless_it_is_asked_for_and_then_reaches_the_operator() -> None:
    assert "status-page" not in json.dumps(releases.render("etj", {}))
    objects = releases.render("etj", EVERYTHING)
    container = only(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    environment = {"POD_IP": "10.0.0.1"}
    settings = read_settings(container["args"], environment)
    assert (settings.status_page_port, settings.status_page_address) == (8090, "10.0.0.1:8090")
    assert {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}} in container["env"]
    assert {"name": "status-page", "containerPort": 8090} in container["ports"]
    (service,) = [item for item in objects if item["metadata"]["name"].endswith("-status-page")]
    assert service["kind"] == "Service"
    assert service["spec"]["ports"][0]["targetPort"] == "status-page"
    labels = only(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    (rule,) = [
        item for item in only(objects, "NetworkPolicy")["spec"]["ingress"] if item["ports"][0]["port"] == 8090
    ]  # fmt: skip
    replicas, readers = rule["from"]
    assert replicas["podSelector"]["matchLabels"].items() <= labels.items(), "a standby reads the leader's page"
    assert readers == {"namespaceSelector": {"matchLabels": {"ingress": "yes"}}}


def test_dashboards_arrive_unchanged() -> None:
    # Grafana's own templates hold {{ }}, which Helm must leave alone.
    files = {path.name: json.loads(path.read_text()) for path in CHART.glob("dashboards/*.json")}
    maps = [item for item in releases.render("etj", EVERYTHING) if item["kind"] == "ConfigMap"]
    assert {name: json.loads(text) for item in maps for name, text in item["data"].items()} == files
    assert all(item["metadata"]["labels"]["grafana_dashboard"] == "1" for item in maps)


def test_alerts_arrive_unchanged() -> None:
    # Their templates hold {{ }} too.
    rule = only(releases.render("etj", EVERYTHING), "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((CHART / "files/alerts.yaml").read_text())
    assert rule["metadata"]["labels"]["release"] == "a"


def test_a_user_with_the_role_view_may_look_at_jobs_and_one_with_edit_may_change_them(
    cluster: Any, namespace: str
) -> None:
    objects = releases.render(namespace, {"crds": {"enabled": False}})
    roles = [item for item in objects if item["kind"] == "ClusterRole" and "aggregate-to" in str(item["metadata"])]
    bindings = [
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": {"name": role, "namespace": namespace},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
            "subjects": [{"kind": "User", "name": f"{role}er"}],
        }
        for role in ("view", "edit", "admin")
    ]
    cluster.apply(*roles, *bindings)

    def may(user: str, verb: str, subresource: str = "") -> bool:
        what = (
            "elastictrainingjobs.elastictraining.dev",
            f"--subresource={subresource}",
            "-n",
            namespace,
            "--as",
            user,
        )
        return cluster.kubectl("auth", "can-i", verb, *what, check=False).strip() == "yes"

    try:
        cluster.wait(lambda: may("editer", "create"), what="the roles to be aggregated", timeout_seconds=20)
        assert may("viewer", "list")
        assert not may("viewer", "patch")
        assert may("adminer", "delete")
        assert may("editer", "update", "scale")
        assert not may("editer", "update", "status")
    finally:
        cluster.kubectl("delete", "clusterrole", *(item["metadata"]["name"] for item in roles))


def test_helm_reads_the_chart_of_a_releases_layout(tmp_path: Path) -> None:
    layout = pack_layout(pack_chart(CHART, tmp_path, epoch=0), tmp_path, epoch=0)
    with tarfile.open(layout) as archive:
        archive.extractall(tmp_path, filter="data")
    blobs = tmp_path / "blobs"
    (entry,) = json.loads((tmp_path / "index.json").read_text())["manifests"]
    manifest = json.loads((blobs / entry["digest"].replace(":", "/")).read_text())
    (layer,) = manifest["layers"]
    assert layer["mediaType"] == CONTENT
    chart = (blobs / layer["digest"].replace(":", "/")).rename(tmp_path / "chart.tgz")
    config = json.loads((blobs / manifest["config"]["digest"].replace(":", "/")).read_text())
    assert yaml.safe_load(helm.run("show", "chart", chart)) == config
    version = f"--kube-version={releases.OLDEST}"
    assert helm.run("template", "etj", chart, version) == helm.run("template", "etj", CHART, version)
